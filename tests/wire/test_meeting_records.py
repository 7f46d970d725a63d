"""Records of processes: what describes one is read, everything else is refused; the group as one process sees it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import RollCallError
from syncline.wire.meeting import Member, Roll, check_member, read_member

ONE = Member(1, 4, "host", "machine", 77, "pids", "127.0.0.1", 5000, "syncline-abc", {"strategy": "ring"}, 2)


def member(index: int, machine: str) -> Member:
    return Member(index, 4, f"host of {machine}", machine, 1, machine, "127.0.0.1", 1, "", {})


def test_a_record_is_read_as_it_was_written() -> None:
    assert read_member(ONE.to_text()) == ONE
    assert read_member(ONE.to_text().encode()) == ONE


@pytest.mark.parametrize(
    "changes",
    [
        {"index": -1},
        {"index": True},
        {"index": 1.0},
        {"world": "4"},
        {"port": 65536},
        {"pid": 1 << 32},
        {"host": None},
        {"terms": {"strategy": 1}},
        {"terms": ["strategy"]},
        {"more": 1},
    ],
    ids=str,
)
def test_a_record_with_a_wrong_field_is_none(changes: dict[str, Any]) -> None:
    with pytest.raises(RollCallError, match="not one of this version"):
        read_member(json.dumps(asdict(ONE) | changes))


@pytest.mark.parametrize("name", asdict(ONE))
def test_a_record_without_a_field_is_none(name: str) -> None:
    found = asdict(ONE)
    del found[name]
    with pytest.raises(RollCallError):
        check_member(found)


@given(st.binary(max_size=200))
def test_noise_is_no_record(noise: bytes) -> None:
    with pytest.raises(RollCallError):
        read_member(noise)


def test_what_is_nested_too_deeply_is_no_record() -> None:
    with pytest.raises(RollCallError):
        read_member("[" * 16000)


def test_nodes_are_numbered_as_they_appear() -> None:
    roll = Roll(0, tuple(member(index, machine) for index, machine in enumerate("baab")), "a run", b"")
    assert roll.nodes == (0, 1, 1, 0)
    assert roll.hosts == 2
    assert roll.near == {3}
    assert replace(roll, index=1).near == {2}


@pytest.mark.parametrize(("cores", "crowded"), [((2, 1, 1, 2), False), ((1, 1, 1, 2), True), ((2, 1, 1, 1), True)])
def test_a_host_is_crowded_when_its_processes_outnumber_the_cores_of_one(cores: tuple[int, ...], crowded: bool) -> None:
    placed = zip("abca", cores, strict=True)
    members = tuple(replace(member(index, machine), cores=count) for index, (machine, count) in enumerate(placed))
    assert Roll(0, members, "a run", b"").crowded is crowded
