"""Processes that tell each other where they are."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from syncline.bench.addresses import all_addresses
from syncline.errors import GroupError
from syncline.launch.environment import recognise

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


STRANGERS = [
    b"5\n",
    b'[7, "127.0.0.1:1"]\n',
    b'[0, "127.0.0.1:1"]\n',
    b'[true, "x"]\n',
    b"GET / HTTP/1.1\r\n",
    b"\xff\n",
    b"\n",
]


def say(port: int, line: bytes) -> bytes:
    """Call at rank 0's door and say something; what comes back until it closes."""
    for _ in range(400):
        try:
            with socket.create_connection(("127.0.0.1", port), 20.0) as caller:
                caller.sendall(line)
                return caller.recv(100)
        except ConnectionRefusedError:
            threading.Event().wait(0.05)
    raise AssertionError("nobody listens")


@pytest.mark.parametrize("line", STRANGERS)
def test_a_stranger_is_passed_over(place: Any, line: bytes) -> None:
    environment, port = place
    with ThreadPoolExecutor(WORLD) as pool:
        first = pool.submit(all_addresses, environment, port, 20.0)
        assert say(port, line) == b""
        others = [pool.submit(all_addresses, replace(environment, rank=rank), port, 20.0) for rank in range(1, WORLD)]
        assert all(one.result() == first.result() for one in others)


def test_who_has_not_come_and_who_was_refused_is_said(place: Any) -> None:
    environment, port = place
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(all_addresses, environment, port, 1.0)
        assert say(port, b'[7, "127.0.0.1:1"]\n') == b""
        with pytest.raises(GroupError, match=r"missing: ranks \[1, 2, 3\]; refused 127.0.0.1: .* of a rank below 4"):
            first.result()


@pytest.mark.parametrize("line", [b"5\n", b'["one", 2, 3, 4]\n', b'["only one"]\n', b""])
def test_who_finds_a_stranger_in_place_of_rank_0_says_so(place: Any, line: bytes) -> None:
    environment, port = place
    with socket.create_server(("127.0.0.1", port)) as door, ThreadPoolExecutor(1) as pool:
        ours = pool.submit(all_addresses, replace(environment, rank=1), port, 20.0)
        caller, _ = door.accept()
        with caller:
            caller.recv(100)
            caller.sendall(line)
        with pytest.raises(GroupError, match="rank 1 of 4 has not met the others"):
            ours.result()


def test_who_says_nothing_holds_up_nobody_for_long(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syncline.bench.addresses._SAYS_S", 0.1)
    environment, port = place
    with ThreadPoolExecutor(WORLD) as pool:
        first = pool.submit(all_addresses, environment, port, 20.0)
        assert say(port, b"") == b""
        others = [pool.submit(all_addresses, replace(environment, rank=rank), port, 20.0) for rank in range(1, WORLD)]
        assert all(one.result() == first.result() for one in others)
