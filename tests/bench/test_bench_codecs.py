"""``syncline bench codecs``: its rows, file, table, peers and errors, at small sizes."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from syncline.errors import DataError, UsageError
from syncline.tuning.codec_times import Trial, every_codec, variants
from syncline_bench.cli import cli
from syncline_bench.codecs import codec_bench
from syncline_bench.report.bench import CodecResult, CodecRow, render_codecs

N = 40_000
FIELDS = (
    "codec", "feedback", "encode_s", "decode_s", "bytes", "bits_per_element", "encode_gb_per_s", "decode_gb_per_s",
    "np_add_gb_per_s", "torch_s", "pays_below_bit_per_s",
)  # fmt: skip


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> tuple[CodecResult, str]:
    """All codecs, measured once: the result file and what was shown."""
    path = tmp_path_factory.mktemp("codecs") / "rows.json"
    out = io.StringIO()
    codec_bench.run(N, repetitions=2, json_path=path, console=Console(file=out, width=100))
    return CodecResult.from_json(path.read_text()), out.getvalue()


def test_every_codec_has_a_row_for_every_way_of_using_it(printed: tuple[CodecResult, str]) -> None:
    result, text = printed
    ways = [way for codec in every_codec() for way in variants(codec, N)]
    assert [(row.codec, row.feedback) for row in result.rows] == ways
    assert len(set(ways)) == len(ways)
    assert all(codec in text for codec in every_codec() if len(codec) <= 25)
    assert "repetition 2 of 2" in text


def test_figures_agree_with_each_other(printed: tuple[CodecResult, str]) -> None:
    result, _ = printed
    for row in result.rows:
        assert row.bits_per_element == pytest.approx(8 * row.bytes / row.elements)
        assert row.encode_gb_per_s == pytest.approx(4 * row.elements / row.encode_s / 1e9)
        assert row.decode_gb_per_s == pytest.approx(4 * row.elements / row.decode_s / 1e9)
        assert row.elements == N
        assert row.np_add_gb_per_s == result.rows[0].np_add_gb_per_s
        assert row.torch_s is None or row.torch_s > 0
        assert row.pays_below_bit_per_s is None or row.pays_below_bit_per_s > 0


def test_the_file_says_where_it_is_from_and_has_the_fields(printed: tuple[CodecResult, str]) -> None:
    result, _ = printed
    data = json.loads(result.to_json())
    assert set(FIELDS) <= set(data["rows"][0])
    assert {"machine", "cores", "versions", "commit", "started", "elements", "workers"} <= set(data)
    assert data["elements"] == N
    for text in ("", "[]", "{}", '{"rows": [{"codec": "int8"}]}'):
        with pytest.raises(DataError, match="not a result file"):
            CodecResult.from_json(text)


def test_int8_stands_beside_its_torch_composition(printed: tuple[CodecResult, str]) -> None:
    pytest.importorskip("torch")
    result, _ = printed
    assert all(row.torch_s is not None for row in result.rows if row.codec in ("int8", "int4"))


@pytest.mark.parametrize("width", [60, 80, 100])
def test_the_table_fits_and_keeps_the_verdict(printed: tuple[CodecResult, str], width: int) -> None:
    rows = tuple(
        replace(row, pays_below_bit_per_s=rate)
        for row, rate in zip(printed[0].rows, (3.2e9, None, 1e12, 45e6), strict=False)
    )
    rows += (replace(rows[0], codec="powersgd(rank=4, of=something, very=long)"),)
    out = io.StringIO()
    result = replace(printed[0], rows=rows)
    Console(file=out, width=width).print(render_codecs(result))
    assert max(map(len, out.getvalue().splitlines())) <= width
    words = " ".join(out.getvalue().split())
    for verdict in ("pays below 3.2 Gbit/s", "never pays", "pays on any link", "pays below 45 Mbit/s"):
        assert verdict in words
    head = next(line for line in out.getvalue().splitlines() if line.strip().startswith("codec "))
    assert ("x torch" in head) == (width == 100)
    assert "bits" in head
    out = io.StringIO()
    Console(file=out, width=width).print(render_codecs(replace(result, rows=())))
    assert "no rows" in out.getvalue()


def test_the_command_measures_what_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    arguments = ["--elements", "1000", "--repetitions", "1", "--workers", "2", "--json", str(path)]
    done = CliRunner().invoke(cli, ["bench", "codecs", *arguments, "--codecs", "feedback(int8)", "int4(block=64),none"])
    assert done.exit_code == 0, done.output
    result = CodecResult.from_json(path.read_text())
    ways = [(row.codec, row.feedback) for row in result.rows]
    assert ways == [("int8", True), ("int4(block=64)", False), ("int4(block=64)", True), ("none", False)]
    assert result.workers == 2
    assert result.rows[-1].pays_below_bit_per_s is None
    assert "never pays" in done.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--codecs", "int9"], "did you mean 'int8'"),
        (["--codecs", "int8(block=3)"], "multiple of 4"),
        (["--elements", "0"], "x>=1"),
        (["--repetitions", "0"], "x>=1"),
        (["--workers", "1"], "x>=2"),
        (["--elements", "99999999999999"], "fewer --elements"),
        (["--json", "/proc/nowhere/rows.json"], "choose another path"),
    ],
)
def test_mistakes_are_named_before_anything_is_measured(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec_bench, "measure", lambda *_: pytest.fail("was measured"))
    done = CliRunner().invoke(cli, ["bench", "codecs", *arguments])
    assert done.exit_code == 2
    assert says in done.output
    assert "Traceback" not in done.output


def test_an_interrupt_ends_with_its_status_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> CodecResult:
        raise KeyboardInterrupt

    monkeypatch.setattr(codec_bench, "measure", interrupt)
    path = tmp_path / "rows.json"
    done = CliRunner().invoke(cli, ["bench", "codecs", "--elements", "1000", "--json", str(path)])
    assert done.exit_code == 130
    assert "interrupted" in done.output
    assert list(tmp_path.iterdir()) == []


def test_without_torch_the_codecs_are_measured_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_bench, "find_spec", lambda _: None)
    result = codec_bench.measure(codec_bench.request_of(["int8"], 1000, 1))
    rows: tuple[CodecRow, ...] = result.rows
    assert [row.torch_s for row in rows] == [None, None]


@pytest.mark.slow
def test_codecs_on_a_device_have_the_same_rows() -> None:
    """The CPU stands in for it, and Triton's interpreter for its kernels."""
    pytest.importorskip("triton")
    torch = pytest.importorskip("torch")
    on_device = pytest.importorskip("syncline_bench.codecs.on_device")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    here, there = Trial("int8", True, 2000), on_device.DeviceTrial("int8", True, 2000, device)
    x = np.linspace(-1, 1, 2000, dtype=np.float32)
    for trial in (here, there):
        encode_s, decode_s = trial(x)
        assert encode_s > 0 < decode_s
    mine, theirs = (trial.result((1.0, 2.0), 3.0) for trial in (here, there))
    assert mine == theirs
    assert on_device.DeviceAddition(2000, device)(x)[0] > 0
    with pytest.raises(UsageError, match="works on the processor only"):
        on_device.DeviceTrial("powersgd(rank=1)", True, 2000, device)


@pytest.mark.parametrize(
    ("device", "says"), [("tpu", "no such device"), ("cuda", "no CUDA device that torch"), ("meta", "do not run on")]
)
def test_a_device_that_cannot_be_used_is_refused_in_a_line(device: str, says: str) -> None:
    torch = pytest.importorskip("torch")
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(UsageError, match=says) as caught:
        codec_bench.request_of(["int8"], 1000, 1, device=device)
    assert "\n" not in str(caught.value)
