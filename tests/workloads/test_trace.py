"""Traces and their files: what is read back, and what is refused with the file and line that is wrong."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from syncline.errors import DataError, UsageError
from syncline.nouns import Spec
from syncline_bench.workloads import load
from syncline_bench.workloads._trace import COLUMNS, Trace, TracedLayer, read_trace

HEAD = ",".join(COLUMNS)

names = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=12)
times = st.floats(0, 1e3)
rows = st.lists(
    st.tuples(names, st.integers(0, 10**9), times, times), min_size=1, max_size=8, unique_by=lambda row: row[0]
).filter(lambda found: any(elements for _, elements, _, _ in found))


def written(folder: Path, text: str) -> Path:
    path = folder / "layers.csv"
    path.write_text(text, encoding="utf-8")
    return path


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(rows, st.permutations([*COLUMNS, "note"]))
def test_what_was_written_is_read(tmp_path: Path, rows: list[tuple[str, int, float, float]], order: list[str]) -> None:
    path = tmp_path / "any.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(order)
        for row in rows:
            values = {**dict(zip(COLUMNS, row, strict=True)), "note": "ignored"}
            writer.writerow([values[column] for column in order])
    trace = read_trace(path)
    assert [layer.name for layer in trace.layers] == [name for name, *_ in rows]
    assert trace.elements == sum(elements for _, elements, _, _ in rows)
    assert trace.nbytes == 4 * trace.elements
    assert trace.total_s == pytest.approx(math.fsum(forward + backward for *_, forward, backward in rows))
    assert trace.batch is None


def test_spaces_blank_lines_and_a_byte_order_mark_do_not_matter(tmp_path: Path) -> None:
    path = written(tmp_path, "\ufeff name , elements,forward_s ,backward_s\n\n conv , 10, 1e-3 ,.5\n\n")
    (layer,) = read_trace(path).layers
    assert layer == TracedLayer("conv", (Spec("weight", (10,)),), 0.001, 0.5)


def test_shapes_rows_and_the_device_are_read(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, f"{HEAD},device,shape,rows\na,6,0,0,,2x3,0.5\nb,4,0,0,cuda,,\n"))
    assert [(layer.tensors[0].shape, layer.rows) for layer in trace.layers] == [((2, 3), 0.5), ((4,), 1.0)]
    assert trace.device == "cuda"


def test_a_layer_without_elements_only_takes_time(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, f"{HEAD}\npool,0,0.1,0.2\nfc,4,0.1,0.1\n"))
    assert [layer.tensors for layer in trace.layers] == [(), (Spec("weight", (4,)),)]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("", 1, "no name and no elements"),
        ("name,elements,forward_s\na,1,1", 1, "this one has no backward_s"),
        ("a,1,0.1,0.1\n", 1, "no name"),
        (f"{HEAD},name\na,1,0.1,0.1,b\n", 1, "a column twice"),
        (f"{HEAD}\n", 1, "has no layers"),
        (f"{HEAD}\n\n\n", 3, "has no layers"),
        (f"{HEAD}\na,1,0.1,0.1\nb,1,-0.1,0.1\n", 3, "forward_s of layer 'b' must be seconds from 0 up, got -0.1"),
        (f"{HEAD}\na,1,0.1,nan\n", 2, "backward_s of layer 'a'"),
        (f"{HEAD}\na,1,inf,0.1\n", 2, "forward_s of layer 'a'"),
        (f"{HEAD}\na,1,0.1,fast\n", 2, "backward_s must be a number of seconds, got 'fast'"),
        (f"{HEAD}\na,1,0.1\n", 2, "there is no backward_s"),
        (f"{HEAD}\na,,0.1,0.1\n", 2, "there is no elements"),
        (f"{HEAD}\n,1,0.1,0.1\n", 2, "there is no name"),
        (f"{HEAD}\na,1,0.1,0.1,7\n", 2, "more values than columns"),
        (f"{HEAD},device\na,1,0.1,0.1,tpu\n", 2, "device must be cpu or cuda, got 'tpu'"),
        (f"{HEAD},device\na,1,0.1,0.1,cpu\nb,1,0.1,0.1,cuda\n", 3, "layers on cpu and on cuda: a trace is of one"),
        (f"{HEAD}\na,-1,0.1,0.1\n", 2, "elements must be a whole number"),
        (f"{HEAD}\na,1.5,0.1,0.1\n", 2, "elements must be a whole number"),
        (f"{HEAD}\na,1,0.1,0.1\n\na,1,0.1,0.1\n", 4, "already on line 2"),
        (f'{HEAD}\n"a,1,0.1,0.1\n', 2, "unexpected end of data"),
        (f"{HEAD},shape\na,6,0.1,0.1,2x4\n", 2, "sizes with the product 6, such as 768x3072, got '2x4'"),
        (f"{HEAD},shape\na,6,0.1,0.1,2xx3\n", 2, "got '2xx3'"),
        (f"{HEAD},rows\na,6,0.1,0.1,0\n", 2, "rows of layer 'a' must be a share above 0 and up to 1, got 0.0"),
        (f"{HEAD},rows\na,6,0.1,0.1,few\n", 2, "rows must be a share, got 'few'"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, text: str, line: int, words: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(DataError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}, line {line}: ")
    assert words in str(caught.value)


def test_what_is_no_trace_at_all_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read the trace .*No such file"):
        read_trace(tmp_path / "missing.csv")
    with pytest.raises(DataError, match="cannot read the trace"):
        read_trace(tmp_path)
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="not text in UTF-8"):
        read_trace(binary)
    with pytest.raises(DataError, match="nothing to exchange"):
        read_trace(written(tmp_path, f"{HEAD}\npool,0,0.1,0.1\n"))


def test_the_workload_takes_its_name_and_times_from_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, f"{HEAD}\nfc,4,0.25,0.5\n")
    workload = load(f"trace:{path}")
    assert workload.name == f"trace:{path}"
    assert workload.trace is not None
    assert workload.trace.total_s == 0.75
    assert (workload.total_batch(3), workload.total_batch(3, 16)) == (3, 48)
    with pytest.raises(UsageError, match=r"write 'trace:FILE.csv'"):
        load("trace")


def test_copies_to_the_device_are_a_column_and_the_default_of_h2d(tmp_path: Path) -> None:
    recorded = written(tmp_path, f"{HEAD},h2d_s\na,4,0.25,0.5,0.003\nb,4,0.1,0.1,0.000000000\nc,4,0.1,0.1,\n")
    workload = load(f"trace:{recorded}")
    assert workload.trace is not None
    assert workload.trace.h2d_s == workload.pipeline.h2d == 0.003
    assert workload.copied
    assert workload.name == f"trace:{recorded}"
    told = load(f"trace:{recorded}(h2d=0)")
    assert (told.pipeline.h2d, told.copied) == (0.0, False)
    assert not load(f"trace:{written(tmp_path, HEAD + chr(10) + 'a,4,0.25,0.5' + chr(10))}").copied
    for wrong, words in (("-1", "h2d_s of layer 'a' must be seconds from 0 up"), ("x", "h2d_s must be a number")):
        with pytest.raises(DataError, match=words):
            load(f"trace:{written(tmp_path, f'{HEAD},h2d_s{chr(10)}a,4,0.25,0.5,{wrong}{chr(10)}')}")


def test_traces_made_by_programs_are_checked_too() -> None:
    layer = TracedLayer("a", (Spec("weight", (1,)),), 0.0, 0.0)
    with pytest.raises(UsageError, match="no layers"):
        Trace("t", ())
    with pytest.raises(UsageError, match="2 layers named 'a'"):
        Trace("t", (layer, layer))
    with pytest.raises(UsageError, match="needs a name"):
        TracedLayer("", (), 0.0, 0.0)
