"""Lines of a timeline: in each, spans lie beside or in each other, whatever is under way at once."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from syncline.engine.trace import Kind
from syncline.timeline.spans import TRAINING
from syncline.timeline.tracks import lines_of
from timelines import span

KINDS: tuple[Kind, ...] = ("run", "send", "receive", "wait", "reduce", "forward", "update", "compute")


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 10), st.sampled_from(KINDS), st.integers(0, 4)), max_size=40)
)
def test_spans_of_a_line_do_not_cross(made: list[tuple[int, int, Kind, int]]) -> None:
    spans = [span(begin, begin + length, kind=kind, thread=f"{thread}") for begin, length, kind, thread in made]
    lines = lines_of(spans, [one.end_s for one in spans])
    assert None not in lines
    together = defaultdict(list)
    for one, line in zip(spans, lines, strict=True):
        together[line].append(one)
    for here in together.values():
        for one in here:
            for other in here:
                apart = one.end_s <= other.begin_s or other.end_s <= one.begin_s
                inside = one.begin_s >= other.begin_s and one.end_s <= other.end_s
                around = other.begin_s >= one.begin_s and other.end_s <= one.end_s
                assert apart or inside or around


def test_an_exchange_has_what_it_consists_of_in_its_line_and_nothing_else() -> None:
    spans = [
        span(1, 9, kind="work", key=1),
        span(2, 8, kind="work", key=2),
        span(3, 7, kind="run", key=2, within=1),
        span(4, 6, kind="run", key=1, within=0),
        span(10, 11, kind="work", key=3),
        span(1, 9, kind="work"),  # of a message, which is a span by itself
    ]
    lines = lines_of(spans, [one.end_s for one in spans])
    assert [line and line.title for line in lines] == [
        "exchanges", "exchanges (2)", "exchanges (2)", "exchanges", "exchanges", None,
    ]  # fmt: skip


def test_threads_and_messages_have_lines_of_their_own() -> None:
    spans = [
        span(1, 9, kind="backward", thread="pt_autograd_0"),
        span(2, 8, kind="send", thread="syncline-progress"),
        span(3, 5, kind="send"),
        span(3, 4, kind="reduce"),
        span(3, 5, kind="advance"),
        span(5, 5, kind="receive", within=4),
        span(2, 3, kind="wait", thread="syncline-owner"),
        span(2, 3, kind="wait"),
        span(2, 3, kind="staging"),
    ]
    lines = lines_of(spans, [one.end_s for one in spans])
    assert [line and line.title for line in lines] == [
        TRAINING, "sends", "sends (2)", "memory", "memory", "memory", "syncline-owner", TRAINING,
        "copies from the device",
    ]  # fmt: skip
