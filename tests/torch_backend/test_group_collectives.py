"""A process group's collectives between threads of one process: every form, reduction and type, beside torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_groups import WORLD, of, options
from torch.distributed.distributed_c10d import AllgatherOptions

from syncline.errors import UsageError
from syncline.torch_backend.group import SynclineGroup

STRATEGIES = ["direct", "ring", "tree"]
SIZES = [5, 3000]
"""What comes along to the meeting, and what does not."""


def values(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    if dtype == torch.bool:
        return torch.randint(0, 2, (size,), generator=generator).bool()
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.randint(1, 4, (size,), generator=generator).to(dtype)
    return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)


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


def test_tensors_that_are_not_contiguous_are_written_back(groups: Any) -> None:
    def body(mine: SynclineGroup) -> torch.Tensor:
        matrix = torch.ones(40, 60)
        mine.allreduce([matrix.t()], options(dist.AllreduceOptions, wait=False)).wait()
        mine.allreduce([matrix[:, ::2]], options(dist.AllreduceOptions)).wait()
        return matrix

    wanted = torch.full((40, 60), float(WORLD))
    wanted[:, ::2] *= WORLD
    assert all(torch.equal(found, wanted) for found in groups(body))


def test_sums_that_are_infinite_are_no_warning(groups: Any) -> None:
    def body(mine: SynclineGroup) -> list[float]:
        tensor = torch.full((2,), 60_000.0, dtype=torch.float16)
        mine.allreduce([tensor], options(dist.AllreduceOptions)).wait()
        return tensor.tolist()

    assert groups(body) == [[float("inf")] * 2] * WORLD


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


def test_what_is_not_there_says_what_is() -> None:
    from syncline.launch.connecting import in_process

    (session,) = in_process("direct", 1)
    mine = of(session)
    with pytest.raises(NotImplementedError, match="backend gloo"):
        mine.allreduce([torch.eye(3).to_sparse()], options(dist.AllreduceOptions))
    with pytest.raises(UsageError, match="for integers"):
        mine.allreduce([torch.ones(3)], options(dist.AllreduceOptions, reduceOp=dist.ReduceOp.BAND))
    with pytest.raises(UsageError, match=r"the output is 1 times"):
        mine._allgather_base(torch.empty(3), torch.empty(2), options(AllgatherOptions))
    session.shutdown()
