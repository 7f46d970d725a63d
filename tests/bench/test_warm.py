"""Ranks that stay: rows of real processes one after the other, a failure between them, and a codec that loses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec

import pytest

from syncline_bench.cases import comparison_of
from syncline_bench.tuner.guard import judge
from syncline_bench.warm import WarmRanks

pytest.importorskip("torch")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("sklearn") is None, reason="the digits are a file of scikit-learn"),
]

PLANTED = '''
from dataclasses import dataclass
from syncline.codecs.cast import Bf16
import numpy as np
from syncline.registry import register


@register("codecs", "nothing")
@dataclass(frozen=True)
class Nothing(Bf16):
    """Sends zeros."""

    def encode(self, x, out, state, start=0):
        return super().encode(np.zeros_like(x), out, state, start)
'''


class Silent:
    def begin(self, strategy: str, processes: int, iterations: int) -> None: ...
    def advance(self, iteration: int, loss: float | None, images_per_s: float | None) -> None: ...
    def end(self, outcome: str) -> None: ...


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmRanks]:
    """Two ranks that have a package with a codec that loses everything."""
    folder = tmp_path_factory.mktemp("planted")
    (folder / "planted.py").write_text(PLANTED)
    info = folder / "planted-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[syncline.codecs]\nnothing = planted\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
        patch.syspath_prepend(str(folder))
        with WarmRanks(2, "digits", "torch", Silent()) as made:
            yield made


CASE = comparison_of("digits", 2, ["ring"], None, 40, None, 0, None, None).cases[1]


def test_rows_follow_each_other_in_the_same_processes_and_learn_alike(ranks: WarmRanks) -> None:
    ranks.start()
    pids = ranks.pids
    first, second = (ranks.train(replace(CASE, strategy=text), 0, 60.0).row for text in ("ring", "tree"))
    assert (first.error, second.error) == (None, None)
    assert ranks.pids == pids
    assert first.replicas_equal
    assert first.replica_sha256 == second.replica_sha256  # of two ranks' sums there is one order
    assert first.accuracy is None  # which nobody asked for


def test_a_strategy_that_fails_is_named_and_the_next_one_runs(ranks: WarmRanks) -> None:
    failed = ranks.train(replace(CASE, strategy="ring transport=mpi"), 0, 60.0).row
    assert failed.error is not None
    assert "mpi" in failed.error.lower()
    assert ranks.train(CASE, 0, 60.0).row.error is None


def test_the_guard_refuses_a_codec_that_is_planted_to_lose(ranks: WarmRanks) -> None:
    rows = [
        ranks.train(replace(CASE, strategy=text, iterations=60), 0, 60.0, scored=True).row
        for text in ("direct", "direct codec=nothing", "direct codec=bf16")
    ]
    assert [row.error for row in rows] == [None] * 3
    planted, harmless = judge(rows[0], rows[1], 0.02), judge(rows[0], rows[2], 0.02)
    assert not planted.accepted
    assert "refused: it loses" in planted.why
    assert harmless.accepted
