"""What launchers tell a process, and what scripts read of ranks and world sizes."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import UsageError
from syncline.launch.environment import (
    NO_GROUP,
    Environment,
    Variables,
    derived_port,
    expand_counts,
    expand_hosts,
    recognise,
    worker_places,
)

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job7",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
LOCAL = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "4000",
    "SYNCLINE_PROCESS": "2",
    "SYNCLINE_PROCESSES": "3",
    "SYNCLINE_MEETING_PORT": "5000",
    "SYNCLINE_LAUNCHER": "77",
    "SYNCLINE_RUN_ID": "ab",
    "SYNCLINE_SECRET": "0123",
    "SYNCLINE_SERVERS": "1",
    "SYNCLINE_MEETING_FD": "9",
    "SYNCLINE_STRATEGY": "ps(servers=1)",
}


def test_torchrun() -> None:
    assert recognise(TORCHRUN) == Environment("torchrun", 5, 8, 1, 4, "node0", 29500, "job7", agent_store=True)
    assert not recognise(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"}).agent_store


def test_local_launcher() -> None:
    """RANK and WORLD_SIZE are the script's, MASTER_PORT too: the processes have numbers and a port of their own."""
    found = recognise(LOCAL)
    assert found == Environment(
        "syncline",
        2,
        3,
        1,
        2,
        "127.0.0.1",
        5000,
        "ab",
        meeting_fd=9,
        servers=1,
        strategy="ps(servers=1)",
        secret=b"0123",
    )
    assert "0123" not in repr(found)
    assert found.where(2) == ""  # the local numbers are the workers'


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
        ({"SYNCLINE_SERVERS": "8"}, "no worker.*SYNCLINE_SERVERS=8"),
    ],
)
def test_a_wrong_variable_is_named(changes: dict[str, str | None], names: str) -> None:
    variables = {name: value for name, value in (TORCHRUN | changes).items() if value is not None}
    with pytest.raises(UsageError, match=names):
        recognise(variables)


OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "6",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-node0-77@1",
    "PMIX_RANK": "5",
}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "PMI_FD": "9", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "5",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[03-04,10]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9",
}
MASTER = {"MASTER_ADDR": "login", "MASTER_PORT": "4000"}


def test_mpirun_of_open_mpi() -> None:
    assert recognise(OPENMPI) == Environment("mpirun", 5, 6, 1, 2, "", 0, "prterun-node0-77@1")
    told = recognise(OPENMPI | MASTER | {"SYNCLINE_STRATEGY": "native", "SYNCLINE_SECRET": "s"})
    assert (told.address, told.port, told.strategy, told.secret) == ("login", 4000, "native", b"s")


def test_mpirun_of_mpich() -> None:
    assert recognise(HYDRA) == Environment("mpirun", 2, 4, 0, 2, "", 0)
    assert recognise({"PMI_RANK": "0", "PMI_SIZE": "1"}).world == 1


def test_srun() -> None:
    found = recognise(SLURM)
    assert found == Environment("srun", 3, 5, 1, 2, "gpu03", derived_port("4711.2"), "4711.2")
    assert 20000 <= found.port < 32000
    assert recognise(SLURM | {"SLURM_PROCID": "4", "SLURM_NODEID": "2", "SLURM_LOCALID": "0"}).local_world == 1
    assert recognise(SLURM | {"SLURM_STEP_NODELIST": "gpu03"}).address == "127.0.0.1"


def test_all_ranks_of_a_step_derive_the_same_place_and_other_steps_another() -> None:
    places = {recognise(SLURM | {"SLURM_PROCID": str(rank)}).port for rank in range(5)}
    assert len(places) == 1
    assert recognise(SLURM | {"SLURM_STEP_ID": "3"}).port not in places


def test_a_given_address_wins_under_srun() -> None:
    found = recognise(SLURM | MASTER)
    assert (found.address, found.port) == ("login", 4000)
    assert recognise(SLURM | {"MASTER_ADDR": "login"}).port == derived_port("4711.2")


def test_a_batch_script_is_no_step() -> None:
    batch = {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "1", "SLURM_NODELIST": "a[1-2]"}
    assert recognise(batch) == Environment("none")


def test_the_inner_launcher_counts() -> None:
    assert recognise(SLURM | HYDRA).launcher == "mpirun"
    assert recognise(SLURM | OPENMPI).launcher == "mpirun"
    assert recognise(SLURM | {"PMI_RANK": "1", "PMI_SIZE": "5"}).launcher == "srun"  # srun's own PMI
    assert recognise(SLURM | OPENMPI | TORCHRUN).launcher == "torchrun"


@pytest.mark.parametrize(
    ("variables", "names"),
    [
        (
            OPENMPI | {"OMPI_COMM_WORLD_RANK": "6"},
            "rank 6 does not exist.*OMPI_COMM_WORLD_RANK=6, OMPI_COMM_WORLD_SIZE=6",
        ),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK is missing"),
        ({"PMI_SIZE": "2"}, "PMI_RANK is missing"),
        (OPENMPI | {"MASTER_ADDR": "a"}, "MASTER_PORT is missing"),
        (OPENMPI | {"MASTER_PORT": "4000"}, "MASTER_ADDR is missing"),
        ({"SLURM_STEP_NUM_TASKS": "3"}, "SLURM_PROCID is missing"),
        (SLURM | {"SLURM_STEP_NODELIST": ""}, "5 tasks.*SLURM_STEP_NODELIST is missing.*MASTER_ADDR"),
        (SLURM | {"SLURM_STEP_NODELIST": "gpu[3-"}, "is not a list of hosts"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "two"}, "is not a list of counts"),
        (SLURM | {"SLURM_NODEID": "7"}, "SLURM_NODEID=7.*3 nodes"),
        (SLURM | {"SLURM_LOCALID": "2"}, "SLURM_LOCALID=2, SLURM_STEP_TASKS_PER_NODE=2"),
        (SLURM | {"SYNCLINE_SERVERS": "5"}, "no worker.*SYNCLINE_SERVERS=5"),
    ],
)
def test_what_is_missing_or_wrong_under_mpirun_and_srun_is_named(variables: dict[str, str], names: str) -> None:
    with pytest.raises(UsageError, match=names):
        recognise(variables)


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


NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def places(hosts: str, servers: int) -> list[tuple[int, ...]]:
    return [tuple(int(found[name]) for name in NAMES) for found in worker_places(hosts, servers)]


@pytest.mark.parametrize(
    ("hosts", "servers", "wanted"),
    [
        ("a", 0, [(0, 1, 0, 1)]),
        ("aabb", 0, [(0, 4, 0, 2), (1, 4, 1, 2), (2, 4, 0, 2), (3, 4, 1, 2)]),
        ("aaa", 1, [(0, 2, 0, 2), (1, 2, 1, 2), (1, 2, 1, 2)]),
        ("aabb", 1, [(0, 3, 0, 2), (1, 3, 1, 2), (2, 3, 0, 1), (2, 3, 0, 1)]),
        ("aab", 1, [(0, 2, 0, 2), (1, 2, 1, 2), (1, 2, 0, 1)]),  # a server alone on its host
        ("aaaa", 3, [(0, 1, 0, 1)] * 4),
    ],
)
def test_places_count_workers(hosts: str, servers: int, wanted: list[tuple[int, ...]]) -> None:
    assert places(hosts, servers) == wanted


@pytest.mark.parametrize("processes", range(1, 9))
def test_workers_have_a_place_each_and_servers_one_that_there_is(processes: int) -> None:
    for servers in range(processes):
        found = places(("ab" * processes)[:processes], servers)
        workers = processes - servers
        assert [place[0] for place in found[:workers]] == list(range(workers))
        for rank, world, local, local_world in found:
            assert rank < world == workers
            assert local < local_world <= max(1, workers)


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> Environment:
    """Process 2 of 3 on one machine, as torchrun counts; the last is a server."""
    for name in list(os.environ):
        if name.startswith("SYNCLINE_"):
            monkeypatch.delenv(name)
    numbers = dict(zip(NAMES, ("2", "3", "2", "3"), strict=True))
    for name, value in {**numbers, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "5", "TORCHELASTIC_RUN_ID": "x"}.items():
        monkeypatch.setenv(name, value)
    return Environment("torchrun", 2, 3, 2, 3, "127.0.0.1", 5, "x")


def test_what_counts_all_counts_workers_from_init_on(torchrun: Environment) -> None:
    variables = Variables()
    assert variables.recognise() == torchrun
    for _ in range(2):  # a second init finds what the launcher has said, and the script what the first has
        variables.count_workers(torchrun, 1)
        assert [os.environ[name] for name in NAMES] == ["1", "2", "1", "2"]
        assert os.environ["MASTER_PORT"] == NO_GROUP
        assert variables.recognise() == torchrun


def test_what_somebody_else_sets_later_counts(torchrun: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = Variables()
    variables.count_workers(torchrun, 1)
    monkeypatch.setenv("MASTER_PORT", "6")
    assert variables.recognise().port == 6


def test_without_servers_nothing_changes(torchrun: Environment) -> None:
    Variables().count_workers(torchrun, 0)
    assert [os.environ[name] for name in NAMES] == ["2", "3", "2", "3"]


@pytest.mark.usefixtures("torchrun")
def test_what_is_not_there_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name)
    Variables().count_workers(Environment("variables", 2, 3, 0, 1, "127.0.0.1", 5), 1)
    assert [os.environ.get(name) for name in NAMES] == ["1", "2", None, None]


def test_torch_says_why_a_server_is_in_no_group(torchrun: Environment) -> None:
    """It would wait for ever for a process that does not come."""
    import torch.distributed as dist

    Variables().count_workers(torchrun, 1)
    with pytest.raises(ValueError, match="a server takes no part in torch"):
        dist.init_process_group("gloo")


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node7", ["node7"]),
        ("a,b-1,c.d", ["a", "b-1", "c.d"]),
        ("n[1-3,7]", ["n1", "n2", "n3", "n7"]),
        ("n[008-011]", ["n008", "n009", "n010", "n011"]),
        ("login,gpu[1,3]-ib,x", ["login", "gpu1-ib", "gpu3-ib", "x"]),
        ("r[1-2]n[08-09]", ["r1n08", "r1n09", "r2n08", "r2n09"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
    ],
)
def test_hosts(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@given(st.lists(st.integers(0, 9999), min_size=1, unique=True), st.integers(1, 6))
def test_numbers_keep_their_width(numbers: list[int], width: int) -> None:
    written = [f"{number:0{width}}" for number in numbers]
    assert expand_hosts(f"node[{','.join(written)}]") == [f"node{number}" for number in written]


@pytest.mark.parametrize("text", ["", "a,,b", "n[", "n[1-", "n[3-1]", "n[a-c]", "n]1", "n[]", "n[1]]"])
def test_no_list_of_hosts(text: str) -> None:
    with pytest.raises(UsageError, match="is not a list of hosts"):
        expand_hosts(text)


def test_counts() -> None:
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    assert expand_counts("4") == [4]
    for text in ("", "2(x)", "x3", "2,,1"):
        with pytest.raises(UsageError, match="is not a list of counts"):
            expand_counts(text)
