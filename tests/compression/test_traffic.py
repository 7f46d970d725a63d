"""What reducers say that they move and compute, held to what they move and compute in the loop, for every codec."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from reducing import ELEMENTS, TEXTS, can_be_served, codec, gradients, moved_bytes
from telling import Served

from syncline.algorithms.ring import ring
from syncline.codecs import Merges
from syncline.compression.reducers import Flows, Operand, Participant, Summed, owners, ways
from syncline.compression.reducers.ways import parts_of
from syncline.nouns import Group, Slice, Spec
from syncline.testing.reducing import Ranks, as_predicted, run
from syncline.wire.scratch import Scratch

ONE_BY_ONE = [[Slice(0, 0, 3), Slice(1, 0, 2000), Slice(2, 0, 7)], [Slice(3, 0, 1), Slice(4, 0, 2112)]]
ONE_BY_ONE += [[Slice(5, 0, 5000)]]


@pytest.fixture
def cuts(cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets in several pieces, where they are ``cut``."""
    if cut:
        monkeypatch.setattr(owners, "PIECE_BYTES", 2000)
        monkeypatch.setattr(owners, "PIECE_ELEMENTS", 1500)


@pytest.mark.every(2)
@pytest.mark.usefixtures("cuts")
@pytest.mark.parametrize(
    ("text", "workers", "servers", "cut"),
    [
        (text, workers, servers, True)
        for text in TEXTS
        for workers, servers in [(1, 1), (3, 2), (5, 0)]
        if can_be_served(text) or not servers
    ],
)
def test_what_travels_is_known_without_data(text: str, workers: int, servers: int) -> None:
    group = Ranks(codec(text), workers, buckets=ONE_BY_ONE, servers=servers)
    at = tuple(range(workers, workers + servers)) or tuple(range(workers))
    for step in (0, 2):  # some codecs warm up
        for rank in group.ranks:
            rank.resume_at(step)
        for worker, (given,) in enumerate(gradients(workers, ELEMENTS, step)):
            for array, start in zip(group.arrays[worker], (0, 2010, 2010 + 2113), strict=True):
                array[:] = given[start : start + array.size]
        for number, bucket in enumerate(group.buckets):
            foreseen = ways.traffic(
                parts_of(group.codec, group.layers, bucket, step), workers, at, served=bool(servers)
            )
            as_predicted([rank.pieces(number) for rank in group.ranks], foreseen)
            for rank in group.ranks:
                rank.finish(number)


@pytest.mark.usefixtures("cuts")
@pytest.mark.parametrize(
    ("text", "workers", "servers", "number", "cut"),
    [
        (row, *other)
        for row, other in zip(
            [text for text in TEXTS if can_be_served(text) and "warmup" not in text],
            cycle([(1, 1, 1, False), (3, 2, 2, True), (3, 0, 3, True)]),
        )
    ],
)
def test_pushes_and_pulls_are_known_without_data(text: str, workers: int, servers: int, number: int) -> None:
    served = Served(text, workers, servers, number)
    first = workers if servers else 0
    at = tuple(range(first, first + number))
    parts = parts_of(codec(text), served.layers, served.buckets[0])
    for worker, (given,) in enumerate(gradients(workers, ELEMENTS, 0)):
        served.gradients[worker][:] = given
    as_predicted([one.pieces(0) for one in served.codecs], owners.push_traffic(parts, workers, at))
    for made in served.codecs:
        made.finish(0)
    for updates in served.updates:
        for one in updates.owned:
            one.weights[:] += np.random.default_rng(one.start).standard_normal(one.weights.size, np.float32)
    as_predicted([one.pieces(0) for one in served.updates], owners.pull_traffic(parts, workers, at))


@pytest.mark.parametrize("text", ["fp16", "powersgd(rank=2)", "int8", "adaptive(topk(ratio=0.1), small=64B)"])
def test_bytes_between_processes_count_sums_by_their_plan(text: str) -> None:
    group = Ranks(codec(text), 3)
    traffic = ways.traffic(parts_of(group.codec, group.layers, group.buckets[0]), 3, range(3))
    found = moved_bytes(traffic, 3, lambda _: ring(Group(3)))
    sums = sum(step.nbytes for one in traffic for step in one if isinstance(step, Summed))
    flows = sum(int(step.nbytes.sum()) for one in traffic for step in one if isinstance(step, Flows))
    assert found.sum() == pytest.approx(2 * 2 * sums + flows)
    assert (sums > 0) == (text != "int8")
    assert not found.diagonal().any()


@pytest.mark.parametrize("workers", [2, 3, 5, 8])
@pytest.mark.parametrize("text", ["fp16", "int8", "topk(ratio=0.1)", "gtopk(ratio=0.1)"])
def test_the_busiest_rank_computes_what_the_way_says(text: str, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inner, spec = codec(text, feedback=False), Spec("p", (128 * 120,))  # shares of equal sizes, whatever the blocks
    encoded, decoded = Counter[int](), Counter[int]()

    def count(name: str, counter: Counter[int], state_at: int, elements: Callable[[Any], int]) -> None:
        work = getattr(type(inner), name)

        def counting(self: Any, *args: Any, **options: Any) -> Any:
            counter[args[state_at].rank % 100] += elements(args)
            return work(self, *args, **options)

        monkeypatch.setattr(type(inner), name, counting)

    count("encode", encoded, 2, lambda args: args[0].size)
    count("decode", decoded, 2, lambda args: args[1].size)
    if isinstance(inner, Merges):
        count("merge", decoded, 3, lambda args: args[3].spec.elements)
    way, reducers = ways.way_of(inner), []
    for rank in range(workers):
        x = np.random.default_rng(rank).standard_normal(spec.elements).astype(np.float32)
        parts = [Operand("p", inner, x, inner.init(spec, rank), inner.init(spec, 100 + rank))]
        reducers.append(way.pieces(parts, Participant(rank, workers, tuple(range(workers)), Scratch())))
    for together in zip(*reducers, strict=True):
        run([start() for start in together])
    encodes, decodes, adds = way.computing(workers)
    assert max(encoded.values()) == pytest.approx(encodes * spec.elements, rel=0.05)
    assert max(decoded.values()) == pytest.approx(decodes * spec.elements, rel=0.05)
    assert (adds > 0) == (way.carrier is None)
