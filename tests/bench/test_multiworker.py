"""Processes that tell each other where they are."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from syncline.errors import GroupError
from syncline.launch.environment import recognise
from syncline_bench.peers.multiworker import all_addresses

WORLD = 4


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Rank 0's place in a world of four."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": WORLD, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    return recognise()


def test_all_know_all_in_the_order_of_ranks(place: Any) -> None:
    ranks = [replace(place, rank=rank) for rank in range(WORLD)]
    with ThreadPoolExecutor(WORLD) as pool:
        found = list(pool.map(lambda one: all_addresses(one, 20.0), reversed(ranks)))
    assert all(one == found[0] for one in found)
    assert len(set(found[0])) == WORLD
    assert all(one.startswith("127.0.0.1:") for one in found[0])


@pytest.mark.parametrize(("rank", "says"), [(0, "3 of 4 processes have not come"), (1, "rank 0")])
def test_who_waits_for_nobody_says_so(place: Any, rank: int, says: str) -> None:
    with pytest.raises(GroupError, match=says):
        all_addresses(replace(place, rank=rank), 0.5)
