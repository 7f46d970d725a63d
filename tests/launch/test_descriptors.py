"""Room for connections: the limit is raised to what a group needs, or refused before anything is connected."""

from __future__ import annotations

import resource

import pytest

from syncline.errors import UsageError
from syncline.launch.connecting import make_room
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
