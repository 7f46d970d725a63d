"""Groups of workers between processes: models, calls, meshes of PyTorch, and what goes wrong."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import group_bodies as bodies
import numpy as np
import pytest
import torch

from pool import Pool


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """One that has loaded what these ranks do."""
    found = Pool(Path(__file__).parent, "group_bodies")
    yield found
    found.close()


def everyone(world: int, address: str, *case: object) -> list[list[object]]:
    return [[[index, world, address], *case] for index in range(world)]


def equal_to_one_process(number: int, found: list[np.ndarray], tolerance: float = 1e-9) -> None:
    for mine, other in zip(found, bodies.learnt_alone(number), strict=True):
        assert np.abs(mine - other).max() <= tolerance * max(1.0, np.abs(other).max())


@pytest.mark.parametrize(
    "strategy",
    [pytest.param("direct schedule=wait_free", marks=pytest.mark.slow), "ps(servers=2, on=workers) transport=tcp"],
)
def test_two_groups_train_two_language_models_at_once(pool: Pool, address: str, strategy: str, tmp_path: Path) -> None:
    """Equal to one process each, and the timeline says whose each exchange is."""
    path = tmp_path / "timeline.json"
    with pool.start(bodies.two_models_at_once, everyone(4, address, strategy), {"SYNCLINE_TRACE": str(path)}) as group:
        for rank, (number, weights, peers, within) in enumerate(group.results()):
            assert number == rank % 2
            assert peers == [(rank + 2) % 4]
            assert within
            equal_to_one_process(number, weights)
    names = {
        (event["pid"] - 1, event["args"]["of"].partition(":")[0])
        for event in json.loads(path.read_text())["traceEvents"]
        if event.get("args", {}).get("of", "").startswith("group of")
    }
    assert names == {(rank, f"group of ranks {rank % 2}, {rank % 2 + 2}") for rank in range(4)}


def test_every_call_takes_a_group(pool: Pool, address: str) -> None:
    with pool.start(bodies.calls, everyone(4, address, "ring")) as group:
        group.results()
        results = [rank.said for rank in group.ranks]
    outside, *inside = (said[0] for said in results)
    name = "<group of ranks 1-3>"
    assert {said[1] for said in results} == {
        f"the {name} belongs to a run that has ended: create it again after syncline.init()"
    }
    for call in ("allreduce", "prepare", "stats"):
        assert outside[call].startswith("rank 0 (")
        assert outside[call].endswith(
            f") is not in the {name}: call this on its ranks alone, as under `if group.rank >= 0:`"
        )
    assert (outside["rank"], outside["size"], outside["is"]) == (-1, 3, name)
    assert [found["rank"] for found in inside] == [0, 1, 2]
    for found in (outside, *inside):
        assert found["all"] == 4.0
        for wrong in ("3", "'data'", "[0, 1]"):
            assert found[wrong].startswith(
                "group= takes the result of syncline.new_group(), one dimension of a DeviceMesh"
            )
    for rank, found in enumerate(inside):
        assert found["sum"] == [[6.0] * 3] * 2
        assert found["root"] == 2.0
        assert found["gather"] == [b"1", b"2", b"3"]
        assert found["samples"] == [rank, rank + 3, rank + 6]


@pytest.mark.parametrize("backend", [pytest.param("gloo", marks=pytest.mark.slow), "syncline"])
def test_dimensions_of_a_mesh_are_groups(pool: Pool, addresses: Callable[[], str], backend: str) -> None:
    with pool.start(bodies.meshes, everyone(4, addresses(), backend)) as group:
        for rank, (number, first, again, place, gathered, several, wrong) in enumerate(group.results()):
            assert number == rank // 2
            equal_to_one_process(number, first)
            equal_to_one_process(number, again)
            assert place == [rank // 2, 2]
            assert gathered == [b"%d" % (rank % 2), b"%d" % (rank % 2 + 2)]
            assert several.startswith("group= is a DeviceMesh of 2 dimensions: give the one whose ranks are to train")
            assert several.endswith('such as mesh["stage"]')
            assert wrong.startswith("group= takes the result of syncline.new_group()")


@pytest.mark.parametrize("strategy", ["ring", "ps(servers=2, on=workers) transport=tcp"])
def test_a_worker_that_dies_in_a_group_is_named_in_all(pool: Pool, address: str, strategy: str) -> None:
    """By its rank in the run and its host, also where it was in another group."""
    with pool.start(bodies.killed, everyone(4, address, strategy)) as group:
        assert group.end() == [1, 1, 1, -signal.SIGKILL]
        for rank in group.ranks[:3]:
            assert f"rank 3 ({bodies.os.uname().nodename}, pid {group.ranks[3].pid}) died" in rank.printed()


def test_a_worker_that_makes_another_group_is_named_by_all(pool: Pool, address: str) -> None:
    with pool.start(bodies.other_ranks, everyone(3, address)) as group:
        assert group.end() == [1, 1, 1]
        for rank in group.ranks:
            assert "is at making a group of ranks 1, 2 (call 2)" in rank.printed()
            assert "let every rank make the same groups in the same order" in rank.printed()


def test_a_worker_that_does_not_come_to_a_call_of_its_group_is_named_by_all(pool: Pool, address: str) -> None:
    with pool.start(bodies.slow, everyone(3, address)) as group:
        assert group.end() == [1, 1, 1]
        for rank in group.ranks:
            assert "barrier: not reached within 1.0 s by rank 1 (" in rank.printed()


@pytest.mark.parametrize("strategy", ["ring", "ps(servers=1, on=workers)"])
def test_ranks_of_a_group_have_different_numbers_of_batches(pool: Pool, address: str, strategy: str) -> None:
    """A group with as many on each rank learns what one process does from the mean of both; the other ends as one."""
    with pool.start(bodies.uneven, everyone(4, address, strategy)) as group:
        found = group.results()
    for one, other in ((0, 2), (1, 3)):
        for mine, theirs in zip(found[one][1], found[other][1], strict=True):
            np.testing.assert_array_equal(mine, theirs)
    assert not np.array_equal(found[0][1][0], found[1][1][0])
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        for rank in range(2):
            for part in (0, 5):
                x = torch.randn(6, 3, generator=torch.Generator().manual_seed(10 * step + rank + part)).double()
                (model(x).square().mean() / 2).backward()
        optimizer.step()
    for mine, theirs in zip(found[0][1], bodies.weights(model), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-12)


def test_groups_that_ranks_wait_in_in_different_orders_end_within_the_limit(pool: Pool, address: str) -> None:
    """By an error on all that says in which group each waits for whom."""
    with pool.start(bodies.crossed, everyone(3, address)) as group:
        assert group.end() == [1, 1, 1]
        for rank in group.ranks:
            assert "waits for others that wait for it" in rank.printed(), rank
            assert "rank 1 for rank 0 (group of ranks 0-2: barrier)" in rank.printed(), rank
            assert "rank 0 for rank 1 (group of ranks 0-1: barrier)" in rank.printed(), rank
