"""Real labs for the tests that need one: where they cannot be made, those tests are skipped and say why."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from syncline.errors import UsageError
from syncline.nouns import Rate
from syncline_bench.lab import Lab
from syncline_bench.lab.namespaces import check_able

RATE = Rate(200e6)


@pytest.fixture(scope="session")
def able() -> None:
    """Skips where this user or machine cannot make namespaces."""
    try:
        check_able()
    except UsageError as error:
        pytest.skip(str(error))
    probe = ["unshare", "--net", "--mount", "--uts", "--ipc", "true"]
    done = subprocess.run(probe, capture_output=True, text=True, timeout=30.0, check=False)
    if done.returncode:
        pytest.skip(f"this root may not make namespaces: {done.stderr.strip()}")


@pytest.fixture(scope="session")
def lab(able: None) -> Iterator[Lab]:  # noqa: ARG001
    """Two hosts with links of 200 Mbit/s, shared by the tests that change nothing in it."""
    with Lab(hosts=2, rate=RATE) as made:
        yield made
