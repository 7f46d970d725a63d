"""The training loop in this process, alone and with a contender that only pretends to communicate."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import pytest

from syncline_bench.messages import Connection, Job, Mailbox, Message
from syncline_bench.report.comparison import BASELINE

torch = pytest.importorskip("torch")

from syncline_bench import train  # noqa: E402
from syncline_bench.frameworks.torch import digest  # noqa: E402
from syncline_bench.sides import Side  # noqa: E402

pytestmark = pytest.mark.skipif(find_spec("sklearn") is None, reason="the digits are a file of scikit-learn")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def job_of(**changes: Any) -> Job:
    values = {"workload": "digits", "strategy": BASELINE, "batch": 64, "iterations": 5, "seed": 1}
    return Job(**{**values, **changes})


def messages_of(job: Job, side: Side | None = None) -> list[Message]:
    """What training in this process reports; few enough to fit into the pipe."""
    with Mailbox(1) as mailbox:
        with closing(Connection(mailbox.addresses[0])) as connection:
            train.train(job, side or train.side_of(job.strategy), connection.send)
        found = []
        while mailbox.open:
            found += [message for _, message in mailbox.receive(10.0)]
    return found


def test_a_single_worker_reports_progress_and_one_result() -> None:
    *progress, result = messages_of(job_of())
    assert [message["kind"] for message in progress] == ["progress"] * len(progress)
    assert progress[-1]["iteration"] == 5
    assert result["kind"] == "result"
    measures = result["measures"]
    assert measures["exposed_comm_s"] == measures["h2d_s"] == measures["bytes_sent_per_step"] == 0
    assert 0 < measures["forward_s"] < measures["iteration_s"]
    scores = [point for point in result["curve"] if point["accuracy"] is not None]
    assert [point["iteration"] for point in scores] == [5]
    assert (result["chosen"], result["sent"]) == (BASELINE, {})
    assert result["start_s"] >= 0
    assert result["peak_bytes"] > 1 << 20


def test_two_runs_end_with_the_same_bits_and_another_seed_with_others() -> None:
    first, second, other = (messages_of(job_of(seed=seed, iterations=3))[-1]["sha256"] for seed in (1, 1, 2))
    assert first == second != other


def test_a_pipeline_and_a_layout_change_times_and_no_bit() -> None:
    plain, ahead, laid_out = (
        messages_of(job_of(workload=text, batch=700, iterations=4))[-1]
        for text in ("digits", "digits(loading=1us, h2d=1us, prefetch=2)", "digits(channels_last=on)")
    )
    assert plain["sha256"] == ahead["sha256"]
    assert plain["measures"]["h2d_s"] == 0 < ahead["measures"]["h2d_s"]
    scores = [[point["iteration"] for point in row["curve"] if point["accuracy"] is not None] for row in (plain, ahead)]
    assert scores[0] == scores[1] == [3, 4]
    # Another layout sums in another order.
    assert laid_out["curve"][-1]["test_loss"] == pytest.approx(plain["curve"][-1]["test_loss"], rel=1e-3)


def test_every_epoch_is_evaluated() -> None:
    result = messages_of(job_of(batch=700, iterations=5))[-1]
    scores = [point["iteration"] for point in result["curve"] if point["accuracy"] is not None]
    assert scores == [3, 5]


@dataclass
class Pretender:
    """A contender whose optimizer step "blocks" for a millisecond and sends 1000 bytes to peer 1."""

    calls: list[str] = field(default_factory=list)
    blocked_s: float = 0.0
    bytes_sent: Mapping[int, int] = field(default_factory=lambda: {1: 500})
    bytes_received: Mapping[int, int] = field(default_factory=dict)
    chosen: str = "ring transport=inproc"
    staleness: Mapping[int, int] = field(default_factory=dict)
    version_lag: Mapping[int, int] = field(default_factory=dict)
    waited_s: Mapping[int, float] = field(default_factory=dict)

    def rank(self) -> int:
        return 0

    def world_size(self) -> int:
        return 2

    def prepare(self, model: Any, optimizer: Any, *, weight: Any) -> tuple[Any, Any]:  # noqa: ARG002
        def count(*_: Any) -> None:
            self.blocked_s += 1e-3
            self.bytes_sent = {1: self.bytes_sent[1] + 1000}

        optimizer.register_step_pre_hook(count)
        return model, optimizer

    def stats(self) -> Pretender:
        return Pretender([], self.blocked_s, self.bytes_sent, self.bytes_received, self.chosen)

    def barrier(self) -> None:
        self.calls.append("barrier")

    def consolidate(self) -> None:
        self.calls.append("consolidate")

    def shutdown(self) -> None:
        self.calls.append("shutdown")


def test_looks_between_epochs_change_no_bit_and_end_at_the_target() -> None:
    plain, looked = (
        messages_of(job_of(batch=700, iterations=6, **looks))[-1]
        for looks in ({}, {"evaluate_every": 1, "target": 1e-6})
    )
    assert plain["sha256"] == looked["sha256"]
    scores = [
        {point["iteration"]: point["accuracy"] for point in row["curve"] if point["accuracy"] is not None}
        for row in (plain, looked)
    ]
    assert list(scores[0]) == [3, 6]
    assert list(scores[1]) == [1, 3, 6]  # reached at the first, epochs are looked at anyway
    assert scores[0].items() <= scores[1].items()
    times = [point["seconds"] for point in looked["curve"]]
    assert times == sorted(times)


def test_of_a_large_model_no_more_copies_are_kept_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    before = messages_of(job_of(iterations=6, evaluate_every=1))[-1]["curve"]
    monkeypatch.setattr(train, "KEPT_BYTES", 1)
    assert scores_of(messages_of(job_of(iterations=6, evaluate_every=1))[-1]["curve"]) == scores_of(before)


def scores_of(curve: list[dict[str, Any]]) -> list[tuple[int, float]]:
    return [(point["iteration"], point["accuracy"]) for point in curve if point["accuracy"] is not None]


def test_blocked_time_and_bytes_are_those_of_the_contender() -> None:
    side = Pretender()
    result = messages_of(job_of(strategy="ring"), side)[-1]
    assert result["measures"]["bytes_sent_per_step"] == 1000
    assert result["measures"]["exposed_comm_s"] == pytest.approx(1e-3)
    assert result["sent"] == {"1": 1000.0}
    assert result["chosen"] == "ring transport=inproc"
    # The others may still be held by a bound on staleness: who waits at a barrier would hold them for good.
    assert side.calls == ["consolidate", "barrier", "shutdown"]


def test_a_worker_without_a_batch_reports_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "batches", lambda *_: iter(()))
    progress, result = messages_of(job_of(strategy="ring"), Pretender())
    assert (progress["iteration"], progress["loss"], progress["images_per_s"]) == (0, None, None)
    assert (result["iterations"], result["seconds"], result["sent"], result["received"]) == (0, 0.0, {}, {})
    assert {name for name, value in result["measures"].items() if value is None} == {"step_s"}
    assert {value for value in result["measures"].values() if value is not None} == {0.0}


def test_a_failure_is_reported_before_it_ends_the_process() -> None:
    with Mailbox(1) as mailbox:
        words = job_of(workload="nothing_like_it", framework="numpy").to_json(), json.dumps(mailbox.addresses)
        done = subprocess.run(
            [sys.executable, "-m", "syncline_bench.train", *words], stderr=subprocess.PIPE, check=False
        )
        ((_, message),) = mailbox.receive(10.0)
    assert done.returncode == 1
    assert b"Traceback" in done.stderr
    assert message["kind"] == "error"
    assert "UsageError" in message["text"]
    assert "nothing_like_it" in message["text"]


def test_the_digest_sees_values_names_and_buffers() -> None:
    def model() -> Any:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))

    base = digest(model())
    assert base == digest(model())
    changed = model()
    changed[1].running_mean[0] = 1.0
    renamed = torch.nn.Sequential(*model(), torch.nn.Identity())
    assert digest(changed) != base
    assert digest(renamed) == base
    assert digest(torch.nn.ModuleDict({"a": model()[0]})) != digest(torch.nn.ModuleDict({"b": model()[0]}))
