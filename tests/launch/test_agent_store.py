"""torchrun's store tells where to meet, and holds nobody longer than their time, whatever it does."""

from __future__ import annotations

import datetime
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
from torch._C._distributed_c10d import TCPStore

from syncline.errors import GroupError
from syncline.launch.address import Told, hear, tell
from syncline.launch.environment import Environment

LIMIT_S = 20.0
TOLD = Told("10.0.0.1", 5000, b"a key against accidents")


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, timeout=datetime.timedelta(seconds=LIMIT_S), wait_for_workers=False)


def at(port: int, rank: int = 1) -> Environment:
    return Environment("torchrun", rank, 2, rank, 2, "127.0.0.1", port, "job", agent_store=True)


@pytest.mark.parametrize("told", [TOLD, replace(TOLD, address="fe80::1", key=b"")])
def test_what_rank_0_tells_is_heard_whoever_comes_first(store: TCPStore, told: Told) -> None:
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(hear, at(store.port), "run", LIMIT_S)
        tell(at(store.port, 0), "run", told, LIMIT_S)
        assert early.result(LIMIT_S) == told
    assert hear(at(store.port), "run", LIMIT_S) == told


def test_starts_are_told_apart(store: TCPStore) -> None:
    tell(at(store.port, 0), "run/1", TOLD, LIMIT_S)
    with pytest.raises(GroupError, match="rank 1 has not heard there where rank 0 is"):
        hear(at(store.port), "run/2", 0.2)


@pytest.mark.parametrize(
    "value",
    ["", "no JSON", "[]", '["a", 0, ""]', '["a", 65536, ""]', '["a", "1", ""]', '["a", 1, "x"]', "[" + " " * 4096],
)
def test_what_is_no_place_is_refused(store: TCPStore, value: str) -> None:
    store.set("syncline/run/meeting", value)
    with pytest.raises(GroupError, match="another program, or another version"):
        hear(at(store.port), "run", LIMIT_S)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_accepts_and_says_nothing_holds_nobody(rank: int) -> None:
    """Its own calls would wait for ever, whatever limit they were given."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environment = at(silent.getsockname()[1], rank)
        call = partial(tell, told=TOLD) if rank == 0 else hear
        with pytest.raises(GroupError, match="is torchrun running there, and has rank 0 come this far"):
            call(environment, "run", limit_s=0.2)


def test_a_store_that_is_not_there_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(
        GroupError, match=rf"rank 1 has not heard there where rank 0 is, at 127.0.0.1:{port}, within 0 s"
    ):
        hear(at(port), "run", 0.3)
