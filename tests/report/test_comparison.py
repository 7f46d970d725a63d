from __future__ import annotations

import dataclasses
import io
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from syncline.errors import DataError
from syncline.session.stats import Stats
from syncline_bench.report import comparison
from syncline_bench.report.columns import broken
from syncline_bench.report.comparison import Point, Result, Row

TOP_KEYS = {"machine", "cores", "versions", "commit", "workload", "rows"}
ROW_KEYS = {
    "strategy",
    "workers",
    "accuracy",
    "loss",
    "images_per_s",
    "scaling_efficiency",
    "iteration_s",
    "loading_s",
    "h2d_s",
    "forward_s",
    "backward_s",
    "update_s",
    "compute_s",
    "exposed_comm_s",
    "bytes_sent_per_step",
    "replicas_equal",
    "requested",
    "preset",
    "staleness",
    "version_lag",
    "wait_s_per_step",
    "waits",
    "slowest_rank",
    "time_to_accuracy_s",
    "steps",
}

numbers = st.none() | st.floats(allow_nan=False, allow_infinity=False)
points = st.builds(Point, st.integers(0, 10**6), st.floats(0, 1e6), loss=numbers, accuracy=numbers, test_loss=numbers)
rows = st.builds(
    Row,
    st.text(min_size=1),
    st.integers(1, 64),
    accuracy=numbers,
    iteration_s=numbers,
    replicas_equal=st.none() | st.booleans(),
    curve=st.lists(points, max_size=3).map(tuple),
    traffic=st.lists(st.lists(st.floats(0, 1e9), max_size=3).map(tuple), max_size=3).map(tuple),
    error=st.none() | st.text(),
    requested=st.none() | st.text(),
    preset=st.none() | st.text(),
    steps=st.lists(st.integers(0, 10**6), max_size=3).map(tuple),
    staleness=st.dictionaries(st.integers(0, 10**6), st.integers(1, 10**6), max_size=3),
    version_lag=st.dictionaries(st.integers(0, 10**6), st.integers(1, 10**6), max_size=3),
    waits=st.lists(st.lists(st.floats(0, 1e9), max_size=3).map(tuple), max_size=3).map(tuple),
    wait_s_per_step=numbers,
    compute_by_rank_s=st.lists(st.floats(0, 1e3), max_size=3).map(tuple),
    slowest_rank=st.none() | st.integers(0, 63),
    time_to_accuracy_s=numbers,
)
results = st.builds(
    Result,
    st.text(),
    st.integers(1, 512),
    st.dictionaries(st.text(), st.text(), max_size=3),
    st.none() | st.text(),
    workload=st.text(),
    rows=st.lists(rows, max_size=3).map(tuple),
)


@given(results)
def test_reading_what_was_written_gives_the_same_result(result: Result) -> None:
    assert Result.from_json(result.to_json()) == result


def test_the_file_has_every_documented_key(mixed: Result) -> None:
    data = json.loads(mixed.to_json())
    assert set(data) >= TOP_KEYS
    for row in data["rows"]:
        assert set(row) >= ROW_KEYS


def test_counts_are_by_number_as_text() -> None:
    data = json.loads(
        Result("m", 1, {}, None, workload="digits", rows=(Row("asp", 2, staleness={0: 3, 12: 1}),)).to_json()
    )
    assert data["rows"][0]["staleness"] == {"0": 3, "12": 1}


def test_a_file_of_a_version_that_told_the_preset_only_is_read() -> None:
    data = json.loads(
        Result("m", 1, {}, None, workload="digits", rows=(Row("ring", 2, requested="caffe-mpi"),)).to_json()
    )
    for name in ("preset", "staleness", "version_lag", "waits", "steps", "compute_by_rank_s"):
        del data["rows"][0][name]
    (row,) = Result.from_json(json.dumps(data)).rows
    assert (row.name, row.staleness, row.waits) == ("caffe-mpi: ring", {}, ())


def test_numbers_that_are_not_finite_become_null() -> None:
    row = Row("ring", 2, loss=float("nan"), images_per_s=float("inf"), curve=(Point(1, 0.1, loss=float("nan")),))
    data = json.loads(Result("m", 1, {}, None, workload="digits", rows=(row,)).to_json())
    assert data["rows"][0]["loss"] is None
    assert data["rows"][0]["images_per_s"] is None
    assert data["rows"][0]["curve"][0]["loss"] is None


def test_keys_of_a_later_version_are_ignored(mixed: Result) -> None:
    data = json.loads(mixed.to_json())
    data["later"] = data["rows"][0]["later"] = 1
    assert Result.from_json(json.dumps(data)) == mixed


@pytest.mark.parametrize("text", ["", "[]", "3", "{}", '{"rows": 1}', '{"rows": [{}]}', '{"rows": []}'])
def test_what_is_not_a_result_file_is_refused(text: str) -> None:
    with pytest.raises(DataError, match="not a result file"):
        Result.from_json(text)


def test_a_row_counts_as_finished_only_without_error_and_with_equal_replicas() -> None:
    assert Row("ring", 2, replicas_equal=True).finished
    assert not Row("ring", 2, replicas_equal=False).finished
    assert not Row("ring", 2).finished
    assert not Row("ring", 2, replicas_equal=True, error="lost").finished


def test_saving_replaces_the_file_in_one_piece(tmp_path: Path, mixed: Result) -> None:
    path = tmp_path / "result.json"
    path.write_text("old")
    mixed.save(path)
    assert Result.from_json(path.read_text()) == mixed
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]


def test_a_reason_is_what_stands_behind_what_was_chosen() -> None:
    texts = {None: False, "ring schedule=fixed(bucket=8MiB) transport=tcp": False, "gloo over eth0": False,
             "ring schedule=priority transport=tcp (schedule=priority: predicted 655 ms)": True}  # fmt: skip
    for chosen, wanted in texts.items():
        assert Row("ring", 2, chosen=chosen).reasoned is wanted
    said = Stats("ring schedule=fixed(bucket=8MiB)", reason="schedule=fixed(bucket=8MiB): predicted 413 ms").chosen
    assert Row("ring", 2, chosen=said).reasoned


def shown(result: Result, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(comparison.render(result))
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_every_row_and_every_error_is_shown_within_80_columns(mixed: Result) -> None:
    text = shown(mixed)
    assert max(map(len, text.splitlines())) <= 80
    for row in mixed.rows:
        assert row.strategy.split()[0] in text
    assert "PeerLost: rank 3 <b>died</b>" in text
    assert "second line" in text


@pytest.mark.parametrize("width", [40, 60, 200])
def test_other_widths_lose_no_row(mixed: Result, width: int) -> None:
    text = shown(mixed, width)
    assert "failed" in text
    assert max(map(len, text.splitlines())) <= width


LONG = "ps(servers=2, on=workers) codec=feedback(topk(ratio=0.01), warmup=500) transport=tcp(rate=1Gbit, delay=5ms)"


@pytest.mark.parametrize("width", [60, 80])
def test_no_word_is_broken_and_no_number_cut_at_usual_widths(mixed: Result, width: int) -> None:
    names = ("single", "halving_doubling transport=tcp", LONG)
    rows = tuple(dataclasses.replace(mixed.rows[1], strategy=name, images_per_s=123_456.0) for name in names)
    text = shown(dataclasses.replace(mixed, rows=rows), width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    for piece in re.findall(r"[^\s(,]+[(,]?", " ".join(names)):
        assert piece in text
    assert "123,000" in text
    assert ("No room for" in text) == (width < 80)


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), 1e308, -1e308, 5e-324])
def test_numbers_that_have_gone_wrong_fit_their_columns(mixed: Result, bad: float) -> None:
    row = mixed.rows[1]
    numbers = [item.name for item in dataclasses.fields(row) if isinstance(getattr(row, item.name), float)]
    rows = (mixed.rows[0], dataclasses.replace(row, **dict.fromkeys(numbers, bad)))
    assert max(map(len, shown(dataclasses.replace(mixed, rows=rows), 100).splitlines())) <= 100


@given(st.text("ab=_(,) ", max_size=60), st.integers(1, 20))
def test_a_broken_text_fits_and_loses_nothing(text: str, width: int) -> None:
    lines = broken(text, width).split("\n")
    assert max(map(len, lines)) <= width
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    if len(text) <= width and not re.search(r"^ |  | $", text):
        assert lines == [text]


def test_strategy_texts_are_not_read_as_markup(mixed: Result) -> None:
    row = mixed.rows[1]
    odd = Result("m", 8, {}, None, workload="digits", rows=(type(row)("[red]x[/red]", 1, error="[bold]why[/bold]"),))
    assert "[red]x[/red]" in shown(odd, 120)
    assert "[bold]why[/bold]" in shown(odd, 120)


def test_sharing_cores_is_said(mixed: Result) -> None:
    assert any("5 processes shared 2 cores" in line for line in comparison.remarks(mixed))
    roomy = Result("m", 64, {}, None, workload="digits", rows=mixed.rows)
    assert not any("cores" in line for line in comparison.remarks(roomy))


def replayed(mixed: Result, **changes: object) -> Result:
    single, ring, *_ = mixed.rows
    rows = (
        dataclasses.replace(single, accuracy=None, bound_s=0.01, of_bound=1.0),
        dataclasses.replace(ring, accuracy=None, bound_s=0.01, of_bound=0.8765),
        dataclasses.replace(ring, strategy="ddp", exposed_comm_s=None, bytes_sent_per_step=None, bound_s=0.01),
    )
    return dataclasses.replace(mixed, rows=rows, **changes)  # type: ignore[arg-type]


def test_replayed_rows_show_their_bound_instead_of_an_accuracy(mixed: Result) -> None:
    text = shown(replayed(mixed))
    assert "bnd %" in text
    assert "acc %" not in text
    assert "87.65" in text
    assert max(map(len, text.splitlines())) <= 80
    assert "bnd" not in shown(mixed)


def test_remarks_say_what_the_bound_rests_on_and_what_peers_do_not_count(mixed: Result) -> None:
    plain = " ".join(comparison.remarks(replayed(mixed)))
    assert "the trace's compute" in plain
    assert "ddp: waits and bytes are not counted there" in plain
    lab = " ".join(comparison.remarks(replayed(mixed, lab="1Gbit", goodput_bytes_per_s=119.6e6)))
    assert "links of 1Gbit, of which one stream gets 957 Mbit/s" in lab
    assert "trace's compute" not in lab


def test_an_empty_result_can_be_shown() -> None:
    assert "strategy" in shown(Result("m", 1, {}, None, workload="digits"))


def test_columns_of_coordination_are_there_where_a_row_has_something_to_say(mixed: Result) -> None:
    for title in ("stale", "wait ms", "to acc s"):
        assert title not in shown(mixed, 200)
    ring, server = mixed.rows[1:3]
    stale = dataclasses.replace(
        server,
        staleness={0: 3, 2: 1},
        wait_s_per_step=0.0123,
        time_to_accuracy_s=4.5,
        compute_by_rank_s=(0.01, 0.03),
        slowest_rank=1,
    )
    text = shown(dataclasses.replace(mixed, rows=(ring, stale), target=0.97), 200)
    line = next(line for line in text.splitlines() if line.strip().startswith("ps("))
    assert "0.50 (2)" in line
    assert "12.3" in line
    assert "4.50" in line
    words = " ".join(text.split())
    assert (
        "To acc is the training time after which the model was first seen to be 97 % accurate; ring never was." in words
    )
    assert "Rank 1 computes 3.0 times as long as the median worker. " in f"{words} "


def test_the_slowest_worker_is_named_once(mixed: Result) -> None:
    ring, server = (
        dataclasses.replace(row, compute_by_rank_s=(1.0, 1.0, 2.0), slowest_rank=2) for row in mixed.rows[1:3]
    )
    slower = dataclasses.replace(server, compute_by_rank_s=(1.0, 1.0, 3.0))
    alike = dataclasses.replace(server, compute_by_rank_s=(1.0, 1.0, 1.0), slowest_rank=None)
    both = " ".join(shown(dataclasses.replace(mixed, rows=(ring, slower))).split())
    assert "Rank 2 computes 2.0 to 3.0 times as long as the median worker." in both
    one = " ".join(shown(dataclasses.replace(mixed, rows=(ring, alike))).split())
    assert "Rank 2 computes 2.0 times as long as the median worker under ring." in one


@pytest.mark.parametrize("width", [40, 80])
def test_they_go_first_where_there_is_no_room_but_for_the_time_that_was_asked_for(mixed: Result, width: int) -> None:
    row = dataclasses.replace(mixed.rows[1], staleness={0: 1, 3: 1}, wait_s_per_step=0.5, time_to_accuracy_s=4.5)
    text = shown(dataclasses.replace(mixed, rows=(row,), target=0.975), width)
    assert max(map(len, text.splitlines())) <= width
    assert "to acc s" in text
    assert "97.50 %" in " ".join(text.split())
