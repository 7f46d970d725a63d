from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import DataError
from syncline.session.session import Stats
from syncline_bench.report.rows import Point, Result, Row

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
