"""``schedule=auto`` overlaps iterations while no rank looks, and goes back when one rank does."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from choosing_runs import STEPS, Asked, Script, answered, clips, overlaps, schedule_of, step
from torch.optim.lr_scheduler import StepLR
from toy import Here, alone, batch, close, loss_of, on_group, same_as_alone, sgd, weights

from syncline.frameworks.torch import choosing


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    return answered(monkeypatch)


def scales(here: Here, number: int) -> None:
    """A GradScaler without a device: what it does to gradients."""
    (4 * loss_of(here.model(here.share(batch(number))))).backward()
    with torch.no_grad():
        for parameter in here.model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(4)
    here.optimizer.step()
    here.optimizer.zero_grad()


def replaces_gradients(here: Here, number: int) -> None:
    loss_of(here.model(here.share(batch(number)))).backward()
    for parameter in here.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    here.optimizer.step()
    here.optimizer.zero_grad()


def changes_kept_gradients(here: Here, number: int) -> None:
    """By views that it has kept; a schedule that overlaps iterations would refuse that."""
    loss_of(here.model(here.share(batch(number)))).backward()
    kept = here.__dict__.setdefault("kept", [parameter.grad for parameter in here.model.parameters()])
    torch._foreach_mul_(kept, 0.5)
    here.optimizer.step()
    here.optimizer.zero_grad(set_to_none=False)


def zeroes_by(keep: Callable[[torch.Tensor], Any], tensors: Callable[[Any], list[torch.Tensor]] = list) -> Script:
    """Zeroes gradients behind the step, by what it has kept once, and never reads them by name again."""

    def zeroes(here: Here, number: int) -> None:
        loss_of(here.model(here.share(batch(number)))).backward()
        here.optimizer.step()
        if "kept" not in vars(here):
            read = [parameter.grad for parameter in here.model.parameters()]
            vars(here)["kept"] = [keep(one) for one in read if one is not None]
        torch._foreach_zero_(tensors(vars(here)["kept"]))

    return zeroes


zeroes_kept_gradients = zeroes_by(lambda gradient: gradient)


zeroes_their_memory = zeroes_by(lambda gradient: gradient.data)


zeroes_unseen = zeroes_by(weakref.ref, lambda kept: [one() for one in kept])


def uses_a_closure(here: Here, number: int) -> None:
    def closure() -> torch.Tensor:
        here.optimizer.zero_grad()
        loss = loss_of(here.model(here.share(batch(number))))
        loss.backward()
        return loss

    here.optimizer.step(closure)  # type: ignore[arg-type]


def averages_weights(here: Here, number: int) -> None:
    step(here, number)
    mean = here.__dict__.setdefault("mean", [parameter.detach().clone() for parameter in here.model.parameters()])
    with torch.no_grad():
        torch._foreach_lerp_(mean, list(here.model.parameters()), 0.1)


def keeps_their_memory(here: Here, number: int) -> None:
    """What shares the memory of weights is not seen when it is read."""
    here.__dict__.setdefault("shared", here.model.state_dict())
    step(here, number)


def reads_the_state(here: Here, number: int) -> None:
    step(here, number)
    here.optimizer.state_dict()


def transforms(here: Here, number: int) -> None:
    step(here, number)
    named = dict(here.model.named_parameters())
    torch.func.grad(lambda x: torch.func.functional_call(here.model, named, (x,)).sum())(batch(number))


def trains_a_part(here: Here, number: int) -> None:
    """Without the model's own forward pass."""
    here.optimizer.zero_grad()
    output = here.share(batch(number))
    for module in here.model.children():
        output = module(output)
    loss_of(output).backward()
    here.optimizer.step()


def reads_behind_a_failure(here: Here, number: int) -> None:
    """A forward pass that fails is over."""
    step(here, number)
    with torch.no_grad(), contextlib.suppress(RuntimeError):
        here.model(torch.zeros(2, 5, dtype=torch.float64))
    weights(here.model)


LOOKS = [
    clips,
    scales,
    replaces_gradients,
    changes_kept_gradients,
    zeroes_kept_gradients,
    zeroes_their_memory,
    zeroes_unseen,
    uses_a_closure,
    averages_weights,
    keeps_their_memory,
    reads_the_state,
    transforms,
]


@pytest.mark.every(2)
@pytest.mark.parametrize("look", LOOKS)
def test_iterations_do_not_overlap_if_one_rank_looks_in_measured_steps(group: Any, asked: Asked, look: Script) -> None:
    """One rank, in one step or in all: the others do as it does in those that all count."""

    def body(here: Here) -> None:
        for number in range(STEPS + 2):
            (look if here.rank == 1 else step)(here, number)
        assert schedule_of(here) == "wait_free"
        assert type(here.optimizer) is torch.optim.SGD

    on_group(group, "ring", 2, sgd, body)
    assert asked == [False]


@pytest.mark.every(2)
@pytest.mark.parametrize("look", LOOKS)
def test_scripts_that_look_get_one_workers_weights(group: Any, look: Script) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        for number in range(STEPS + 2):
            look(here, number)
        return weights(here.model)

    same_as_alone(group, "ring", 2, sgd, body)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("look", "who"),
    [
        *zip(
            [
                clips,
                scales,
                replaces_gradients,
                uses_a_closure,
                averages_weights,
                reads_the_state,
                reads_behind_a_failure,
            ],
            cycle([0, 2]),
        )
    ],
)
def test_one_look_of_one_rank_later_makes_all_go_back(group: Any, asked: Asked, look: Script, who: int) -> None:
    """In the step after the one whose ticket tells of it."""
    at = STEPS + 3

    def body(here: Here) -> list[bool]:
        found = []
        for number in range(at + 5):
            (look if here.rank == who and number == at else step)(here, number)
            found.append(overlaps(here))
        assert type(here.optimizer) is torch.optim.SGD
        return found

    found = on_group(group, "ring", 3, sgd, body)
    first = found[0]
    assert first[STEPS:at] == [True] * 3
    assert first[-2:] == [False] * 2
    assert all(one == first for one in found)
    assert asked == [True, False]


def test_iterations_overlap_again_when_no_rank_has_looked_for_long(
    group: Any, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice as late each time; a look while ranks watch lets them wait again."""
    patience = 8  # longer than iterations overlap here
    monkeypatch.setattr(choosing, "_PATIENCE", patience)
    again = STEPS + 2 + 2 + patience + choosing._MEASURED  # a look at once, three steps until all are back
    looks = (STEPS, again + 2, again + 5 + 2 * patience + 2)
    last = again + 5 + 2 * patience + choosing._MEASURED + 4 * patience + choosing._MEASURED + 4

    def body(here: Here) -> dict[str, torch.Tensor]:
        seen = []
        for number in range(last):
            (reads_the_state if number in looks else step)(here, number)
            if here.session is not None:
                seen.append(overlaps(here))
        if here.session is not None:
            changes = [number for number in range(1, last) if seen[number] != seen[number - 1]]
            assert changes[:3] == [STEPS, STEPS + 3, STEPS + 3 + patience + choosing._MEASURED]
            assert seen[-1]
        return weights(here.model)

    same_as_alone(group, "ring", 2, sgd, body)
    assert asked == [True, False, True, False, False, True], asked


@pytest.mark.parametrize(
    ("keep", "at"), [*zip(["weights", "gradients", "memory of gradients"], cycle([STEPS, STEPS + 2]))]
)
def test_references_kept_during_overlap_are_found_in_the_same_step(
    group: Any, asked: Asked, keep: str, at: int
) -> None:
    """Tensors with the memory of weights, made where nothing is under way, or gradients that are zeroed by them."""

    def body(here: Here) -> list[torch.Tensor]:
        kept: list[torch.Tensor] = []
        found: list[torch.Tensor] = []
        for number in range(STEPS + 7):
            if number < at:
                step(here, number)
                continue
            output = here.model(here.share(batch(number)))
            if keep == "weights" and number == at:
                kept = [parameter.detach() for parameter in here.model.parameters()]
            loss_of(output).backward()
            here.optimizer.step()
            if keep == "weights":
                found += [one.clone() for one in kept]
                here.optimizer.zero_grad()
                continue
            if number == at:
                read = [parameter.grad for parameter in here.model.parameters()]
                kept = [one if keep == "gradients" else one.data for one in read if one is not None]
                del read
            torch._foreach_zero_(kept)
        assert here.session is None or not overlaps(here)
        return [*found, *weights(here.model).values()]

    wanted = dict(enumerate(alone(sgd, body)))
    for found in on_group(group, "ring", 2, sgd, body):
        close(dict(enumerate(found)), wanted)  # type: ignore[arg-type]
    assert asked == [True, False]


def in_shared_memory(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model, optimizer = sgd(index)
    model.share_memory()
    return model, optimizer


def over_numpy(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model, optimizer = sgd(index)
    for parameter in model.parameters():
        parameter.data = torch.from_numpy(parameter.detach().numpy().copy())
    return model, optimizer


@pytest.mark.parametrize("make", [in_shared_memory, over_numpy])
def test_iterations_do_not_overlap_if_other_objects_share_the_memory_of_weights(
    group: Any, asked: Asked, make: Any
) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        for number in range(STEPS + 2):
            step(here, number)
        return weights(here.model)

    same_as_alone(group, "ring", 2, make, body)
    assert asked == [False]


def test_ranks_wait_no_longer_than_at_first_after_a_long_overlap(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a checkpoint now and then: all go back three steps behind it."""
    patience, overlapped = 4, 11
    monkeypatch.setattr(choosing, "_PATIENCE", patience)
    period = overlapped + patience + choosing._MEASURED

    def body(here: Here) -> list[int]:
        seen = []
        for number in range(STEPS + 3 * period + 1):
            looks = number >= STEPS and (number - STEPS) % period == overlapped - 3
            (reads_the_state if looks else step)(here, number)
            seen.append(overlaps(here))
        return [number - STEPS for number in range(1, len(seen)) if seen[number] != seen[number - 1]]

    wanted = [0, overlapped, period, period + overlapped, 2 * period, 2 * period + overlapped, 3 * period]
    assert on_group(group, "ring", 2, sgd, body) == [wanted] * 2


def scheduled(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model, optimizer = sgd(index)
    optimizer.scheduler = StepLR(optimizer, 5, 0.9)  # type: ignore[attr-defined]
    return model, optimizer


@pytest.mark.parametrize("at", [4, STEPS + 1])
def test_methods_that_were_kept_are_the_plain_ones_when_all_have_gone_back(group: Any, asked: Asked, at: int) -> None:
    """Kept while steps are observed or iterations overlap; a scheduler checks whether the optimizer was called."""

    def body(here: Here) -> dict[str, torch.Tensor]:
        optimizer: Any = here.optimizer
        for number in range(STEPS + 8):
            if number <= at:
                zero_grad, state = optimizer.zero_grad, optimizer.state_dict
                load, add = optimizer.load_state_dict, optimizer.add_param_group
            zero_grad()
            loss_of(here.model(here.share(batch(number)))).backward()
            if number == STEPS + 3:
                assert all(parameter.grad is not None for parameter in here.model.parameters())
            if number <= at:
                update = partial(optimizer.step)
            update()
            optimizer.scheduler.step()
        load(state())
        if here.replica is not None:
            assert type(optimizer) is torch.optim.SGD
        with pytest.raises(TypeError, match="param_group must be a dict"):
            add([])
        return weights(here.model)

    same_as_alone(group, "ring", 2, scheduled, body)
    assert asked == [True, False]


def counted(call: Callable[[], Any], calls: list[int]) -> Callable[[], None]:
    def counts() -> None:
        calls.append(1)
        call()

    return counts


def test_a_step_that_the_script_puts_on_the_optimizer_meanwhile_stays(group: Any, asked: Asked) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        optimizer: Any = here.optimizer
        calls: list[int] = []
        for number in range(STEPS + 8):
            if number == STEPS + 1:
                optimizer.step = counted(optimizer.step, calls)
            (reads_gradients if number == STEPS + 3 else step)(here, number)
            optimizer.scheduler.step()
        assert len(calls) == 7
        return weights(here.model)

    same_as_alone(group, "ring", 2, scheduled, body)
    assert asked == [True, False]


def test_weights_that_are_used_without_the_models_forward_pass_are_looked_at(group: Any, asked: Asked) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        for number in range(STEPS + 3):
            trains_a_part(here, number)
        return weights(here.model)

    same_as_alone(group, "ring", 2, sgd, body, weight=1)
    assert asked == [False]


def test_a_step_in_which_all_look_gives_one_workers_weights_and_all_go_back(group: Any, asked: Asked) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        for number in range(STEPS + 8):
            (clips if number == STEPS + 3 else averages_weights if number == STEPS + 6 else step)(here, number)
        return weights(here.model) | dict(enumerate(here.__dict__["mean"]))  # type: ignore[arg-type]

    same_as_alone(group, "direct", 2, sgd, body)
    assert asked == [True, False]


def reads_gradients(here: Here, number: int) -> None:
    here.optimizer.zero_grad()
    loss_of(here.model(here.share(batch(number)))).backward()
    assert all(parameter.grad is not None for parameter in here.model.parameters())
    here.optimizer.step()


def evaluates(here: Here, number: int) -> None:
    step(here, number)
    here.model.eval()
    with torch.no_grad():
        here.model(batch(number))
    here.model.train()


def flushes(here: Here, number: int) -> None:
    step(here, number)
    if here.replica is not None:
        here.replica.flush()


@pytest.mark.parametrize("seed", range(3))
def test_whatever_ranks_look_at_and_when_all_run_the_same_and_the_weights_are_those_of_fifo(
    group: Any, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """To the bit between two, whose sums are the same however tensors are cut."""
    monkeypatch.setattr(choosing, "_PATIENCE", 3)
    ways = [step] * 24 + [reads_gradients, evaluates, flushes, reads_the_state, averages_weights]
    chosen = np.random.default_rng(seed).integers(len(ways), size=(2, 60))

    def body(here: Here) -> tuple[list[str], dict[str, torch.Tensor]]:
        seen = []
        for number, way in enumerate(chosen[here.rank]):
            ways[way](here, number)
            seen.append(schedule_of(here))
        return seen, weights(here.model)

    (first, found), (second, other) = on_group(group, "ring", 2, sgd, body)
    assert first == second
    assert {"fixed", "merged", "wait_free"} <= set(first)
    (_, wanted), _ = on_group(group, "ring schedule=fifo", 2, sgd, body)
    close(found, wanted, 0.0)
    close(other, wanted, 0.0)
