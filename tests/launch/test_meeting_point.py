"""Coming to the meeting under every launcher: again and again at one port, by its socket, or by torchrun's store."""

from __future__ import annotations

import datetime
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from starts import LIMIT_S, WRONG, Case, Stranger, environment, free_port, serving
from torch._C._distributed_c10d import TCPStore

from syncline.launch.address import Told, tell
from syncline.launch.environment import Environment
from syncline.wire.listener import bind_here


def test_all_meet_again_and_again_at_one_port(start: Case) -> None:
    port = free_port()
    places = [environment(rank, 3, port) for rank in range(3)]
    for number in range(3):
        assert start(*places, run=f"run {number}", secret="text") == [b"text"] * 3
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), LIMIT_S)
    assert not serving()


def test_the_launchers_listening_socket_is_taken_for_the_first_start(start: Case) -> None:
    with bind_here() as kept:
        port = kept.getsockname()[1]
        door = bind_here(port=port)
        door.listen()
        places = [environment(0, port=port, meeting_fd=door.detach()), environment(1, port=port)]
        assert start(*places, secret="text") == [b"text"] * 2
        assert start(*places, secret="text", run="a second one") == [b"text"] * 2


def test_a_descriptor_that_has_become_another_one_is_let_be(start: Case) -> None:
    """A child that inherits the variables does not inherit the socket."""
    with socket.create_server(("127.0.0.1", 0)) as other, Path("/dev/null").open() as file:
        for fd in (other.fileno(), file.fileno(), 999):
            port = free_port()
            places = [environment(0, port=port, meeting_fd=fd), environment(1, port=port)]
            assert start(*places, secret="text") == [b"text"] * 2
        assert other.getsockname()
        assert file.read() == ""


def test_one_that_comes_before_rank_0_waits_for_it(start: Case) -> None:
    port = free_port()
    early = threading.Event()
    found: list[Any] = []

    def come() -> None:
        early.set()
        found.extend(start(environment(1, port=port), secret="text"))

    thread = threading.Thread(target=come)
    thread.start()
    assert early.wait(LIMIT_S)
    assert start(environment(0, port=port), secret="text") == [b"text"]
    thread.join(LIMIT_S)
    assert found == [b"text"]


@pytest.fixture
def agent() -> TCPStore:
    limit = datetime.timedelta(seconds=LIMIT_S)
    return TCPStore("127.0.0.1", 0, is_master=True, timeout=limit, wait_for_workers=False)


def under_torchrun(agent: TCPStore, world: int = 2) -> list[Environment]:
    return [environment(rank, world, agent.port, launcher="torchrun", agent_store=True) for rank in range(world)]


def test_the_agents_store_tells_the_place_and_nothing_else(start: Case, agent: TCPStore) -> None:
    assert start(*under_torchrun(agent, 3), secret="text") == [b"text"] * 3
    assert b"text".hex().encode() not in bytes(agent.get("syncline/run/meeting"))
    assert agent.num_keys() <= 2  # and one that torch has of itself


def test_without_a_secret_the_key_in_the_agents_store_proves(start: Case, agent: TCPStore) -> None:
    mine, theirs = start(*under_torchrun(agent))
    assert mine == theirs
    assert mine.hex().encode() in bytes(agent.get("syncline/run/meeting"))


def test_a_rank_without_a_secret_learns_from_the_agents_store_that_there_is_one(start: Case, agent: TCPStore) -> None:
    _, own = start(*under_torchrun(agent), each=[{"secret": "text", "timeout": 0.5}, {}])
    assert "rank 1 has no secret, rank 0 has one" in str(own)


@pytest.mark.parametrize("answer", WRONG, ids=["wrong", "nothing"])
@pytest.mark.parametrize("secret", ["text", None])
def test_a_place_of_an_earlier_start_is_not_believed_for_long(
    start: Case, agent: TCPStore, answer: bytes, secret: str | None
) -> None:
    stranger = Stranger(answer)
    mine, theirs = under_torchrun(agent)
    tell(mine, "run", Told("127.0.0.1", stranger.port, b"another key"), LIMIT_S)
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(start, theirs, secret=secret)
        stranger.answer_one()
        found = start(mine, secret=secret)
        assert early.result(LIMIT_S) == found
