"""A process group's collectives between threads of one process: every form, reduction and type, beside torch's own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions

from syncline.errors import MismatchError, PeerError, PeerTimeout, UsageError
from syncline.frameworks.torch.distributed import SynclineGroup
from syncline.session.session import Session

WORLD = 3
STRATEGIES = ["direct", "ring", "tree"]
SIZES = [5, 3000]
"""What comes along to the meeting, and what does not."""
LIMIT = timedelta(seconds=60)


@pytest.fixture
def groups(group: Any) -> Callable[..., list[Any]]:
    """Run a body on every rank's process group."""

    def run(body: Callable[[SynclineGroup], Any], strategy: str = "direct", world: int = WORLD) -> list[Any]:
        return group(strategy, world, lambda session: body(of(session)))

    return run


def of(session: Session) -> SynclineGroup:
    return SynclineGroup(None, session, LIMIT)


def values(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    if dtype == torch.bool:
        return torch.randint(0, 2, (size,), generator=generator).bool()
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.randint(1, 4, (size,), generator=generator).to(dtype)
    return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)


def options(kind: Any, wait: bool = True, **given: Any) -> Any:
    made = kind()
    made.asyncOp = not wait
    for name, value in given.items():
        setattr(made, name, value)
    return made


REDUCED: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    dist.ReduceOp.SUM: lambda rows: rows.any(0) if rows.dtype == torch.bool else rows.sum(0, dtype=rows.dtype),
    dist.ReduceOp.AVG: lambda rows: rows.mean(0) if rows.is_floating_point() else rows.sum(0) // WORLD,
    dist.ReduceOp.PRODUCT: lambda rows: rows.all(0) if rows.dtype == torch.bool else rows.prod(0, dtype=rows.dtype),
    dist.ReduceOp.MIN: lambda rows: rows.amin(0),
    dist.ReduceOp.MAX: lambda rows: rows.amax(0),
    dist.ReduceOp.BAND: lambda rows: rows[0] & rows[1] & rows[2],
    dist.ReduceOp.BOR: lambda rows: rows[0] | rows[1] | rows[2],
    dist.ReduceOp.BXOR: lambda rows: rows[0] ^ rows[1] ^ rows[2],
}
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
BITWISE = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)


def pairs() -> list[tuple[Any, torch.dtype]]:
    found = [(op, dtype) for op in REDUCED for dtype in (*FLOATS, *WHOLE, torch.bool)]
    fits = [(op, dtype) for op, dtype in found if op not in BITWISE or not dtype.is_floating_point]
    fits = [(op, dtype) for op, dtype in fits if (op, dtype) != (dist.ReduceOp.AVG, torch.bool)]
    return [*fits, (dist.ReduceOp.SUM, torch.complex64), (dist.ReduceOp.SUM, torch.complex128)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_reduction_of_every_type(groups: Any, strategy: str) -> None:
    def body(mine: SynclineGroup) -> list[torch.Tensor]:
        found = []
        for op, dtype in pairs():
            for size in SIZES:
                tensor = values(mine.rank(), size, dtype)
                mine.allreduce([tensor], options(dist.AllreduceOptions, reduceOp=op)).wait()
                found.append(tensor)
        return found

    results = groups(body, strategy)
    cases = [(op, dtype, size) for op, dtype in pairs() for size in SIZES]
    for number, (op, dtype, size) in enumerate(cases):
        rows = torch.stack([values(rank, size, dtype) for rank in range(WORLD)])
        wanted = REDUCED[op](rows)
        for rank in range(WORLD):
            assert torch.equal(results[rank][number], results[0][number]), (op, dtype, "ranks differ")
        near = {"rtol": 3e-2, "atol": 3e-2} if dtype in FLOATS[2:] else {}
        torch.testing.assert_close(results[0][number], wanted.to(dtype), **near)


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_what_is_moved_arrives(groups: Any, size: int, wait: bool) -> None:
    def body(mine: SynclineGroup) -> dict[str, Any]:
        rank, found = mine.rank(), {}
        given = torch.arange(size) + 1000 * rank
        told = given.clone()
        mine.broadcast([told], options(dist.BroadcastOptions, wait, rootRank=1)).wait()
        found["broadcast"] = told
        rows = [torch.empty_like(given) for _ in range(WORLD)]
        mine.allgather([rows], [given], options(AllgatherOptions, wait)).wait()
        found["allgather"] = torch.stack(rows)
        whole = torch.empty(WORLD * size, dtype=given.dtype)
        mine._allgather_base(whole, given, options(AllgatherOptions, wait)).wait()
        found["base"] = whole.view(WORLD, size)
        at_root = [torch.empty_like(given) for _ in range(WORLD)] if rank == 2 else []
        outputs = [at_root] if at_root else []
        mine.gather(outputs, [given], options(dist.GatherOptions, wait, rootRank=2)).wait()
        found["gather"] = torch.stack(at_root) if at_root else None
        mine_of = torch.empty(size, dtype=given.dtype)
        parts = [[torch.arange(size) + 1000 * other for other in range(WORLD)]] if rank == 0 else []
        mine.scatter([mine_of], parts, options(dist.ScatterOptions, wait, rootRank=0)).wait()
        found["scatter"] = mine_of
        return found

    everyone = torch.stack([torch.arange(size) + 1000 * rank for rank in range(WORLD)])
    for rank, found in enumerate(groups(body)):
        assert torch.equal(found["broadcast"], everyone[1])
        assert torch.equal(found["allgather"], everyone)
        assert torch.equal(found["base"], everyone)
        assert found["gather"] is None or torch.equal(found["gather"], everyone)
        assert (found["gather"] is None) == (rank != 2)
        assert torch.equal(found["scatter"], everyone[rank])


@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parts_of_reductions(groups: Any, strategy: str, size: int, op: Any) -> None:
    """Reduce, and reduce-scatter in its three forms, are an allreduce of which a rank keeps a part."""

    def body(mine: SynclineGroup) -> dict[str, Any]:
        rank, found = mine.rank(), {}
        whole = values(rank, WORLD * size, torch.float64)
        given = options(dist.ReduceScatterOptions, reduceOp=op)
        output = torch.empty(size, dtype=torch.float64)
        mine.reduce_scatter([output], [list(whole.chunk(WORLD))], given).wait()
        found["list"] = output.clone()
        mine._reduce_scatter_base(output, whole.clone(), given).wait()
        found["base"] = output.clone()
        both = [torch.empty(size, dtype=torch.float64), torch.empty(2, dtype=torch.float64)]
        mine.reduce_scatter_tensor_coalesced(both, [whole.clone(), whole[: 2 * WORLD].clone()], given).wait()
        found["coalesced"] = both
        alone = whole.clone()
        mine.reduce([alone], options(dist.ReduceOptions, reduceOp=op, rootRank=1)).wait()
        found["reduce"] = alone
        assert torch.equal(whole, values(rank, WORLD * size, torch.float64)), "inputs stay as they are"
        return found

    rows = torch.stack([values(rank, WORLD * size, torch.float64) for rank in range(WORLD)])
    wanted = REDUCED[op](rows)
    for rank, found in enumerate(groups(body, strategy)):
        torch.testing.assert_close(found["list"], wanted.chunk(WORLD)[rank])
        torch.testing.assert_close(found["base"], wanted.chunk(WORLD)[rank])
        torch.testing.assert_close(found["coalesced"][0], wanted.chunk(WORLD)[rank])
        torch.testing.assert_close(found["coalesced"][1], wanted[: 2 * WORLD].chunk(WORLD)[rank])
        torch.testing.assert_close(found["reduce"], wanted if rank == 1 else rows[rank])


def test_all_to_all_with_parts_of_different_sizes(groups: Any) -> None:
    """Rank r gives rank s r + s rows, and nothing to itself."""

    def rows(give: int, take: int) -> int:
        return 700 * (give + take) if give != take else 0

    def body(mine: SynclineGroup) -> tuple[torch.Tensor, list[torch.Tensor]]:
        rank = mine.rank()
        out, into = ([rows(rank, other) for other in range(WORLD)], [rows(other, rank) for other in range(WORLD)])
        given = torch.cat([torch.full((count, 2), 10 * rank + other) for other, count in enumerate(out)])
        output = torch.zeros(sum(into), 2, dtype=given.dtype)
        mine.alltoall_base(output, given, into, out, options(dist.AllToAllOptions)).wait()
        parts = [torch.zeros(count, 2, dtype=given.dtype) for count in into]
        mine.alltoall(parts, list(given.split(out)), options(dist.AllToAllOptions)).wait()
        return output, parts

    for rank, (output, parts) in enumerate(groups(body)):
        wanted = [torch.full((rows(other, rank), 2), 10 * other + rank) for other in range(WORLD)]
        assert torch.equal(output, torch.cat(wanted))
        assert all(torch.equal(one, other) for one, other in zip(parts, wanted, strict=True))


def test_messages_are_matched_by_tag_and_from_any_rank(groups: Any) -> None:
    """Sent in one order, received in another; then from whoever sends."""

    def body(mine: SynclineGroup) -> Any:
        if mine.rank() > 0:
            works = [mine.send([torch.full((size,), mine.rank())], 0, tag) for tag, size in enumerate((4, 50_000, 6))]
            for work in works:
                work.wait()
            return None
        found = []
        for rank, tag, size in ((2, 1, 50_000), (1, 2, 6), (1, 0, 4), (2, 0, 4)):
            tensor = torch.zeros(size, dtype=torch.int64)
            mine.recv([tensor], rank, tag).wait()
            found.append((tensor == rank).all().item())
        sources = []
        for tag, size in ((2, 6), (1, 50_000)):
            tensor = torch.zeros(size, dtype=torch.int64)
            work = mine.recv_anysource([tensor], tag)
            work.wait()
            sources.append(work._source_rank())
            found.append((tensor == sources[-1]).all().item())
        return found, sources

    assert groups(body)[0] == ([True] * 6, [2, 1])


def test_a_receive_that_is_refused_takes_no_message(groups: Any) -> None:
    def body(mine: SynclineGroup) -> list[float]:
        tensor = torch.full((4,), 7.0)
        if mine.rank() == 0:
            mine.send([tensor], 1).wait()
        elif mine.rank() == 1:
            with pytest.raises(UsageError, match="recv: give a contiguous tensor"):
                mine.recv([torch.zeros(4, 4)[:, 0]], 0)
            tensor = torch.zeros(4)
            mine.recv([tensor], 0).wait()
        return tensor.tolist()

    assert groups(body) == [[7.0] * 4] * WORLD


def test_tensors_that_are_not_contiguous_are_written_back(groups: Any) -> None:
    def body(mine: SynclineGroup) -> torch.Tensor:
        matrix = torch.ones(40, 60)
        mine.allreduce([matrix.t()], options(dist.AllreduceOptions, wait=False)).wait()
        mine.allreduce([matrix[:, ::2]], options(dist.AllreduceOptions)).wait()
        return matrix

    wanted = torch.full((40, 60), float(WORLD))
    wanted[:, ::2] *= WORLD
    assert all(torch.equal(found, wanted) for found in groups(body))


def test_many_calls_are_under_way_and_futures_call_back(groups: Any) -> None:
    """A callback may itself wait for a collective, as PowerSGD's hook of torch does."""

    def body(mine: SynclineGroup) -> list[float]:
        def again(future: Any) -> torch.Tensor:
            tensor = future.value()[0]
            return mine.allreduce([tensor], options(dist.AllreduceOptions, wait=False)).get_future().wait()[0]

        works = [
            mine.allreduce([torch.full((size,), 1.0)], options(dist.AllreduceOptions, wait=False))
            for size in (3, 5000, 3, 5000)
        ]
        plain = [work.get_future().wait()[0] for work in works]
        twice = mine.allreduce([torch.ones(4)], options(dist.AllreduceOptions, wait=False)).get_future().then(again)
        assert all(work.is_completed() and work.is_success() and work.exception() is None for work in works)
        return [float(tensor[0]) for tensor in (*plain, twice.wait())]

    assert groups(body) == [[3.0, 3.0, 3.0, 3.0, 9.0]] * WORLD


def test_sums_that_are_infinite_are_no_warning(groups: Any) -> None:
    def body(mine: SynclineGroup) -> list[float]:
        tensor = torch.full((2,), 60_000.0, dtype=torch.float16)
        mine.allreduce([tensor], options(dist.AllreduceOptions)).wait()
        return tensor.tolist()

    assert groups(body) == [[float("inf")] * 2] * WORLD


def test_a_future_does_not_wait_for_one_that_was_asked_for_before(groups: Any) -> None:
    def body(mine: SynclineGroup) -> list[float]:
        tensor, total = torch.zeros(3), torch.ones(3)
        slow = mine.recv([tensor], 1).get_future() if mine.rank() == 0 else None
        mine.allreduce([total], options(dist.AllreduceOptions, wait=False)).get_future().wait()
        mine.barrier().wait()  # rank 1 sends when rank 0 has the sum
        if mine.rank() == 1:
            mine.send([total], 0).wait()
        if slow is not None:
            slow.wait()
        return tensor.tolist()

    assert groups(body) == [[3.0] * 3, [0.0] * 3, [0.0] * 3]


def test_a_group_ends_though_nothing_comes_that_it_receives(groups: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syncline.engine.driver._FLUSH_S", 1e6)
    together = threading.Barrier(3)  # one that has gone is gone for those that begin to receive from it

    def body(mine: SynclineGroup) -> None:
        for rank in {0, 1, 2} - {mine.rank()}:
            mine.recv([torch.zeros(3)], rank)
        mine.recv_anysource([torch.zeros(3)], 4)
        together.wait(30)
        mine.shutdown()
        together.wait(30)
        mine.us.shutdown()

    groups(body)


def test_a_group_that_is_aborted_waits_for_nothing(groups: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syncline.engine.driver._FLUSH_S", 1e6)

    def body(mine: SynclineGroup) -> None:
        if mine.rank() != 1:
            mine.barrier().wait()
        mine.send([torch.zeros(100_000)], 0)  # nobody receives it
        mine.abort()

    with pytest.raises(PeerError, match="rank 1"):
        groups(body)


@pytest.mark.parametrize("keys", [2, 7])
def test_more_calls_are_made_than_there_are_keys(groups: Any, monkeypatch: pytest.MonkeyPatch, keys: int) -> None:
    """Those of rank 0 before anybody else comes."""
    monkeypatch.setattr("syncline.session.communicator._CALLS_IN_FLIGHT", keys)
    made = threading.Event()

    def body(mine: SynclineGroup) -> list[float]:
        if mine.rank() > 0:
            made.wait(60)
        works, tensors = [], [torch.full((size,), 1.0) for size in (3, 3000) * 20]
        for number, tensor in enumerate(tensors):
            if number == keys // 2:
                made.set()
            works.append(mine.allreduce([tensor], options(dist.AllreduceOptions, wait=False)))
        for work in works:
            work.wait()
        return [float(tensor[-1]) for tensor in tensors]

    assert groups(body) == [[3.0] * 40] * WORLD


def test_a_group_of_some_ranks_is_made_by_them_alone(groups: Any) -> None:
    def body(mine: SynclineGroup) -> Any:
        found = []
        for name, ranks in (("a", [0, 2]), ("b", [1, 2]), ("c", [2])):
            if mine.rank() in ranks:
                some = SynclineGroup(None, mine.us.found(ranks, name), LIMIT)
                tensor = torch.full((3000,), 10.0 ** mine.rank())
                some.allreduce([tensor], options(dist.AllreduceOptions)).wait()
                found.append((some.rank(), some.size(), float(tensor[0])))
        return found

    assert groups(body) == [
        [(0, 2, 101.0)],
        [(0, 2, 110.0)],
        [(1, 2, 101.0), (1, 2, 110.0), (0, 1, 100.0)],
    ]


def test_one_rank_alone_has_every_collective(groups: Any) -> None:
    def body(mine: SynclineGroup) -> list[list[float]]:
        tensor = torch.ones(4)
        mine.allreduce([tensor], options(dist.AllreduceOptions)).wait()
        output = torch.empty(4)
        mine._reduce_scatter_base(output, tensor, options(dist.ReduceScatterOptions)).wait()
        other = torch.empty(4)
        mine._allgather_base(other, tensor, options(AllgatherOptions, wait=False)).wait()
        third = torch.empty(4)
        mine.alltoall_base(third, tensor, [], [], options(dist.AllToAllOptions)).wait()
        mine.barrier().wait()
        return [found.tolist() for found in (tensor, output, other, third)]

    assert groups(body, world=1) == [[[1.0] * 4] * 4]


def scattered(mine: SynclineGroup, *sizes: int) -> Any:
    outputs, inputs = [torch.empty(size) for size in sizes], [torch.ones(WORLD * size) for size in sizes]
    return mine.reduce_scatter_tensor_coalesced(outputs, inputs, options(dist.ReduceScatterOptions))


def gathered(mine: SynclineGroup, *sizes: int) -> Any:
    outputs, inputs = [torch.empty(WORLD * size) for size in sizes], [torch.ones(size) for size in sizes]
    return mine.allgather_into_tensor_coalesced(outputs, inputs, options(AllgatherOptions))


Calls = dict[str, Callable[[SynclineGroup], Any]]
CALLS: Calls = {
    "allreduce": lambda mine: mine.allreduce([torch.ones(3)], options(dist.AllreduceOptions)),
    "larger": lambda mine: mine.allreduce([torch.ones(3000)], options(dist.AllreduceOptions)),
    "double": lambda mine: mine.allreduce([torch.ones(3, dtype=torch.float64)], options(dist.AllreduceOptions)),
    "maximum": lambda mine: mine.allreduce([torch.ones(3)], options(dist.AllreduceOptions, reduceOp=dist.ReduceOp.MAX)),
    "broadcast": lambda mine: mine.broadcast([torch.ones(3000)], options(dist.BroadcastOptions, rootRank=0)),
    "barrier": lambda mine: mine.barrier(),
    "behind": lambda mine: mine.allreduce([torch.ones(3000)], options(dist.AllreduceOptions, wait=False)),
    "3 and 5": lambda mine: mine.allreduce_coalesced([torch.ones(3), torch.ones(5)], options(dist.AllreduceOptions)),
    "5 and 3": lambda mine: mine.allreduce_coalesced([torch.ones(5), torch.ones(3)], options(dist.AllreduceOptions)),
    "parts 3 and 5": lambda mine: scattered(mine, 3, 5),
    "parts 5 and 3": lambda mine: scattered(mine, 5, 3),
    "gathered 3 and 5": lambda mine: gathered(mine, 3, 5),
    "gathered 5 and 3": lambda mine: gathered(mine, 5, 3),
}


@pytest.mark.parametrize(
    ("ours", "theirs", "parts"),
    [
        ("allreduce", "larger", ["3000 elements of float32", "3 elements of float32"]),
        ("allreduce", "double", ["of float64", "of float32"]),
        ("allreduce", "maximum", ["at allreduce"]),
        ("larger", "broadcast", ["at allreduce", "at broadcast"]),
        ("barrier", "behind", ["at barrier", "at allreduce"]),
        ("3 and 5", "5 and 3", ["at allreduce", "8 elements of float32", "types of the tensors one by one"]),
        ("parts 3 and 5", "parts 5 and 3", ["at reduce-scatter", "types of the tensors one by one"]),
        ("gathered 3 and 5", "gathered 5 and 3", ["at all-gather", "types of the tensors one by one"]),
    ],
)
def test_calls_that_do_not_match_are_named_on_all(run_on: Any, ours: str, theirs: str, parts: Sequence[str]) -> None:
    from syncline.launch.connecting import in_process

    said: list[str] = []
    lock = threading.Lock()

    def body(session: Session) -> None:
        mine = of(session)
        try:
            CALLS[theirs if mine.rank() == 1 else ours](mine).wait()
        except MismatchError as error:
            with lock:
                said.append(str(error))
            raise

    with pytest.raises(MismatchError, match="rank"):
        run_on(in_process("direct", WORLD), body)
    assert said
    assert all(part in said[0] for part in parts), said[0]


def test_a_late_rank_is_named(groups: Any) -> None:
    ready = threading.Event()

    def body(mine: SynclineGroup) -> None:
        if mine.rank() == 1:
            ready.wait(60)
            return
        try:
            mine.monitored_barrier(timedelta(seconds=0.2))
        finally:
            ready.set()

    with pytest.raises(PeerTimeout, match=r"barrier: not reached within 0.2 s by rank 1"):
        groups(body)


def test_what_is_not_there_says_what_is() -> None:
    from syncline.launch.connecting import in_process

    (session,) = in_process("direct", 1)
    mine = of(session)
    with pytest.raises(NotImplementedError, match="backend gloo"):
        mine.allreduce([torch.eye(3).to_sparse()], options(dist.AllreduceOptions))
    with pytest.raises(UsageError, match="whole numbers"):
        mine.allreduce([torch.ones(3)], options(dist.AllreduceOptions, reduceOp=dist.ReduceOp.BAND))
    with pytest.raises(UsageError, match=r"the output is 1 times"):
        mine._allgather_base(torch.empty(3), torch.empty(2), options(AllgatherOptions))
    session.shutdown()
