"""The matrix of faults: its cells and covering; some cells between real processes. ``make faults`` runs the others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cell_runs import run_cell, warm_pool
from fault_cells import FAULTS, POINTS, STRATEGIES, TRANSPORTS, Cell, cells, covering, pairs

from pool import Pool
from syncline.errors import UsageError
from syncline_bench.lab import Lab


def test_every_pair_of_values_that_can_meet_meets_in_the_covering() -> None:
    everything = cells()
    chosen = covering(everything)
    assert set(chosen) <= set(everything)
    assert {pair for cell in chosen for pair in pairs(cell)} == {pair for cell in everything for pair in pairs(cell)}
    assert len(chosen) < len(everything) / 5
    for number, values in enumerate((FAULTS, STRATEGIES, POINTS, TRANSPORTS)):
        assert {cell[number] for cell in chosen} == set(values)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Pool]:
    with warm_pool() as pool:
        yield pool


@pytest.mark.slow
@pytest.mark.parametrize(
    "cell",
    [
        Cell("garbage", "ps(servers=1)", "step", "tcp"),
        Cell("altered", "ps(servers=1)", "step", "tcp"),
        Cell("reset", "ring", "checkpoint", "shm"),
        Cell("no descriptors", "direct codec=int8", "prepare", "shm"),
        Cell("no file space", "ring sync=local(steps=2)", "checkpoint", "tcp"),
        Cell("stranger", "ps(servers=1) sync=asp", "start", "tcp"),
        Cell("exit", "backend", "step", "shm"),
        Cell("partition", "ring", "step", "hosts"),
    ],
    ids=str,
)
def test_a_cell_ends_as_promised(ranks: Pool, cell: Cell) -> None:
    if cell.transport == "hosts":
        try:
            with Lab(1):
                pass
        except UsageError as error:
            pytest.skip(str(error))
    assert run_cell(ranks, cell) == ""
