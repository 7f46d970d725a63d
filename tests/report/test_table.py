from __future__ import annotations

import dataclasses
import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from syncline_bench.report import table
from syncline_bench.report.columns import broken
from syncline_bench.report.rows import Result


def shown(result: Result, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(table.render(result))
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
    assert any("5 processes shared 2 cores" in line for line in table.remarks(mixed))
    roomy = Result("m", 64, {}, None, workload="digits", rows=mixed.rows)
    assert not any("cores" in line for line in table.remarks(roomy))


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
    plain = " ".join(table.remarks(replayed(mixed)))
    assert "the trace's compute" in plain
    assert "ddp: nobody counts" in plain
    lab = " ".join(table.remarks(replayed(mixed, lab="1Gbit", goodput_bytes_per_s=119.6e6)))
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
