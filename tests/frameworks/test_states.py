"""States that a run takes up: whose they are, and that nothing stays of what was before."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from periodic import Normalised, equal
from toy import Here, alone, batch, close, fill, loss_of, on_group, sgd, train, weights

from syncline import checkpoint
from syncline.errors import UsageError
from syncline.frameworks.torch import Options, Prepared, prepare
from syncline.session.groups import new_group
from syncline.session.session import Session


@pytest.mark.parametrize("order", ["AB", "BA"])
def test_a_state_finds_its_group_in_whatever_order_groups_are_made(group: Any, order: str) -> None:
    """Two groups of the same ranks, told apart by the models that are theirs."""
    kept: dict[int, Any] = {}

    def prepared(session: Session, groups: str) -> list[Prepared]:
        made = {name: new_group(session, [0, 1]) for name in groups}
        found = [prepare(made[name].session, *sgd(), Options(weight=1)) for name in "AB"]
        return [one for one in found if one is not None]

    def steps(models: list[Prepared], some: range) -> list[dict[str, torch.Tensor]]:
        for made, times in zip(models, (1, 2), strict=True):
            assert made.optimizer is not None
            here = Here(made.model, made.optimizer, made.replica.session.rank, 2)
            train(here, range(some.start * times, some.stop * times))
        return [weights(made.model) for made in models]

    def whole(session: Session) -> Any:
        models = prepared(session, "AB")
        before = steps(models, range(3))
        optimizers = [copy.deepcopy(made.optimizer.state_dict()) for made in models if made.optimizer is not None]
        kept[session.rank] = (before, optimizers, checkpoint.save(session, models))
        return steps(models, range(3, 5))

    def resumed(session: Session) -> Any:
        models = prepared(session, order)
        before, optimizers, state = kept[session.rank]
        for made, values, optimizer in zip(models, before, optimizers, strict=True):
            assert made.optimizer is not None
            made.model.load_state_dict(values)
            made.optimizer.load_state_dict(optimizer)
        checkpoint.load(session, models, state)
        assert [made.replica.steps for made in models] == [3, 6]
        return steps(models, range(3, 5))

    strategy = "ring codec=topk(ratio=0.3)"
    wanted = group(strategy, 2, whole)
    for found, models in zip(group(strategy, 2, resumed), wanted, strict=True):
        for mine, theirs in zip(found, models, strict=True):
            assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_a_state_of_other_ranks_is_refused_by_their_names(group: Any) -> None:
    def body(session: Session) -> None:
        first, second = (new_group(session, ranks) for ranks in ([0, 1], [0, 1, 2]))
        made = prepare(second.session, *sgd())
        assert made is not None
        state = checkpoint.save(session, [made])
        if first.rank >= 0:
            made = prepare(first.session, *sgd())
            assert made is not None
            with pytest.raises(
                UsageError,
                match=r"prepared model 0 in the group of ranks 0-1, but this state has model 0 in the group of ranks"
                r" 0-2 \(models are numbered in the order of their preparation\): prepare the same models in the same",
            ):
                checkpoint.load(session, [made], state)

    group("ring", 3, body)


def test_the_state_of_one_worker_says_that_steps_are_not_in_it(group: Any) -> None:
    state = group("sync=local(steps=2)", 1, lambda session: checkpoint.save(session, []))[0]

    def body(session: Session) -> None:
        made = prepare(session, *sgd())
        assert made is not None
        checkpoint.load(session, [made], {**state, "strategy": str(session.strategy)})

    with pytest.warns(UserWarning, match="this state comes from a single worker, which does not count steps"):
        group("sync=local(steps=2)", 2, body)


def test_one_worker_takes_up_what_several_have_saved(group: Any) -> None:
    """Of which it needs nothing, and is told what is lost."""

    def save(session: Session) -> Any:
        made = prepare(session, *sgd())
        assert made is not None
        loss_of(made.model(batch(session.rank))).backward()
        return checkpoint.save(session, [made])

    strategy = "codec=topk(ratio=0.3)"
    state = group(strategy, 2, save)[0]

    def body(session: Session) -> None:
        with pytest.warns(UserWarning, match="a single worker restores only the weights"):
            checkpoint.load(session, [], {**state, "strategy": str(session.strategy)})

    group(strategy, 1, body)


def test_what_carries_a_run_is_no_part_of_its_state(group: Any) -> None:
    """Nor the architecture, where it was left open; what it computes is."""

    def body(session: Session) -> None:
        here = str(session.strategy)
        assert session.as_here("ring schedule=fixed transport=tcp") == here
        assert session.as_here("tree schedule=fixed") != here
        session.left_open = True
        assert session.as_here("tree schedule=fixed transport=tcp") == here
        # Inside hosts a library sums, which the transport here has none of.
        assert session.as_here("hierarchical(inside=native) schedule=fixed transport=torch") == here
        session.left_open = False
        native = "hierarchical(inside=native) schedule=fixed transport=torch"
        assert session.as_here(native) == native
        for other in ("codec=int8", "sync=local(steps=2)", "ps(servers=1)"):
            assert session.as_here(f"{other} schedule=fixed") != here

    group("ring", 2, body)


def test_a_codec_that_one_host_leaves_out_is_resumed_on_several_and_back(group: Any) -> None:
    """It follows from the hosts. Residuals that are lost, and those that a state lacks, are told."""

    def run(nodes: tuple[int, ...], state: Any = None) -> Any:
        def body(session: Session) -> Any:
            made = prepare(session, *sgd(), Options(weight=1))
            assert made is not None
            if state is not None:
                checkpoint.load(session, [made], state)
            loss_of(made.model(batch(session.rank))).backward()
            return checkpoint.save(session, [made])

        return group("hierarchical codec=int8", 4, body, nodes)[0]

    several, one = (0, 0, 1, 1), (0, 0, 0, 0)
    there = run(several)
    with pytest.warns(
        UserWarning, match="residuals of codec=feedback, which this run leaves out .*all ranks are on one"
    ):
        here = run(one, there)
    with pytest.warns(UserWarning, match="this state lacks the residuals of the codec"):
        back = run(several, here)
    assert "codec" in there
    assert "codec" not in here
    assert [state["strategy"] for state in (here, back)] == [there["strategy"]] * 2
    assert back["steps"] == [3]


# Of workers that train by themselves.


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


@pytest.mark.parametrize(
    ("sync", "at"),
    [
        ("local(steps=3)", 4),
        ("easgd(steps=3)", 5),
        ("gossip(steps=2)", 3),
        ("post_local(after=4, steps=2)", 3),
        ("post_local(after=3, steps=2) codec=int8", 5),
    ],
)
def test_statistics_and_counts_of_samples_are_resumed(group: Any, sync: str, at: int) -> None:
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


def test_a_state_of_another_model_is_refused(group: Any) -> None:
    kept: list[Any] = []

    def first(here: Here) -> None:
        assert here.session is not None
        kept.append(checkpoint.save(here.session, prepared(here)))

    def second(here: Here) -> None:
        assert here.session is not None
        checkpoint.load(here.session, prepared(here), kept[0])

    on_group(group, "ring sync=local(steps=2)", 2, sgd, first, weight=1)
    with pytest.raises(UsageError, match=r"the agreed weights in this state .* another model"):
        on_group(group, "ring sync=local(steps=2)", 2, small_with_statistics, second, weight=1)


ARCHITECTURES = ["ring", "ps(servers=1)", "ps(servers=2, on=workers, update=worker)", "direct"]


@pytest.mark.every(2)
@pytest.mark.parametrize("after", ARCHITECTURES)
@pytest.mark.parametrize("before", ARCHITECTURES)
def test_a_run_goes_on_under_another_architecture(group: Any, before: str, after: str) -> None:
    """As if nothing had changed, up to the order of sums."""
    kept: list[Any] = []

    def saved(here: Here) -> None:
        train(here, range(3))
        assert here.session is not None
        assert here.replica is not None
        own = checkpoint.save(here.session, [Prepared(here.model, here.optimizer, here.replica, here.client)])
        if here.rank == 0:
            kept.extend([weights(here.model), copy.deepcopy(here.optimizer.state_dict()), own])

    def resumed(here: Here) -> dict[str, torch.Tensor]:
        values, optimizer, own = copy.deepcopy(kept)  # optimizers keep the tensors that they load
        here.model.load_state_dict(values)
        here.optimizer.load_state_dict(optimizer)
        assert here.session is not None
        assert here.replica is not None
        checkpoint.load(here.session, [Prepared(here.model, here.optimizer, here.replica, here.client)], own)
        assert here.replica.steps == 3
        train(here, range(3, 6))
        return weights(here.model)

    def whole(here: Here) -> dict[str, torch.Tensor]:
        train(here, range(6))
        return weights(here.model)

    on_group(group, before, 2, sgd, saved)
    wanted = alone(sgd, whole)
    for found in on_group(group, after, 2, sgd, resumed):
        close(found, wanted)


def test_under_another_architecture_residuals_are_lost_with_a_warning_and_other_training_is_refused(group: Any) -> None:
    kept: list[Any] = []

    def prepared(here: Here) -> list[Prepared]:
        assert here.replica is not None
        return [Prepared(here.model, here.optimizer, here.replica, here.client)]

    def saved(here: Here) -> None:
        train(here, range(3))
        kept.append(checkpoint.save(here.session, prepared(here)))  # type: ignore[arg-type]

    def resumed(here: Here) -> None:
        checkpoint.load(here.session, prepared(here), kept[0])  # type: ignore[arg-type]
        for other in ("ps(servers=1) codec=topk(ratio=0.3) sync=asp", "ps(servers=1) codec=int8"):
            with pytest.raises(UsageError, match="this state belongs to a run with"):
                checkpoint.load(here.session, prepared(here), kept[0] | {"strategy": other})  # type: ignore[arg-type]

    on_group(group, "direct codec=topk(ratio=0.3)", 2, sgd, saved)
    with pytest.warns(UserWarning, match="this state lacks the residuals of the codec"):
        on_group(group, "ps(servers=1, on=workers) codec=topk(ratio=0.3)", 2, sgd, resumed)
