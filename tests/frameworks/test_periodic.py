"""Workers that train by themselves and exchange weights: each mode against its formulas, by hand, in one process."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from toy import STAGED, Here, adam, batch, close, fill, loss_of, making, mlp, on_group, same_as_alone, sgd, weights

from syncline import checkpoint
from syncline.errors import GradientError, UsageError
from syncline.frameworks.torch import Options, Prepared, prepare
from syncline.frameworks.torch.joining import shadow_until_all_joined
from syncline.plans.check import mixing_matrix
from syncline.session.session import Session
from syncline.sync.gossip import Gossip

WORKERS, STEPS = 3, 6
CARRIED = ["ring", "direct schedule=wait_free", "ps(servers=2, update=worker)", "ring" + STAGED, "tree schedule=fifo"]

Weights = list[torch.Tensor]
Agree = Callable[[Weights, list[Weights]], None]
"""Changes the agreed weights, and all workers', in place."""


def under(strategy: str, sync: str) -> str:
    """A strategy with a sync mode; what ``toy`` says behind it stays there."""
    text, staged, _ = strategy.partition(STAGED)
    return f"{text} sync={sync}{staged}"


def shares(here: Here, steps: range = range(STEPS), rank: int | None = None) -> None:
    """Plain training on batches of this rank's own."""
    for step in steps:
        here.optimizer.zero_grad()
        loss_of(here.model(batch(10 * step + (here.rank if rank is None else rank)))).backward()
        here.optimizer.step()


def trained(here: Here) -> list[dict[str, torch.Tensor]]:
    """The weights after every step."""
    found = []
    for step in range(STEPS):
        shares(here, range(step, step + 1))
        found.append(weights(here.model))
    return found


def by_hand(
    make: Callable[[int], Any], due: Callable[[int], bool], agree: Agree, workers: int = WORKERS
) -> list[list[dict[str, torch.Tensor]]]:
    """The same for every worker, one after the other in this process."""
    made = [make(index) for index in range(workers)]
    agreed = [parameter.detach().clone() for parameter in made[0][0].parameters()]
    found: list[list[dict[str, torch.Tensor]]] = [[] for _ in range(workers)]
    for step in range(STEPS):
        for rank, (model, optimizer) in enumerate(made):
            shares(Here(model, optimizer), range(step, step + 1), rank)
        if due(step):
            with torch.no_grad():
                agree(agreed, [list(model.parameters()) for model, _ in made])
        for mine, (model, _) in zip(found, made, strict=True):
            mine.append(weights(model))
    return found


def mean(agreed: Weights, workers: list[Weights]) -> None:
    for place, value in enumerate(agreed):
        value.copy_(sum(mine[place] for mine in workers) / len(workers))  # type: ignore[arg-type]
        for mine in workers:
            mine[place].copy_(value)


def compare(found: Any, wanted: Any) -> None:
    assert len(found) == len(wanted)
    for mine, theirs in zip(found, wanted, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            close(one, other)


@pytest.mark.parametrize("strategy", CARRIED)
def test_local_is_the_mean_of_weights_after_every_period(group: Any, strategy: str) -> None:
    found = on_group(group, under(strategy, "local(steps=2)"), WORKERS, adam, trained, weight=1)
    compare(found, by_hand(adam, lambda step: step % 2 == 1, mean))
    for step in range(1, STEPS, 2):
        for mine in found[1:]:
            assert all(torch.equal(mine[step][name], tensor) for name, tensor in found[0][step].items())


@pytest.mark.parametrize("strategy", CARRIED)
def test_an_average_after_every_step_of_plain_descent_is_synchronous(group: Any, strategy: str) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        for step in range(STEPS):
            here.optimizer.zero_grad()
            loss_of(here.model(here.share(batch(step, 13)))).backward()
            here.optimizer.step()
        return weights(here.model)

    same_as_alone(group, under(strategy, "local(steps=1)"), WORKERS, making("sgd"), body)


@pytest.mark.parametrize("strategy", ["ring", "ring" + STAGED, "ps(servers=1, update=worker)"])
def test_post_local_is_synchronous_first(group: Any, strategy: str) -> None:
    """After two steps with everybody's gradients, which momentum remembers, two periods of two steps each."""

    def together(steps: range, made: list[Any]) -> None:
        for step in steps:
            for rank, (model, optimizer) in enumerate(made):
                optimizer.zero_grad()
                loss_of(model(batch(10 * step + rank))).backward()
            for parameters in zip(*(model.parameters() for model, _ in made), strict=True):
                average = sum(parameter.grad for parameter in parameters) / len(made)
                for parameter in parameters:
                    parameter.grad = average.clone()
            for _, optimizer in made:
                optimizer.step()

    made = [sgd() for _ in range(WORKERS)]
    together(range(2), made)
    found = on_group(group, under(strategy, "post_local(after=2, steps=2)"), WORKERS, sgd, trained, weight=1)
    for mine in found:
        close(mine[1], weights(made[0][0]))
    agreed = [parameter.detach().clone() for parameter in made[0][0].parameters()]
    for step in range(2, STEPS):
        for rank, (model, optimizer) in enumerate(made):
            shares(Here(model, optimizer), range(step, step + 1), rank)
        if step % 2 == 1:
            with torch.no_grad():
                mean(agreed, [list(model.parameters()) for model, _ in made])
        for mine, (model, _) in zip(found, made, strict=True):
            close(mine[step], weights(model))


@pytest.mark.parametrize(("nesterov", "lr", "momentum"), [("on", 0.7, 0.9), ("off", 0.5, 0.8), ("on", 1.0, 0.0)])
def test_diloco_is_an_outer_sgd_by_pseudo_gradients(group: Any, nesterov: str, lr: float, momentum: float) -> None:
    outer: list[torch.optim.Optimizer] = []

    def agree(agreed: Weights, workers: list[Weights]) -> None:
        if not outer:
            fast = nesterov == "on" and momentum > 0
            outer.append(torch.optim.SGD(agreed, lr=lr, momentum=momentum, nesterov=fast))
        for place, value in enumerate(agreed):
            value.grad = value - sum(mine[place] for mine in workers) / len(workers)
        outer[0].step()
        for mine in workers:
            for parameter, value in zip(mine, agreed, strict=True):
                parameter.copy_(value)

    sync = f"diloco(steps=2, lr={lr}, momentum={momentum}, nesterov={nesterov})"
    found = on_group(group, under("ring", sync), WORKERS, adam, trained, weight=1)
    compare(found, by_hand(adam, lambda step: step % 2 == 1, agree))
    assert all(torch.equal(found[1][-1][name], tensor) for name, tensor in found[0][-1].items())


@pytest.mark.parametrize("strategy", ["ring", "ring" + STAGED])
def test_easgd_is_two_springs(group: Any, strategy: str) -> None:
    beta = 0.6

    def agree(centre: Weights, workers: list[Weights]) -> None:
        for place, value in enumerate(centre):
            apart = [mine[place] - value for mine in workers]
            for mine, difference in zip(workers, apart, strict=True):
                mine[place].sub_(beta / WORKERS * difference)
            value.add_(beta / WORKERS * sum(apart))

    def body(here: Here) -> list[dict[str, torch.Tensor]]:
        found = trained(here)
        assert here.replica is not None
        assert here.replica.averaging is not None
        here.replica.averaging.consolidate()
        return [*found, weights(here.model)]

    centre: list[Weights] = []

    def kept(agreed: Weights, workers: list[Weights]) -> None:
        centre[:] = [agreed]
        agree(agreed, workers)

    found = on_group(group, under(strategy, "easgd(steps=2, beta=0.6)"), WORKERS, sgd, body, weight=1)
    compare([mine[:-1] for mine in found], by_hand(sgd, lambda step: step % 2 == 1, kept))
    for mine in found:
        assert all(torch.equal(mine[-1][name], tensor) for name, tensor in found[0][-1].items())
        for tensor, value in zip(mine[-1].values(), centre[0], strict=True):
            assert torch.allclose(tensor, value, rtol=1e-12)


@pytest.mark.parametrize("strategy", ["ring", "direct schedule=wait_free", "ring" + STAGED])
@pytest.mark.parametrize(("graph", "workers"), [("ring", 4), ("exponential", 5), ("ring", 2)])
def test_gossip_is_a_product_with_the_mixing_matrix(group: Any, strategy: str, graph: Any, workers: int) -> None:
    turns = itertools.count()

    def mixed(_: Weights, of_workers: list[Weights]) -> None:
        matrix = mixing_matrix(Gossip(graph).mix(workers, next(turns)))
        for place in range(len(of_workers[0])):
            rows = torch.stack([mine[place].detach().clone() for mine in of_workers])
            found = torch.einsum("ij,j...->i...", torch.from_numpy(matrix), rows)
            assert torch.allclose(found.mean(0), rows.mean(0), rtol=1e-12)
            for mine, value in zip(of_workers, found, strict=True):
                mine[place].copy_(value)

    text = under(strategy, f"gossip(graph={graph})")
    found = on_group(group, text, workers, adam, trained, weight=1)
    compare(found, by_hand(adam, lambda _: True, mixed, workers))


def test_gossip_ends_with_the_mean_of_all(group: Any) -> None:
    def body(here: Here) -> list[dict[str, torch.Tensor]]:
        shares(here, range(3))
        before = weights(here.model)
        averaging(here).consolidate()
        return [before, weights(here.model)]

    found = on_group(group, "ring sync=gossip", 4, sgd, body, weight=1)
    for mine in found:
        close(mine[1], {name: sum(other[0][name] for other in found) / 4 for name in mine[0]})
    equal([mine[1] for mine in found])
    assert not torch.equal(found[0][0]["0.weight"], found[2][0]["0.weight"])


class Watching(torch.nn.Module):
    """Keeps the mean of what it has seen last, which is no number where that was nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.register_buffer("seen", torch.zeros(4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.copy_(x.detach().mean(0))
        return self.inner(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize("strategy", ["ring sync=local(steps=2)", "ring sync=local(steps=2)" + STAGED])
def test_who_has_seen_no_samples_counts_nothing(group: Any, strategy: str, steps: int) -> None:
    """Whose weights and statistics are no numbers: after a period, and in the final mean in the middle of one."""

    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = Watching()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def body(here: Here) -> dict[str, torch.Tensor]:
        for step in range(steps):
            here.optimizer.zero_grad()
            loss_of(here.model(batch(step, 0 if here.rank == 1 else 8))).backward()
            here.optimizer.step()
        if here.replica is not None:
            averaging(here).consolidate()
        return weights(here.model)

    wanted = body(Here(*make(0)))
    for found in on_group(group, strategy, 2, make, body, weight="batch"):
        close(found, wanted)


def test_gossip_counts_all_alike(group: Any) -> None:
    with pytest.raises(UsageError, match=r"weight='batch': under sync=gossip .* leave weight= out"):
        on_group(group, "ring sync=gossip", 2, sgd, shares)


# What a script does between two averages ----------------------------------------------------------------------------


def averaging(here: Here) -> Any:
    assert here.replica is not None
    assert here.replica.averaging is not None
    return here.replica.averaging


def equal(results: list[dict[str, torch.Tensor]]) -> None:
    """All ranks have the same bits."""
    for found in results[1:]:
        assert all(torch.equal(found[name], tensor) for name, tensor in results[0].items())


def clipped(here: Here) -> list[float]:
    """With gradients clipped by their own norm, and a scheduler; weights and rates at the end."""
    schedule = torch.optim.lr_scheduler.StepLR(here.optimizer, 2, 0.5)
    norms = []
    for step in range(4):
        here.optimizer.zero_grad()
        loss_of(here.model(batch(10 * step + here.rank))).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(here.model.parameters(), 0.3)))
        here.optimizer.step()
        schedule.step()
    return [*norms, here.optimizer.param_groups[0]["lr"]]


def test_steps_of_a_worker_are_clipped_and_scheduled_as_without_others(group: Any) -> None:
    found = on_group(group, "ring sync=local(steps=9)", 2, sgd, clipped, weight=1)
    for rank, norms in enumerate(found):
        assert norms == clipped(Here(*sgd(), rank=rank))


def test_a_step_that_the_scaler_skips_on_one_rank_is_counted_on_all(group: Any) -> None:
    """The average is made before that rank's next forward pass, or when it consolidates."""

    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = mlp().float()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def body(here: Here) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        scales = []
        for step in range(6):
            here.optimizer.zero_grad()
            factor = float("inf") if (here.rank, step) in ((1, 1), (0, 5)) else 1.0
            scaler.scale(loss_of(here.model(batch(10 * step + here.rank).float())) * factor).backward()
            scaler.step(here.optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        before = weights(here.model)
        with torch.no_grad():
            here.model(batch(0).float())
        here.model.eval()
        here.model(batch(0).float())
        if here.rank == 0:  # evaluation exchanges nothing by itself
            equal([before, weights(here.model)])
        averaging(here).consolidate()
        return scales, before, weights(here.model)

    (first, _, a), (second, _, b) = on_group(group, "ring sync=local(steps=2)", 2, make, body, weight=1)
    assert (first[-1], second[-1]) == (512.0, 512.0)
    assert (first[1], second[1]) == (1024.0, 512.0)
    equal([a, b])


@pytest.mark.parametrize("call", ["barrier", "gather", "allreduce"])
def test_a_rank_whose_last_step_the_scaler_has_skipped_exchanges_before_another_call(group: Any, call: str) -> None:
    """And calls between backward pass and optimizer come before the exchange on all ranks."""

    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = mlp().float()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def body(here: Here) -> dict[str, torch.Tensor]:
        assert here.session is not None
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        seen = np.ones(3, np.float32)
        calls: dict[str, Callable[[], Any]] = {
            "barrier": here.session.barrier,
            "gather": lambda: here.session.gather(b"me") if here.session else None,
            "allreduce": lambda: here.session.allreduce(seen) if here.session else None,
        }
        for step in range(4):
            here.optimizer.zero_grad()
            factor = float("inf") if (here.rank, step) in ((1, 1), (0, 3)) else 1.0
            scaler.scale(loss_of(here.model(batch(10 * step + here.rank).float())) * factor).backward()
            before = weights(here.model)
            calls[call]()
            scaler.unscale_(here.optimizer)
            calls[call]()
            equal([before, weights(here.model)])
            scaler.step(here.optimizer)
            calls[call]()
            scaler.update()
        return weights(here.model)

    equal(on_group(group, "ring sync=local(steps=2)", 2, make, body, weight=1))


def test_a_grad_scaler_finds_an_optimizer_as_it_was_when_the_run_is_over(group: Any) -> None:
    kept: list[torch.optim.Optimizer] = []

    def body(here: Here) -> None:
        shares(here, range(1))
        kept.append(here.optimizer)
        copy.deepcopy(here.optimizer).step()

    on_group(group, "ring sync=local(steps=2)", 2, sgd, body, weight=1)
    assert not any("_step_supports_amp_scaling" in vars(optimizer) for optimizer in kept)


def test_accumulated_passes_and_those_of_one_closure_are_one_step(group: Any) -> None:
    def accumulated(here: Here) -> int:
        for step in range(4):
            here.optimizer.zero_grad()
            with here.no_sync():
                loss_of(here.model(batch(step))).backward()
            loss_of(here.model(batch(step + 10))).backward()
            here.optimizer.step()
        return here.replica.steps if here.replica is not None else 0

    def several(here: Here) -> int:
        def closure() -> torch.Tensor:
            here.optimizer.zero_grad()
            loss = loss_of(here.model(batch(here.rank)))
            loss.backward()
            return loss.detach()

        for _ in range(4):
            here.optimizer.step(closure)
        return here.replica.steps if here.replica is not None else 0

    def counted(here: Here) -> float:
        several(here)
        here.optimizer.step(lambda: several_batches(here))
        return 0.0 if here.replica is None else here.replica.left_weight

    def several_batches(here: Here) -> torch.Tensor:
        here.optimizer.zero_grad()
        with here.no_sync():
            loss_of(here.model(batch(1, 3))).backward()
        loss = loss_of(here.model(batch(2, 5)))
        loss.backward()
        return loss.detach()

    def raising(here: Here) -> int:
        def closure() -> torch.Tensor:
            several_batches(here)
            raise ValueError

        with contextlib.suppress(ValueError):
            here.optimizer.step(closure)
        loss_of(here.model(batch(3))).backward()
        return here.replica.steps if here.replica is not None else 0

    def lbfgs(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = mlp()
        return model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, tolerance_change=0)

    assert on_group(group, "ring sync=local(steps=2)", 2, sgd, accumulated, weight=1) == [4, 4]
    assert on_group(group, "ring sync=local(steps=2)", 2, lbfgs, several, weight=1) == [4, 4]
    assert on_group(group, "ring sync=local(steps=2)", 2, lbfgs, counted, weight="batch") == [8.0, 8.0]
    assert on_group(group, "ring sync=local(steps=3)", 2, sgd, raising, weight=1) == [2, 2]


@pytest.mark.filterwarnings("ignore")  # the compiler filters its own warnings, which threads disturb
def test_compiled_models_train_as_others(group: Any) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        plain = here.model
        here.model = torch.compile(plain, backend="aot_eager", dynamic=True)  # type: ignore[assignment]
        shares(here, range(4))
        return weights(plain)

    own = by_hand(sgd, lambda step: step % 2 == 1, mean, 2)
    for found, wanted in zip(on_group(group, "ring sync=local(steps=2)", 2, sgd, body, weight=1), own, strict=True):
        close(found, wanted[3])


def test_gradients_stay_where_autograd_puts_them(group: Any) -> None:
    """So does what a script holds on to: an average writes to none of it."""

    def body(here: Here) -> None:
        loss_of(here.model(batch(here.rank))).backward()
        kept = [parameter.grad for parameter in here.model.parameters()]
        values = [gradient.clone() for gradient in kept if gradient is not None]
        here.optimizer.step()
        for parameter, gradient, value in zip(here.model.parameters(), kept, values, strict=True):
            assert parameter.grad is gradient
            assert torch.equal(value, gradient)

    on_group(group, "ring sync=local(steps=1)", 2, sgd, body, weight=1)
    on_group(group, "ring sync=post_local(after=0, steps=1)", 2, sgd, body, weight=1)


@pytest.mark.parametrize("weight", ["batch", "number"])
def test_ranks_count_by_what_they_have_seen_since_the_last_average(group: Any, weight: str) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        for step in range(2):
            here.optimizer.zero_grad()
            loss_of(here.model(batch(10 * step + here.rank, 3 if here.rank == 0 else 6))).backward()
            here.optimizer.step()
        return weights(here.model)

    def run(session: Session) -> dict[str, torch.Tensor]:
        made = prepare(session, *sgd(), Options(weight="batch" if weight == "batch" else 1.0 + session.rank))
        assert made is not None
        return body(Here(made.model, made.optimizer, session.rank, 2, session, made.replica))  # type: ignore[arg-type]

    found = group("ring sync=local(steps=2)", 2, run)
    own = [body(Here(*sgd(), rank=rank)) for rank in range(2)]
    wanted = {name: (own[0][name] + 2 * own[1][name]) / 3 for name in own[0]}
    for mine in found:
        close(mine, wanted)


class Normalised(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "strategy",
    [
        "ring sync=local(steps=2)",
        "ps(servers=1, update=worker) sync=local(steps=2)",
        "ring sync=local(steps=2)" + STAGED,
        "ring sync=gossip(steps=2)",
    ],
)
@pytest.mark.parametrize("shared", [True, False])
def test_statistics_of_batches_are_averaged_with_the_weights(group: Any, strategy: str, shared: bool) -> None:
    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        torch.manual_seed(5)
        model = Normalised().double()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def body(here: Here) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            for tensor in here.model.parameters():
                tensor.fill_(0.25)
        shares(here, range(2))
        return weights(here.model)

    own = [body(Here(*make(0), rank=rank)) for rank in range(2)]
    found = on_group(group, strategy, 2, make, body, weight=1, broadcast_buffers=shared)
    for mine, alone in zip(found, own, strict=True):
        for name in ("norm.running_mean", "norm.running_var"):
            average = (own[0][name] + own[1][name]) / 2
            assert torch.allclose(mine[name], average if shared else alone[name], rtol=1e-12)
        assert int(mine["norm.num_batches_tracked"]) == 2


# Consolidation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["ring codec=topk(ratio=0.1)", "ps(servers=1, update=worker)", "ring" + STAGED])
@pytest.mark.parametrize("sync", ["local(steps=4)", "diloco(steps=4)", "post_local(after=1, steps=4)"])
def test_all_have_the_mean_of_what_they_had_and_go_on_as_if_nothing_had_been(
    group: Any, strategy: str, sync: str
) -> None:
    def body(here: Here) -> list[dict[str, torch.Tensor]]:
        shares(here, range(3))
        before = weights(here.model)
        averaging(here).consolidate()
        once = weights(here.model)
        averaging(here).consolidate()
        return [before, once, weights(here.model)]

    found = on_group(group, under(strategy, sync), 2, sgd, body, weight=1)
    before = [mine[0] for mine in found]
    assert not torch.equal(before[0]["0.weight"], before[1]["0.weight"])
    for mine in found:
        close(mine[1], {name: (before[0][name] + before[1][name]) / 2 for name in before[0]})
        close(mine[2], mine[1])
    equal([mine[2] for mine in found])


def test_where_all_have_the_same_weights_to_consolidate_changes_no_bit(group: Any) -> None:
    """Before anything, in synchronous steps, and when a period has just ended: with three workers, who round."""

    def body(here: Here) -> None:
        for steps in (0, 2, 2):
            shares(here, range(steps))
            before = weights(here.model)
            averaging(here).consolidate()
            equal([before, weights(here.model)])

    on_group(group, "ring sync=post_local(after=2, steps=2)", 3, sgd, body, weight=1)


def test_two_models_with_one_optimizer_each_exchange_their_weights(group: Any) -> None:
    def both(session: Session | None, rank: int) -> dict[str, torch.Tensor]:
        first, second = mlp(3), mlp(4)
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
        for model in (first, second) if session is not None else ():
            assert session is not None
            prepare(session, model, optimizer)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(second(torch.nn.functional.pad(first(batch(10 * step + rank)), (0, 1)))).backward()
            optimizer.step()
        found = {f"first {name}": tensor for name, tensor in weights(first).items()}
        return found | {f"second {name}": tensor for name, tensor in weights(second).items()}

    own = [both(None, rank) for rank in range(2)]
    for found in group("ring sync=local(steps=2)", 2, lambda session: both(session, session.rank)):
        close(found, {name: (own[0][name] + own[1][name]) / 2 for name in found})


def test_a_model_that_is_prepared_again_begins_anew(group: Any) -> None:
    def run(session: Session) -> dict[str, torch.Tensor]:
        model, optimizer = sgd()
        for _ in range(2):
            made = prepare(session, model, optimizer)
            assert made is not None
            here = Here(model, optimizer, session.rank, 2, session, made.replica)
            shares(here, range(3))
        assert made is not None
        assert made.replica.steps == 6
        return weights(model)

    equal(group("ring sync=local(steps=2)", 2, run))


def test_ranks_that_do_not_consolidate_together_are_named(group: Any) -> None:
    def body(here: Here) -> None:
        shares(here, range(1))
        if here.rank == 0:
            averaging(here).consolidate()
        else:
            shares(here, range(1))

    with pytest.raises(Exception, match=r"rank [01] .*consolidate"):
        on_group(group, "ring sync=local(steps=2)", 2, sgd, body, weight=1)


def test_ranks_that_consolidate_after_different_numbers_of_steps_are_told_these(group: Any) -> None:
    def body(here: Here) -> None:
        shares(here, range(1 + here.rank))
        averaging(here).consolidate()

    says = r"consolidate \(call \d+, step [12]\) .* consolidate \(call \d+, step [12]\); .*join\(\)"
    with pytest.raises(Exception, match=says):
        on_group(group, "ring sync=local(steps=4)", 2, sgd, body, weight=1)


# What travels -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sync", "period"), [("local(steps=16)", 16), ("diloco(steps=50)", 50)])
def test_bytes_are_fewer_by_the_period(group: Any, sync: str, period: int) -> None:
    """Counted at the transport, with headers and tickets."""

    def sent(session: Session) -> int:
        made = prepare(session, *sgd())
        assert made is not None
        here = Here(made.model, made.optimizer, session.rank, 2, session, made.replica)  # type: ignore[arg-type]
        shares(here, range(1))
        before = session.stats().bytes_sent
        shares(here, range(1, 1 + period))
        return sum(session.stats().bytes_sent.values()) - sum(before.values())

    often, seldom = group("ring", 2, sent)[0], group(f"ring sync={sync}", 2, sent)[0]
    assert often == period * seldom


@pytest.mark.parametrize("codec", ["int8", "onebit", "topk(ratio=0.1)", "powersgd(rank=2)", "fp16"])
@pytest.mark.parametrize(
    "sync", ["local(steps=2)", "diloco(steps=2)", "easgd(steps=2)", "post_local(after=2, steps=2)"]
)
def test_a_codec_leaves_agreed_weights_equal(group: Any, codec: str, sync: str) -> None:
    refused = codec in ("topk(ratio=0.1)", "powersgd(rank=2)") and sync == "easgd(steps=2)"
    without = " feedback=off" if refused else ""

    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = mlp().float()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def body(here: Here) -> dict[str, torch.Tensor]:
        for step in range(4):
            here.optimizer.zero_grad()
            loss_of(here.model(batch(10 * step + here.rank).float())).backward()
            here.optimizer.step()
        if sync.startswith("easgd"):
            averaging(here).consolidate()
        return weights(here.model)

    equal(on_group(group, f"ring sync={sync} codec={codec}{without}", 3, make, body, weight=1))


def test_what_a_codec_has_lost_comes_with_the_next_differences(group: Any) -> None:
    """Error feedback: when workers stand still, the agreed weights become the mean at last."""

    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = mlp().float()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def body(here: Here) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        shares_float(here, range(1))
        first = weights(here.model)
        here.optimizer.param_groups[0]["lr"] = 0.0
        for _ in range(40):
            shares_float(here, range(1))
        return first, weights(here.model)

    def shares_float(here: Here, steps: range) -> None:
        for step in steps:
            here.optimizer.zero_grad()
            loss_of(here.model(batch(10 * step + here.rank).float())).backward()
            here.optimizer.step()

    own = []
    for rank in range(2):
        here = Here(*make(0), rank=rank)
        shares_float(here, range(1))
        own.append(weights(here.model))
    wanted = {name: (own[0][name] + own[1][name]) / 2 for name in own[0]}
    for first, last in on_group(group, "ring sync=local(steps=1) codec=topk(ratio=0.1)", 2, make, body, weight=1):
        assert (first["0.weight"] - wanted["0.weight"]).norm() > 1e-3
        close(last, wanted, 1e-5)


# Faults -------------------------------------------------------------------------------------------------------------


def test_weights_are_exchanged_by_an_optimizer_that_is_known(group: Any) -> None:
    def run(session: Session) -> None:
        prepare(session, mlp())

    with pytest.raises(UsageError, match=r"sync=local exchanges weights when the optimizer .* give syncline.prepare"):
        group("ring sync=local(steps=2)", 2, run)


def test_different_weights_that_ranks_load_are_found(group: Any) -> None:
    def body(here: Here) -> None:
        here.model.load_state_dict(mlp(here.rank).state_dict())
        shares(here)

    with pytest.raises(GradientError, match=r"loaded different weights .* load the same ones on all ranks"):
        on_group(group, "ring sync=local(steps=2)", 2, sgd, body, weight=1)


def test_the_same_weights_that_ranks_load_are_agreed_on(group: Any) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        shares(here, range(1))
        here.model.load_state_dict(mlp(7).state_dict())
        shares(here, range(1, 2))
        return weights(here.model)

    own = []
    for rank in range(2):
        here = Here(mlp(7), None, rank=rank)  # type: ignore[arg-type]
        here.optimizer = torch.optim.SGD(here.model.parameters(), lr=0.1)
        shares(here, range(1, 2))
        own.append(weights(here.model))
    wanted = {name: (own[0][name] + own[1][name]) / 2 for name in own[0]}
    for mine in on_group(group, "ring sync=local(steps=2)", 2, making("sgd"), body, weight=1):
        close(mine, wanted)


@pytest.mark.parametrize("counts", [[2, 5], [3, 0], [4, 4]])
@pytest.mark.parametrize("sync", ["local(steps=2)", "diloco(steps=2)", "easgd(steps=2)", "gossip", "gossip(steps=2)"])
def test_joined_ranks_end_equal_and_go_on(group: Any, sync: str, counts: list[int]) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        assert here.replica is not None
        for start, mine in ((0, counts), (20, counts[::-1])):
            shares(here, range(start, start + mine[here.rank]))
            shadow_until_all_joined(here.replica)
        assert here.replica.steps == 2 * max(counts)
        return weights(here.model)

    equal(on_group(group, f"ring sync={sync}", 2, adam, body, weight=1))


def test_a_joined_rank_counts_with_the_steps_that_it_has_made(group: Any) -> None:
    """Of three steps, and of one: the mean after two is of both, and that at the end of the first alone."""

    def body(here: Here) -> dict[str, torch.Tensor]:
        assert here.replica is not None
        shares(here, range([3, 1][here.rank]))
        shadow_until_all_joined(here.replica)
        return weights(here.model)

    made = [making("sgd")(0) for _ in range(2)]
    shares(Here(*made[0], rank=0), range(2))
    shares(Here(*made[1], rank=1), range(1))
    with torch.no_grad():
        for mine, other in zip(made[0][0].parameters(), made[1][0].parameters(), strict=True):
            mine.copy_((mine + other) / 2)
    shares(Here(*made[0], rank=0), range(2, 3))
    for found in on_group(group, "ring sync=local(steps=2)", 2, making("sgd"), body, weight=1):
        close(found, weights(made[0][0]))


# Checkpoints --------------------------------------------------------------------------------------------------------


def saved_state(here: Here) -> Any:
    """What each rank saves, as ``torch.save`` and ``torch.load`` leave it."""
    assert here.session is not None
    file = io.BytesIO()
    state = checkpoint.save(here.session, prepared(here))
    torch.save([here.model.state_dict(), here.optimizer.state_dict(), state], file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def prepared(here: Here) -> list[Any]:
    assert here.replica is not None
    return [Prepared(here.model, here.optimizer, here.replica, None)]


def small_with_statistics(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
    model = fill(Normalised().float())
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def float_shares(here: Here, steps: range) -> None:
    for step in steps:
        here.optimizer.zero_grad()
        x = batch(10 * step + here.rank, 4 + 2 * here.rank).float()
        here.model(x).square().sum().backward()
        here.optimizer.step()


@pytest.mark.parametrize("at", [2, 3, 4, 5])
@pytest.mark.parametrize(
    "sync",
    [
        "local(steps=3)",
        "diloco(steps=3)",
        "easgd(steps=3)",
        "gossip(graph=exponential, steps=2)",
        "post_local(after=4, steps=2)",
        "local(steps=2) codec=topk(ratio=0.3)",
        "post_local(after=3, steps=2) codec=int8",
    ],
)
def test_a_resumed_run_goes_on_with_the_same_bits(group: Any, sync: str, at: int) -> None:
    """From the middle of a period too: each rank with its own weights, statistics and optimizer."""
    kept: dict[int, Any] = {}

    def whole(here: Here) -> dict[str, torch.Tensor]:
        float_shares(here, range(at))
        kept[here.rank] = saved_state(here)
        float_shares(here, range(at, 9))
        return weights(here.model)

    def resumed(here: Here) -> dict[str, torch.Tensor]:
        assert here.session is not None
        model, optimizer, state = kept[here.rank]
        here.model.load_state_dict(kept[0][0])  # rank 0's, as most scripts have it
        here.optimizer.load_state_dict(optimizer)
        checkpoint.load(here.session, prepared(here), state)
        assert here.replica is not None
        assert here.replica.steps == at
        for name, tensor in weights(here.model).items():
            assert torch.equal(tensor, model[name])
        float_shares(here, range(at, 9))
        return weights(here.model)

    weight = 1 if sync.startswith("gossip") else "batch"
    wanted = on_group(group, f"ring sync={sync}", 2, small_with_statistics, whole, weight=weight)
    found = on_group(group, f"ring sync={sync}", 2, small_with_statistics, resumed, weight=weight)
    for mine, theirs in zip(found, wanted, strict=True):
        equal([theirs, mine])


def test_a_state_after_a_period_that_ended_in_a_skipped_step_is_of_one_moment(group: Any) -> None:
    """As when a GradScaler skips on all ranks: what the codec keeps is of the exchange that is made to save."""
    kept: dict[int, Any] = {}

    def whole(here: Here) -> dict[str, torch.Tensor]:
        float_shares(here, range(3))
        here.model(batch(30 + here.rank).float()).square().sum().backward()
        kept[here.rank] = saved_state(here)
        float_shares(here, range(4, 8))
        return weights(here.model)

    def resumed(here: Here) -> dict[str, torch.Tensor]:
        assert here.session is not None
        _, optimizer, state = kept[here.rank]
        here.model.load_state_dict(kept[0][0])
        here.optimizer.load_state_dict(optimizer)
        checkpoint.load(here.session, prepared(here), state)
        float_shares(here, range(4, 8))
        return weights(here.model)

    strategy = "ring sync=local(steps=2) codec=topk(ratio=0.3)"
    wanted = on_group(group, strategy, 2, small_with_statistics, whole, weight=1)
    found = on_group(group, strategy, 2, small_with_statistics, resumed, weight=1)
    for mine, theirs in zip(found, wanted, strict=True):
        equal([theirs, mine])


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3)])
def test_another_number_of_workers_goes_on_from_the_mean(group: Any, before: int, after: int) -> None:
    kept: list[Any] = []

    def first(here: Here) -> dict[str, torch.Tensor]:
        shares(here, range(3))
        state = saved_state(here)
        if here.rank == 0:
            kept.append(state)
        return weights(here.model)

    def second(here: Here) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        assert here.session is not None
        checkpoint.load(here.session, prepared(here), kept[0][2])
        found = weights(here.model)
        shares(here, range(3, 6))
        return found, weights(here.model)

    own = on_group(group, "ring sync=diloco(steps=2)", before, sgd, first, weight=1)
    found = on_group(group, "ring sync=diloco(steps=2)", after, sgd, second, weight=1)
    for mine, _ in found:
        close(mine, {name: sum(one[name] for one in own) / before for name in mine})
    equal([last for _, last in found])


def test_a_state_of_another_model_is_refused(group: Any) -> None:
    kept: list[Any] = []

    def first(here: Here) -> None:
        assert here.session is not None
        kept.append(checkpoint.save(here.session, prepared(here)))

    def second(here: Here) -> None:
        assert here.session is not None
        checkpoint.load(here.session, prepared(here), kept[0])

    on_group(group, "ring sync=local(steps=2)", 2, sgd, first, weight=1)
    with pytest.raises(UsageError, match="the agreed weights in this state are of another model"):
        on_group(group, "ring sync=local(steps=2)", 2, small_with_statistics, second, weight=1)
