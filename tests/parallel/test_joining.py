"""How a group of real processes comes together, or why it does not: all that have come say the same, at once."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest
import rank_bodies as bodies

from pool import Pool

Options = dict[str, Any]


def start_all(pool: Pool, places: list[tuple[int, int, str]], options: list[Options] | None = None) -> list[Any]:
    """What each process said: "met", or the kind and text of its error."""
    each = options or [{} for _ in places]
    with pool.start(
        bodies.starts, [[list(place), option] for place, option in zip(places, each, strict=True)]
    ) as group:
        return group.results()


def places(world: int, address: str) -> list[tuple[int, int, str]]:
    return [(index, world, address) for index in range(world)]


def test_all_meet(pool: Pool, address: str) -> None:
    assert start_all(pool, places(4, address)) == ["met"] * 4


def test_all_meet_without_a_secret_but_with_a_warning(pool: Pool, address: str) -> None:
    with pool.start(bodies.starts, [[place, {"secret": None}] for place in places(3, address)]) as group:
        assert group.results() == ["met"] * 3
        assert "no secret is set" in group.ranks[0].printed()


@pytest.mark.parametrize(
    ("secret", "own"),
    [("a guess", "rank 2 has another secret than the process at"), (None, "rank 2 has no secret, but rank 0 has one")],
    ids=["another", "none"],
)
def test_a_rank_that_cannot_prove_itself(pool: Pool, address: str, secret: str | None, own: str) -> None:
    """Its time ends it. Who cannot prove itself ends nothing: the others miss it, and say who was refused."""
    limits = {"timeout": 1.0}
    said = start_all(pool, places(3, address), [limits, limits, {"secret": secret, "timeout": 2.0}])
    assert [kind for kind, _ in said] == ["RollCallError", "RollCallError", "SecretError"]
    assert own in said[2][1]
    for _, text in said[:2]:
        assert "1 of 3 processes have not come: rank 2 (one that claims to be it was refused at 127.0.0.1:" in text


def test_an_empty_secret(pool: Pool, address: str) -> None:
    ((kind, text),) = start_all(pool, [(0, 2, address)], [{"secret": ""}])
    assert kind == "UsageError"
    assert "secret= is empty" in text


def test_world_sizes_that_disagree(pool: Pool, address: str) -> None:
    said = start_all(pool, [(0, 3, address), (1, 3, address), (2, 4, address)])
    for kind, text in said:
        assert kind == "RollCallError"
        assert "rank 2" in text
        assert "same world size" in text


def test_who_starts_when_it_is_all_over_reads_why(pool: Pool, address: str) -> None:
    """Rank 0 has its error at once, and serves its store for those that are still starting."""
    with pool.start(bodies.starts, [[(0, 3, address), {}], [(2, 4, address), {}]]) as early:
        early.hear(1)
        late = start_all(pool, [(1, 3, address)])
        told = early.results()
    for kind, text in (*told, *late):
        assert kind == "RollCallError"
        assert "same world size" in text


def test_what_one_rank_cannot_do_is_told_to_all(pool: Pool, address: str) -> None:
    """Nobody waits for the time limit of a roll call to which a rank will not come."""
    said = start_all(pool, places(3, address), [{}, {"interface": "nowhere0"}, {}])
    assert [kind for kind, _ in said] == ["RollCallError", "UsageError", "RollCallError"]
    for index in (0, 2):
        assert said[index][1].startswith("rank 1 (from 127.0.0.1:")
        assert "): interface 'nowhere0' has no IPv4 address" in said[index][1]


def test_a_duplicate_rank(pool: Pool, address: str) -> None:
    said = start_all(pool, [(0, 3, address), (1, 3, address), (1, 3, address)])
    for kind, text in said:
        assert kind == "RollCallError"
        assert "rank 1 is taken" in text


def test_strategies_that_disagree(pool: Pool, address: str) -> None:
    said = start_all(pool, places(3, address), [{}, {"strategy": "direct"}, {}])
    for kind, text in said:
        assert kind == "RollCallError"
        assert "rank 1" in text
        assert "has strategy" in text


def test_the_missing_are_named(pool: Pool, address: str) -> None:
    said = start_all(pool, places(4, address)[:2], [{"timeout": 1.0}] * 2)
    for kind, text in said:
        assert kind == "RollCallError"
        assert (
            "2 of 4 processes have not come: rank 2 (node 0, local rank 2), rank 3" in text or "rank 2, rank 3" in text
        )


def test_without_rank_0_nobody_waits_for_ever(pool: Pool, address: str) -> None:
    ((kind, text),) = start_all(pool, [(1, 2, address)], [{"timeout": 1.0}])
    assert kind == "GroupError"
    assert f"rank 1 cannot reach the meeting of rank 0 at {address} within 1 s" in text


def test_a_port_in_use(pool: Pool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ((kind, text),) = start_all(pool, [(0, 2, f"127.0.0.1:{port}")])
    assert kind == "GroupError"
    assert f"rank 0 cannot listen on port {port}" in text
    assert "Choose a free port" in text


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("place", "options", "part"),
    [
        ((2, 2, "127.0.0.1:29500"), {}, "rank 2 does not exist in a world of 2"),
        ((0, 2, "127.0.0.1"), {}, "address= must be host:port"),
        ((0, 2, "127.0.0.1:29500"), {"strategy": "rign"}, "rign"),
        ((0, 2, "ADDRESS"), {"interface": "nowhere0"}, "interface 'nowhere0' has no IPv4 address"),
        ((0, 2, "ADDRESS"), {"interface": "192.0.2.1"}, "cannot listen on 192.0.2.1"),
        ((0, 2, "ADDRESS"), {"strategy": "ps(servers=2)"}, "needs 2 server processes and at least one worker"),
    ],
)
def test_wrong_arguments(
    pool: Pool, addresses: Callable[[], str], place: tuple[int, int, str], options: Options, part: str
) -> None:
    index, world, address = place
    where = addresses() if address == "ADDRESS" else address
    ((kind, text),) = start_all(pool, [(index, world, where)], [options | {"timeout": 1.0}])
    assert kind in ("UsageError", "StrategyError")
    assert part in text


def test_what_fails_after_a_second_try_is_told_as_after_a_first(
    pool: Pool, addresses: Callable[[], str], address: str
) -> None:
    nowhere = addresses()
    each = [[place, nowhere] for place in places(2, address)]
    with pool.start(bodies.raises_at_the_second_try, each) as group:
        assert group.end() == [1, 1]
        assert "failed: ValueError: the data of this rank are spoilt" in group.ranks[0].printed()


def test_a_group_that_cannot_be_watched_leaves_no_connection(pool: Pool, address: str) -> None:
    with pool.start(bodies.finds_no_room_to_watch, [[place] for place in places(2, address)]) as group:
        assert group.results() == [("can't start new thread", 0)] * 2


def test_strangers_on_the_ports_do_not_disturb(pool: Pool, address: str) -> None:
    """Those that say nothing, noise, and HTTP, on every port on which rank 0 listens while it waits for rank 1."""
    with pool.start(bodies.tells_its_ports, [[[0, 2, address]]]) as first:
        first.hear(1)
        strangers = []
        ports = first.ranks[0].said[0]
        assert int(address.rpartition(":")[2]) in ports
        for port in ports:
            for noise in (b"", b"\0" * 100, b"\xff" * 100, b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" + b" " * 100):
                stranger = socket.create_connection(("127.0.0.1", port), 10)
                stranger.sendall(noise)
                strangers.append(stranger)
        with pool.start(bodies.starts, [[[1, 2, address], {}]]) as second:
            assert second.results() == ["met"]
        assert first.results() == ["met"]
        assert first.ranks[0].printed().count("refused a connection from 127.0.0.1") >= 3
        for stranger in strangers:
            stranger.close()
