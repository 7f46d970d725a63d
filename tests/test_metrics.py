"""Metrics while a run goes on: what is served, who can read it, and what is refused before training begins."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from syncline import metrics
from syncline.errors import UsageError
from syncline.frameworks._supported import SILENT
from syncline.frameworks.numpy import adapt
from syncline.launch.connecting import in_process
from syncline.metrics import Serving, announced, read_serving, serving_of
from syncline.process import Process
from syncline.session.session import Session
from syncline.session.stats import Stats, error_of

try:
    import prometheus_client  # noqa: F401
except ImportError:
    installed = False
else:
    installed = True
needs_library = pytest.mark.skipif(not installed, reason="prometheus-client is not installed")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@contextmanager
def served(session: Session, serving: Serving = Serving("127.0.0.1", 0)) -> Iterator[str]:  # noqa: B008 - frozen
    """The address while a session's metrics are served."""
    running = serving.begin(session)
    try:
        (address,) = announced()
        yield address
    finally:
        running.close()


def scraped(address: str, path: str = "/metrics") -> tuple[int, str]:
    host, _, port = address.rpartition(":")
    link = http.client.HTTPConnection(host, int(port), timeout=20)
    link.request("GET", path)
    answer = link.getresponse()
    found = answer.status, answer.read().decode()
    link.close()
    return found


def _sent(address: str, said: bytes) -> socket.socket:
    """A connection that sends this and nothing more, perhaps to a server that has closed it."""
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host, int(port)), timeout=20)
    with suppress(ConnectionError):
        sock.sendall(said)
    return sock


def samples(text: str) -> dict[str, float]:
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}


class Rule:
    lr: float

    def __init__(self) -> None:
        self.lr = 0.1

    def update(self, weights: Any, gradient: Any, state: Any) -> None:  # noqa: ARG002
        weights -= self.lr * gradient


def train(session: Session, steps: int) -> Stats | None:
    handed = adapt(session, {"w": np.ones(4096, np.float32)}, Rule(), SILENT)
    if handed is None:
        return None
    _, trainer = handed.result
    for step in range(steps):
        trainer.step({"w": np.random.default_rng(step).standard_normal(4096).astype(np.float32)})
    return session.stats()


@needs_library
@pytest.mark.parametrize("strategy", ["ring", "ring codec=feedback(int8)", "ps(servers=1) sync=ssp(staleness=2)"])
def test_a_scrape_shows_what_stats_count(group: Any, strategy: str, capfd: pytest.CaptureFixture[str]) -> None:
    def body(session: Session) -> Any:
        if session.index:
            return train(session, 5)
        with served(session, Serving("127.0.0.1", 0, error_every=2)) as address:
            stats = train(session, 5)
            status, text = scraped(address)
            return stats, status, text

    (stats, status, text), *_ = group(strategy, 2, body)
    found = samples(text)
    assert status == 200
    assert "metrics at http://127.0.0.1:" in capfd.readouterr().err
    assert found['syncline_steps_total{rank="0"}'] == stats.steps == 5
    assert found['syncline_repairs_total{rank="0"}'] == stats.repairs == 0
    assert found['syncline_step_seconds_count{rank="0"}'] == stats.timed_steps == 4
    assert found['syncline_step_seconds_sum{rank="0"}'] == stats.timed_s >= stats.step_s > 0
    assert found['syncline_blocked_seconds_total{rank="0"}'] >= stats.blocked_s > 0
    for name, counts in (("sent", stats.bytes_sent), ("received", stats.bytes_received)):
        for peer, nbytes in counts.items():
            label = str(peer) if peer < 2 else f"server {peer - 2}"
            assert found[f'syncline_{name}_bytes_total{{peer="{label}",rank="0"}}'] >= nbytes
    (info,) = [name for name in found if name.startswith("syncline_info")]
    assert 'workers="2"' in info
    assert f'strategy="{stats.strategy}"' in info
    error = 'syncline_compression_error{rank="0"}'
    assert (error in found) == ("codec" in strategy)
    assert 0 < found.get(error, 0.01) < 0.1
    assert ('syncline_staleness_steps_count{rank="0"}' in found) == ("ssp" in strategy)
    if "ssp" in strategy:
        assert found['syncline_version_lag_sum{rank="0"}'] == sum(lag * n for lag, n in stats.version_lag.items())


@needs_library
def test_another_path_is_not_found_and_a_broken_request_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_GIVES_WAY_S", 20.0)
    (session,) = in_process("ring", 1)
    with served(session) as address:
        assert scraped(address, "/etc/passwd")[0] == 404
        host, _, port = address.rpartition(":")
        held = [socket.create_connection((host, int(port)), timeout=20) for _ in range(metrics._READERS)]
        for sock in held:  # who says nothing takes a place
            sock.sendall(b"GET ")
        with socket.create_connection((host, int(port)), timeout=20) as one_more:
            assert one_more.recv(1) == b""
        for sock in held:
            sock.close()
        for _ in range(200):
            try:
                assert scraped(address)[0] == 200
            except (http.client.HTTPException, ConnectionError):
                continue
            break
        else:
            pytest.fail("nobody is answered any more")


@needs_library
@pytest.mark.parametrize("said", [b"", b"GET ", b"GET /metrics HTTP/1.1\r\nA: "])
def test_readers_that_never_finish_their_request_give_way(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_GIVES_WAY_S", 0.0)
    (session,) = in_process("ring", 1)
    with served(session) as address:
        before = threading.active_count()
        held = [_sent(address, said) for _ in range(100)]
        assert scraped(address)[0] == 200
        assert threading.active_count() <= before + 2 * metrics._READERS  # some are about to end
        for sock in held:
            sock.close()


@needs_library
def test_a_huge_request_is_refused_and_many_readers_read_the_counters_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_FRESH_S", 20.0)
    (session,) = in_process("ring", 1)
    asked, stats = list[Session](), Session.stats

    def counted(self: Session) -> Stats:
        asked.append(self)
        return stats(self)

    monkeypatch.setattr(Session, "stats", counted)
    with served(session) as address:
        for line in (b"GET /" + b"x" * (1 << 20), b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 10_000):
            with _sent(address, line) as sock, suppress(ConnectionError):
                assert b" 200 " not in sock.recv(100)
        answers = [scraped(address) for _ in range(10)]
    assert answers == answers[:1] * 10
    assert len(asked) == 1


@needs_library
def test_metrics_end_with_their_session_and_leave_no_file(tmp_path: Path) -> None:
    (session,) = in_process("ring", 1)
    with served(session) as address:
        (file,) = tmp_path.joinpath(*metrics.FOLDER).iterdir()
        assert file.stat().st_mode & 0o777 == 0o600
    assert announced() == []
    assert not file.exists()
    with pytest.raises(ConnectionRefusedError):
        scraped(address)


@needs_library
def test_a_forked_child_gives_up_what_its_parent_serves() -> None:
    (session,) = in_process("ring", 1)
    running = Serving("127.0.0.1", 0).begin(session)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a process with threads
        child = os.fork()
    if child == 0:  # which has no thread that could end the server
        running.forget()
        running.close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    (address,) = announced()
    assert scraped(address)[0] == 200
    running.close()


@needs_library
def test_a_port_that_is_taken_is_named_before_training_begins() -> None:
    (session,) = in_process("ring", 1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = rf"rank 0 cannot serve metrics at 127.0.0.1:{port} \(Address already in use\): choose another port"
        with pytest.raises(UsageError, match=said):
            Serving("127.0.0.1", port).begin(session)
    assert announced() == []


def test_a_later_view_goes_on_without_a_port_that_a_stopped_worker_holds(capfd: pytest.CaptureFixture[str]) -> None:
    (session,) = in_process("ring", 1)
    process = Process()
    process.joined, process._again = session, True
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process._serve(Serving("127.0.0.1", taken.getsockname()[1]))
    assert process.joined is session
    assert "no metrics from here on: rank 0 cannot serve" in capfd.readouterr().err


@needs_library
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("70000", "from 0 to 65535"),
        ("-1", "from 0 to 65535"),
        (":9400", "HOST:PORT"),
        ("host:", "HOST:PORT"),
        ("9400,error=0", "error=n"),
        ("9400,often", "'often' is unknown"),
        ("٩٤٠٠", "PORT"),
    ],
)
def test_a_wrong_address_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_serving(text, "--metrics")


@needs_library
def test_an_address_is_local_unless_it_names_a_host() -> None:
    assert read_serving("9400", "") == Serving("127.0.0.1", 9400)
    assert read_serving("0.0.0.0:0,error=50", "") == Serving("0.0.0.0", 0, 50)
    assert read_serving("[::1]:9400", "") == Serving("::1", 9400)
    assert serving_of({}) is None


def test_a_missing_library_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(UsageError, match=r"SYNCLINE_METRICS needs the package prometheus-client .*syncline\[metrics\]"):
        serving_of({"SYNCLINE_METRICS": "9400"})


def test_what_killed_processes_or_other_networks_announced_is_not_shown(tmp_path: Path) -> None:
    folder = tmp_path.joinpath(*metrics.FOLDER)
    folder.mkdir(parents=True, mode=0o700)
    folder.parent.chmod(0o700)
    left = folder / "1.json"
    left.write_text(json.dumps({"address": "127.0.0.1:1", "network": metrics.network()}))
    left.chmod(0o600)
    (folder / "2.json").write_text("no announcement")
    assert announced() == []
    assert not left.exists()
    fd, path = metrics._announce("127.0.0.1:2") or (-1, Path())
    assert announced() == ["127.0.0.1:2"]
    path.write_text(json.dumps({"address": "127.0.0.1:2", "network": -1}))
    assert announced() == []
    os.close(fd)


def test_rates_are_those_between_two_calls() -> None:
    before = Stats("ring", blocked_s=1.0, bytes_sent={1: 10}, at_s=100.0, timed_steps=5, timed_s=1.0, samples=8.0)
    now = Stats(
        "ring",
        blocked_s=1.5,
        bytes_sent={1: 2_000_010, 2: 2_000_000},
        staleness={0: 2, 3: 2},
        version_lag={1: 1},
        at_s=102.0,
        timed_steps=9,
        timed_s=1.2,
        samples=24.0,
        compression_error=0.25,
    )
    assert now.since(before) == pytest.approx(
        {
            "step_ms": 50.0,
            "exposed_percent": 25.0,
            "sent_mb_per_s": 2.0,
            "received_mb_per_s": 0.0,
            "samples_per_s": 8.0,
            "staleness": 1.5,
            "compression_error": 0.25,
        }
    )
    assert "step_ms" not in now.since(now)
    assert error_of([]) is None


class Writer:
    """Stands for the writer of TensorBoard, whose package need not be there."""

    def __init__(self) -> None:
        self.written: dict[str, list[tuple[int, float]]] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.written.setdefault(tag, []).append((int(global_step), float(scalar_value)))


def test_the_lines_of_the_documentation_write_to_a_tracker(group: Any) -> None:
    page = Path(__file__).parent.parent / "docs/how-to/monitoring.md"
    (lines,) = re.findall(r"```python\n(now = .*?)```", page.read_text(), re.DOTALL)

    def body(session: Session) -> Any:
        handed = adapt(session, {"w": np.ones(8, np.float32)}, Rule(), SILENT)
        assert handed is not None
        writer, before = Writer(), session.stats()
        for step in range(3):
            handed.result[1].step({"w": np.ones(8, np.float32)})
            names: dict[str, Any] = {"syncline": session, "before": before, "writer": writer, "step": step}
            exec(lines, names)
            before = names["before"]
        return writer.written

    for written in group("ring", 2, body):
        assert written.keys() >= {"syncline/step_ms", "syncline/exposed_percent", "syncline/sent_mb_per_s"}
        assert [step for step, _ in written["syncline/step_ms"]] == [1, 2]  # the first step has none before it
        assert all(value >= 0 for _, value in written["syncline/exposed_percent"])
