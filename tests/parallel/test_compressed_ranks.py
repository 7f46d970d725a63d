"""Real processes train with codecs: equal replicas, checkpoints that go on with the same bits, the bits on the wire."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from codec_bodies import chosen_codec, compressed_steps, stop_and_resume, stop_and_resume_served, wire_bits

from pool import Pool

KEEPING = [
    "direct codec=int8",
    "direct codec=onebit",
    "direct codec=topk(ratio=0.1)",
    "direct codec=threshold(ratio=0.1, momentum=0.9)",
    "ring codec=powersgd(rank=1)",
    "tree codec=gtopk(ratio=0.1)",
    "ring codec=randomk(ratio=0.1)",
    "ps(servers=2, on=workers, update=worker) codec=int4",
]
FORGETFUL = ["ring codec=fp16", "ring"]


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_resumed_run_goes_on_with_the_same_bits(pool: Pool, address: str, workers: int) -> None:
    strategies = KEEPING + FORGETFUL if workers == 2 else KEEPING[::3]
    case: list[Any] = [[f"{text} transport=shm" for text in strategies]]
    with pool.start(stop_and_resume, [[[index, workers, address], *case] for index in range(workers)]) as group:
        for found in group.results():
            for text, (same, warned, kept) in zip(strategies, found, strict=True):
                assert same, text
                assert warned == kept == (text in KEEPING), text


@pytest.mark.parametrize(
    ("place", "keeping"),
    [
        pytest.param("ps(servers=1)", ["threshold(ratio=0.1, momentum=0.9)"], marks=pytest.mark.slow),
        ("ps(servers=2)", ["int8", "fp16"]),
        pytest.param("ps(servers=2, on=workers)", ["topk(ratio=0.1)", "randomk(ratio=0.1)"], marks=pytest.mark.slow),
    ],
)
def test_a_run_on_servers_is_resumed_with_the_same_bits(
    pool: Pool, address: str, place: str, keeping: list[str]
) -> None:
    """What the owners know beyond the workers is in the checkpoint too; without it there is a warning."""
    every = [*keeping, "qsgd(levels=7)"] if place == "ps(servers=2)" else keeping
    case: list[Any] = [[f"{place} codec={text} transport=shm" for text in every]]
    processes = 2 if "workers" in place else 2 + int(place[11])
    with pool.start(
        stop_and_resume_served, [[[index, processes, address], *case] for index in range(processes)]
    ) as group:
        one, two, *servers = group.results()
    for found in (one, two):
        for text, row in zip(every, found, strict=True):
            assert row[:2] == [True, 0], text
            assert row[3] == 1, text
            assert row[4] == (text in keeping), text
    assert all(row == [] for found in servers for row in found)


@pytest.mark.every(2)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_replicas_learn_the_same_over_real_transports(pool: Pool, address: str, transport: str) -> None:
    texts = ["ring codec=int8", "ring codec=topk(ratio=0.1)", "ring codec=gtopk(ratio=0.1)", "ring codec=fp16"]
    case: list[Any] = [[f"{text} transport={transport}" for text in texts]]
    with pool.start(compressed_steps, [[[index, 3, address], *case] for index in range(3)]) as group:
        one, *others = group.results()
    for other in others:
        assert [row[:3] for row in other] == [row[:3] for row in one]
    assert [row[1].split()[0] for row in one] == ["direct", "direct", "tree", "ring"]
    assert ["owners" in one[0][2], "gathers" in one[1][2], "merged" in one[2][2], "summed" in one[3][2]] == [True] * 4


@pytest.mark.every(2)
@pytest.mark.parametrize(("servers", "update"), [(1, "worker"), (2, "server")])
def test_gradients_go_through_servers_as_codes(pool: Pool, address: str, servers: int, update: str) -> None:
    texts = ["int8", "topk(ratio=0.1)", "onebit", "fp16"]
    case: list[Any] = [[f"ps(servers={servers}, update={update}) codec={text} transport=tcp" for text in texts]]
    processes = 2 + servers
    with pool.start(compressed_steps, [[[index, processes, address], *case] for index in range(processes)]) as group:
        one, two, *rest = group.results()
    assert [row[0] for row in one] == [row[0] for row in two]
    assert all("servers" in row[2] for row in one)
    assert rest == [[None] * len(texts)] * servers


@pytest.mark.slow
def test_the_bits_on_the_wire_are_those_promised(pool: Pool, address: str) -> None:
    """Counted at the transport, headers included: 8, 4, 1 and 1.6 bits and under 1 % more."""
    promised = {"int8": 8, "int4": 4, "onebit": 1, "sign": 1, "ternary": 1.6, "fp8": 8, "fp16": 16, "natural": 8}
    case: list[Any] = [[[text, 1 << 22] for text in promised]]
    with pool.start(wire_bits, [[[index, 2, address], *case] for index in range(2)]) as group:
        for found in group.results():
            for text, bits in zip(promised, found, strict=True):
                assert promised[text] <= bits < 1.01 * promised[text], (text, bits)


@pytest.mark.slow
def test_auto_compresses_where_the_network_is_slow(pool: Pool, addresses: Callable[[], str]) -> None:
    """Told by all ranks, with the reason; a resumed run keeps what was chosen, on whatever network it finds itself."""
    environ = {"SYNCLINE_TUNING": "on"}
    fast = "ring codec=auto transport=shm"
    slow = "ring codec=auto transport=tcp(rate=2Mbit)"  # of two codecs one takes tens of ms more, whatever else runs
    for first, later, codec in ((slow, slow, "feedback(int4)"), (fast, fast, "")):
        case = [[[index, 2, place], first, later] for place in [addresses()] for index in range(2)]
        with pool.start(chosen_codec, case, environ) as group:
            one, two = group.results()
        assert one == two
        assert f"codec={codec}" in one[0] if codec else "codec" not in one[0], one[:2]
        times = r"codec=.*, measured for [0-9]+[KM]iB: none [0-9.]+ ms, bf16 [0-9.]+ ms"
        assert re.match(times if codec else "codec=none: shared memory", one[1])
        assert one[2:] == [one[0], True]
