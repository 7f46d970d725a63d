"""``delayed`` is its recursion, computed by hand, and synchronous where somebody looks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from scripts import (
    STEPS,
    added_up,
    clipped,
    copied,
    moving_average,
    never_zeroed,
    own_gradients,
    plain,
    saved,
    scaled,
    scheduled,
    skipped,
    with_closure,
    zeroed_otherwise,
)
from toy import STAGED, Here, batch, close, loss_of, mlp, on_group, same_as_alone, sgd, weights

from syncline.codecs import Codec, Floats, State, codec_of, relay_of
from syncline.errors import GradientError
from syncline.nouns import Spec
from syncline.strategy.strategy import Strategy


def test_a_gradient_that_is_still_under_way_is_not_added_to(group: Any) -> None:
    with pytest.raises(GradientError, match=r"adds to the gradient of .* still in flight.*call zero_grad"):
        on_group(group, "ring schedule=delayed", 2, sgd, never_zeroed)


Mean = Callable[[int, Sequence[torch.Tensor], int], torch.Tensor]
"""Of a tensor's gradients, by its number, at a step."""


def plain_mean(tensor: int, gradients: Sequence[torch.Tensor], step: int) -> torch.Tensor:  # noqa: ARG001
    return (gradients[0] + gradients[1]) / 2


def coded_mean(text: str) -> Mean:
    """By payloads, each with what the one before has left; where an owner adds them up, so has its own."""
    specs = [Spec(name, tuple(one.shape)) for name, one in mlp().named_parameters()]
    applied = [codec_of(Strategy.parse(f"ring codec={text}").codec_object(), spec) for spec in specs]
    mine = [[a.codec.init(spec, rank, a.feedback) for a, spec in zip(applied, specs, strict=True)] for rank in (0, 1)]
    again = [relay_of(a.codec).init(spec, -1, a.feedback) for a, spec in zip(applied, specs, strict=True)]

    def through(codec: Codec, values: Floats, state: State, step: int) -> Floats:
        payload, found = np.zeros(codec.wire_bytes(state.spec)[1] // 4, np.uint32), np.zeros_like(values)
        state.step, state.world = step, 2
        codec.decode(payload[: codec.encode(values, payload, state).words], found, state)
        return found

    def mean(tensor: int, gradients: Sequence[torch.Tensor], step: int) -> torch.Tensor:
        codec, feedback, _ = applied[tensor]
        halves = [(0.5 * one).reshape(-1).numpy().astype(np.float32) for one in gradients]
        total = sum(through(codec, half, mine[rank][tensor], step) for rank, half in enumerate(halves))
        if codec.combine == "owner":
            total = through(relay_of(codec), total, again[tensor], step)
        assert not feedback or np.any(mine[0][tensor].residual)
        return torch.from_numpy(total).double().reshape(gradients[0].shape)

    return mean


def delayed_by_hand(local: bool, mean: Mean = plain_mean) -> list[dict[str, torch.Tensor]]:
    """The recursion, for two workers: W(t+1) = W(t) - lr mean g(t); w(t+1) = W(t) - lr g(t)."""
    shared = [mlp()]
    optimizer = torch.optim.SGD(shared[0].parameters(), lr=0.1, momentum=0.9)
    workers = [mlp(), mlp()]
    waiting: list[torch.Tensor] | None = None
    for step in range(STEPS):
        mine = []
        for rank, model in enumerate(workers):
            model.zero_grad()
            x = batch(step)
            loss_of(model(x[6 * rank : 6 * rank + 6])).backward()
            mine.append([parameter.grad for parameter in model.parameters()])
        if waiting is not None:
            update(shared[0], optimizer, waiting)
        pairs = enumerate(zip(*mine, strict=True))
        waiting = [mean(tensor, (a, b), step) for tensor, (a, b) in pairs if a is not None and b is not None]
        with torch.no_grad():
            for model, own in zip(workers, mine, strict=True):
                for parameter, whole, gradient in zip(model.parameters(), shared[0].parameters(), own, strict=True):
                    assert gradient is not None
                    parameter.copy_(whole - 0.1 * gradient if local else whole)
    assert waiting is not None
    update(shared[0], optimizer, waiting)
    return [weights(shared[0])] * 2


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer, gradients: list[torch.Tensor]) -> None:
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()


@pytest.mark.parametrize("place", ["ring", "ps(servers=1, on=workers, update=worker)", "ring" + STAGED])
@pytest.mark.parametrize("local", [True, False])
def test_delayed_steps_are_their_recursion(group: Any, place: str, local: bool) -> None:
    """To the bit, with buckets of a tensor each; whoever looks sees the weights that all have."""
    architecture, staged = place.removesuffix(STAGED), STAGED if place.endswith(STAGED) else ""
    text = f"{architecture} schedule=delayed(bucket=1B, local={'on' if local else 'off'}){staged}"
    for found, wanted in zip(on_group(group, text, 2, sgd, plain), delayed_by_hand(local), strict=True):
        close(found, wanted, 1e-15)


def test_a_local_step_goes_up_where_the_optimizer_maximizes(group: Any) -> None:
    """The same steps of what has the opposite sign."""

    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = mlp()
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, maximize=True)

    def body(here: Here) -> dict[str, torch.Tensor]:
        for step in range(STEPS):
            here.optimizer.zero_grad()
            (-loss_of(here.model(here.share(batch(step))))).backward()
            here.optimizer.step()
        return weights(here.model)

    found = on_group(group, "ring schedule=delayed(bucket=1B)", 2, make, body)
    for one, wanted in zip(found, delayed_by_hand(local=True), strict=True):
        close(one, wanted, 1e-15)


@pytest.mark.parametrize("given_up", [False, True])
def test_a_local_step_is_of_the_last_backward_pass_alone(group: Any, given_up: bool) -> None:
    """Not of one whose gradients were read, or that was given up: a layer that it does not use stays where it is."""

    def body(here: Here) -> tuple[torch.Tensor, torch.Tensor]:
        first, last = here.model.get_submodule("0"), here.model.get_submodule("2")
        x = here.share(batch(0))

        def fail(_: torch.Tensor) -> None:
            raise ValueError("given up")

        if given_up:
            handle = first.weight.register_hook(fail)
            with pytest.raises(ValueError, match="given up"):
                loss_of(here.model(x)).backward()
            handle.remove()
        else:
            loss_of(here.model(x)).backward()
            torch.nn.utils.clip_grad_norm_(here.model.parameters(), 1e9)
            here.optimizer.step()
        here.optimizer.zero_grad()
        before = last.weight.detach().clone()
        here.model(x)
        first(x).sum().backward()
        here.optimizer.step()
        own: list[torch.Tensor] = []
        last.register_forward_pre_hook(lambda module, _: own.append(module.weight.detach().clone()))
        here.model(x)
        return own[0], before

    for own, before in on_group(group, "ring schedule=delayed(local=on)", 2, sgd, body, weight=1, unused="zeros"):
        assert torch.equal(own, before)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("codec", "local"),
    [*zip(["topk(ratio=0.4)", "onebit", "sign", "threshold(ratio=0.3, momentum=0.5)", "int8"], cycle([True, False]))],
)
def test_delayed_steps_of_a_codec_are_their_recursion(group: Any, codec: str, local: bool) -> None:
    """What a step leaves goes into the next one, whichever of two buffers its gradients are in."""
    text = f"codec={codec} schedule=delayed(bucket=1B, local={'on' if local else 'off'})"
    wanted = delayed_by_hand(local, coded_mean(codec))
    for place in ("ring", "direct"):
        for found, other in zip(on_group(group, f"{place} {text}", 2, sgd, plain), wanted, strict=True):
            close(found, other, 1e-6)


CODED = [
    "ring codec=powersgd(rank=1)",
    "ps(servers=2, on=workers, update=worker) codec=onebit",
    "codec=gtopk(ratio=0.4)",
]


@pytest.mark.every(2)
@pytest.mark.parametrize("text", [*CODED, "ring codec=topk(ratio=0.4)" + STAGED, "hierarchical codec=ternary"])
def test_a_codecs_delayed_steps_are_synchronous_where_every_gradient_is_read(group: Any, text: str) -> None:
    """To the bit: the codec remembers the same."""
    architecture, staged = text.removesuffix(STAGED), STAGED if text.endswith(STAGED) else ""
    nodes = (0, 0, 1, 1) if "hierarchical" in text else (0, 1, 2, 3)
    found, wanted = (
        on_group(group, f"{architecture} schedule={schedule}(bucket=1B){staged}", 4, sgd, clipped, nodes)
        for schedule in ("delayed", "fixed")
    )
    for one, other in zip(found, wanted, strict=True):
        close(one, other, 0.0)


@pytest.mark.every(2)
@pytest.mark.parametrize("text", [*CODED, "hierarchical codec=ternary"])
def test_a_codecs_delayed_steps_leave_the_same_weights_on_all_ranks(group: Any, text: str) -> None:
    """With all that a codec can be, and two steps under way; a run gives the same again."""
    nodes = (0, 0, 1, 1) if "hierarchical" in text else (0, 1, 2, 3)
    runs = [on_group(group, f"{text} schedule=delayed(bucket=1B)", 4, sgd, plain, nodes) for _ in range(2)]
    for found in (*runs[0], *runs[1]):
        close(found, runs[0][0], 0.0)


@pytest.mark.parametrize("script", [clipped, scaled])
def test_who_reads_every_gradient_makes_delayed_steps_synchronous(group: Any, script: Callable[[Here], Any]) -> None:
    same_as_alone(group, "ring schedule=delayed", 2, sgd, script)


@pytest.mark.parametrize(
    "script",
    [moving_average, saved, scheduled, added_up, zeroed_otherwise, skipped, own_gradients, copied, with_closure],
)
def test_delayed_scripts_leave_the_same_weights_on_all_ranks(group: Any, script: Callable[[Here], Any]) -> None:
    found, other = on_group(group, "ring schedule=delayed", 2, sgd, script)
    close(found, other, 0.0)


EVALUATED = {"by all": {1: (0, 1), 4: (0, 1)}, "by one": {1: (0,), 2: (0,), 5: (1,)}, "by each": {0: (0,), 3: (1,)}}
"""Steps behind which weights are evaluated, and on which ranks."""


def adamw(index: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
    model = mlp()
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)


class ByHand:
    """A worker: W, which all have where nobody evaluates, w, at which gradients are taken, and what is due."""

    def __init__(self) -> None:
        self.shared, self.optimizer = adamw()
        self.ahead = mlp()
        self.due: tuple[list[torch.Tensor], float] | None = None  # the mean of a step, and the rate of that step

    def catch_up(self) -> None:
        """Update W with what is due, at the rate of the step that it is of, and let w be W."""
        if self.due is not None:
            gradients, self.optimizer.param_groups[0]["lr"] = self.due
            update(self.shared, self.optimizer, gradients)
        self.due = None
        self.ahead.load_state_dict(self.shared.state_dict())

    def evaluate(self) -> torch.Tensor:
        with torch.no_grad():
            return loss_of(self.shared(batch(100)))


def evaluated_by_hand(local: bool, ranks_of: dict[int, tuple[int, ...]], steps: int) -> list[Any]:
    workers = [ByHand(), ByHand()]
    seen: list[list[torch.Tensor]] = [[], []]
    for step in range(steps):
        mine = []
        for rank, one in enumerate(workers):
            one.ahead.zero_grad()
            loss_of(one.ahead(batch(step)[6 * rank : 6 * rank + 6])).backward()
            mine.append([parameter.grad for parameter in one.ahead.parameters() if parameter.grad is not None])
        rate = 0.1 * 0.5 ** (step // 2)
        for one, own in zip(workers, mine, strict=True):
            one.catch_up()
            one.due = [(a + b) / 2 for a, b in zip(*mine, strict=True)], rate
            with torch.no_grad():
                for parameter, gradient in zip(one.ahead.parameters(), own, strict=True):
                    parameter -= rate * gradient if local else 0 * gradient
        for rank in ranks_of.get(step, ()):
            workers[rank].catch_up()
            seen[rank].append(workers[rank].evaluate())
    for one in workers:
        one.catch_up()
    return [(weights(one.shared), found) for one, found in zip(workers, seen, strict=True)]


@pytest.mark.parametrize("who", EVALUATED)
@pytest.mark.parametrize("local", [True, False])
def test_an_update_has_the_values_of_its_step_and_an_evaluation_ends_the_delay(
    group: Any, local: bool, who: str
) -> None:
    """AdamW under StepLR: an update has the rate of the step whose gradients it brings, not that of the one it is in.

    Who evaluates sees all steps so far, and takes the next gradient there; the others go on as they were.
    """

    def body(here: Here) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        rates = torch.optim.lr_scheduler.StepLR(here.optimizer, 2, 0.5)
        seen = []
        for step in range(8):
            here.optimizer.zero_grad()
            loss_of(here.model(here.share(batch(step)))).backward()
            here.optimizer.step()
            rates.step()
            if here.rank in EVALUATED[who].get(step, ()):
                here.model.eval()
                with torch.no_grad():
                    seen.append(loss_of(here.model(batch(100))))
                here.model.train()
        return weights(here.model), seen

    text = f"ring schedule=delayed(local={'on' if local else 'off'})"
    wanted = evaluated_by_hand(local, EVALUATED[who], 8)
    for (found, seen), (by_hand, wanted_seen) in zip(on_group(group, text, 2, adamw, body), wanted, strict=True):
        close(found, by_hand, 1e-12)
        torch.testing.assert_close(seen, wanted_seen, rtol=1e-12, atol=0)
    close(wanted[0][0], wanted[1][0], 1e-12)
