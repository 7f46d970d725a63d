"""Models of groups of workers: a group trains as a run of so many workers does, whatever the others do meanwhile."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import Here, alone, batch, close, fill, loss_of, mlp, sgd, train, weights

from syncline import checkpoint
from syncline.errors import GradientError, MismatchError, PeerError, UsageError
from syncline.frameworks import numpy
from syncline.frameworks._supported import SILENT
from syncline.frameworks.torch import Options, Prepared, prepare
from syncline.sampling import SampleOrder, sampler_of
from syncline.session.groups import WorkerGroup, new_group
from syncline.session.session import Session

STEPS = 6
DETERMINED = [
    "ring",
    "direct schedule=wait_free",
    "tree codec=none schedule=fixed",
    "hierarchical",
    "codec=int8",
    "codec=topk(ratio=0.3)",
    "codec=powersgd(rank=2)",
    "schedule=priority",
    "schedule=split",
    "schedule=delayed",
    "sync=local(steps=2)",
    "sync=post_local(after=2, steps=2)",
    "sync=easgd(steps=2)",
    "sync=diloco(steps=2)",
    "sync=gossip",
    "ps(servers=1, on=workers)",
    "ps(servers=2, on=workers) codec=int8",
    "ps(servers=2, on=workers, update=worker)",
    "ps(servers=2, on=workers) schedule=priority",
]
BY_THEMSELVES = [
    "ps(servers=2, on=workers) sync=asp",
    "ps(servers=1, on=workers) sync=ssp(staleness=1)",
    "ps(servers=2, on=workers) sync=asp codec=int8",
]


def trained(session: Session, steps: int = STEPS) -> dict[str, torch.Tensor]:
    """What the workers of a session learn together, each from its share."""
    made = prepare(session, *sgd(), Options(weight=1))
    assert made is not None
    train(Here(made.model, made.optimizer or sgd()[1], session.rank, session.world_size), range(steps))
    made.consolidate()
    found = weights(made.model)
    made.release(settle=True)
    return found


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "strategy", [pytest.param(text, marks=[pytest.mark.slow] * (n % 2)) for n, text in enumerate(DETERMINED)]
)
def test_a_group_learns_bit_for_bit_what_a_run_of_so_many_workers_does(group: Any, strategy: str) -> None:
    """Two groups and a worker that is in none train at once; nothing of it is in what the other one learns."""

    def body(session: Session) -> Any:
        first, second = new_group(session, [0, 3]), new_group(session, [1, 4, 2])
        return [trained(one.session) for one in (first, second) if one.rank >= 0]

    found = group(strategy, 6, body)
    wanted = {size: group(strategy, size, trained) for size in (2, 3)}
    assert found[5] == []
    for ranks in ((0, 3), (1, 2, 4)):
        for rank, one in zip(ranks, wanted[len(ranks)], strict=True):
            for name, tensor in one.items():
                assert torch.equal(found[rank][0][name], tensor), (rank, name)


@pytest.mark.parametrize("architecture", ["hierarchical", "ps(servers=2, on=workers, local=on)"])
def test_hosts_of_a_group_are_those_of_its_ranks(group: Any, architecture: str) -> None:
    def body(session: Session) -> Any:
        made = new_group(session, [1, 2, 3, 4])
        return trained(made.session) if made.rank >= 0 else {}

    strategy = f"{architecture} codec=int8"
    wanted = group(strategy, 4, trained, (0, 0, 1, 1))
    for found, one in zip(group(strategy, 5, body, (1, 0, 0, 1, 1))[1:], wanted, strict=True):
        assert all(torch.equal(found[name], one[name]) for name in one)


@pytest.mark.parametrize("strategy", BY_THEMSELVES)
def test_groups_whose_pushes_are_updates_by_themselves_come_to_one_model_each(group: Any, strategy: str) -> None:
    def body(session: Session) -> Any:
        made = [new_group(session, ranks) for ranks in ([0, 2], [1, 3])]
        return trained(made[session.rank % 2].session)

    found = group(strategy, 4, body)
    for one, other in ((0, 2), (1, 3)):
        assert all(torch.equal(found[one][name], found[other][name]) for name in found[one])
    before = weights(mlp())
    assert all(not torch.equal(found[rank][name], before[name]) for rank in range(4) for name in before)


@settings(max_examples=15, deadline=None)
@given(places=st.lists(st.integers(0, 2), min_size=2, max_size=6), strategy=st.sampled_from(DETERMINED[:3]))
def test_any_partition_trains_as_many_models_each_as_one_process_would(
    group: Any, places: list[int], strategy: str
) -> None:
    """To 1e-9 in float64, on the union of the group's batches; groups of one train by themselves."""

    def body(session: Session) -> Any:
        made = {place: new_group(session, np.flatnonzero(np.equal(places, place))) for place in sorted(set(places))}
        here = made[places[session.rank]].session
        model, optimizer = sgd()
        if not here.alone:
            assert prepare(here, model, optimizer, Options(weight="batch")) is not None
        train(Here(model, optimizer, here.rank, here.world_size), range(STEPS))
        return weights(model)

    for found in group(strategy, len(places), body):
        close(found, alone(sgd, lambda here: (train(here, range(STEPS)), weights(here.model))[1]))


@pytest.mark.parametrize("strategy", ["ring", "direct schedule=wait_free", "ps(servers=2, on=workers)"])
def test_a_worker_trains_models_of_overlapping_groups_in_one_backward_pass(group: Any, strategy: str) -> None:
    """Halves that are each a pair's, and a part that all share: as one process that has them all."""

    def halves(index: int) -> torch.nn.Module:
        return fill(torch.nn.Linear(4, 3).double(), seed=index)

    def step(number: int, x: torch.Tensor, shared: torch.nn.Module, half: torch.nn.Module) -> torch.Tensor:
        return loss_of(shared(torch.tanh(half(x)))) * (1 + number)

    def body(session: Session) -> Any:
        pairs = [new_group(session, ranks) for ranks in ([0, 1], [2, 3])]
        mine = pairs[session.rank // 2]
        shared, half = fill(torch.nn.Linear(3, 3).double()), halves(session.rank // 2)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (shared, half)]
        prepare(session, shared, optimizers[0])
        prepare(mine.session, half, optimizers[1])
        for number in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            x = batch(number).chunk(2)[mine.rank]
            step(session.rank // 2, x, shared, half).backward()
            for optimizer in optimizers:
                optimizer.step()
        return weights(shared), weights(half)

    shared, both = fill(torch.nn.Linear(3, 3).double()), [halves(index) for index in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (shared, *both)]
    for number in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = [step(index, batch(number), shared, half) for index, half in enumerate(both)]
        sum(losses).backward()  # type: ignore[union-attr]
        for parameter in shared.parameters():
            assert parameter.grad is not None
            parameter.grad /= 2
        for optimizer in optimizers:
            optimizer.step()
    for rank, (common, own) in enumerate(group(strategy, 4, body)):
        close(common, weights(shared))
        close(own, weights(both[rank // 2]))


@pytest.mark.parametrize("forgotten", [False, True])
def test_one_optimizer_of_models_of_two_groups(group: Any, forgotten: bool) -> None:
    """What it holds is averaged somewhere; what no group averages is an error as ever."""

    def body(session: Session) -> Any:
        pair = new_group(session, [0, 1])
        models = torch.nn.ModuleList([mlp(), mlp(5), mlp(7)][: 2 + forgotten])
        optimizer = torch.optim.SGD(models.parameters(), lr=0.1)
        prepare(session, models[0], optimizer)
        prepare(pair.session, models[1], optimizer)
        loss = torch.stack([loss_of(model(batch(session.rank))) for model in models]).sum()
        if not forgotten:
            loss.backward()
            return [float(parameter.grad.sum()) for parameter in models.parameters() if parameter.grad is not None]
        with pytest.raises(GradientError, match="that is not a parameter of any prepared model"):
            loss.backward()
        return []

    first, second = group("ring", 2, body)
    assert first == second
    assert len(first) == 8 * (not forgotten)


def test_a_model_that_is_prepared_with_another_group_is_that_ones(group: Any) -> None:
    def body(session: Session) -> Any:
        pair, model, optimizer = new_group(session, [0, 1]), *sgd()
        prepare(session, model, optimizer, Options(weight="batch"))
        train(Here(model, optimizer, session.rank, session.world_size), range(2))
        if pair.rank < 0:
            return session.family[0].prepared.keys()
        made = prepare(pair.session, model, optimizer, Options(weight="batch"))
        assert made is not None
        assert (list(session.prepared), list(pair.session.prepared)) == ([], [0])
        train(Here(model, optimizer, pair.rank, pair.size), range(2, 4))
        return weights(model)

    found = group("ring", 3, body)
    for one in found[:2]:
        close(one, alone(sgd, lambda here: (train(here, range(4)), weights(here.model))[1]))


def test_a_parameter_is_in_one_group_only(group: Any) -> None:
    def body(session: Session) -> None:
        pair, model = new_group(session, [0, 1]), mlp()
        prepare(session, model)
        with pytest.raises(UsageError, match="is in a model that was prepared before, which averages its gradient"):
            prepare(pair.session, model[0])  # type: ignore[index]

    group("ring", 2, body)


def test_samples_are_shared_out_among_a_group(group: Any) -> None:
    """Also from a pool, of which each group has its own."""

    def body(session: Session) -> Any:
        made = [new_group(session, ranks) for ranks in ([0, 3], [1, 2])]
        one = made[session.rank in (1, 2)]
        sampler = sampler_of(one.session, SampleOrder(40, 4, 0, True))
        return [index for part in sampler for index in part]

    for strategy in ("ring", "ps(servers=1, on=workers) sync=asp"):
        found = group(strategy, 4, body)
        for one, other in ((0, 3), (1, 2)):
            assert sorted(found[one] + found[other]) == list(range(40))


@pytest.mark.parametrize("strategy", ["codec=topk(ratio=0.3)", "sync=local(steps=4)", "ps(servers=1, on=workers)"])
def test_a_state_of_models_of_groups_resumes_where_it_was_saved(group: Any, strategy: str) -> None:
    """Each rank's is of its own group."""

    def prepared(session: Session) -> tuple[WorkerGroup, Prepared]:
        made = [new_group(session, ranks) for ranks in ([0, 2], [1, 3])]
        one = made[session.rank % 2]
        found = prepare(one.session, *sgd(), Options(weight=1))
        assert found is not None
        return one, found

    def steps(one: WorkerGroup, made: Prepared, some: range) -> None:
        assert made.optimizer is not None
        train(Here(made.model, made.optimizer, one.rank, one.size), some)

    saved: dict[int, Any] = {}

    def whole(session: Session) -> Any:
        one, made = prepared(session)
        steps(one, made, range(3))
        assert made.optimizer is not None
        state = checkpoint.save(session, [made])
        assert state["steps"] == []
        assert [found["world_size"] for found in state["groups"]] == [2]
        saved[session.rank] = (weights(made.model), copy.deepcopy(made.optimizer.state_dict()), state)
        steps(one, made, range(3, STEPS))
        return weights(made.model)

    def resumed(session: Session) -> Any:
        one, made = prepared(session)
        assert made.optimizer is not None
        model, optimizer, state = saved[session.rank]
        made.model.load_state_dict(model)
        made.optimizer.load_state_dict(optimizer)
        checkpoint.load(session, [made], state)
        steps(one, made, range(3, STEPS))
        return weights(made.model)

    wanted = group(strategy, 4, whole)
    for found, one in zip(group(strategy, 4, resumed), wanted, strict=True):
        assert all(torch.equal(found[name], one[name]) for name in one)


def test_a_state_with_other_groups_is_refused(group: Any) -> None:
    def body(session: Session) -> None:
        one = new_group(session, [0, 1])
        made = prepare(one.session, *sgd())
        assert made is not None
        state = checkpoint.save(session, [made])
        with pytest.raises(
            UsageError, match="this state has models of 1 groups, but this rank has prepared models in 0"
        ):
            checkpoint.load(session, [], state)

    group("ring", 2, body)


# What goes wrong.


def test_models_that_differ_within_a_group_are_named(group: Any) -> None:
    def body(session: Session) -> None:
        one = new_group(session, [1, 2])
        if one.rank >= 0:
            prepare(one.session, torch.nn.Linear(3, 2 + (session.rank == 2)))

    with pytest.raises(MismatchError, match="rank 2 has another model than rank 1: 'weight' with shape"):
        group("ring", 3, body)


def test_a_fault_of_a_model_says_of_which_group_it_is(group: Any) -> None:
    def body(session: Session) -> None:
        one = new_group(session, [1, 2])
        if one.rank < 0:
            return
        model = torch.nn.Linear(3, 1)
        made = prepare(one.session, model, torch.optim.SGD([*model.parameters(), torch.ones(1, requires_grad=True)]))
        assert made is not None
        made.model(torch.ones(1, 3)).sum().backward()

    with pytest.raises(GradientError, match=r"^group of ranks 1-2: rank [12]: the optimizer holds a tensor of shape"):
        group("ring", 3, body)


def test_a_worker_that_leaves_its_group_in_the_middle_is_named(group: Any) -> None:
    """By its number in the run, on the workers of its group and on all others."""

    def body(session: Session) -> None:
        made = [new_group(session, ranks) for ranks in ([0, 2], [1, 3])]
        one = made[session.rank % 2]
        found = prepare(one.session, *sgd())
        assert found is not None
        assert found.optimizer is not None
        train(Here(found.model, found.optimizer, one.rank, one.size), range(2))
        if session.rank == 3:
            raise RuntimeError("rank 3 cannot go on")
        train(Here(found.model, found.optimizer, one.rank, one.size), range(2, 50))
        session.barrier()

    with pytest.raises(RuntimeError, match="rank 3 cannot go on"):
        group("ring", 4, body)


def test_the_batches_of_a_group_have_to_be_as_many(group: Any) -> None:
    def body(session: Session) -> None:
        one = new_group(session, [1, 2])
        if one.rank < 0:
            return
        found = prepare(one.session, *sgd())
        assert found is not None
        assert found.optimizer is not None
        train(Here(found.model, found.optimizer, one.rank, one.size), range(2 + one.rank))
        one.session.barrier()

    with pytest.raises((MismatchError, PeerError), match=r"rank 2 is at a training step|rank 1 is at barrier"):
        group("ring", 3, body)


@pytest.mark.parametrize(
    ("strategy", "says"),
    [
        (
            "ps(servers=2, on=workers)",
            "rank [12] is at the optimizer's step .* while rank [12] is at the optimizer's step",
        ),
        (
            "ps(servers=1, on=workers) sync=asp",
            "rank [12] is at .* while rank [12] is at .*: all workers that have not",
        ),
    ],
)
def test_owners_of_a_group_name_workers_by_their_rank_in_the_run(group: Any, strategy: str, says: str) -> None:
    """Those whose learning rates differ; where pushes are updates by themselves, that make different calls."""

    def body(session: Session) -> None:
        one = new_group(session, [1, 2])
        if one.rank < 0:
            return
        found = prepare(one.session, *sgd())
        assert found is not None
        assert found.optimizer is not None
        assert found.client is not None
        here = Here(found.model, found.optimizer, one.rank, one.size)
        train(here, range(2))
        if "asp" not in strategy:
            found.optimizer.param_groups[0]["lr"] = 0.1 * session.rank
            train(here, range(2, 4))
        elif session.rank == 1:
            found.consolidate()
        else:
            found.client.owners_weights()

    with pytest.raises(MismatchError, match=says):
        group(strategy, 3, body)


class Plain:
    def __init__(self) -> None:
        self.lr = 0.1

    def update(self, weights: Any, gradient: Any, state: Any) -> None:  # noqa: ARG002
        weights -= self.lr * gradient


def test_a_dictionary_of_arrays_is_a_model_of_a_group_too(group: Any) -> None:
    def body(session: Session) -> Any:
        made = [new_group(session, ranks) for ranks in ([0, 2], [1, 3])]
        one = made[session.rank % 2]
        handed = numpy.adapt(one.session, {"w": np.zeros(3)}, Plain(), dict(SILENT))
        assert handed is not None
        arrays, optimizer = handed.result
        for _ in range(3):
            optimizer.step({"w": np.full(3, float(session.rank))})
        return arrays["w"].tolist()

    for strategy in ("ring", "ps(servers=2, on=workers)", "sync=local(steps=1)"):
        found = group(strategy, 4, body)
        for rank, one in enumerate(found):
            np.testing.assert_allclose(one, [-0.3 * (1 + rank % 2)] * 3)


def test_a_gradient_that_does_not_fit_an_array_of_a_group_is_named(group: Any) -> None:
    def body(session: Session) -> None:
        one = new_group(session, [1, 2])
        if one.rank >= 0:
            handed = numpy.adapt(one.session, {"w": np.zeros(3)}, Plain(), dict(SILENT))
            assert handed is not None
            handed.result[1].step({"w": np.zeros(4)})

    with pytest.raises(GradientError, match=r"the gradient of 'w'.*group of ranks 1-2|group of ranks 1-2.*'w'"):
        group("ring", 3, body)


def test_a_codec_of_two_levels_is_none_in_a_group_on_one_host_and_says_so(group: Any) -> None:
    """Between hosts it compresses."""

    def body(session: Session) -> Any:
        made = [new_group(session, ranks) for ranks in ([0, 1], [0, 2], [0, 1, 2, 3])]
        return [(str(one.session.strategy), one.session.reason) for one in made if one.rank >= 0]

    found = group("hierarchical codec=int8", 4, body, (0, 0, 1, 1))
    why = "codec=feedback compresses between hosts only, and all ranks of the group are on one"
    assert found[0] == [
        ("hierarchical schedule=fixed transport=inproc", why),
        ("direct codec=feedback(int8) schedule=fixed transport=inproc", ""),
        ("hierarchical codec=feedback(int8) schedule=fixed transport=inproc", ""),
    ]
