"""Whole runs over message libraries: between ranks of the pool, and over MPI between ranks of mpirun."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from itertools import cycle
from pathlib import Path
from typing import Any

import fault_bodies
import pytest
import rank_bodies as bodies
from trained import check_trained_as_one

from mpi_launch import LIBRARIES, mpi_command
from pool import Pool

HERE = Path(__file__).resolve().parent
LIMIT_S = 240.0
CASES = [["sgd", "float64"], ["adam", "float32"], ["adam", "float32"]]


def everyone(world: int, address: str, *case: Any) -> list[list[Any]]:
    return [[[index, world, address], *case] for index in range(world)]


def check_training(results: list[Any]) -> None:
    """Servers, which have no weights, left out."""
    check_trained_as_one([states for states in results if any(state is not None for state in states)], CASES)


# Libraries between processes that nobody has to start in their way.

NATIVE = ["native transport=torch"]
MESSAGES = ["torch", "grpc", "ucx", "zmq"]


def over_each(*strategies: str) -> list[str]:
    """One of the strategies over each library, in turn."""
    return [f"{strategy} transport={library}" for library, strategy in zip(MESSAGES, cycle(strategies))]


@pytest.mark.parametrize("strategy", [*NATIVE, *over_each("ring", "ps(servers=1)", "ps(servers=2, on=workers)")])
def test_processes_over_libraries_train_as_one(pool: Pool, address: str, strategy: str) -> None:
    with pool.start(bodies.train, everyone(3, address, strategy, CASES)) as group:
        check_training(group.results())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ring", "ps(servers=1)"])
def test_the_weights_are_those_of_tcp_bit_for_bit(pool: Pool, address: str, strategy: str) -> None:
    processes = 4 + strategy.startswith("ps")
    found: dict[str, Any] = {}
    for transport in ("tcp", "zmq", "grpc", "ucx"):
        case = everyone(processes, address, f"{strategy} transport={transport}", CASES)
        with pool.start(bodies.train, case) as group:
            found[transport] = group.results()
    assert len({pickle.dumps(weights) for weights in found.values()}) == 1
    check_training(found["tcp"])


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("strategy", "world"), [*((one, 3) for one in NATIVE), *((one, 2) for one in over_each("ring")[1:])]
)
def test_collectives_over_libraries(pool: Pool, address: str, strategy: str, world: int) -> None:
    with pool.start(bodies.collectives, everyone(world, address, strategy)) as group:
        sent, received = zip(*group.results(), strict=True)
    assert min(sent) > 0
    assert min(received) > 0


@pytest.mark.every(2)
@pytest.mark.parametrize("strategy", [*NATIVE, "ring transport=grpc", "ring transport=ucx", "ring transport=zmq"])
def test_worlds_over_libraries_leave_nothing_behind(pool: Pool, address: str, strategy: str) -> None:
    with pool.start(bodies.again_and_again, everyone(3, address, [strategy] * 6)) as group:
        for held in group.results():
            first, warm, *later = held
            assert all(holding["threads"] == 1 for holding in (warm, *later))
            # The library's threads close theirs a moment later, so a world may see the last one's. A leak grows with
            # every world: each later one would hold more than both of these.
            most = max(len(holding["descriptors"]) for holding in (first, warm))
            assert min(len(holding["descriptors"]) for holding in later) <= most, (first, warm, later)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("strategy", "number"),
    [
        ("ring transport=torch", signal.SIGKILL),
        ("native transport=torch", signal.SIGSTOP),
        ("ring transport=grpc", signal.SIGKILL),
        ("ring transport=grpc", signal.SIGSTOP),
        ("ring transport=ucx", signal.SIGKILL),
        ("ring transport=ucx", signal.SIGSTOP),
        ("ring transport=zmq", signal.SIGKILL),
        ("ring transport=zmq", signal.SIGSTOP),
    ],
)
def test_everyone_over_a_library_names_who_fails(pool: Pool, address: str, strategy: str, number: int) -> None:
    with pool.start(fault_bodies.train_until, everyone(3, address, strategy, 1, number, 1.0)) as group:
        group.hear(2)
        group.ranks[1].line.send("all are there")
        others = [rank for rank in group.ranks if rank.index != 1]
        group.end(among=[0, 2])
        if number == signal.SIGKILL:
            group.end()
        for rank in others:
            assert rank.status == 1, rank
            assert "rank 1 (" in rank.printed(), rank
            assert ("stopped" if number == signal.SIGSTOP else "died") in rank.printed(), rank


@pytest.mark.parametrize("strategy", [*NATIVE, "ring transport=grpc", "ring transport=ucx", "ring transport=zmq"])
def test_a_forked_child_does_a_run_over_a_library_no_harm(pool: Pool, address: str, strategy: str) -> None:
    with pool.start(bodies.forks, everyone(2, address, strategy)) as group:
        for said, status in group.results():
            assert all("only the parent can communicate" in text for text in said)
            assert status == 1


# MPI.


def mpirun(library: str, ranks: int, script: list[str], environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command, variables = mpi_command(library, ranks)
    return subprocess.run(
        [*command, sys.executable, *script],
        env=variables | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def run_bodies(library: str, ranks: int, folder: Path, *parts: list[Any]) -> list[list[Any]]:
    """What each part has sent, by rank."""
    path = os.pathsep.join([str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    script = [str(HERE / "mpi_bodies.py"), str(folder), json.dumps(parts)]
    done = mpirun(library, ranks, script, {"PYTHONPATH": path})
    assert done.returncode == 0, done.stdout
    return [
        [pickle.loads((folder / f"{rank}.{number}").read_bytes()) for rank in range(ranks)]
        for number in range(len(parts))
    ]


SAME = [
    [f"{strategy} transport={transport}" for transport in ("tcp", "mpi", "mpi(onesided=on)")]
    for strategy in ("ring", "ps(servers=1)")
]
"""In each row, what gives the same weights, in both forms of the transport."""
TRAIN = [*SAME[0], *SAME[1], "native transport=mpi", "ring transport=shm"]
COLLECTIVES = ("ring transport=mpi", "native transport=mpi", "ring transport=mpi(onesided=on)")


@pytest.fixture(scope="module", params=LIBRARIES)
def mpi(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """What five ranks of one mpirun have sent: after trainings, after collectives, and after a fork."""
    folder = tmp_path_factory.mktemp("mpi")
    parts: list[list[Any]] = [["train", strategy, CASES] for strategy in TRAIN]
    parts += [["collectives", strategy] for strategy in COLLECTIVES]
    parts += [["on_nodes", [0, 0, 1, 1, 1], "collectives", "hierarchical(inside=native) transport=mpi"]]
    return run_bodies(request.param, 5, folder, *parts, ["forks", "native transport=mpi"])


@pytest.mark.beyond(1)
def test_ranks_of_mpirun_train_as_one(mpi: list[list[Any]]) -> None:
    for results in mpi[: len(TRAIN)]:
        check_training(results)


@pytest.mark.beyond(1)
def test_the_weights_over_mpi_are_those_of_tcp_bit_for_bit(mpi: list[list[Any]]) -> None:
    """On five workers, and on four with a server."""
    found = dict(zip(TRAIN, map(pickle.dumps, mpi), strict=False))
    for row in SAME:
        assert len({found[strategy] for strategy in row}) == 1, row


@pytest.mark.beyond(1)
def test_collectives_over_mpi(mpi: list[list[Any]]) -> None:
    for results in mpi[len(TRAIN) : -1]:
        for sent, received in results:
            assert sent > 0
            assert received > 0


@pytest.mark.beyond(1)
def test_a_forked_child_does_a_run_over_mpi_no_harm(mpi: list[list[Any]]) -> None:
    for said, status in mpi[-1]:
        assert all("only the parent can communicate" in text for text in said)
        assert status == 1


@pytest.mark.parametrize(("library", "strategy"), [("openmpi", "native"), ("mpich", "ring")])
def test_a_rank_of_mpirun_that_raises_is_named(library: str, strategy: str) -> None:
    script = (
        "import numpy, syncline\n"
        f"syncline.init({strategy + ' transport=mpi'!r})\n"
        "if syncline.rank() == 1: raise RuntimeError('out of cheese')\n"
        "syncline.allreduce(numpy.ones(1000))\n"
    )
    done = mpirun(library, 3, ["-c", script], {})
    assert done.returncode != 0
    assert "out of cheese" in done.stdout


@pytest.mark.parametrize("library", LIBRARIES)
def test_too_few_ranks_know_of_each_other(library: str) -> None:
    """Started by something else than mpirun, or by another library's: said before anybody waits."""
    _, environ = mpi_command(library, 2)
    code = (
        "from syncline.transports import Place\nfrom syncline.transports.mpi import Mpi\n"
        "try: Mpi(Place(0, 3))\nexcept Exception as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    assert done.stdout.startswith("UsageError MPI knows 1 process, but this run has 3: start all of them with mpirun")
