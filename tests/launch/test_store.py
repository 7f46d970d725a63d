"""Meeting at a store: torch's behind three calls, the secret, the address to listen on."""

from __future__ import annotations

import logging
import socket
import threading
from dataclasses import replace

import pytest

from syncline.errors import GroupError, RollCallError, UsageError
from syncline.launch.environment import Environment
from syncline.launch.store import failing_together, find_secret, listen_address, open_store
from syncline.wire.rollcall import check_failed
from syncline.wire.store import MemoryStore

RUN = "a run"


def environment(rank: int = 0, port: int = 0, secret: bytes | None = None, fd: int | None = None) -> Environment:
    return Environment("test", rank=rank, world=2, port=port, secret=secret, store_fd=fd)


def test_a_store_keeps_and_counts_for_all() -> None:
    door = socket.create_server(("127.0.0.1", 0))
    port = door.getsockname()[1]
    serving = open_store(environment(0, port, fd=door.detach()), 10)
    other = open_store(environment(1, port), 10)
    assert other.get("key") is None
    serving.set("key", b"\0any bytes\xff")
    assert other.get("key") == b"\0any bytes\xff"
    assert [serving.add("count", 2), other.add("count", 3), serving.add("count", 0)] == [2, 5, 5]
    del serving
    with pytest.raises(GroupError, match="the store in which the processes meet is gone"):
        other.add("count", 1)


def test_a_port_in_use_is_a_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(GroupError, match=f"rank 0 cannot listen on port {port}: Address already in use"):
            open_store(environment(0, port), 1)


def test_no_port_is_a_clear_error() -> None:
    with pytest.raises(UsageError, match="rank 0 needs a port"):
        open_store(environment(), 1)


@pytest.mark.parametrize("given", ["text", b"text"])
def test_a_secret_that_is_given_is_taken_first(given: str | bytes) -> None:
    assert find_secret(MemoryStore(), RUN, environment(secret=b"variable"), given) == b"text"


def test_then_the_environments() -> None:
    assert find_secret(MemoryStore(), RUN, environment(secret=b"variable"), None) == b"variable"


def test_then_a_key_against_accidents_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    with caplog.at_level(logging.WARNING, "syncline"):
        made = find_secret(store, RUN, environment(), None)
    assert "no secret is set" in caplog.text
    assert len(made) == 32
    assert find_secret(store, RUN, environment(1), None) == made


def test_a_rank_without_a_secret_does_not_wait_for_a_key_that_will_not_come() -> None:
    store = MemoryStore()
    find_secret(store, RUN, environment(), "secret")
    with pytest.raises(GroupError, match="rank 1 has no secret, rank 0 has one"):
        find_secret(store, RUN, environment(1), None)
    assert store.get(f"{RUN}/failed") is not None  # the others learn of it


def test_nor_for_a_rank_0_that_does_not_come() -> None:
    with pytest.raises(GroupError, match="rank 0 has not come"):
        find_secret(MemoryStore(), RUN, environment(1), None, timeout=0.0)


def test_what_goes_wrong_is_told_to_all_and_read_before_the_store_goes() -> None:
    """Rank 0's error is raised at once; the thread that keeps its store ends when the other rank has left."""
    store = MemoryStore()
    with pytest.raises(UsageError, match="no such interface"), failing_together(store, RUN, environment(), 60):
        raise UsageError("no such interface")
    (keeper,) = (thread for thread in threading.enumerate() if thread.name == "syncline-store-of-failed-start")
    assert not keeper.daemon  # the end of the interpreter waits for it
    with pytest.raises(RollCallError) as told, failing_together(store, RUN, environment(1), 60):
        check_failed(store, RUN)
    assert str(told.value) == "rank 0: no such interface"
    keeper.join(10)
    assert not keeper.is_alive()


def test_a_store_is_not_kept_for_those_whose_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only as long as those who have come need to read; a minute for others would outlast this test."""
    monkeypatch.setattr("syncline.launch.store._LATE_S", 60.0)
    monkeypatch.setattr("syncline.launch.store._READ_S", 0.1)
    with pytest.raises(RollCallError), failing_together(MemoryStore(), RUN, environment(), 0):
        raise RollCallError("rank 1 has not come")
    for keeper in threading.enumerate():
        if keeper.name == "syncline-store-of-failed-start":
            keeper.join(10)
            assert not keeper.is_alive()


def test_under_an_agent_rank_0_has_no_store_to_keep() -> None:
    served = replace(environment(), agent_store=True)
    with pytest.raises(RollCallError), failing_together(MemoryStore(), RUN, served, 60):
        raise RollCallError("rank 1 has not come")
    assert "syncline-store-of-failed-start" not in {thread.name for thread in threading.enumerate()}


def test_where_to_listen() -> None:
    assert listen_address(environment(), None) == "127.0.0.1"
    assert listen_address(environment(), "lo") == "127.0.0.1"
    with pytest.raises(UsageError, match="there are"):
        listen_address(environment(), "nowhere0")
