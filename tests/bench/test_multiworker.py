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
    """Rank 0's place in a world of four, and a port for it."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": WORLD, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    return recognise(), port


def test_all_know_all_in_the_order_of_ranks(place: Any) -> None:
    environment, port = place
    ranks = [replace(environment, rank=rank) for rank in range(WORLD)]
    with ThreadPoolExecutor(WORLD) as pool:
        found = list(pool.map(lambda one: all_addresses(one, port, 20.0), reversed(ranks)))
    assert all(one == found[0] for one in found)
    assert len(set(found[0])) == WORLD
    assert all(one.startswith("127.0.0.1:") for one in found[0])


@pytest.mark.parametrize("rank", [0, 1])
def test_who_waits_for_nobody_says_so(place: Any, rank: int) -> None:
    environment, port = place
    with pytest.raises(GroupError, match=f"rank {rank} of 4 has not met the others at 127.0.0.1:{port} within 0 s"):
        all_addresses(replace(environment, rank=rank), port, 0.2)
