"""Forming a group: all find each other, or all learn the same fault at once."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import pytest

from syncline.errors import GroupError, RollCallError
from syncline.wire.handshake import run_id, seal
from syncline.wire.listener import Listener
from syncline.wire.rollcall import (
    Member,
    Roll,
    all_left,
    call_roll,
    check_failed,
    connect,
    describe_self,
    give_up,
    leave,
    tell_failed,
)
from syncline.wire.store import MemoryStore

LIMIT_S = 20.0
RUN = "a run"


@dataclass(frozen=True)
class Caller:
    """How one process comes to the roll call."""

    index: int
    world: int
    secret: bytes = b"the run's secret"
    strategy: str = "ring"
    timeout: float = LIMIT_S


def form(store: MemoryStore, caller: Caller, hint: Callable[[int], str] = lambda _: "") -> Roll:
    """The roll call and connections of one process, with bytes over every connection."""
    listener = Listener("127.0.0.1", run_id(RUN), caller.secret, caller.index)
    socks: list[socket.socket] = []
    try:
        me = describe_self(caller.index, caller.world, listener, {"strategy": caller.strategy, "version": "1"})
        roll = call_roll(store, RUN, caller.secret, me, caller.timeout, hint)
        for purpose, near in (("control", frozenset[int]()), ("data", roll.near)):
            found = connect(store, roll, listener, purpose, near, caller.timeout)
            socks += found.values()
            for peer, sock in found.items():
                sock.sendall(f"{purpose} {caller.index} to {peer};".encode())
            for peer, sock in found.items():
                expected = f"{purpose} {peer} to {caller.index};".encode()
                assert sock.recv(len(expected), socket.MSG_WAITALL) == expected
        leave(store, RUN, caller.index, caller.world)
        return roll
    except GroupError as error:
        give_up(store, RUN, caller.index, str(error))
        raise
    finally:
        listener.close()
        for sock in socks:
            sock.close()


def form_all(callers: Sequence[Caller], **options: Any) -> list[Roll | GroupError]:
    """All at once, each in its thread; what each got."""
    store = MemoryStore()

    def body(caller: Caller) -> Roll | GroupError:
        try:
            return form(store, caller, **options)
        except GroupError as error:
            return error

    with ThreadPoolExecutor(len(callers)) as pool:
        return list(pool.map(body, callers, timeout=2 * LIMIT_S))


def faults(callers: Sequence[Caller], **options: Any) -> list[str]:
    """The texts of a roll call in which everyone fails."""
    found = form_all(callers, **options)
    assert all(isinstance(result, RollCallError) for result in found), found
    return [str(error) for error in found]


@pytest.mark.parametrize("world", [1, 2, 5])
def test_all_find_each_other(world: int) -> None:
    rolls = form_all([Caller(index, world) for index in reversed(range(world))])
    assert all(isinstance(roll, Roll) for roll in rolls)
    first = rolls[0]
    assert isinstance(first, Roll)
    assert [member.index for member in first.members] == list(range(world))
    assert first.hosts == 1
    assert [roll.near for roll in rolls if isinstance(roll, Roll)] == [
        frozenset(range(world)) - {index} for index in reversed(range(world))
    ]
    assert first.nodes == (0,) * world
    for roll in rolls:
        assert isinstance(roll, Roll)
        assert roll.members == first.members


def test_the_missing_are_named_with_where_they_were_expected() -> None:
    came = [Caller(index, 5, timeout=0.2) for index in (0, 3)]
    for text in faults(came, hint=lambda index: f" (node {index // 2})"):
        assert "3 of 5 processes have not come: rank 1 (node 0), rank 2 (node 1), rank 4 (node 2);" in text
        assert "init(timeout=)" in text


def test_who_gives_up_first_tells_the_others() -> None:
    """They end with the same text, without waiting for their own time limit."""
    texts = faults([Caller(0, 3, timeout=0.1), Caller(1, 3, timeout=1000.0)])
    assert len(set(texts)) == 1
    assert "rank 2" in texts[0]


def test_a_duplicate_rank_fails_all() -> None:
    callers = [Caller(0, 3), Caller(1, 3), Caller(1, 3)]
    for text in faults(callers):
        assert "rank 1 is taken" in text
        assert "claims it too" in text


@pytest.mark.parametrize(
    ("odd", "wanted"),
    [
        (Caller(2, 4), ["counts 4", "counts 3", "same world size"]),
        (Caller(2, 3, secret=b"another"), ["has another secret than rank"]),
        (
            Caller(2, 3, strategy="ps(servers=1)"),
            ["has strategy", "'ps(servers=1)'", "'ring'", "all ranks need the same"],
        ),
    ],
    ids=["world", "secret", "strategy"],
)
def test_one_that_disagrees_fails_all_at_once(odd: Caller, wanted: list[str]) -> None:
    """Its rank, host and process are in everybody's error, whoever sees it first."""
    texts = faults([Caller(0, 3), Caller(1, 3), odd])
    for text in texts:
        for part in ("rank 2", socket.gethostname(), *wanted):
            assert part in text


def test_a_fault_found_elsewhere_ends_the_wait_for_connections() -> None:
    store = MemoryStore()
    caller = Caller(0, 2)
    listener = Listener("127.0.0.1", run_id(RUN), caller.secret, 0)
    me = describe_self(0, 2, listener, {})
    absent = replace(me, index=1)
    roll = Roll(0, (me, absent), RUN, caller.secret)
    tell_failed(store, RUN, "rank 1 has burnt down")
    tell_failed(store, RUN, "a later fault")
    try:
        with pytest.raises(RollCallError, match="rank 1 has burnt down"):
            connect(store, roll, listener, "data", {1}, LIMIT_S)
    finally:
        listener.close()


def test_a_peer_that_does_not_connect_is_named() -> None:
    store = MemoryStore()
    listener = Listener("127.0.0.1", run_id(RUN), b"", 0)
    me = describe_self(0, 2, listener, {})
    roll = Roll(0, (me, replace(me, index=1, host="elsewhere", pid=77)), RUN, b"")
    try:
        with pytest.raises(GroupError, match=r"no data connection within 0 s from rank 1 \(elsewhere, pid 77\)"):
            connect(store, roll, listener, "data", {1}, 0.0)
    finally:
        listener.close()


def test_a_peer_that_cannot_be_reached_is_named_with_its_address() -> None:
    store = MemoryStore()
    listener = Listener("127.0.0.1", run_id(RUN), b"", 1)
    me = describe_self(1, 2, listener, {})
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    roll = Roll(1, (replace(me, index=0, port=port, host="elsewhere", pid=77), me), RUN, b"")
    try:
        with pytest.raises(GroupError, match=rf"cannot connect to rank 0 \(elsewhere, pid 77\) at 127.0.0.1:{port}: "):
            connect(store, roll, listener, "control", (), LIMIT_S)
    finally:
        listener.close()


def member(index: int, machine: str) -> Member:
    return Member(index, 4, f"host of {machine}", machine, 1, machine, "127.0.0.1", 1, "", {})


def test_nodes_are_numbered_as_they_appear() -> None:
    roll = Roll(0, tuple(member(index, machine) for index, machine in enumerate("baab")), RUN, b"")
    assert roll.nodes == (0, 1, 1, 0)
    assert roll.hosts == 2
    assert roll.near == {3}


@pytest.mark.parametrize(
    "record", [b"", b"no JSON", b"[]", b'["{}", "signature"]', json.dumps(["{", 3]).encode(), b"\xff\xfe"]
)
def test_records_that_are_none_are_refused(record: bytes) -> None:
    store = MemoryStore()
    store.set(f"{RUN}/member/1", record)
    with pytest.raises(RollCallError, match="another version"):
        form(store, Caller(0, 2))


def test_a_forged_record_is_refused() -> None:
    store = MemoryStore()
    text = json.dumps(asdict(replace(member(1, "a"), world=2)))
    store.set(f"{RUN}/member/1", json.dumps([text, seal(b"a guess", text.encode())]).encode())
    with pytest.raises(RollCallError, match="has another secret"):
        form(store, Caller(0, 2))


def test_process_0_leaves_last() -> None:
    """The store may go with it: it stays until all others are through."""
    store = MemoryStore()
    gone = threading.Event()

    def last() -> None:
        leave(store, RUN, 0, 3)
        gone.set()

    thread = threading.Thread(target=last)
    thread.start()
    leave(store, RUN, 1, 3)
    assert not gone.wait(0.05)
    leave(store, RUN, 2, 3)
    assert gone.wait(LIMIT_S)
    thread.join()


def test_process_0_does_not_wait_for_the_impossible() -> None:
    store = MemoryStore()
    give_up(store, RUN, 1, "rank 1 has burnt down")
    with pytest.raises(RollCallError, match="burnt"):
        leave(store, RUN, 0, 3)


def test_a_fault_is_seen_although_all_have_left() -> None:
    store = MemoryStore()
    give_up(store, RUN, 1, "rank 1 has burnt down")
    for index in range(2):
        with pytest.raises(RollCallError, match="burnt"):
            leave(store, RUN, index, 2)


def test_the_first_fault_is_the_one_that_all_read() -> None:
    store = MemoryStore()
    give_up(store, RUN, 1, "rank 1 has burnt down")
    assert not all_left(store, RUN, 3)
    give_up(store, RUN, 2, "rank 2 has drowned")
    assert all_left(store, RUN, 3)
    with pytest.raises(RollCallError, match="burnt"):
        check_failed(store, RUN)


def test_a_memory_store_keeps_what_it_is_told() -> None:
    store = MemoryStore()
    assert store.get("key") is None
    store.set("key", b"value")
    assert store.get("key") == b"value"
    assert [store.add("count", amount) for amount in (1, 5, 0)] == [1, 6, 6]
