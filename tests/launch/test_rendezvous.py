"""The way to the rendezvous under every launcher: where it is, what proves membership, and starts that fail."""

from __future__ import annotations

import datetime
import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from starts import LIMIT_S, WRONG, Case, Stranger, environment, free_port, meet, serving
from torch._C._distributed_c10d import TCPStore

from syncline.errors import RollCallError, SecretError, UsageError
from syncline.launch.address import listen_address
from syncline.launch.environment import Environment
from syncline.launch.rendezvous import Joined, MeetingAddress, Rendezvous, publish, secret_bytes
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
    assert "rank 1 has no secret, but rank 0 has one" in str(own)


@pytest.mark.parametrize("answer", WRONG, ids=["wrong", "nothing"])
@pytest.mark.parametrize("secret", ["text", None])
def test_a_place_of_an_earlier_start_is_not_believed_for_long(
    start: Case, agent: TCPStore, answer: bytes, secret: str | None
) -> None:
    stranger = Stranger(answer)
    mine, theirs = under_torchrun(agent)
    publish(mine, "run", MeetingAddress("127.0.0.1", stranger.port, b"another key"), LIMIT_S)
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(start, theirs, secret=secret)
        stranger.answer_one()
        found = start(mine, secret=secret)
        assert early.result(LIMIT_S) == found


def test_a_port_in_use_is_a_clear_error(start: Case) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (error,) = start(environment(0, port=port), secret="text")
    assert f"rank 0 cannot listen on port {port} of 127.0.0.1: Address already in use" in str(error)


def test_no_port_is_a_clear_error(start: Case) -> None:
    (error,) = start(environment(0), secret="text")
    assert isinstance(error, UsageError)
    assert "rank 0 needs a port" in str(error)


def test_it_is_on_the_interface_of_rank_0s_address_and_on_the_one_asked_for_only(start: Case) -> None:
    port = free_port()
    open_at = []

    def look(_: Joined) -> None:
        for address in ("127.0.0.1", "127.0.0.7", "127.0.0.8"):
            with suppress(ConnectionRefusedError):
                socket.create_connection((address, port), LIMIT_S).close()
                open_at.append(address)
        raise UsageError("enough")

    start(environment(0, 1, port), secret="text", body=look)
    start(environment(0, 1, port), secret="text", body=look, interface="127.0.0.7")
    assert open_at == ["127.0.0.1", "127.0.0.1", "127.0.0.7"]


Names = Callable[..., None]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    """Gives a name addresses, in the order in which the system's resolver would tell them."""
    real = socket.getaddrinfo

    def call(name: str, *addresses: str) -> None:
        def resolve(host: Any, port: Any, *rest: Any, **options: Any) -> Any:
            asked = addresses if host == name else (host,)
            return [found for address in asked for found in real(address, port, *rest, **options)]

        monkeypatch.setattr(socket, "getaddrinfo", resolve)

    return call


@pytest.mark.parametrize("addresses", [("::1", "127.0.0.1"), ("127.0.0.7", "127.0.0.8")])
def test_a_name_with_several_addresses_is_met_at(start: Case, names: Names, addresses: tuple[str, ...]) -> None:
    """Also where only one of them is known to those who call."""
    port = free_port()
    names("localhost", *addresses)
    assert start(*(environment(rank, port=port, address="localhost") for rank in range(2)), secret="text") == [
        b"text",
        b"text",
    ]
    calling = environment(1, port=port, address=addresses[-1])
    assert start(environment(0, port=port, address="localhost"), calling, secret="text") == [b"text"] * 2


@pytest.mark.parametrize(
    ("place", "doors"),
    [
        ({"address": "node1"}, ["127.0.1.1", "127.0.0.9"]),
        ({"address": "node1", "local_world": 2}, ["127.0.1.1"]),
        ({"address": "127.0.1.1"}, ["127.0.1.1"]),
        ({"address": "localhost"}, ["127.0.1.1"]),
    ],
    ids=["elsewhere", "all here", "address", "localhost"],
)
def test_a_machine_that_calls_itself_loopback_is_met_from_others_too(
    start: Case, names: Names, monkeypatch: pytest.MonkeyPatch, place: dict[str, Any], doors: list[str]
) -> None:
    """Only where others may be elsewhere: 127.0.0.9 is this machine's address for them."""
    names(place["address"], "127.0.1.1")
    monkeypatch.setattr("syncline.launch.address.own_address", lambda: "127.0.0.9")
    mine = environment(0, port=free_port(), **place)
    open_at = []

    def look(_: Joined) -> None:
        for address in ("127.0.1.1", "127.0.0.9"):
            with suppress(ConnectionRefusedError):
                socket.create_connection((address, mine.port), LIMIT_S).close()
                open_at.append(address)
        raise UsageError("enough")

    start(mine, secret="text", body=look)
    assert open_at == doors
    assert listen_address(mine, None) == doors[-1]
    assert listen_address(environment(1, address="0.0.0.0"), None) == "127.0.0.1"
    assert listen_address(mine, "127.0.0.5") == "127.0.0.5"


def test_rank_0_that_does_not_come_is_named(start: Case) -> None:
    port = free_port()
    (error,) = start(environment(1, port=port), secret="text", timeout=0.2)
    assert f"rank 1 cannot reach the meeting of rank 0 at 127.0.0.1:{port} within 0 s: Connection refused;" in str(
        error
    )


def test_a_port_that_answers_nothing_holds_nobody(start: Case) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        (error,) = start(environment(1, port=silent.getsockname()[1]), secret="text", timeout=0.2)
    assert "rank 1 cannot reach the meeting of rank 0" in str(error)


def test_where_to_listen() -> None:
    assert listen_address(environment(0), None) == "127.0.0.1"
    assert listen_address(environment(0), "lo") == "127.0.0.1"
    with pytest.raises(UsageError, match="there are"):
        listen_address(environment(0), "nowhere0")


@pytest.mark.parametrize("given", ["text", b"text"])
def test_a_secret_that_is_given_comes_before_the_environments(start: Case, given: str | bytes) -> None:
    port = free_port()
    places = [environment(rank, port=port, secret=b"variable") for rank in range(2)]
    assert start(*places, secret=given) == [b"text"] * 2
    assert start(*places) == [b"variable"] * 2


def test_without_one_rank_0_makes_a_key_and_warns(start: Case, caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    with caplog.at_level(logging.WARNING, "syncline"):
        mine, theirs = start(environment(0, port=port), environment(1, port=port))
    assert "no secret is set" in caplog.text
    assert mine == theirs
    assert len(mine) == 32


@pytest.mark.parametrize("given", ["", b""])
def test_an_empty_secret_is_refused(given: str | bytes) -> None:
    with pytest.raises(UsageError, match="secret= is empty, which proves nothing: give the same random text"):
        secret_bytes(given)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"secret": "a guess"}, "rank 1 has another secret than the process at 127.0.0.1"),
        ({"secret": None}, "rank 1 has no secret, but rank 0 has one: set SYNCLINE_SECRET"),
    ],
    ids=["another", "none"],
)
def test_a_rank_that_cannot_prove_itself_is_warned_at_once(
    start: Case, other: dict[str, Any], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It ends, as the others do, when its time is over: what answers may be a stranger, and gone when rank 0 comes."""
    port = free_port()
    each = [{"secret": "text", "timeout": 0.5}, {"timeout": 1.0} | other]
    with caplog.at_level(logging.WARNING, "syncline"):
        told, own = start(environment(0, port=port), environment(1, port=port), each=each)
    assert isinstance(own, SecretError)
    assert text in str(own)
    assert caplog.text.count(f"rank 1: the process at 127.0.0.1:{port}, where rank 0 should be, has another") == 1
    assert "rank 1 (one that claims to be it was refused at 127.0.0.1" in str(told)


@pytest.mark.parametrize("answer", WRONG, ids=["wrong", "nothing"])
@pytest.mark.parametrize("secret", ["text", None])
def test_whoever_answers_at_the_port_before_rank_0_ends_no_rank(start: Case, answer: bytes, secret: str | None) -> None:
    stranger = Stranger(answer)
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(start, environment(1, port=stranger.port), secret=secret)
        stranger.answer_one()
        mine = start(environment(0, port=stranger.port), secret=secret)
        assert early.result(LIMIT_S) == mine


def fails(joined: Joined) -> Any:
    """Rank 1 cannot join; the others come as always."""
    if joined.environment.rank == 1:
        raise UsageError("no such interface")
    return meet(joined)


def test_what_one_rank_cannot_do_is_told_to_all(start: Case) -> None:
    port = free_port()
    found = start(*(environment(rank, 3, port) for rank in range(3)), body=fails, secret="text")
    named = str(found[0]).removesuffix(": no such interface")
    assert named.startswith("rank 1 (from 127.0.0.1")
    assert [str(error) for error in found] == [
        f"{named}: no such interface",
        "no such interface",
        f"{named}: no such interface",
    ]
    assert [type(error) for error in found] == [RollCallError, UsageError, RollCallError]


def test_those_who_come_late_read_why_and_the_next_start_is_not_disturbed(start: Case) -> None:
    port = free_port()
    places = [environment(rank, 3, port) for rank in range(3)]

    def gives_up(_: Joined) -> None:
        raise UsageError("no such interface")

    assert str(start(places[0], body=gives_up, secret="text")[0]) == "no such interface"
    assert len(serving()) == 1
    late = str(start(places[1], secret="text")[0])
    assert late == f"rank 0 (serving at 127.0.0.1:{port}): no such interface"
    assert start(*places, run="the next", secret="text") == [b"text"] * 3
    assert not serving()


@pytest.mark.parametrize("launcher", ["syncline", "torchrun", "mpirun"])
def test_where_the_launcher_ends_all_nobody_is_waited_for(start: Case, launcher: str) -> None:
    (error,) = start(environment(0, 3, free_port(), launcher=launcher), body=fails, secret="text", timeout=1.0)
    assert "2 of 3 processes have not come" in str(error)
    for thread in serving():
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def test_nobody_is_waited_for_whose_time_is_over(start: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute for others would outlast this test."""
    monkeypatch.setattr("syncline.launch.rendezvous._LATE_S", 60.0)
    (error,) = start(environment(0, 3, free_port()), secret="text", timeout=1.0)
    assert "2 of 3 processes have not come" in str(error)
    for thread in serving():
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def test_an_interrupt_on_the_way_in_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meeting is served already, and nobody has come in."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("syncline.launch.rendezvous.MeetingClient.limit", interrupted)
    point = Rendezvous(environment(0, 3, free_port()))
    with pytest.raises(KeyboardInterrupt), point.join("run", "text", None, LIMIT_S):
        pass
    for thread in serving():
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    point.close()


def test_an_interrupt_is_told_and_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syncline.launch.rendezvous._LATE_S", 60.0)
    point = Rendezvous(environment(0, 3, free_port()))

    def interrupted() -> None:
        with point.join("run", "text", None, LIMIT_S):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    for thread in serving():
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    point.close()


def test_a_process_of_another_start_is_not_taken_for_one_of_this(start: Case) -> None:
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(start, environment(1, port=port), run="the start after", secret="text", timeout=0.5)
        (mine,) = start(environment(0, port=port), run="this start", secret="text", timeout=0.7)
        assert "cannot reach the meeting" in str(other.result(LIMIT_S)[0])
    assert "1 of 2 processes have not come: rank 1" in str(mine)
