"""Runs of real processes with a planted cause each: ``explain`` names it first, and in a sound run none."""

from __future__ import annotations

from pathlib import Path

import explained_bodies as bodies
import pytest

from pool import Pool
from syncline_bench.explain.command import explain

PLANTS = [
    ["healthy", "ring transport=tcp"],
    ["slow_rank", "ring transport=tcp"],
    ["slow_link", "ring transport=tcp"],
    ["late_loader", "ring transport=tcp"],
    ["slow_loading", "ring transport=shm"],
    ["small_buckets", "ring transport=tcp schedule=fixed(bucket=16KiB)"],
    ["shared_server", "ps(servers=1) transport=tcp(rate=200Mbit)"],
]
AT_FAULT = {"slow_rank": (1, None), "slow_link": (None, (1, 2)), "late_loader": (2, None), "shared_server": (3, None)}
NEVER = {"slow_rank", "late_loader", "slow_loading", "slow_link", "shared_server", "small_buckets"}


@pytest.mark.deep
def test_planted_causes_are_named_first(pool: Pool, address: str, tmp_path: Path) -> None:
    path, world = tmp_path / "t.json.gz", 4
    cases = [[[index, world, address], PLANTS, 8] for index in range(world)]
    with pool.start(bodies.are_slow, cases, {"SYNCLINE_TRACE": str(path)}) as group:
        group.results()
    found, wanted = {}, {}
    for number, (cause, strategy) in enumerate(PLANTS, 1):
        told = explain(path if number == 1 else tmp_path / f"t-{number}.json.gz")
        assert told.name.startswith(strategy.partition(" ")[0]), told
        if cause == "healthy":
            assert not NEVER & {one.cause for one in told.causes}, told
            continue
        main = told.causes[0] if told.causes else None
        found[cause] = (main.cause, main.rank, main.link) if main is not None else None
        if main is not None and main.link is not None and main.rank in main.link:
            found[cause] = (main.cause, None, main.link)  # beside other work the port of one end may look slow too
        wanted[cause] = (cause, *AT_FAULT.get(cause, (None, None)))
    assert found == wanted
