"""Predicted rows: intervals, bottlenecks, knees and warnings, on layers and links that one computes by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from syncline.errors import UsageError
from syncline_bench.predict.asked import asked_of, settled
from syncline_bench.predict.networks import inline, parse_holdout
from syncline_bench.predict.rows import predict, question, worker_counts
from syncline_bench.predict.vary import Varied
from syncline_bench.report.predictions import Predicted, Prediction, findings

BETA = 0.25e-6
COMPUTING_S = 4.0
"""Two layers of 12 MB, each 1 s forward and 1 s backward."""


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "layers.csv"
    path.write_text("name,elements,forward_s,backward_s\none,3000000,1,1\ntwo,3000000,1,1\n")
    return f"trace:{path}"


def network(tmp_path: Path, name: str = "test", **given: object) -> str:
    """A file with a port that moves 4 MB in a second, and what is given for other constants."""
    constants = {"between.alpha": {"value": 0.0}, "between.beta": {"value": BETA}, **given}
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps({"name": name, "constants": constants}))
    return str(path)


def rows_of(
    trace: str, networks: str | list[str], strategies: list[str], workers: tuple[int, ...] = (2,)
) -> Prediction:
    return predict(question(trace, [networks] if isinstance(networks, str) else networks, workers, strategies))


def row_of(trace: str, network: str, strategy: str, workers: int = 2) -> Predicted:
    return rows_of(trace, network, [strategy], (workers,)).rows[0]


def test_a_row_says_what_one_computes_by_hand(trace: str, tmp_path: Path) -> None:
    row = row_of(trace, network(tmp_path), "ring schedule=fifo")
    assert row.iteration_s == pytest.approx(10.0)
    assert (row.comm_s, row.exposed_comm_s) == (pytest.approx(6.0), pytest.approx(6.0))
    assert row.scaling_efficiency == pytest.approx(COMPUTING_S / 10)
    assert row.images_per_s == pytest.approx(2 / 10)
    assert row.bytes_sent_per_step == pytest.approx(24e6)
    assert (row.low_s, row.high_s) == (row.iteration_s, row.iteration_s)


def test_an_interval_is_the_root_of_the_squares_of_what_each_constant_does(trace: str, tmp_path: Path) -> None:
    beta = {"value": BETA, "low": BETA, "high": 1.5 * BETA}
    where = network(tmp_path, **{"between.beta": beta, "gamma": {"value": 0.5e-6, "low": 0.25e-6, "high": 0.75e-6}})
    row = row_of(trace, where, "ring schedule=fifo")
    nominal_s = 10 + 12 * 0.5
    assert row.iteration_s == pytest.approx(nominal_s)
    assert row.high_s == pytest.approx(nominal_s + (3.0**2 + 3.0**2) ** 0.5)
    assert row.low_s == pytest.approx(nominal_s - 3.0)


def test_effects_that_hide_the_same_wait_do_not_make_an_iteration_shorter_than_its_layers(
    trace: str, tmp_path: Path
) -> None:
    beta = {"value": BETA, "low": 0.5 * BETA, "high": BETA}
    where = network(tmp_path, **{"between.beta": beta, "between.alpha": {"value": 0.25, "low": 0.0, "high": 0.25}})
    row = row_of(trace, where, "ring schedule=delayed(bucket=1B)")
    assert row.iteration_s == pytest.approx(6.0 + 4 * 0.25, rel=0.05)
    assert row.low_s == pytest.approx(COMPUTING_S)


@pytest.mark.parametrize(
    ("given", "strategy", "bottleneck", "says"),
    [
        ({}, "ring schedule=fifo", "bandwidth", "10 times the bandwidth saves 5.40 s of 10.0 s"),
        ({"between.alpha": {"value": 10.0}}, "ring schedule=fifo", "latency", "a tenth of the latency"),
        ({"gamma": {"value": 1e-5}}, "ring schedule=fifo", "adding", "10 times faster adding"),
        ({"update": {"value": 1e-5}}, "ring schedule=fifo", "update", "a 10 times faster update"),
        ({"between.beta": {"value": 0.0}}, "ring schedule=fifo", "compute", "hides all communication"),
        ({}, "ps(servers=1) schedule=fifo", "servers' ports", "bandwidth of servers"),
    ],
)
def test_what_would_save_most_is_the_bottleneck(
    trace: str, tmp_path: Path, given: dict[str, object], strategy: str, bottleneck: str, says: str
) -> None:
    row = row_of(trace, network(tmp_path, **given), strategy)
    assert row.bottleneck == bottleneck
    assert pytest.approx(max(row.would_save_s.values())) == row.would_save_s[bottleneck]
    assert re.search(says, row.remedy), row.remedy


def test_resources_that_save_as_much_are_named_together(trace: str, tmp_path: Path) -> None:
    row = row_of(trace, network(tmp_path, gamma={"value": 2 * BETA}), "ring schedule=fifo")
    assert row.bottleneck == "bandwidth and adding"


def test_the_knee_is_where_a_doubling_brings_too_little_and_the_fastest_wins(trace: str, tmp_path: Path) -> None:
    found = rows_of(trace, network(tmp_path), ["ring schedule=fifo", "ps(servers=1) schedule=fifo"], (2, 4, 8, 16))
    knees = {knee["strategy"]: knee["workers"] for knee in found.knees}
    assert knees == {"ring schedule=fifo": None, "ps(servers=1) schedule=fifo": 2}
    assert {(won["workers"], won["strategy"]) for won in found.winners if won["workers"] > 2} == {
        (count, "ring schedule=fifo") for count in (4, 8, 16)
    }


def test_compression_pays_below_the_speed_at_which_both_are_as_fast(trace: str, tmp_path: Path) -> None:
    free = rows_of(trace, network(tmp_path), ["direct codec=fp16 feedback=off schedule=fifo"])
    assert free.break_even[0]["where"] == "everywhere"
    costs = {f"codecs.fp16.{what}": {"value": 1e-9} for what in ("encode", "decode")}
    costly = rows_of(trace, network(tmp_path, **costs), ["direct codec=fp16 feedback=off schedule=fifo"])
    # 12 MB less travel, and to encode and decode 24 MB takes 48 ms.
    assert costly.break_even[0]["where"] == "below"
    assert costly.break_even[0]["below_bit_per_s"] == pytest.approx(8 * 12e6 / 0.048, rel=0.01)


def test_what_was_varied_in_vain_is_said(trace: str, tmp_path: Path) -> None:
    one, other = network(tmp_path, "one"), network(tmp_path, "other", message={"value": 0.0})
    alike = rows_of(trace, [one, other], ["ring schedule=fifo", "caffe-mpi", "ring schedule=wait_free"])
    assert any("one and other have equal predictions" in line for line in alike.warnings)
    assert any("caffe-mpi and ring schedule=wait_free have equal predictions" in line for line in alike.warnings)
    given = rows_of(trace, "alpha=1ns,beta=250ns,topology=fat_tree(hosts_per_leaf=4)", ["ring schedule=fifo"])
    assert any("no row depends on between.alpha" in line for line in given.warnings)
    assert any("no row depends on the topology" in line for line in given.warnings)
    assert any("no measurements of this network" in line for line in given.warnings)


def test_ranks_of_a_host_without_links_inside_are_warned_of(trace: str) -> None:
    found = predict(question(trace, ["beta=250ns,alpha=1s"], (4,), ["ring schedule=fifo"], per_node=2))
    assert any("no constants of links inside hosts" in line for line in found.warnings)


def test_an_epoch_has_its_price(trace: str, tmp_path: Path) -> None:
    found = predict(question(trace, [network(tmp_path)], (2,), ["ring schedule=fifo"], price=3.0, epoch_images=720))
    assert found.rows[0].epoch_s == pytest.approx(720 / 0.2)
    assert found.rows[0].price == pytest.approx(3.0 * 2)


def test_a_prediction_is_the_same_every_time_and_its_file_is_read_back(trace: str, tmp_path: Path) -> None:
    where = network(tmp_path, gamma={"value": 0.5e-6, "low": 0.25e-6, "high": 0.75e-6})
    one, other = (rows_of(trace, where, ["ring", "direct codec=int8"]) for _ in range(2))
    assert one == other
    assert Prediction.from_json(one.to_json()).rows == one.rows


def test_measurements_that_nothing_was_fitted_on_widen_the_interval(trace: str) -> None:
    rows = [{"predicted_s": predicted_s, "measured_s": 1.0} for predicted_s in (1.1, 0.95, 1.0)]
    found = parse_holdout(json.dumps({"rows": rows, "source": "here"}), "lab")
    assert found is not None
    assert (found.count, found.mean, found.worst) == (3, pytest.approx(0.05), pytest.approx(0.1))
    asked = question(trace, ["beta=250ns,alpha=1s"], (2,), ["ring schedule=fifo"])
    it = settled(asked.asked[0], asked.clusters[0], 2, None, asked.model)
    low_s, high_s = Varied(it.setting, asked.model, it.iteration).interval(0.1)
    assert (low_s, high_s) == (
        pytest.approx(0.9 * it.iteration.iteration_s),
        pytest.approx(1.1 * it.iteration.iteration_s),
    )


def test_peers_and_presets_say_what_stands_for_them() -> None:
    assert str(asked_of("ddp(bucket=1MiB)").strategy) == "ring schedule=fixed(bucket=1MiB)"
    assert "assumed" in asked_of("ddp(hook=fp16)").note
    assert str(asked_of("ddp(hook=powersgd)").strategy) == "ring codec=feedback(powersgd(rank=1)) schedule=fixed"
    assert str(asked_of("ddp(codec=int8)").strategy) == "ring codec=feedback(int8) schedule=fixed"
    assert asked_of("caffe-mpi").note == "the original sums with NCCL"
    assert inline("beta=1ns,alpha=1us").name == "beta=1ns,alpha=1us"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"workload": "gogglenet"}, "did you mean 'googlenet'"),
        ({"workload": "digits"}, "syncline record"),
        ({"networks": ["10gb"]}, "did you mean '10gbe'"),
        ({"networks": ["alpha=-1us,beta=1ns"]}, "negative"),
        ({"networks": ["10gbe", "10gbe"]}, "different networks"),
        ({"workers": (0,)}, "1 or more, got 0"),
        ({"workers": (2, 2)}, "different numbers"),
        ({"strategies": ["rign"]}, "did you mean 'ring'"),
        ({"strategies": ["native"]}, "cannot be predicted"),
        ({"strategies": ["ddp(bukcet=1MB)"]}, "did you mean 'bucket'"),
        ({"strategies": ["ring", "ring"]}, "listed twice"),
        ({"strategies": []}, "no strategy"),
        ({"strategies": ["ring codec=auto"]}, "name one: .*codec=bf16, codec=feedback"),
        ({"strategies": ["ddp(hook=auto)"]}, "name one: codec="),
        ({"strategies": ["ring transport=tcp(rate=10Mbit)"]}, "rate of transport=tcp .*rate=10Mbit"),
        ({"strategies": ["ring transport=tcp(delay=5ms)"]}, "delay of transport=tcp"),
        ({"strategies": ["ring sync=post_local(after=100, steps=8)"]}, r"each phase: sync=bsp .*sync=local\(steps=8\)"),
        ({"workers": ()}, "--workers is missing: predict --workload"),
        ({"price": -1.0}, "0 or more, got -1"),
        ({"price": 1.0}, "give --epoch-images"),
    ],
)
def test_bad_input_is_refused_with_the_nearest(trace: str, change: dict[str, object], says: str) -> None:
    asked = {"workload": trace, "networks": ["10gbe"], "workers": (2,), "strategies": ["ring"], **change}
    with pytest.raises(UsageError, match=says):
        question(**asked)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("strategy", "network", "says"),
    [
        (
            "ring",
            "alpha=1us,beta=1ns,topology=ring",
            "plan of ring has about 19,999,800,000 messages.*on ring.*no closed",
        ),
        (
            "direct codec=int8",
            "10gbe",
            r"payloads of codec=feedback\(int8\) have no closed form: predict fewer workers",
        ),
        ("double_tree", "10gbe", "the plan of double_tree.* has 100,000 workers"),
    ],
)
def test_a_plan_that_no_machine_holds_is_refused_before_it_is_made(
    trace: str, strategy: str, network: str, says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        predict(question(trace, [network], (100_000,), [strategy]))


def test_what_no_plan_fits_is_predicted_by_closed_forms_and_says_so(trace: str) -> None:
    texts = [
        "auto",
        "ring schedule=wait_free",
        "ring schedule=split(slice=4MiB)",
        "ring codec=fp16",
        "ps(servers=3000)",
    ]
    found = predict(question(trace, ["10gbe"], (4096,), texts))
    assert {row.model for row in found.rows} == {"formula"}
    assert all("a closed form" in line for text in texts for line in findings(found) if line.startswith(f"{text}: "))
    (few,) = predict(question(trace, ["10gbe"], (64,), ["ring schedule=wait_free"])).rows
    (many,) = (row for row in found.rows if row.requested == "ring schedule=wait_free")
    assert few.model == "plan"
    assert many.iteration_s > few.iteration_s
    assert many.bytes_sent_per_step == pytest.approx((few.bytes_sent_per_step or 0.0) * (4095 / 4096) / (63 / 64))


def test_a_network_that_is_too_small_is_no_schedule_that_cannot_be_laid_out(
    trace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SYNCLINE_TUNING", "on")
    with pytest.raises(UsageError, match="has 4 hosts, but 8 are needed"):
        predict(question(trace, ["alpha=1us,beta=1ns,topology=torus(dims=2x2)"], (8,), ["ring"]))


def test_measurements_of_a_ready_made_network_say_nothing_of_a_file_of_its_name(trace: str, tmp_path: Path) -> None:
    found = rows_of(trace, network(tmp_path, "lab"), ["ring schedule=fifo"])
    assert found.holdout == ()
    assert any("no measurements of this network" in line for line in found.warnings)


def test_what_intervals_have_of_measurements_is_said(trace: str) -> None:
    found = rows_of(trace, "lab", ["ring schedule=fifo"])
    (holdout,) = found.holdout
    (said,) = (line for line in found.warnings if "held-out measurements" in line)
    assert f"include {100 * holdout['usual']:.1f} %, the error that 90 % of them do not exceed" in said
    assert f"fitted on {holdout['fitted']}" in said


def test_copying_matters_where_owners_copy_for_each_worker(trace: str, tmp_path: Path) -> None:
    where = network(tmp_path, copy={"value": 0.5e-6, "low": 0.25e-6, "high": 0.75e-6})
    alone = row_of(trace, where, "ps(servers=1) sync=asp schedule=fifo")
    assert alone.low_s < alone.iteration_s < alone.high_s
    assert alone.would_save_s["copying at owners"] > 0
    together = row_of(trace, where, "ring schedule=fifo")
    assert together.low_s == together.high_s
    assert "copying at owners" not in together.would_save_s


def test_a_strategy_that_cannot_run_so_is_named(trace: str) -> None:
    with pytest.raises(UsageError, match="on 2 workers: "):
        predict(question(trace, ["10gbe"], (2,), ["ps(servers=1) sync=bsp(backup=4)"]))


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["2,4", "8"], [2, 4, 8]),
        (["2,4,8,...,64"], [2, 4, 8, 16, 32, 64]),
        (["4,8,...,16,3"], [4, 8, 16, 3]),
        (["3,5,...,9"], [3, 5, 7, 9]),
    ],
)
def test_dots_go_on_as_the_numbers_before_them(texts: list[str], expected: list[int]) -> None:
    assert worker_counts(texts) == expected


def test_dots_that_stand_for_too_many_are_refused() -> None:
    with pytest.raises(UsageError, match="more than 10,000 numbers"):
        worker_counts(["1,2,3,...,1000000000"])


@pytest.mark.parametrize("text", ["2,...,8", "2,4,...", "2,4,...,7", "4,2,...,8", "many"])
def test_dots_that_lead_nowhere_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--workers"):
        worker_counts([text])
