"""What comes before connections: room for descriptors, torchrun's store, and rank 0's address."""

from __future__ import annotations

import datetime
import importlib.util
import resource
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

import syncline
from syncline.errors import GroupError, UsageError
from syncline.launch.address import find_address
from syncline.launch.connecting import make_room
from syncline.launch.environment import Environment, derived_port
from syncline.launch.rendezvous import MeetingAddress, look_up, publish
from syncline.wire.listener import CALLERS
from syncline.wire.meeting_sockets import MORE

Limits = tuple[int, int]


class System:
    """The limits of a pretended process."""

    def __init__(self, soft: int, hard: int) -> None:
        self.limits: Limits = soft, hard

    def getrlimit(self, _which: int) -> Limits:
        return self.limits

    def setrlimit(self, _which: int, limits: Limits) -> None:
        self.limits = limits


def system(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int) -> System:
    found = System(soft, hard)
    monkeypatch.setattr(resource, "getrlimit", found.getrlimit)
    monkeypatch.setattr(resource, "setrlimit", found.setrlimit)
    return found


@pytest.mark.parametrize("hard", [1 << 20, resource.RLIM_INFINITY])
def test_the_limit_is_raised_as_far_as_needed(monkeypatch: pytest.MonkeyPatch, hard: int) -> None:
    found = system(monkeypatch, 1024, hard)
    make_room(4)
    assert found.limits == (1024, hard)
    make_room(2048)
    assert found.limits[0] > 2 * 2048
    assert found.limits[1] == hard
    before = found.limits
    make_room(2048)
    assert found.limits == before


@pytest.mark.parametrize("world", [2, 25, 500])
def test_a_crowd_of_strangers_leaves_room_for_the_group(monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    """In rank 0: unfinished handshakes at its own doors and at the meeting's, and the meeting's connections."""
    found = system(monkeypatch, 256, 1 << 20)
    make_room(world)
    crowds = 2 * (CALLERS + 2 * world) + MORE + 2 * world
    assert found.limits[0] >= crowds + 2 * world + 256


def test_where_the_system_allows_no_crowd_it_has_what_the_group_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = system(monkeypatch, 256, 1024)
    make_room(100)
    assert found.limits == (1024, 1024)


def test_a_world_beyond_the_system_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    system(monkeypatch, 1024, 4096)
    with pytest.raises(
        UsageError, match=r"1025 processes need \d+ descriptors in each .* allows 4096: raise the limit"
    ):
        make_room(1025)


def test_no_limit_is_room_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    found = system(monkeypatch, resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    make_room(1 << 20)
    assert found.limits == (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


LIMIT_S = 20.0
TOLD = MeetingAddress("10.0.0.1", 5000, b"a key against accidents")


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, timeout=datetime.timedelta(seconds=LIMIT_S), wait_for_workers=False)


def at(port: int, rank: int = 1) -> Environment:
    return Environment("torchrun", rank, 2, rank, 2, "127.0.0.1", port, "job", agent_store=True)


@pytest.mark.parametrize("told", [TOLD, replace(TOLD, address="fe80::1", key=b"")])
def test_what_rank_0_tells_is_heard_whoever_comes_first(store: TCPStore, told: MeetingAddress) -> None:
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(look_up, at(store.port), "run", LIMIT_S)
        publish(at(store.port, 0), "run", told, LIMIT_S)
        assert early.result(LIMIT_S) == told
    assert look_up(at(store.port), "run", LIMIT_S) == told


def test_starts_are_told_apart(store: TCPStore) -> None:
    publish(at(store.port, 0), "run/1", TOLD, LIMIT_S)
    with pytest.raises(GroupError, match="rank 1 has not heard there where rank 0 is"):
        look_up(at(store.port), "run/2", 0.2)


@pytest.mark.parametrize(
    "value",
    ["", "no JSON", "[]", '["a", 0, ""]', '["a", 65536, ""]', '["a", "1", ""]', '["a", 1, "x"]', "[" + " " * 4096],
)
def test_what_is_no_place_is_refused(store: TCPStore, value: str) -> None:
    store.set("syncline/run/meeting", value)
    with pytest.raises(GroupError, match="another program, or another version"):
        look_up(at(store.port), "run", LIMIT_S)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_accepts_and_says_nothing_holds_nobody(rank: int) -> None:
    """Its own calls would wait for ever, whatever limit they were given."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environment = at(silent.getsockname()[1], rank)
        call = partial(publish, at=TOLD) if rank == 0 else look_up
        with pytest.raises(GroupError, match="is torchrun running there, and has rank 0 come this far"):
            call(environment, "run", limit_s=0.2)


def test_a_store_that_is_not_there_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    why = rf"rank 1 has not heard there where rank 0 is, at 127.0.0.1:{port}, within 0 s.*; where nodes join or leave"
    with pytest.raises(GroupError, match=why):
        look_up(at(port), "run", 0.3)


ONE_HOST = Environment("mpirun", 1, 2, 1, 2, "", 0, "prterun-a-1@1")


@pytest.fixture
def no_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "mpi4py" else found(name))


def test_a_given_address_stays() -> None:
    given = Environment("srun", 1, 2, 0, 1, "node0", 4000)
    assert find_address(given, None, 1.0) == (given, None)
    alone = Environment("mpirun")
    assert find_address(alone, None, 1.0) == (alone, None)


@pytest.mark.usefixtures("no_mpi")
def test_one_host_without_mpi4py_meets_at_a_derived_port() -> None:
    found, _ = find_address(ONE_HOST, None, 1.0)
    assert (found.address, found.port) == ("127.0.0.1", derived_port("prterun-a-1@1"))


@pytest.mark.usefixtures("no_mpi")
@pytest.mark.parametrize("changes", [{"local_rank": 0, "local_world": 1}, {"run_id": ""}])
def test_no_way_to_meet_says_what_is_missing(changes: dict[str, Any]) -> None:
    from dataclasses import replace

    with pytest.raises(UsageError, match=r"process 1 of 2.*MASTER_ADDR.*MASTER_PORT.*mpi4py"):
        find_address(replace(ONE_HOST, **changes), None, 1.0)


@pytest.mark.parametrize("given", ["argument", "variable"])
def test_checksums_under_tls_are_refused_before_anybody_is_met(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    if given == "variable":
        monkeypatch.setenv("SYNCLINE_TLS", "on")
    tls = "on" if given == "argument" else None
    with pytest.raises(UsageError, match=r"tls=on with tcp\(checksum=on\): TLS finds altered bytes already, leave out"):
        syncline.init("transport=tcp(checksum=on)", rank=0, world_size=2, address="127.0.0.1:1", secret="s", tls=tls)
