"""The warm pool of the session, and addresses to meet at."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Ranks on demand, as forks of one warm process, which has loaded all that they do."""
    folder = Path(__file__).parent
    found = Pool(folder, *(path.stem for path in folder.glob("*_bodies.py")), "gradient_users", "numpy.random")
    yield found
    found.close()


@pytest.fixture
def address() -> str:
    """Where a group may meet."""
    return free_address()


@pytest.fixture(scope="session")
def addresses() -> Callable[[], str]:
    """As many of them as are needed."""
    return free_address


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"
