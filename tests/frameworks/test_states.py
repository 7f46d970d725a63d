"""States that a run takes up: whose they are, and that nothing stays of what was before."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from toy import Here, batch, loss_of, sgd, train, weights

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


@pytest.mark.filterwarnings("ignore:this state:UserWarning")
@pytest.mark.parametrize(
    "strategy",
    [
        "codec=topk(ratio=0.3)",
        "codec=powersgd(rank=2)",
        "codec=feedback(onebit, warmup=2)",
        "sync=diloco(steps=2)",
        "sync=easgd(steps=2)",
        "sync=local(steps=3) codec=topk(ratio=0.3)",
        "sync=gossip(steps=2)",
        "ps(servers=2, on=workers) codec=topk(ratio=0.3)",
        "ps(servers=2, on=workers, update=worker) codec=topk(ratio=0.3)",
        "ring",
    ],
)
def test_the_state_of_one_worker_leaves_nothing_of_what_several_did_before(group: Any, strategy: str) -> None:
    """Whoever takes it up in the middle goes on as one who does in the beginning, and is told what is not in it."""
    values, optimizer = weights(sgd()[0]), sgd()[1].state_dict()
    state = group(strategy.replace("servers=2", "servers=1"), 1, lambda session: checkpoint.save(session, []))[0]

    def body(session: Session, before: int) -> Any:
        made = prepare(session, *sgd(), Options(weight=1))
        assert made is not None
        assert made.optimizer is not None
        here = Here(made.model, made.optimizer, session.rank, session.world_size)
        train(here, range(20, 20 + before))
        made.consolidate()
        made.model.load_state_dict(values)
        made.optimizer.load_state_dict(copy.deepcopy(optimizer))
        checkpoint.load(session, [made], {**state, "strategy": str(session.strategy)})
        assert made.replica.steps == 0
        train(here, range(4))
        made.consolidate()
        return weights(made.model)

    wanted = group(strategy, 2, lambda session: body(session, 0))
    for before in (1, 4):
        for mine, theirs in zip(group(strategy, 2, lambda session, n=before: body(session, n)), wanted, strict=True):
            for name, tensor in theirs.items():
                assert torch.equal(mine[name], tensor), (before, name)


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
        for other in ("codec=int8", "sync=local(steps=2)", "ps(servers=1)"):
            assert session.as_here(f"{other} schedule=fixed") != here

    group("ring", 2, body)
