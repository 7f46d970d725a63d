"""The exchange alone: every algorithm, size, type and order of events gives the right bits, sums and mixes included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from exchanging import ALGORITHMS, Case, cases, check, chooser, drive, native_cases
from hypothesis import given, settings
from hypothesis import strategies as st
from mapped import anyone, machine, placed, run_of, turn
from numpy.typing import NDArray

from summing import Summing
from syncline import registry
from syncline.algorithms.hierarchical import hierarchical
from syncline.algorithms.ps import push_and_pull
from syncline.collectives import Collective
from syncline.compression.reducers import Message, Reducer, Round, Total
from syncline.engine.exchange import MOST_ACTIONS, Exchange, Run, Segment, segment_bytes_of
from syncline.engine.order import KEYS, CodedOrder
from syncline.engine.reducing import MOST_PIECES, Reducing
from syncline.errors import PeerLost, ProtocolError, SynclineError, UsageError
from syncline.nouns import Group, numpy_dtype
from syncline.plans.messages import Cut, chunk_edges, compile_program
from syncline.plans.plan import REDUCE, Plan
from syncline.session.session import Session
from syncline.sync.gossip import Gossip
from syncline.transports import Handle
from syncline.transports.inproc import Hub, InProc


@settings(deadline=None, max_examples=60)
@given(st.data(), cases(), st.booleans())
def test_every_algorithm_reaches_its_goal_in_any_order_of_events(
    data: st.DataObject, case: Case, start_late: bool
) -> None:
    inputs = case.inputs()
    outputs = [array.copy() for array in inputs]
    drive(case, [[array] for array in outputs], chooser(data), start_late)
    check(case, inputs, outputs)


@settings(deadline=None, max_examples=40)
@given(st.data(), native_cases(), st.booleans())
def test_a_library_sums_inside_groups_in_any_order_of_events(data: st.DataObject, case: Case, start_late: bool) -> None:
    inputs = case.inputs()
    outputs = [array.copy() for array in inputs]
    drive(case, [[array] for array in outputs], chooser(data), start_late)
    check(case, inputs, outputs)


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(1, 6), st.integers(1, 3), st.booleans(), st.integers(0, 200))
def test_push_and_pull_reduce_to_servers_and_copy_from_them(
    data: st.DataObject, workers: int, servers: int, own: bool, size: int
) -> None:
    servers = servers if own else min(servers, workers)
    group = Group(workers, servers if own else 0)
    push, pull = push_and_pull(group, servers=servers, on="ranks" if own else "workers")
    choose = chooser(data)
    first = Case(push, size, "float64", data.draw(st.sampled_from([8, 100, 1 << 20])), 2)
    inputs = first.inputs()
    pushed = [array.copy() for array in inputs]
    drive(first, [[array] for array in pushed], choose)
    check(first, inputs, pushed)
    second = Case(pull, size, "float64", first.segment_bytes, 2)
    pulled = [array.copy() for array in pushed]
    drive(second, [[array] for array in pulled], choose)
    total = np.sum(inputs[:workers], axis=0)
    assert all(np.array_equal(array, total) for array in pulled[:workers])


REDUCING = tuple(name for name in ALGORITHMS if name not in ("broadcast", "all_gather", "direct_all_gather"))


@settings(deadline=None, max_examples=60)
@given(st.data(), cases(REDUCING), st.sampled_from(["float32", "bfloat16"]))
def test_rounding_does_not_depend_on_timing_and_is_the_same_on_all_ranks(
    data: st.DataObject, case: Case, dtype: str
) -> None:
    """Numbers whose sum depends on its order: the bits still agree between ranks and between runs."""
    draw = np.random.default_rng(1)
    inputs = [
        (draw.standard_normal(case.size) * 10.0 ** draw.integers(-6, 6, case.size)).astype(numpy_dtype(dtype))
        for _ in range(case.plan.world)
    ]
    outputs = []
    for _ in range(2):
        arrays = [array.copy() for array in inputs]
        drive(case, [[array] for array in arrays], chooser(data), start_late=True)
        outputs.append(arrays)
    for first, second in zip(*outputs, strict=True):
        assert first.tobytes() == second.tobytes()
    if case.plan.goal == "allreduce":
        assert len({outputs[0][member].tobytes() for member in case.plan.members}) == 1


@settings(deadline=None, max_examples=60)
@given(st.data(), cases(), st.integers(2, 4))
def test_several_exchanges_in_flight_do_not_mix(data: st.DataObject, case: Case, count: int) -> None:
    inputs = [case.inputs(seed) for seed in range(count)]
    arrays = [[inputs[key][rank].copy() for key in range(count)] for rank in range(case.plan.world)]
    drive(case, arrays, chooser(data))
    for key in range(count):
        check(case, inputs[key], [mine[key] for mine in arrays])


@settings(deadline=None, max_examples=30)
@given(st.data(), cases())
def test_scratch_is_given_back_and_used_again(data: st.DataObject, case: Case) -> None:
    """After an exchange nothing is kept; what there is does not exceed the window of segments."""
    arrays = [array.copy() for array in case.inputs()]
    for exchange in drive(case, [[array] for array in arrays], chooser(data)):
        assert exchange.labels == []
        assert exchange.waiting_for == {}
        free = sum(buffer.nbytes for shelf in exchange.scratch._free.values() for buffer in shelf)
        assert free == exchange.scratch.allocated_bytes


def pair(size: int = 100) -> tuple[Hub, list[Exchange], list[Run]]:
    hub = Hub(2)
    plan = ALGORITHMS["ring"](Group(2))
    exchanges = [Exchange(hub.transport(rank)) for rank in range(2)]
    runs = [Run(compile_program(plan, rank), np.ones(size), 3, "bucket 3 (weight)") for rank in range(2)]
    return hub, exchanges, runs


def test_a_key_in_use_is_refused_and_free_again_afterwards() -> None:
    _, exchanges, runs = pair()
    exchanges[0].start(runs[0])
    again = Run(runs[0].program, np.ones(5), 3, "bucket 3 again")
    with pytest.raises(UsageError, match=r"bucket 3 again: key 3 is in use by bucket 3 \(weight\)"):
        exchanges[0].start(again)
    exchanges[1].start(runs[1])
    while not all(run.done for run in runs):
        for exchange in exchanges:
            exchange.progress(0.0)
    exchanges[0].start(again)


def test_as_many_segments_as_tags_can_number_and_one_more() -> None:
    plan = compile_program(registry.get("algorithms", "ring").target(Group(2)), 0)
    exchange = Exchange(Hub(2).transport(0), segment_bytes=1)
    exchange.start(Run(plan, np.zeros(1 << 16, np.uint8), 0, "at the limit"))
    with pytest.raises(
        UsageError, match=r"one more: an array of 65537 bytes has 65537 segments, and tags can number 65536"
    ):
        exchange.start(Run(plan, np.zeros((1 << 16) + 1, np.uint8), 1, "one more"))


def test_the_tags_of_the_last_key_segment_and_action_are_their_own() -> None:
    """Below those of single messages and of reducers, which have the highest bit."""
    program = compile_program(ALGORITHMS["ring"](Group(2)), 0)
    run = Run(program, np.zeros(1 << 16, np.uint8), (1 << 30) - 1, "of the last key")
    run.cut = Cut(program, run.array.size, 1, (False,) * len(program.actions))
    assert Segment(run, (1 << 16) - 1).tag + (1 << 17) - 1 == (1 << 63) - 1


def limited() -> Exchange:
    return Exchange(Hub(2).transport(0))


def test_one_transfer_more_than_tags_can_number_is_refused_before_anything_is_sent() -> None:
    program = compile_program(ALGORITHMS["ring"](Group(2)), 0)
    most = replace(program, actions=program.actions[:1] * MOST_ACTIONS, waits=(1,) * MOST_ACTIONS)
    exchange = limited()
    exchange.start(Run(most, np.zeros(4), 1, "the most"))
    more = replace(program, actions=program.actions[:1] * (MOST_ACTIONS + 1))
    with pytest.raises(UsageError, match=f"a rank has {MOST_ACTIONS + 1} transfers in ring, and tags can number"):
        exchange.start(Run(more, np.zeros(4), 2, "one more"))
    assert exchange.labels == ["the most"]


class Pieces(Sequence[Any]):
    """So many, of which none is there."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: Any) -> Any:
        raise AssertionError("opened")


@pytest.mark.parametrize(
    ("pieces", "key", "says"),
    [
        (MOST_PIECES + 1, 1, f"bucket 0: a bucket of {MOST_PIECES + 1} pieces is too large"),
        (1, KEYS, f"bucket 0: key {KEYS} is out of range"),
        (MOST_PIECES, KEYS - 1, ""),
    ],
)
def test_one_piece_or_key_more_than_tags_can_number_is_refused(pieces: int, key: int, says: str) -> None:
    def make() -> Reducing:
        order = CodedOrder(lambda: Pieces(pieces), lambda _: Mock(), key, "bucket 0")
        return Reducing(limited(), order, Mock(), Mock(), Mock())

    if says:
        with pytest.raises(UsageError, match=says):
            make()
    else:
        assert make().label == "bucket 0"


@pytest.mark.parametrize("key", [-1, 1 << 30])
def test_keys_out_of_range_are_refused(key: int) -> None:
    _, exchanges, runs = pair()
    with pytest.raises(UsageError, match=f"key {key} is out of range"):
        exchanges[0].start(Run(runs[0].program, np.ones(5), key, "bucket"))


@pytest.mark.parametrize("array", [np.ones((2, 3)), np.ones(10)[::2]])
def test_arrays_that_are_no_flat_memory_are_refused(array: NDArray[Any]) -> None:
    _, exchanges, runs = pair()
    with pytest.raises(UsageError, match="one-dimensional contiguous"):
        exchanges[0].start(Run(runs[0].program, array, 0, "bucket"))


@pytest.mark.parametrize(
    ("algorithm", "workers", "chunk_bytes", "segment_bytes"),
    [("ring", 2, 10, 20), ("ring", 16, 10, 100), ("ring", 2, None, 100), ("all_gather", 2, 10, 100)],
)
def test_only_plans_that_add_are_cut_into_chunks_for_the_cache(
    algorithm: str, workers: int, chunk_bytes: int | None, segment_bytes: int
) -> None:
    plan = registry.get("algorithms", algorithm).target(Group(workers))
    assert segment_bytes_of(plan, 100, chunk_bytes) == segment_bytes


@pytest.mark.parametrize("arguments", [{"segment_bytes": 0}, {"window": 0}])
def test_segments_and_window_have_to_be_positive(arguments: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="make no sense"):
        Exchange(Hub(1).transport(0), **arguments)


def test_nothing_to_do_is_done_at_once() -> None:
    _, exchanges, runs = pair(size=0)
    called: list[int] = []
    runs[0].on_done = lambda: called.append(1)
    exchanges[0].start(runs[0])
    assert runs[0].done
    assert called == [1]


def test_a_peer_that_is_gone_is_named_with_bucket_operation_and_step() -> None:
    hub, exchanges, runs = pair()
    exchanges[0].start(runs[0])
    hub.kill(1)
    with pytest.raises(
        PeerLost, match=r"bucket 3 \(weight\): (sending to|reducing from) rank 1 \(ring, step 0, segment 1 of 1\)"
    ) as caught:
        exchanges[0].progress(0.0)
    assert caught.value.rank == 1


def test_sizes_that_differ_between_ranks_are_an_error_that_names_both() -> None:
    _, exchanges, runs = pair()
    exchanges[0].start(runs[0])
    exchanges[1].start(Run(runs[1].program, np.ones(60), 3, "bucket 3"))
    with pytest.raises(SynclineError, match=r"bucket 3 .*rank 1.*240 bytes came where 400 were expected"):
        exchanges[0].progress(0.0)


def test_a_tolerant_run_does_not_mind_a_peer_that_has_left() -> None:
    hub = Hub(2)
    exchange = Exchange(hub.transport(0), has_left=lambda peer: peer == 1)
    run = Run(compile_program(ALGORITHMS["ring"](Group(2)), 0), np.ones(10), 0, "next step", tolerant=True)
    exchange.start(run)
    assert exchange.labels == []
    assert exchange.waiting_for == {}  # nobody is blamed for a step that need not come
    hub.kill(1)
    exchange.progress(0.0)
    assert not run.done


def test_a_tolerant_run_does_mind_a_peer_that_was_lost() -> None:
    hub = Hub(2)
    exchange = Exchange(hub.transport(0), has_left=lambda _: False)
    exchange.start(Run(compile_program(ALGORITHMS["ring"](Group(2)), 0), np.ones(10), 0, "next step", tolerant=True))
    hub.kill(1)
    with pytest.raises(PeerLost, match="next step"):
        exchange.progress(0.0)


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_chunks_cover_the_array_and_differ_by_at_most_one_element(size: int, chunks: int) -> None:
    edges = chunk_edges(size, chunks)
    assert edges[0] == 0
    assert edges[-1] == size
    lengths = np.diff(edges)
    assert len(lengths) == chunks
    assert lengths.min() >= 0
    assert lengths.max() - lengths.min() <= 1


@pytest.mark.parametrize("world", [2, 3, 4, 5])
@pytest.mark.parametrize("copying", [False, True])
def test_everyone_may_send_a_chunk_to_everyone_in_one_step(world: int, copying: bool) -> None:
    """Every rank lends what every other one holds: nobody may wait for the own send before taking what came."""
    pairs = [(0, a, b, 0, 1, REDUCE) for a in range(world) for b in range(world) if a != b]
    case = Case(Plan.of("all to all", world, 1, pairs), 50, "float64", 1 << 20, 1, copying)
    arrays = case.inputs()
    drive(case, [[array] for array in arrays], lambda _: 0)
    check(case, case.inputs(), arrays)


class Asked(InProc):
    """A transport that is asked whether it adds what it receives, and does not."""

    def __init__(self, hub: Hub, rank: int) -> None:
        super().__init__(hub, rank)
        self.types: list[str] = []

    def adds_from(self, src: int, dtype: np.dtype[Any]) -> bool:  # noqa: ARG002
        self.types.append(dtype.name)
        return False

    def add(self, *_: Any, **__: Any) -> Handle:
        raise AssertionError("added")


def test_whether_the_transport_adds_is_asked_once_of_each_program_and_type() -> None:
    transport = Asked(Hub(2), 0)
    exchange, program = Exchange(transport), compile_program(ALGORITHMS["ring"](Group(2)), 0)
    for key, dtype in enumerate(("float32", "float32", "float64", "float32")):
        exchange.start(Run(program, np.ones(10, dtype), key, "bucket"))
    assert transport.types == ["float32", "float64"]


class Adding(InProc):
    """A transport whose library adds at once: all ranks' arrays are equal."""

    failure: Exception | None = None

    def allreduce(self, key: int, array: NDArray[Any], owner: Any = None) -> Handle:
        handle = Handle("allreduce", -1, key, array.nbytes, owner)
        array *= self.world
        self._operations.finish(handle, self.failure)
        return handle


def test_a_collective_is_handed_over_and_reported() -> None:
    exchange = Exchange(Adding(Hub(3), 1))
    array, done = np.ones(10, np.float32), []
    exchange.hand_over(Collective("allreduce"), array, 5, "bucket 5", lambda: done.append(5))
    assert exchange.labels == ["bucket 5"]
    assert not done
    exchange.progress(0.0)
    assert done == [5]
    assert exchange.labels == []
    np.testing.assert_array_equal(array, np.full(10, 3.0))
    exchange.hand_over(Collective("allreduce"), array[:0], 5, "nothing", lambda: done.append(6))
    assert done == [5, 6]


def test_a_collective_that_fails_names_what_it_was_for() -> None:
    transport = Adding(Hub(2), 0)
    transport.failure = PeerLost("rank 1 is gone", rank=1)
    exchange = Exchange(transport)
    exchange.hand_over(Collective("allreduce"), np.ones(3), 0, "bucket 0", lambda: None)
    with pytest.raises(PeerLost, match="bucket 0: rank 1 is gone"):
        exchange.progress(0.0)


def test_a_transport_without_collectives_is_refused() -> None:
    exchange = Exchange(InProc(Hub(2), 0))
    with pytest.raises(UsageError, match="transport=inproc has no allreduce of its own"):
        exchange.hand_over(Collective("allreduce"), np.ones(3), 0, "bucket 0", lambda: None)
    with pytest.raises(UsageError, match="one-dimensional"):
        Exchange(Adding(Hub(2), 0)).hand_over(Collective("allreduce"), np.ones((3, 3)), 0, "x", lambda: None)


def test_a_library_without_the_plans_collectives_is_refused() -> None:
    """Before anything is sent: a transport without any, and one whose group is another than the plan's."""
    plan = hierarchical(Group(4, nodes=(0, 0, 1, 1)), inside="native")
    hub = Hub(4)
    for end, reason in (
        (InProc(hub, 0), "transport=inproc has no collectives of its own"),
        (Summing(hub, 0), "the library's group is ranks 0-3, and the plan's ranks 0-1: use inside=ring"),
    ):
        exchange = Exchange(end)
        with pytest.raises(UsageError, match=reason):
            exchange.start(Run(compile_program(plan, 0), np.ones(8, np.float32), 0, "bucket 0"))
        assert exchange.labels == []


def test_a_library_that_fails_inside_a_host_is_named_with_the_ranks() -> None:
    class Failing(Summing):
        def _meet(self, goal: Any, key: int, parts: Any, owner: Any) -> Handle:  # noqa: ARG002
            handle = Handle(goal, -1, key, 0, owner)
            self._operations.finish(handle, PeerLost("rank 1 is gone", rank=1))
            return handle

    plan = hierarchical(Group(4, nodes=(0, 0, 1, 1)), inside="native")
    exchange = Exchange(Failing(Hub(4), 0, (0, 1)))
    exchange.start(Run(compile_program(plan, 0), np.ones(8, np.float32), 0, "bucket 0"))
    assert exchange.waiting_for == {1: "bucket 0"}
    with pytest.raises(PeerLost, match="bucket 0: reduce-scatter by transport=inproc among ranks 0-1: rank 1 is gone"):
        exchange.progress(0.0)


GIVEN = (1e8, 1.0, -1e8, 3.0)
"""What their sum is depends on the order."""


def run(session: Session, *rounds: Round) -> None:
    def reducer() -> Reducer:
        for one in rounds:
            lengths = yield one
            assert len(lengths) == len(one.receives)

    def program(_: int) -> Any:
        raise AssertionError("a plan sums")

    session.engine.wait(session.engine.start(CodedOrder(lambda: [reducer], program, 0, "a total")))


def test_arrays_are_added_in_the_order_of_ranks(group: Any) -> None:
    def body(session: Session) -> float:
        me, everyone = session.index, range(4)
        array = np.full(30_000, GIVEN[me], np.float32)
        mine = array.copy()
        total = Total(array, [rank for rank in everyone if rank < me], [rank for rank in everyone if rank > me])
        run(session, Round([Message(rank, mine.view(np.uint8)) for rank in total.peers], [], [total]))
        assert (array == array[0]).all()
        return float(array[0])

    wanted = np.float32(0)
    for value in GIVEN:
        wanted += np.float32(value)
    assert group("ring", 4, body) == [wanted] * 4


def test_a_total_of_one_is_what_it_was(group: Any) -> None:
    def body(session: Session) -> float:
        array = np.full(5, GIVEN[session.index], np.float32)
        run(session, Round([], [], [Total(array, [], [])]))
        return float(array[0])

    assert group("ring", 2, body) == list(GIVEN[:2])


def test_an_array_of_another_size_is_refused_with_the_name_of_its_rank(group: Any) -> None:
    def body(session: Session) -> None:
        if session.index == 0:
            run(session, Round([Message(1, np.zeros(8, np.uint8))], []), Round([], [Message(1, np.zeros(1, np.uint8))]))
        else:
            run(session, Round([], [], [Total(np.zeros(3, np.float32), [0], [])]))

    with pytest.raises(ProtocolError, match="a total: 8 bytes came from rank 0 to be added to 12; do all ranks run"):
        group("ring", 2, body)


@settings(deadline=None, max_examples=40)
@given(
    st.data(),
    st.sampled_from(["ring", "exponential"]),
    st.integers(1, 7),
    st.integers(0, 4),
    st.sampled_from([0, 1, 5, 100]),
)
def test_neighbours_are_added_by_messages_in_any_order(
    data: st.DataObject, graph: str, workers: int, turn: int, size: int
) -> None:
    plan = Gossip(graph).mix(workers, turn)  # type: ignore[arg-type]
    case = Case(plan, size, "float64", data.draw(st.sampled_from([8, 100, 1 << 20])), 2)
    inputs = case.inputs()
    outputs = [array.copy() for array in inputs]
    drive(case, [[array] for array in outputs], chooser(data))
    for found, of in zip(outputs, plan.sums, strict=True):
        assert np.allclose(found, np.sum([inputs[rank] for rank in of], axis=0))


@pytest.mark.parametrize("graph", ["ring", "exponential"])
@pytest.mark.parametrize("workers", [2, 3, 5])
@pytest.mark.parametrize("shared", [True, False])
def test_neighbours_are_added_in_shared_memory(graph: str, workers: int, shared: bool) -> None:
    plan = Gossip(graph).mix(workers, 1)  # type: ignore[arg-type]
    inputs = [np.arange(10.0) + 100.0 * rank for rank in range(workers)]
    with machine(workers) as ends:
        exchanges = [Exchange(end, 16) for end in ends]
        arrays = [placed(end, array, shared) for end, array in zip(ends, inputs, strict=True)]
        runs = [run_of(plan, rank, array) for rank, array in enumerate(arrays)]
        for exchange, run in zip(exchanges, runs, strict=True):
            exchange.start(run)
        turn(exchanges, runs, anyone())
        for found, of in zip(arrays, plan.sums, strict=True):
            assert np.array_equal(found, np.sum([inputs[rank] for rank in of], axis=0))
