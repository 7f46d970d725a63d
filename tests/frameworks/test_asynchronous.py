"""Models of PyTorch that train asynchronously: one set of weights at the end, in checkpoints and after ``join``."""

from __future__ import annotations

import threading
import warnings
from itertools import cycle
from typing import Any

import pytest
import torch
from toy import STAGED, Here, adam, batch, close, loss_of, making, on_group, sgd, weights
from toy import train as train_together

from syncline import checkpoint
from syncline.errors import GradientError, MismatchError, UsageError
from syncline.frameworks.torch.prepare import Prepared, shadow_until_all_joined

WORKERS = 2
PLACES = ["ps(servers=2) sync=asp", "ps(servers=2, on=workers) sync=ssp(staleness=1)"]


def train(here: Here, steps: int, first: int = 0) -> None:
    """Steps of this rank's own."""
    for step in range(first, first + steps):
        here.optimizer.zero_grad()
        loss_of(here.model(batch(10 * step + here.rank))).backward()
        here.optimizer.step()


def prepared(here: Here) -> list[Prepared]:
    assert here.replica is not None
    return [Prepared(here.model, here.optimizer, here.replica, here.client)]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize(
    ("strategy", "ends"),
    [
        *zip(
            [*PLACES, PLACES[0] + STAGED, *(f"{place} schedule=priority codec=int8" for place in PLACES)],
            cycle(["consolidate", "join", "state_dict"]),
        )
    ],
)
def test_all_have_the_same_weights_at_the_end(group: Any, strategy: str, ends: str) -> None:
    """After different numbers of batches; the optimizer's state is that of all pushes."""

    def body(here: Here) -> Any:
        train(here, 2 + 3 * here.rank)
        (made,) = prepared(here)
        if ends == "consolidate":
            made.consolidate()
        elif ends == "join":
            shadow_until_all_joined(made.replica, made.client)
        else:
            checkpoint.save(here.session, [made])
        train(here, 0)
        return weights(here.model), here.optimizer.state_dict()["state"][0]["step"]

    (first, pushes), (second, _) = on_group(group, strategy, WORKERS, adam, body, weight=1)
    assert int(pushes) == 7
    same(first, second)


@pytest.mark.parametrize("strategy", [*PLACES, "ps(servers=2) sync=asp(momentum=own)"])
def test_a_run_goes_on_from_its_checkpoint(group: Any, strategy: str) -> None:
    """Whatever was trained since: weights and optimizer state are those that were saved, on all ranks and owners."""
    kept: dict[int, Any] = {}
    looked = threading.Barrier(WORKERS)

    def body(here: Here) -> Any:
        train(here, 2 + here.rank)
        own = checkpoint.save(here.session, prepared(here))
        looked.wait(60)
        kept[here.rank] = [weights(here.model), here.optimizer.state_dict(), own]
        looked.wait(60)
        train(here, 3 - here.rank, 5)
        assert here.session.world_size == WORKERS
        model, optimizer, state = kept[0]
        here.model.load_state_dict(model)
        here.optimizer.load_state_dict(optimizer)
        checkpoint.load(here.session, prepared(here), state)
        found = weights(here.model)
        looked.wait(60)
        learnt = here.optimizer.state_dict()["state"]
        looked.wait(60)
        train(here, 2, 9)
        return found, learnt

    for found, learnt in on_group(group, strategy, WORKERS, adam, body, weight=1):
        same(found, kept[0][0])
        for index, entry in kept[0][1]["state"].items():
            assert all(torch.equal(learnt[index][key], value) for key, value in entry.items())


@pytest.mark.parametrize("strategy", PLACES)
def test_a_checkpoint_holds_the_owners_weights_whatever_the_model_had_when_it_was_saved(
    group: Any, strategy: str
) -> None:
    kept: dict[int, Any] = {}

    def first(here: Here) -> Any:
        train(here, 1 + 2 * here.rank)
        stale = weights(here.model)
        kept[here.rank] = stale, checkpoint.save(here.session, prepared(here))
        return weights(here.model)

    wanted, _ = on_group(group, strategy, WORKERS, sgd, first, weight=1)

    def second(here: Here) -> Any:
        stale, state = kept[0]
        here.model.load_state_dict(stale)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            checkpoint.load(here.session, prepared(here), state)
        return weights(here.model)

    for found in on_group(group, strategy, WORKERS, sgd, second, weight=1):
        same(found, wanted)


@pytest.mark.parametrize("strategy", PLACES)
def test_under_a_codec_a_run_goes_on_from_the_owners_own_weights(group: Any, strategy: str) -> None:
    """Which say more than any worker knew."""
    kept: dict[int, Any] = {}

    def body(here: Here) -> Any:
        train(here, 2 + here.rank)
        own = checkpoint.save(here.session, prepared(here))
        found = weights(here.model)
        if here.rank == 0:
            kept[0] = own
            assert any(not torch.equal(own["weights"][0][name], tensor) for name, tensor in found.items())
        train(here, 2, 5)
        prepared(here)[0].consolidate()
        checkpoint.load(here.session, prepared(here), kept[0])
        resumed = weights(here.model)
        train(here, 2, 9)
        prepared(here)[0].consolidate()
        return found, resumed, weights(here.model)

    first, second = on_group(group, f"{strategy} codec=int8", WORKERS, adam, body, weight=1)
    for one, other in zip(first, second, strict=True):
        same(one, other)
    same(first[1], kept[0]["weights"][0])


@pytest.mark.parametrize("strategy", PLACES)
def test_nobody_consolidates_in_the_middle_of_a_step(group: Any, strategy: str) -> None:
    def body(here: Here) -> None:
        loss_of(here.model(batch(here.rank))).backward()
        prepared(here)[0].consolidate()

    with pytest.raises(GradientError, match=r"syncline.consolidate\(\) between backward\(\) and step\(\)"):
        on_group(group, strategy, WORKERS, sgd, body, weight=1)


class Unrated(torch.optim.SGD):
    """An optimizer that goes by another name of its rate."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        for group in self.param_groups:
            group["pace"] = group.pop("lr")

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad, alpha=group["pace"])


def unrated(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
    model, _ = sgd()
    return model, Unrated(model.parameters())


def test_an_optimizer_without_a_rate_to_share_is_refused_or_goes_by_its_own(group: Any) -> None:
    with pytest.raises(UsageError, match=r"group 0 has no number as 'lr': use asp\(rate=own\)"):
        on_group(group, "ps(servers=1) sync=asp", WORKERS, unrated, lambda here: train(here, 1), weight=1)

    def body(here: Here) -> dict[str, torch.Tensor]:
        train(here, 2)
        prepared(here)[0].consolidate()
        return weights(here.model)

    first, second = on_group(group, "ps(servers=1) sync=asp(rate=own)", WORKERS, unrated, body, weight=1)
    same(first, second)


@pytest.mark.parametrize("place", ["ps(servers=2)", "ps(servers=2, on=workers)"])
@pytest.mark.parametrize("mode", ["asp", "ssp(staleness=2)"])
def test_pushes_of_all_move_weights_as_far_as_one_step_of_all(group: Any, place: str, mode: str) -> None:
    """Under an optimizer that normalises gradients too, whose steps they would else be one each: its rate is shared."""

    def body(here: Here) -> dict[str, torch.Tensor]:
        for _ in range(5):
            here.optimizer.zero_grad()
            sum(parameter.sum() for parameter in here.model.parameters()).backward()  # type: ignore[union-attr]
            here.optimizer.step()
        if here.client is not None:
            prepared(here)[0].consolidate()
        return weights(here.model)

    wanted = body(Here(*adam()))
    for found in on_group(group, f"{place} sync={mode}", 4, adam, body, weight=1):
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("momentum", "strategy"),
    [
        *zip(
            ["own", "dana", "auto"],
            cycle(["ps(servers=2)", "ps(servers=2, on=workers)", "ps(servers=2) schedule=priority"]),
        )
    ],
)
def test_momenta_of_workers_that_wait_for_each_other_are_that_of_one(group: Any, strategy: str, momentum: str) -> None:
    """In the weights, and in the state that an optimizer without workers goes on from. SGD's is ``dana`` by default."""

    def body(here: Here) -> Any:
        train_together(here, range(4))
        if here.client is None:
            here.optimizer.param_groups[0]["nesterov"] = False
            return weights(here.model), here.optimizer.state_dict()
        prepared(here)[0].consolidate()
        return weights(here.model), here.optimizer.state_dict()

    plain = Here(*sgd())
    plain.optimizer.param_groups[0]["nesterov"] = momentum != "own"
    wanted, state = body(plain)
    text = f"{strategy} sync=ssp(staleness=0, momentum={momentum})"
    for found, saved in on_group(group, text, WORKERS, sgd, body, weight=1):
        close(found, wanted)
        for index, entry in state["state"].items():
            torch.testing.assert_close(saved["state"][index]["momentum_buffer"], entry["momentum_buffer"])
            assert {f"momentum_buffer of rank {rank} of 2" for rank in range(2)} < saved["state"][index].keys()
        assert not saved["param_groups"][0]["nesterov"]
        _, other = sgd()
        other.load_state_dict(saved)
        other.step()


def test_momenta_that_an_optimizer_does_not_have_are_refused_by_its_name(group: Any) -> None:
    with pytest.raises(
        UsageError,
        match=r"sync=ssp\(momentum=own\) keeps the optimizer's state for every worker.* SGD, .* has no state",
    ):
        on_group(group, "ps sync=ssp(staleness=1, momentum=own)", WORKERS, making("sgd"), lambda here: train(here, 1))
    with pytest.raises(UsageError, match=r"looks ahead by Nesterov's momentum.* use asp\(momentum=own\)"):
        on_group(group, "ps sync=asp(momentum=dana)", WORKERS, adam, lambda here: train(here, 1))


@pytest.mark.parametrize("place", ["ps(servers=1)", "ps(servers=1, on=workers)"])
def test_the_momentum_that_the_optimizer_decides_is_told_and_the_same_everywhere(group: Any, place: str) -> None:
    def reason(here: Here) -> str:
        assert here.session is not None
        return here.session.stats().reason

    plain = making("sgd")  # without momentum
    for make, wanted in ((sgd, "momentum=dana: "), (adam, "momentum=shared: "), (plain, "momentum=shared: ")):
        assert all(wanted in one for one in on_group(group, f"{place} sync=asp", WORKERS, make, reason, weight=1))
    with pytest.raises(MismatchError, match=r"sync=asp has momentum=(dana|shared), and rank 0 .*=(dana|shared): give"):
        on_group(group, f"{place} sync=asp", WORKERS, lambda index: (adam if index else sgd)(index), reason, weight=1)


@pytest.mark.parametrize("strategy", ["ring", "ps(servers=1)", "ps(servers=2, on=workers)"])
def test_in_bulk_synchronous_steps_nobody_is_ahead(group: Any, strategy: str) -> None:
    def body(here: Here) -> Any:
        train(here, 3)
        assert here.session is not None
        stats = here.session.stats()
        return dict(stats.staleness), dict(stats.version_lag)

    assert on_group(group, strategy, WORKERS, sgd, body, weight=1) == [({0: 3}, {})] * WORKERS


@pytest.mark.parametrize("strategy", ["ps(servers=1) sync=asp", "ps(servers=2, on=workers) sync=ssp(staleness=2)"])
def test_who_joins_takes_part_in_what_others_do_between_their_steps(group: Any, strategy: str) -> None:
    """However often the others consolidate, all end with the same weights."""

    def body(here: Here) -> dict[str, torch.Tensor]:
        assert here.replica is not None
        assert here.client is not None
        for number in range([2, 4][here.rank]):
            here.optimizer.zero_grad()
            loss_of(here.model(batch(10 * number + here.rank, 4))).backward()
            here.optimizer.step()
            here.client.consolidate()
        shadow_until_all_joined(here.replica, here.client)
        return weights(here.model)

    first, second = on_group(group, strategy, 2, sgd, body, weight=1)
    assert all(torch.equal(first[name], tensor) for name, tensor in second.items())


def test_calls_that_do_not_go_together_name_both_workers(group: Any) -> None:
    def body(here: Here) -> None:
        assert here.client is not None
        if here.rank == 0:
            here.client.consolidate()
        else:
            here.client.owners_weights()

    says = r"rank . is at (consolidate|state_dict)\(\) while rank . is at (state_dict|consolidate)\(\)"
    with pytest.raises(MismatchError, match=says):
        on_group(group, "ps(servers=1) sync=asp", 2, sgd, body, weight=1)
