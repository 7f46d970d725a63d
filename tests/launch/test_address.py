"""Finding rank 0 where the launcher has not said where it is."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from syncline.errors import UsageError
from syncline.launch.address import find_address
from syncline.launch.environment import Environment, derived_port

ONE_HOST = Environment("mpirun", 1, 2, 1, 2, "", 0, "prterun-a-1@1")


@pytest.fixture
def no_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "mpi4py" else found(name))


def test_a_given_address_stays() -> None:
    given = Environment("srun", 1, 2, 0, 1, "node0", 4000)
    assert find_address(given, None, 1.0) == (given, None)
    alone = Environment("mpirun")
    assert find_address(alone, None, 1.0) == (alone, None)


@pytest.mark.usefixtures("no_mpi")
def test_one_host_without_mpi4py_meets_at_a_derived_port() -> None:
    found, _ = find_address(ONE_HOST, None, 1.0)
    assert (found.address, found.port) == ("127.0.0.1", derived_port("prterun-a-1@1"))


@pytest.mark.usefixtures("no_mpi")
@pytest.mark.parametrize("changes", [{"local_rank": 0, "local_world": 1}, {"run_id": ""}])
def test_no_way_to_meet_says_what_is_missing(changes: dict[str, Any]) -> None:
    from dataclasses import replace

    with pytest.raises(UsageError, match=r"process 1 of 2.*MASTER_ADDR.*MASTER_PORT.*mpi4py"):
        find_address(replace(ONE_HOST, **changes), None, 1.0)
