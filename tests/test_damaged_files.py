"""Whatever a file or an argument has in it, what comes out is one line that names it: no traceback, no endless work."""

from __future__ import annotations

import io
import zipfile
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from syncline.compression.saved import as_bytes, from_bytes
from syncline.errors import DataError, StrategyError, UsageError
from syncline.session.layout import reading_state
from syncline.strategy.strategy import Strategy
from syncline_bench.cli import cli
from syncline_bench.predict.networks import parse_holdout, parse_network
from syncline_bench.report.accuracy import AccuracyResult
from syncline_bench.report.bench import BenchResult, CodecResult, GradientResult, StepResult
from syncline_bench.report.comparison import Result
from syncline_bench.report.files import ResultFile
from syncline_bench.report.predictions import CollectivePrediction, Prediction

RESULTS: list[type[ResultFile]] = [
    AccuracyResult, BenchResult, CodecResult, CollectivePrediction, GradientResult, Prediction, Result, StepResult,
]  # fmt: skip
DEEP = "[" * 100_000


def one_line(*arguments: str) -> str:
    """What a command that is refused says, which is one line, and its status 2."""
    done = CliRunner().invoke(cli, list(arguments), prog_name="syncline")
    assert done.exit_code == 2, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert "Traceback" not in done.output
    return done.output


@pytest.mark.parametrize("kind", RESULTS)
def test_result_files_of_other_content_are_none(kind: type[ResultFile]) -> None:
    rows = [f'{{"machine": "m", "rows": {value}}}' for value in ("3", "null", "[null]")]
    for text in (DEEP, '{"machine":' * 2000, "", "null", "[]", '{"machine": "m"}', "{", *rows):
        with pytest.raises(DataError, match="this is not a result file"):
            kind.from_json(text)


@pytest.mark.parametrize("parse", [parse_network, parse_holdout])
def test_what_is_nested_too_deeply_is_no_network(parse: Any) -> None:
    with pytest.raises(DataError, match="here"):
        parse(DEEP, "here")


@pytest.mark.parametrize("opening", ["(", "ring(", "a=b(", "feedback("])
def test_strategies_are_nested_as_deeply_as_makes_sense(opening: str) -> None:
    with pytest.raises(StrategyError):
        Strategy.parse("ring codec=" + opening * 50_000)
    text = "feedback(" * 16 + "int8" + ")" * 16
    with pytest.raises(StrategyError, match="nested more than 16 deep"):
        Strategy.parse(f"ring codec=feedback({text})")


@pytest.mark.parametrize(
    "arguments",
    [
        ("show", "ring", "--nodes", "99999999999x2"),
        ("show", "ring", "--nodes", "2x99999999999"),
        ("show", "ring", "--nodes", "513x1"),
        ("show", "ring", "--nodes", "1x513"),
        ("show", "ring", "--ranks", "513"),
        ("show", "ps(servers=513)"),
        ("show", "ps", "--servers", "513"),
        ("show", "ps(servers=99999999999)"),
        ("show", "ring", "--nodes", "1x1x1"),
        ("show", "ring", "--nodes", "-1x-1"),
        ("show", "ring", "--nodes", ",".join(["9" * 4000] * 2)),
        ("show", "ring", "--ranks", "99999999999"),
    ],
)
def test_numbers_of_ranks_have_a_limit(arguments: tuple[str, ...]) -> None:
    assert one_line(*arguments)


@pytest.mark.parametrize(
    "error", [KeyError("models"), AttributeError("a"), TypeError("b"), ValueError("c"), IndexError()]
)
def test_a_state_that_is_none_is_an_error_with_the_remedy(error: Exception) -> None:
    with pytest.raises(UsageError, match="not a complete state of a run"), reading_state():
        raise error
    with pytest.raises(DataError), reading_state():
        raise DataError("which says more")


@pytest.mark.slow
def test_the_largest_group_is_drawn() -> None:
    done = CliRunner().invoke(cli, ["show", "ring", "--ranks", "512"], prog_name="syncline")
    assert done.exit_code == 0


def with_header(header: bytes, body: bytes = b"", method: int = zipfile.ZIP_STORED) -> bytes:
    """An archive of one array whose header says that, in valid brackets of the format."""
    member = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + body
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        archive.writestr("own/0/residual.npy", member)
    return file.getvalue()


HEADER = "{'descr': '%s', 'fortran_order': False, 'shape': %s, }\n"


@pytest.mark.parametrize(
    "data",
    [
        with_header((HEADER % ("<f8", "(1000000000000,)")).encode()),
        with_header((HEADER % ("<f8", f"({10**30},)")).encode()),
        with_header((HEADER % ("|O", "(1,)")).encode(), bytes(8)),
        with_header((HEADER % ("<f8", "(2,)")).encode(), bytes(15)),
        with_header(b"{'descr':'<f8'"),
        with_header(b"{'descr': ((((((((("),
        with_header((HEADER % ("<f8", "(1000000,)")).encode(), bytes(8_000_000), zipfile.ZIP_DEFLATED),
        with_header(b""),
    ],
)
def test_archives_whose_headers_lie_are_errors_that_cost_nothing(data: bytes) -> None:
    with pytest.raises(ValueError, match="not an archive of arrays"):
        from_bytes(data)


def test_arrays_that_were_packed_are_read_back_as_they_were() -> None:
    packed = {"a": np.arange(6.0).reshape(2, 3), "b": np.array(3), "c": np.asfortranarray(np.ones((2, 3), "f2"))}
    for key, array in from_bytes(as_bytes(packed | {"empty": np.zeros((0, 4), "i4")})).items():
        np.testing.assert_array_equal(array, packed.get(key, np.zeros((0, 4), "i4")))
        assert array.flags.writeable
