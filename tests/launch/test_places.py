"""What scripts read of ranks and world sizes: they count workers, under every launcher."""

from __future__ import annotations

import os

import pytest

from syncline.launch.environment import NO_GROUP, Environment, Variables, worker_places

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
