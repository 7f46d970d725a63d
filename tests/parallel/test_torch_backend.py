"""torch.distributed over the backend syncline, between processes: DDP, FSDP2, meshes, hooks, and what goes wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import backend_bodies as bodies
import numpy as np
import pytest
import torch_users

from pool import Group, Pool
from syncline.timeline.flight_memory import record_in


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """One that has loaded what these ranks do: FSDP2, and the compiler that it asks, take two seconds."""
    modules = "torch.distributed.fsdp", "torch._dynamo.config", "syncline.torch_backend.sessions"
    found = Pool(Path(__file__).parent, "backend_bodies", "torch_users", *modules)
    yield found
    found.close()


def everyone(world: int, address: str, *case: Any) -> list[list[Any]]:
    return [[[index, world, address], *case] for index in range(world)]


def failures(group: Group, *parts: str) -> None:
    assert all(status == 1 for status in group.end()), "\n".join(map(str, group.ranks))
    for rank in group.ranks:
        assert all(part in rank.printed() for part in parts), f"{parts} not in what this one printed: {rank}"


def test_ddp_has_the_weights_of_gloo(pool: Pool, addresses: Callable[[], str]) -> None:
    found = []
    for backend, strategy in (("gloo", ""), ("syncline", "ring transport=tcp")):
        with pool.start(bodies.ddp, everyone(2, addresses(), backend), {"SYNCLINE_STRATEGY": strategy}) as group:
            results = group.results()
        assert [name for name, _ in results] == [backend] * 2
        for mine, other in zip(results[0][1], results[1][1], strict=True):
            if mine.dtype.kind == "f" and mine.ndim != 1:  # statistics of batches are each rank's
                np.testing.assert_array_equal(mine, other)
        found.append(results[0][1])
    for gloo, *ours in zip(*found, strict=True):
        for one in ours:
            np.testing.assert_allclose(gloo, one, rtol=1e-6, atol=1e-6)


def test_fully_sharded_models_train_as_replicated_ones(pool: Pool, address: str) -> None:
    with pool.start(bodies.sharded, everyone(2, address)) as group:
        assert max(group.results()) < 1e-6


@pytest.mark.slow
def test_what_else_of_torch_uses_groups_has_the_same_numbers(pool: Pool, address: str) -> None:
    with pool.start(torch_users.users, everyone(2, address)) as group:
        for found in group.results():
            assert max(found.values()) < 1e-6, found


def test_meshes_and_groups_of_some_ranks(pool: Pool, address: str) -> None:
    with pool.start(bodies.mesh, everyone(4, address)) as group:
        found = group.results()
    everybody = [0, 1, 2, 3]
    assert found == [
        [101.0, 11.0, 1011.0, everybody],
        [1010.0, 11.0, 1011.0, everybody],
        [101.0, 1100.0, everybody],
        [1010.0, 1100.0, 1011.0, everybody],
    ]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("calls", "parts"),
    [
        (["4000", "4000", "4001"], ["rank 2 (", "4001 elements of float32", "4000 elements of float32"]),
        (["barrier", "7", "7"], ["at allreduce", "at barrier"]),
        (["behind", "broadcast", "behind"], ["at allreduce", "at broadcast"]),
        (["again 7", "again 7", "again 8"], ["rank 2 (", "8 elements of float32", "7 elements of float32"]),
        (["again barrier", "again 7", "again 7"], ["rank 0 (", "at allreduce", "at barrier"]),
        (["again 7", "again maximum", "again 7"], ["at allreduce", "they differ in the root, the reduction"]),
        (["again 7", "again 7", "again whole"], ["7 elements of int64", "7 elements of float32"]),
        (["gather", "scatter", "gather"], ["at all-gather", "at reduce-scatter"]),
        (["gather", "gather", "behind"], ["at all-gather", "at allreduce"]),
        (["send", "receive", "barrier"], ["receive from rank 0", "16 bytes", "12"]),
    ],
)
def test_calls_that_do_not_match_are_an_error_on_all(pool: Pool, address: str, calls: list[str], parts: Any) -> None:
    with pool.start(bodies.mismatch, everyone(3, address, calls)) as group:
        failures(group, *parts)


def test_a_barrier_names_the_late_rank(pool: Pool, address: str) -> None:
    with pool.start(bodies.mismatch, everyone(3, address, ["soon", "late", "soon"])) as group:
        group.end(among=[0, 2])
        group.ranks[1].line.send("now")
        failures(group, "barrier: not reached within 2.0 s by rank 1 (")


@pytest.mark.parametrize(("strategy", "how"), [("ring", "call"), ("direct", "work"), ("ring transport=tcp", "future")])
def test_an_allreduce_names_the_late_rank_and_its_limit(
    pool: Pool, address: str, tmp_path: Path, strategy: str, how: str
) -> None:
    """And so does the flight record of those that waited."""
    environ = {"SYNCLINE_STRATEGY": strategy, "SYNCLINE_FLIGHT": str(tmp_path / "f.json")}
    with pool.start(bodies.late, everyone(4, address, how), environ) as group:
        group.end(among=[0, 1, 3])
        group.ranks[2].line.send("now")
        failures(group, "rank 2 (", "within 2.0 s")
    record = record_in(tmp_path / "f.json.parts")
    assert record is not None
    assert record.verdict.startswith("rank 2 did not enter allreduce; ranks 0-1, 3 waited for it for ")


def test_calls_and_groups_may_have_more_time_than_the_default_group(pool: Pool, address: str) -> None:
    with pool.start(bodies.patient, everyone(2, address)) as group:
        for _ in range(2):
            assert pool.ending(group.ranks[0].pid, 2.5) is None
            group.ranks[1].line.send("now")
        assert group.results() == ["done", "done"]


def test_a_forked_child_is_told_that_only_the_parent_communicates(pool: Pool, address: str) -> None:
    with pool.start(bodies.forked, everyone(2, address)) as group:
        for said, total in group.results():
            assert said.count("ClosedError: this process was forked from one that uses Syncline") == 3
            assert total == [2.0] * 7


def test_a_rank_that_aborts_is_named(pool: Pool, address: str) -> None:
    with pool.start(bodies.aborts, everyone(3, address)) as group:
        assert group.end(among=[0, 2]) == [1, None, 1]
        group.ranks[1].line.send("end")
        for rank in (group.ranks[0], group.ranks[2]):
            assert "rank 1 (" in rank.printed()
            assert "has aborted the process group" in rank.printed()


def test_groups_that_torch_does_not_split_are_made_anew(pool: Pool, address: str) -> None:
    with pool.start(bodies.split, everyone(2, address)) as group:
        for said, world in group.results():
            assert "No device associated with the default pg" in said
            assert world == 1


@pytest.mark.parametrize(
    "strategy", [pytest.param("direct", marks=pytest.mark.slow), "halving_doubling", "ring transport=tcp"]
)
def test_sums_and_tables_are_right_again_and_again(pool: Pool, address: str, strategy: str) -> None:
    with pool.start(bodies.sums, everyone(3, address), {"SYNCLINE_STRATEGY": strategy}) as group:
        assert group.results() == [[]] * 3


def test_sums_that_nobody_attends_to_are_right(pool: Pool, address: str) -> None:
    with pool.start(bodies.unattended, everyone(3, address)) as group:
        assert group.results() == [[[3.0, 9.0, 3.0]] * 30] * 3


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("use", "fault", "strategy"),
    [
        *(
            (use, "is killed", f"ring transport={transport}")
            for use, transport in zip(bodies.USES, cycle(("shm", "tcp")))
        ),
        ("all_reduce", "is killed", "ring transport=tcp"),
        ("DDP", "is killed", "ring transport=shm"),
        *((use, fault, "") for use, fault in (("all_reduce", "raises"), ("DDP hook", "raises"), ("DDP", "exits"))),
    ],
)
def test_a_rank_that_is_lost_is_named_by_all_others(
    pool: Pool, address: str, use: str, fault: str, strategy: str
) -> None:
    """Nobody dies of it: C++ of torch that waits for a future gets an error, and no value that is none."""
    with pool.start(bodies.loses_one, everyone(3, address, use, fault, strategy)) as group:
        lost = {"is killed": -signal.SIGKILL, "raises": 1, "exits": 3}[fault]
        assert group.end() == [1, lost, 1], "\n".join(map(str, group.ranks))
        for rank in (group.ranks[0], group.ranks[2]):
            assert "rank 1 (" in rank.printed()
            assert ("the data of this rank are spoilt" if fault == "raises" else "died") in rank.printed()


@pytest.mark.beyond(2)
@pytest.mark.parametrize("use", ["DDP", "FSDP2", "DDP hook", "callbacks"])
def test_a_rank_that_is_stopped_is_named_by_all_others(pool: Pool, address: str, use: str) -> None:
    """Which takes as long as a peer may give no sign of life."""
    with pool.start(bodies.loses_one, everyone(3, address, use, "is stopped", "ring transport=tcp")) as group:
        assert group.end(30, among=[0, 2]) == [1, None, 1], "\n".join(map(str, group.ranks))
        for rank in (group.ranks[0], group.ranks[2]):
            assert "rank 1 (" in rank.printed()
            assert "is stopped for" in rank.printed()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_destroyed_groups_leave_their_numbers_to_groups_of_the_same_ranks(
    pool: Pool, address: str, transport: str
) -> None:
    with pool.start(bodies.makes_groups_again, everyone(3, address, f"ring transport={transport}")) as group:
        for rank, (again, between, after) in enumerate(group.results()):
            assert len(again) == (0 if rank == 2 else 1)
            assert rank == 2 or between not in again
            assert rank == 2 or (after not in again and after != between)


def test_groups_need_not_be_destroyed(pool: Pool, address: str) -> None:
    with pool.start(bodies.goes_without_a_word, everyone(3, address)) as group:
        group.end(among=[1, 2])
        group.ranks[0].line.send("go")
        assert group.end() == [0, 0, 0], "\n".join(map(str, group.ranks))


def test_other_devices_and_what_is_not_there(pool: Pool, address: str) -> None:
    with pool.start(bodies.refused, everyone(2, address)) as group:
        for total, passed_on, device, bits, servers, codec, tree, transport, ended in group.results():
            assert total == [2.0, 2.0, 2.0]
            assert passed_on == ["meta"]
            assert device.startswith("NotImplementedError: the backend syncline moves tensors on the CPU")
            assert "for integers" in bits
            assert "parameter servers" in servers
            assert "register_comm_hook" in codec
            assert (tree, transport, ended) == (2.0, "tcp", ["shut down"])


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("backend", "codec"),
    [
        ("gloo", "codec=int8"),
        ("gloo", "codec=threshold(ratio=0.1)"),  # whose messages have no fixed size
        ("syncline", "codec=topk(ratio=0.1)"),
        ("syncline", "codec=powersgd(rank=2)"),
    ],
)
def test_a_hook_compresses_and_resumes(pool: Pool, address: str, backend: str, codec: str) -> None:
    with pool.start(bodies.hooked, everyone(2, address, backend, codec)) as group:
        one, other = group.results()
    for number in range(3):
        for mine, theirs in zip(one[number], other[number], strict=True):
            if mine.ndim != 1:
                np.testing.assert_array_equal(mine, theirs)
    for first, second in zip(one[1], one[2], strict=True):  # both resumed from the same state
        np.testing.assert_array_equal(first, second)
    assert any((before != after).any() for before, after in zip(one[0], one[1], strict=True))
    assert one[3] > 0


def test_a_bucket_of_the_hook_waits_for_no_other(pool: Pool, address: str) -> None:
    with pool.start(bodies.hooked_out_of_step, everyone(2, address)) as group:
        (_, one), (begun, other) = group.results()
    assert begun.index(1) < begun.index(0)
    for mine, theirs in zip(one, other, strict=True):
        if mine.ndim != 1:
            np.testing.assert_array_equal(mine, theirs)


def test_a_bucket_that_fails_is_named_on_all_ranks(pool: Pool, address: str) -> None:
    """Also on those that wait for its messages, by the limit of DDP's group, which the hook's groups have too."""
    with pool.start(bodies.hook_fails, everyone(2, address)) as group:
        (waiting, _), (failing, kept) = group.results()
    assert "rank 1: bucket 1 of DistributedDataParallel: no memory left" in failing
    assert "no memory left" in kept
    assert "rank 0: bucket 1 of DistributedDataParallel: receiving from rank 1: " in waiting


SCRIPT = """
import torch, torch.distributed as dist

dist.init_process_group("syncline")
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {dist.get_world_size()} with {dist.get_backend()}: {total.item()}")
"""


HOOKED = """
import torch, torch.distributed as dist
import syncline

def main():
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(*(torch.nn.Linear(100, 100) for _ in range(4))), bucket_cap_mb=0.04
    )
    model.register_comm_hook(syncline.hook_state("codec=int8"), syncline.comm_hook)
    for _ in range(3):
        model(torch.randn(5, 100)).sum().backward()
    dist.barrier()
    dist.destroy_process_group()

main()
"""


@pytest.mark.deep
def test_a_script_with_the_hook_ends_well(tmp_path: Path) -> None:
    """With nothing said, though the hook's threads and groups are still there."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(HOOKED))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "terminate" not in done.stderr


@pytest.mark.slow
def test_torchrun_starts_a_script_that_knows_torch_only(tmp_path: Path) -> None:
    """As where the package is installed: by its entry point, which is what ``register`` is."""
    package = tmp_path / "installed.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: installed\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[torch.backends]\nsyncline = _syncline_torch:register\n")
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    paths = [str(tmp_path), *filter(None, sys.path)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):  # both write to one pipe, and may do so into each other's lines
        assert done.stdout.count(f"rank {rank} of 2 with syncline: 3.0") == 1
