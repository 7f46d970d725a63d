"""Buckets that take the place of others between two steps: training goes on as if they had always been these."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import pytest
import torch
from scripts import coupled
from toy import (
    STAGED,
    Here,
    adam,
    alone,
    batch,
    close,
    fill,
    loss_of,
    on_group,
    same_as_alone,
    sgd,
    uneven_epochs_as_alone,
    weights,
)

from remade import Remade
from syncline import checkpoint, registry
from syncline.engine.engine import Engine
from syncline.engine.order import Work
from syncline.errors import GradientError
from syncline.frameworks.torch import Prepared
from syncline.nouns import Bucket, Layer
from syncline.schedules import Cost, PushAndPull

Asked = list[tuple[Sequence[Layer], Cost | None]]

PLACES = [
    "ring",
    "ps(servers=2, update=worker)",
    "ps(servers=2)",
    "ps(servers=2, on=workers)",
    "ring" + STAGED,
    "ps(servers=2)" + STAGED,
]


@pytest.fixture(autouse=True)
def remade(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Schedules that make other buckets once they know times; the layers and costs that they were given with these."""
    registry.names("schedules")
    monkeypatch.setitem(registry._entries, "schedules", dict(registry._entries["schedules"]))
    given: Asked = []

    @registry.register("schedules", "remade")
    @dataclass(frozen=True)
    class Noted(Remade):
        def buckets(self, layers: Sequence[Layer], cost: Cost | None = None) -> list[Bucket]:
            if any(layer.backward_s for layer in layers):
                given.append((layers, cost))
            return super().buckets(layers, cost)

    return given


def with_schedule(place: str, schedule: str, codec: str = "none") -> str:
    staged = STAGED if place.endswith(STAGED) else ""
    return f"{place.removesuffix(STAGED)} codec={codec} schedule={schedule}{staged}"


def train(here: Here, steps: range = range(6)) -> dict[str, torch.Tensor]:
    for step in steps:
        here.optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss_of(here.model(here.share(batch(step)))).backward()
        here.optimizer.step()
    return weights(here.model)


@pytest.mark.every(2)
@pytest.mark.parametrize(("place", "make"), [*((place, adam) for place in PLACES), ("ps(servers=2)", sgd)])
def test_training_goes_on_as_on_one_worker(group: Any, remade: Asked, place: str, make: Any) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        found = train(here)
        assert here.replica is None or len(here.replica.exchange.layout.buckets) == 5
        return found

    wanted = alone(make, train)
    for found in on_group(group, with_schedule(place, "remade(cut=1)"), 3, make, body):
        close(found, wanted)
    ((layers, cost),) = remade
    assert all(layer.backward_s >= 0 for layer in layers)
    assert cost is not None
    assert 0 < cost(1000) <= cost(1_000_000)
    if place.startswith("ps") and "update=worker" not in place:  # each by itself, as they go in two directions
        assert isinstance(cost, PushAndPull)
        assert min(cost.push(1_000_000), cost.pull(1_000_000)) > 0
    else:
        assert not isinstance(cost, PushAndPull)


@pytest.mark.parametrize(
    "strategy", ["ring", "ring codec=int8", "ps(servers=1)", "ps(servers=2, on=workers) codec=int8"]
)
def test_merged_buckets_train_as_those_of_other_schedules(group: Any, strategy: str) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        found = train(here, range(9))
        assert here.replica is not None
        assert here.replica.exchange.measured
        return found

    found = on_group(group, f"{strategy} schedule=merged", 2, sgd, body)
    for one, wanted in zip(found, on_group(group, strategy, 2, sgd, lambda here: train(here, range(9))), strict=True):
        close(one, wanted, 0.0 if "int8" in strategy else 1e-12)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("place", "codec"),
    [(place, codec) for place in PLACES[:4] for codec in ("int8", "topk(ratio=0.4)")] + [("ring", "powersgd(rank=1)")],
)
def test_a_codec_forgets_nothing(group: Any, place: str, codec: str) -> None:
    """What workers and owners have kept back counts in other buckets too; sums have another order in other places."""
    plain, again = (
        on_group(group, with_schedule(place, schedule, codec), 3, sgd, train) for schedule in ("wait_free", "remade")
    )
    for found, wanted in zip(again, plain, strict=True):
        close(found, wanted, 1e-6 if codec.startswith("powersgd") else 0.0)


@pytest.mark.parametrize(
    ("counts", "place"), [*zip([[2, 5, 3], [5, 2, 2], [2, 2, 2]], cycle(["ring", "ps(servers=2, update=worker)"]))]
)
def test_ranks_without_batches_follow(group: Any, place: str, counts: list[int]) -> None:
    """Those that have run out take part; where nobody has a batch left, nothing is replaced before the next epoch."""

    def check(here: Here) -> None:
        assert here.replica is not None
        assert len(here.replica.exchange.layout.buckets) == 2

    uneven_epochs_as_alone(group, with_schedule(place, "remade"), counts, check)


@pytest.mark.parametrize("place", ["ring", "ps(servers=1)", "ps(servers=2, on=workers)"])
def test_what_a_script_holds_on_to_stays_what_it_is(group: Any, place: str) -> None:
    """Weights by other names, gradients that wait, and a graph that has not been gone through."""

    def body(here: Here) -> dict[str, torch.Tensor]:
        held = here.model.state_dict()
        for step in range(6):
            here.optimizer.zero_grad(set_to_none=step != 3)
            penalty = sum((weight * held[name]).sum() for name, weight in here.model.named_parameters())
            with here.no_sync():
                loss_of(here.model(here.share(batch(step)))).backward()
            (loss_of(here.model(here.share(batch(step)))) + penalty).backward()
            here.optimizer.step()
            assert all(torch.equal(held[name], tensor) for name, tensor in here.model.state_dict().items())
        return weights(here.model)

    same_as_alone(group, with_schedule(place, "remade"), 2, sgd, body)


def wide(index: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
    model = fill(torch.nn.Sequential(torch.nn.Linear(4, 900), torch.nn.Tanh(), torch.nn.Linear(900, 9)).float())
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("codec", "place"),
    [*zip(["int8", "fp8", "qsgd", "bf16"], cycle(["ring", "ps(servers=2)", "ps(servers=2, on=workers)"]))],
)
def test_a_tensor_may_be_cut_between_blocks_of_a_codec(group: Any, place: str, codec: str) -> None:
    """Its parts are in different buckets, of which a server may have nothing to do in one."""

    def body(here: Here) -> dict[str, torch.Tensor]:
        for step in range(5):
            here.optimizer.zero_grad()
            loss_of(here.model(here.share(batch(step).float()))).backward()
            here.optimizer.step()
        assert here.replica is not None
        return weights(here.model) | {"buckets": torch.tensor(len(here.replica.exchange.layout.buckets))}

    plain, cut = (
        on_group(group, f"{place} codec={codec} schedule={schedule}", 2, wide, body)
        for schedule in ("wait_free", "remade(cut=1024)")
    )
    for found, wanted in zip(cut, plain, strict=True):
        assert found.pop("buckets") == 5
        assert wanted.pop("buckets") == 4
        close(found, wanted, 0.0)


@pytest.mark.parametrize("place", ["ring", "ps(servers=2)"])
def test_buckets_that_cannot_be_leave_those_that_there_are(
    group: Any, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    """A run that has trained well is not ended for better ones."""

    def body(here: Here) -> dict[str, torch.Tensor]:
        found = train(here)
        assert here.replica is not None
        assert here.replica.exchange.measured
        assert len(here.replica.exchange.layout.buckets) == 4
        return found

    found = on_group(group, with_schedule(place, "remade(swapped=True)", "int8"), 2, sgd, body)
    (said,) = [record.message for record in caplog.records if "buckets stay as they were" in record.message]
    assert "in another order than the present ones" in said
    for one, wanted in zip(
        found, on_group(group, with_schedule(place, "wait_free", "int8"), 2, sgd, train), strict=True
    ):
        close(one, wanted, 0.0)


@pytest.mark.parametrize("place", ["ring", "ps(servers=2)"])
def test_what_a_codec_sees_whole_is_put_together_again(
    group: Any, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    """Scales and selections belong to tensors, wherever a schedule cuts them."""
    cut, whole = (
        on_group(group, with_schedule(place, schedule, "topk(ratio=0.4)"), 2, sgd, train)
        for schedule in ("remade(cut=1)", "wait_free")
    )
    assert "buckets stay as they were" not in caplog.text
    for found, wanted in zip(cut, whole, strict=True):
        close(found, wanted, 0.0)


@pytest.mark.parametrize(("place", "codec"), [("ring", "int8"), ("ps(servers=2)", "topk(ratio=0.4)"), ("ring", "none")])
def test_a_run_goes_back_to_a_checkpoint_of_its_own(group: Any, remade: Asked, place: str, codec: str) -> None:
    """To buckets of before anything was measured, and measures again."""

    def body(here: Here) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        train(here, range(1))
        kept = copied(here, "save")
        first = train(here, range(1, 7))
        copied(here, "load", kept)
        assert here.replica is not None
        assert (len(here.replica.exchange.layout.buckets), here.replica.exchange.measured) == (4, False)
        again = train(here, range(1, 7))
        assert len(here.replica.exchange.layout.buckets) == 2
        return first, again

    for first, again in on_group(group, with_schedule(place, "remade", codec), 2, sgd, body):
        close(again, first, 0.0 if codec != "none" else 1e-12)
    assert len(remade) == 2


def test_measuring_leaves_modules_without_hooks(group: Any) -> None:
    """Each would break a compiled model apart, and a schedule that needs no forward times pays nothing for them."""

    def body(here: Here) -> list[int]:
        train(here, range(1))
        assert here.replica is not None
        assert here.rank > 0 or here.replica.exchange.times is not None
        assert not here.replica.exchange.replaces
        train(here, range(1, 2))  # the last one that the schedule asks for
        assert here.replica.exchange.replaces
        return [len(one._forward_hooks) + len(one._forward_pre_hooks) for one in here.model.children()]

    assert on_group(group, "ring schedule=remade", 2, sgd, body) == [[0, 0, 0]] * 2


@pytest.mark.parametrize(
    ("place", "codec"),
    [("ring", "int8"), ("ps(servers=2)", "topk(ratio=0.4)"), ("ps(servers=2, update=worker)", "none")],
)
def test_a_checkpoint_says_which_buckets_there_were(group: Any, remade: Asked, place: str, codec: str) -> None:
    """A run that is resumed goes on with them from its first step, and measures no more."""
    strategy, kept = with_schedule(place, "remade", codec), dict[int, Any]()

    def first(here: Here) -> dict[str, torch.Tensor]:
        train(here, range(4))
        kept[here.rank] = copied(here, "save")
        return train(here, range(4, 6))

    def resumed(here: Here) -> dict[str, torch.Tensor]:
        copied(here, "load", kept[here.rank])
        assert here.replica is not None
        assert len(here.replica.exchange.layout.buckets) == 2
        return train(here, range(4, 6))

    wanted = on_group(group, strategy, 3, sgd, first)
    for found, known in zip(on_group(group, strategy, 3, sgd, resumed), wanted, strict=True):
        close(found, known, 0.0)
    assert len(remade) == 1


@pytest.mark.parametrize(
    ("place", "codec"),
    [
        *zip(
            ["ring", "ps(servers=1)", "ps(servers=2, on=workers)"],
            cycle(["topk(ratio=0.4)", "feedback(onebit, warmup=3)"]),
        )
    ],
)
def test_a_run_is_resumed_whose_model_was_loaded_after_prepare(group: Any, place: str, codec: str) -> None:
    """Owners have their own weights again and not those that were loaded; payloads are those of the step."""
    kept = dict[int, Any]()

    def first(here: Here) -> dict[str, torch.Tensor]:
        train(here, range(5))
        kept[here.rank] = copied(here, "save")
        return train(here, range(5, 8))

    def resumed(here: Here) -> dict[str, torch.Tensor]:
        copied(here, "load", kept[here.rank])
        return train(here, range(5, 8))

    wanted = on_group(group, f"{place} codec={codec}", 2, sgd, first)
    for found, known in zip(on_group(group, f"{place} codec={codec}", 2, sgd, resumed), wanted, strict=True):
        close(found, known, 0.0)


def test_between_backward_and_step_nothing_is_loaded_into_served_models(group: Any) -> None:
    def body(here: Here) -> None:
        train(here, range(1))
        kept = copied(here, "save")
        train(here, range(1, 4))
        loss_of(here.model(here.share(batch(4)))).backward()
        copied(here, "load", kept)

    with pytest.raises(GradientError, match=r"load_state_dict\(\) between backward\(\) and step\(\)"):
        on_group(group, "ps(servers=1) schedule=remade", 2, sgd, body)


def copied(here: Here, what: str, state: Any = None) -> Any:
    """Everything of a run that a script saves, or loads."""
    assert here.session is not None
    assert here.replica is not None
    prepared = [Prepared(here.model, here.optimizer, here.replica, here.client)]
    if what == "save":
        model = {name: tensor.clone() for name, tensor in here.model.state_dict().items()}
        return copy.deepcopy([model, here.optimizer.state_dict(), checkpoint.save(here.session, prepared)])
    here.model.load_state_dict(state[0])
    here.optimizer.load_state_dict(state[1])
    checkpoint.load(here.session, prepared, state[2])
    return None


@pytest.mark.parametrize("make", [sgd, coupled])
def test_owners_hold_on_to_no_buckets_that_are_gone(group: Any, monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    """For what updates them next, which keeps their memory: at the end only the last buckets do."""
    promised: list[Work] = []
    promise = Engine.promise

    def noted(self: Engine, label: str, tolerant: bool = False) -> Work:
        work = promise(self, label, tolerant)
        promised.append(work)
        return work

    monkeypatch.setattr(Engine, "promise", noted)
    on_group(group, with_schedule("ps(servers=1)", "remade(cut=1)"), 2, make, train)
    assert any(work.done for work in promised)
    labels = [work.label for work in promised if not work.done]
    assert len(labels) == len(set(labels))
