"""The file that measurements make, and what is refused before there are any."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from syncline.errors import SynclineError, UsageError
from syncline.nouns import Rate
from syncline.session.session import Session
from syncline_bench.calibration import links, overlap, stepping
from syncline_bench.calibration.command import Request, request_of
from syncline_bench.calibration.computing import Computed, measure, ways_of
from syncline_bench.calibration.fits import Estimate, Samples
from syncline_bench.calibration.links import SIZES, Timed, cells_of
from syncline_bench.calibration.network import Hosts, calibration_of
from syncline_bench.predict.networks import load_network, parse_network, to_json
from threads import run_group

ORIGIN: dict[str, Any] = {
    "machine": "a processor",
    "cores": 2,
    "versions": {"python": "3.12", "syncline": "0.1"},
    "started": "2026-01-02T03:04:05+00:00",
}
WHY = "torch is not installed on rank 1"
COMPUTED = Computed({"gamma": Estimate(1e-10, 9e-11, 1.1e-10, 15)}, {})


def timed(alpha_s: float = 30e-6, later_s: float = 0.0, beta_s: float = 1e-9) -> list[Timed]:
    """A link on which messages of 128 KiB and more take ``later_s`` longer; one sample of each cell is far out."""
    found = []
    for nbytes in SIZES:
        for cell in cells_of(nbytes, 32 << 20):
            extra_s = later_s * (nbytes >= 1 << 17)
            seconds = 20e-6 + cell.flights * 80e-6 + cell.messages * (alpha_s + extra_s + nbytes * beta_s)
            found.append(Timed(cell, Samples((*[seconds] * 8, 5 * seconds)), Samples((cell.moved * 1e-5 + 1e-5,) * 8)))
    return found


def place(*nodes: int, **more: Any) -> Hosts:
    return Hosts(nodes, **{"cores": 2, "one_machine": True, "transport": "tcp", **more})


def test_what_is_written_is_read_back_with_sources_and_intervals() -> None:
    found = calibration_of("mine", place(0, 1), timed(), (), WHY, COMPUTED, ORIGIN, "syncline calibrate")
    cluster = parse_network(to_json(found.cluster), "mine.json")
    assert (cluster.name, cluster.cores, cluster.one_machine, cluster.per_host) == ("mine", 2, True, 1)
    assert "a processor, 2 cores; python 3.12" in cluster.source
    assert cluster.source.startswith("syncline calibrate")
    assert cluster.date == ORIGIN["started"]
    assert cluster.inside is None
    alpha = cluster.constants["between.alpha"]
    assert alpha.value == pytest.approx(30e-6, rel=0.05)
    assert all(constant.measured for constant in cluster.constants.values())
    assert {row.name for row in found.rows} == set(cluster.constants)


def test_what_computing_loses_is_kept_with_its_range_and_source() -> None:
    lost = Estimate(0.6, 0.4, 1.1, 28)
    found = calibration_of("mine", place(0, 1), timed(), (), lost, COMPUTED, ORIGIN, "syncline calibrate")
    cluster = parse_network(to_json(found.cluster), "mine.json")
    assert cluster.slowdown("cpu") == 0.6
    assert cluster.slowdown("cuda") == 0.0
    kept = cluster.constants["slowdown.cpu"]
    assert (kept.range, kept.measured) == ((0.4, 1.1), True)
    assert "backward passes" in kept.source


def test_what_computing_loses_is_the_median_of_layers_and_sizes_and_nothing_where_rounds_disagree() -> None:
    rows = np.array([[0.5, 0.6, 9.0], [1.0, 1.1, 1.0], [-0.4, -0.2, -0.3], [0.8, 0.7, 0.9]])
    found = overlap._estimate(rows)
    assert found is not None
    assert (found.value, found.low, found.high) == (pytest.approx(0.7), 0.0, 1.0)
    assert "other work on the machine" in str(overlap._estimate(np.array([[-9.0, 0.5, 9.0], [4.0, -3.0, 1.0]])))
    assert "an allreduce of 64.0 KiB takes longer than 0.2 s" in str(overlap._estimate(np.array([])))


def test_a_constant_of_steps_that_is_absent_has_its_own_reason() -> None:
    found = calibration_of("mine", place(0, 1), timed(), (), WHY, COMPUTED, ORIGIN, "", tensor="it needs wait_free")
    assert not {"tensor", "slowdown.cpu"} & set(found.cluster.constants)
    (slowdown,) = (line for line in found.remarks if line.startswith("slowdown.cpu was not measured"))
    (tensor,) = (line for line in found.remarks if line.startswith("tensor was not measured"))
    assert WHY in slowdown
    assert "it needs wait_free" in tensor


def test_the_reasons_name_the_ranks_without_torch_and_the_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(session: Session) -> tuple[Estimate | str, ...]:
        first = stepping.measure(session, 0.1, lambda *_: None)
        session.barrier()
        monkeypatch.setattr(links, "find_spec", lambda _: None)
        session.barrier()
        return (
            first,
            stepping.measure(session, 0.1, lambda *_: None),
            overlap.measure(session, (), 0.1, lambda *_: None),
        )

    for found in run_group("ring schedule=fifo", 2, body):
        assert "fifo" in str(found[0])
        assert "needs schedule=wait_free" in str(found[0])
        assert found[1:] == ("torch is not installed on rank 0, 1",) * 2


def test_the_time_of_a_gradient_does_not_grow_with_the_work_in_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that waits drives the engine; other constants contain that time."""
    pytest.importorskip("torch")
    extra_s, tensors, steps = 0.005, 8, 2
    monkeypatch.setattr(stepping, "_TENSORS", tensors)
    monkeypatch.setattr(stepping, "_STEPS", steps)

    def body(session: Session) -> tuple[Estimate | str, float]:
        engine, drive, thread, spent_s = session.engine, session.engine.drive, threading.get_ident(), [0.0]

        def slow(*given: Any) -> None:
            drive(*given)
            if threading.get_ident() == thread:
                end_s = time.thread_time() + extra_s
                while time.thread_time() < end_s:
                    pass
                spent_s[0] += extra_s

        engine.drive = slow  # type: ignore[method-assign, assignment]
        return stepping.measure(session, 0.1, lambda *_: None), spent_s[0]

    for found, spent_s in run_group("ring schedule=wait_free", 2, body):
        assert isinstance(found, Estimate)
        assert found.value < spent_s / (tensors * steps * 5) / 5  # five rounds


def test_what_a_gradient_costs_the_training_thread_is_kept_with_its_source() -> None:
    tensor = Estimate(60e-6, 50e-6, 80e-6, 13)
    cluster = calibration_of("mine", place(0, 1), timed(), (), WHY, COMPUTED, ORIGIN, "", tensor=tensor).cluster
    assert cluster.tensor_s == 60e-6
    assert cluster.constants["tensor"].range == (50e-6, 80e-6)
    assert "real steps" in cluster.constants["tensor"].source


def test_pieces_and_links_inside_hosts_have_names_of_their_own() -> None:
    inside = timed(alpha_s=5e-6)
    found = calibration_of("mine", place(0, 0, 1, 1), timed(later_s=2e-3), inside, WHY, COMPUTED, ORIGIN, "").cluster
    assert found.constants["between.from_131072.alpha"].value == pytest.approx(2.03e-3, rel=0.05)
    assert found.constants["inside.alpha"].value == pytest.approx(5e-6, rel=0.1)
    assert found.per_host == 2


def test_a_library_inside_a_host_has_constants_of_its_own() -> None:
    """Of all ranks of the host with the most; a range of sizes that takes longer has a line of its own."""
    sizes = {nbytes: cells_of(nbytes, 32 << 20, native=True)[0] for nbytes in SIZES}
    seconds = {nbytes: 1e-4 + (2e-3 if nbytes >= 1 << 17 else 0.0) + nbytes * 3e-9 for nbytes in SIZES}
    native = [Timed(cell, Samples((seconds[n],) * 8), Samples((0.0,) * 8)) for n, cell in sizes.items()]
    where = place(0, 1, 1, 1, transport="torch")
    assert where.native == [1, 2, 3]
    assert place(0, 1).native == []
    cluster = calibration_of("mine", where, timed(), (), WHY, COMPUTED, ORIGIN, "", native).cluster
    again = parse_network(to_json(cluster), "mine.json").native
    assert again is not None
    for nbytes, wanted in seconds.items():
        assert again.busy_s(nbytes) == pytest.approx(wanted, rel=0.05)
    assert "among 3 ranks of a host, by the library of transport=torch" in cluster.constants["native.alpha"].source


def test_times_that_do_not_grow_with_the_size_make_no_network() -> None:
    """It would be one of unlimited bandwidth."""
    with pytest.raises(SynclineError, match=r"between: .* show no bandwidth: measure longer, with --seconds"):
        calibration_of("mine", place(0, 1), timed(beta_s=0.0), (), WHY, COMPUTED, ORIGIN, "")


def test_outliers_are_told_with_the_farthest() -> None:
    remarks = calibration_of("mine", place(0, 1), timed(), (), WHY, COMPUTED, ORIGIN, "").remarks
    (told,) = (line for line in remarks if "outliers" in line)
    cells = len(timed())
    assert told.startswith(f"{cells} of {9 * cells}")
    assert "5.0 times the median" in told


def test_one_rank_has_no_links_and_the_file_says_what_stands_for_them() -> None:
    found = calibration_of("mine", place(0), (), (), WHY, COMPUTED, ORIGIN, "")
    assert any("Links were not measured" in line for line in found.remarks)
    cluster = parse_network(to_json(found.cluster), "mine.json")
    alpha = cluster.constants["between.alpha"]
    assert (alpha.value, alpha.measured) == (load_network("loopback").constants["between.alpha"].value, False)
    assert "assumed" in alpha.source
    assert cluster.constants["gamma"].measured


@pytest.mark.parametrize(
    ("nodes", "cores", "one_machine", "between", "inside"),
    [
        ((0,), 8, True, [], []),
        ((0, 0), 8, True, [0, 1], []),
        ((0, 0, 0), 8, True, [0, 1], []),
        ((0, 0, 0, 0), 2, True, [0, 1], []),  # as many as have a core each
        ((0, 1, 2, 3), 2, True, [0, 1], []),
        ((0, 1, 2, 3), 2, False, [0, 1, 2, 3], []),
        ((0, 0, 1, 1, 1, 2), 4, False, [0, 2], [2, 3]),
        ((0, 1, 0, 1), 4, False, [0, 1], [0, 2]),
    ],
)
def test_who_measures_a_link(
    nodes: tuple[int, ...], cores: int, one_machine: bool, between: list[int], inside: list[int]
) -> None:
    found = place(*nodes, cores=cores, one_machine=one_machine)
    assert (found.between, found.inside) == (between, inside)


def test_the_place_in_words() -> None:
    assert place(0).text == "1 rank of one host"
    assert place(0, 0).text == "2 ranks of one host over tcp"
    lab = place(0, 0, 1, 1, lab_rate=Rate(1e9)).text
    assert lab == "2 hosts of a lab with links of 1Gbit with 2 ranks each over tcp"


def test_codecs_are_measured_under_the_names_that_strategies_print() -> None:
    found = measure(ways_of(["int8", "feedback(onebit)"]), lambda *_: None).per_byte
    codecs = {name for name in found if name.startswith("codecs.")}
    names = ("int8", "feedback(int8)", "feedback(onebit)")
    assert codecs == {f"codecs.{name}.{what}" for name in names for what in ("encode", "decode")}
    assert {"gamma", "copy", "update"} <= set(found)
    assert all(0 < estimate.low <= estimate.value <= estimate.high for estimate in found.values())


def test_an_update_without_torch_is_an_assumption(monkeypatch: pytest.MonkeyPatch) -> None:
    from syncline_bench.calibration import computing

    monkeypatch.setattr(computing, "find_spec", lambda _: None)
    found = measure((), lambda *_: None)
    assert found.per_byte["update"].value == pytest.approx(1.5 * found.per_byte["copy"].value)
    assert "torch is not installed" in found.assumed["update"]
    cluster = calibration_of("mine", place(0, 1), timed(), (), WHY, found, ORIGIN, "").cluster
    assert not cluster.constants["update"].measured


def test_all_codecs_are_measured_unless_some_are_named() -> None:
    every = {text for text, _ in ways_of(())}
    assert {"int8", "onebit", "adaptive", "topk(ratio=0.01)"} <= every
    assert ways_of(["none"]) == ()


def test_a_request_travels_to_the_ranks_as_it_is(tmp_path: Path) -> None:
    asked = request_of(
        nodes=(2, 2), lab_rate=Rate(1e9), codecs=["int8"], transport="tcp", output=tmp_path / "mine.json"
    )
    assert Request.from_json(asked.to_json()) == asked
    assert asked.asked == "syncline calibrate --lab 1Gbit --nodes 2x2 --transport tcp --codecs int8"
    assert (asked.ranks, asked.per_host) == (4, 2)


def test_nodes_are_alike() -> None:
    with pytest.raises(UsageError, match="same number of ranks"):
        request_of(nodes=(2, 1), lab_rate=Rate(1e9))
