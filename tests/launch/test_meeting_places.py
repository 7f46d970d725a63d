"""Where the meeting is: its port, interface and names, and who is named where nobody can be reached there."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from starts import LIMIT_S, Case, environment, free_port

from syncline.errors import UsageError
from syncline.launch.address import listen_address
from syncline.launch.meeting import Joined


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
