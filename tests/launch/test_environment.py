"""What launchers tell a process, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from syncline.errors import NotBuiltError, UsageError
from syncline.launch.environment import Environment, recognise

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job7",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
LOCAL = {
    "RANK": "0",
    "WORLD_SIZE": "3",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "3",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "4000",
    "SYNCLINE_LAUNCHER": "77",
    "SYNCLINE_RUN_ID": "ab",
    "SYNCLINE_SECRET": "0123",
    "SYNCLINE_SERVERS": "1",
    "SYNCLINE_STORE_FD": "9",
    "SYNCLINE_STRATEGY": "ps(servers=1)",
}


def test_the_local_launchers_store_has_a_port_of_its_own() -> None:
    found = recognise(LOCAL | {"SYNCLINE_STORE_PORT": "5000"})
    assert (found.address, found.port) == ("127.0.0.1", 5000)


def test_torchrun() -> None:
    assert recognise(TORCHRUN) == Environment(
        "torchrun", 5, 8, 1, 4, "node0", 29500, "job7", restart=2, agent_store=True
    )
    assert not recognise(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"}).agent_store


def test_local_launcher() -> None:
    found = recognise(LOCAL)
    assert found == Environment(
        "syncline",
        0,
        3,
        0,
        3,
        "127.0.0.1",
        4000,
        "ab",
        store_fd=9,
        servers=1,
        strategy="ps(servers=1)",
        secret=b"0123",
    )
    assert "0123" not in repr(found)


def test_alone_without_a_launcher() -> None:
    found = recognise({"PATH": "/bin"})
    assert (found.launcher, found.rank, found.world, found.local_world) == ("none", 0, 1, 1)


def test_variables_set_by_hand() -> None:
    found = recognise({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"})
    assert (found.launcher, found.rank, found.world, found.address) == ("variables", 1, 2, "a")
    assert recognise({"RANK": "0", "WORLD_SIZE": "1"}).world == 1


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"RANK": "x"}, "RANK must be a whole number, got 'x'"),
        ({"RANK": "-1"}, "RANK must be a whole number"),
        ({"RANK": None}, "RANK is missing"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE is missing"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR is missing"),
        ({"MASTER_PORT": None}, "MASTER_PORT is missing"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000"),
        ({"RANK": "8"}, r"rank 8 does not exist in a world of 8.*RANK=8, WORLD_SIZE=8"),
        ({"WORLD_SIZE": "0"}, "at least 1.*WORLD_SIZE=0"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK=4, LOCAL_WORLD_SIZE=4"),
        ({"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9"),
        ({"TORCHELASTIC_RESTART_COUNT": "few"}, "TORCHELASTIC_RESTART_COUNT"),
        ({"SYNCLINE_SERVERS": "8"}, "no worker.*SYNCLINE_SERVERS=8"),
    ],
)
def test_a_wrong_variable_is_named(changes: dict[str, str | None], names: str) -> None:
    variables = {name: value for name, value in (TORCHRUN | changes).items() if value is not None}
    with pytest.raises(UsageError, match=names):
        recognise(variables)


@pytest.mark.parametrize("variables", [{"OMPI_COMM_WORLD_SIZE": "4"}, {"PMI_SIZE": "2"}, {"SLURM_STEP_NUM_TASKS": "3"}])
def test_launchers_that_are_not_read_yet_are_refused_by_name(variables: dict[str, str]) -> None:
    name, value = next(iter(variables.items()))
    with pytest.raises(NotBuiltError, match=f"{name}={value}.*torchrun"):
        recognise(variables)
    assert recognise({name: "1"}).world == 1
    assert recognise(variables | TORCHRUN).launcher == "torchrun"


def test_arguments_go_before_what_launchers_say() -> None:
    found = recognise(TORCHRUN, rank=1, world_size=2, address="node3:4000")
    assert (found.launcher, found.rank, found.world, found.address, found.port) == ("arguments", 1, 2, "node3", 4000)
    assert (found.local_rank, found.local_world) == (0, 1)
    here = recognise({}, rank=1, world_size=2, address="[::1]:4000")
    assert (here.address, here.local_rank, here.local_world) == ("::1", 1, 2)
    assert recognise({}, rank=0, world_size=1).world == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"rank": 1}, "belong together"),
        ({"rank": 0, "world_size": 2}, "belong together"),
        ({"address": "a:1"}, "belong together"),
        ({"rank": 2, "world_size": 2, "address": "a:1"}, "rank 2 does not exist in a world of 2"),
        ({"rank": 0, "world_size": 2, "address": "a"}, "host:port"),
        ({"rank": 0, "world_size": 2, "address": "a:70000"}, "host:port"),
        ({"rank": 0, "world_size": 2, "address": ":7000"}, "host:port"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        recognise({}, **arguments)


def test_where_a_rank_was_expected() -> None:
    assert recognise(TORCHRUN).where(6) == " (node 1, local rank 2)"
    assert recognise(LOCAL).where(2) == ""
