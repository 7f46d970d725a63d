"""``codec=auto`` where the architecture has two levels: candidates are measured as they would run."""

from __future__ import annotations

from typing import Any

import pytest

from syncline import registry
from syncline.session.session import Session
from syncline.strategy.strategy import Strategy
from syncline.tuning import codec_choice


@pytest.fixture(autouse=True)
def as_if_between_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads stand for processes that a network joins, which are worth measuring."""
    monkeypatch.delitem(registry.get("transports", "inproc").capabilities, "one_host")  # type: ignore[arg-type]


def chosen(group: Any, nodes: tuple[int, ...]) -> tuple[str, str, str]:
    asked = "hierarchical codec=auto"

    def body(session: Session) -> tuple[str, str, str]:
        codec_choice.choose_codec(session, Strategy.parse(asked))
        return str(session.strategy), session.strategy.exchange, session.reason

    first, *others = group(asked, len(nodes), body, nodes)
    assert all(other == first for other in others)
    return first  # type: ignore[no-any-return]


def test_candidates_are_measured_on_two_levels(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_choice, "_MOST_ELEMENTS", 1 << 14)
    seen: list[str] = []
    right = codec_choice._measure

    def measure(session: Session, array: Any) -> float:
        if session.index == 0:
            seen.append(f"{session.strategy.architecture.name} {session.strategy.codec.name}")
        return right(session, array)

    monkeypatch.setattr(codec_choice, "_measure", measure)
    text, _, reason = chosen(group, (0, 0, 1, 1))
    assert text.startswith("hierarchical")
    assert seen[-4:] == ["hierarchical none", "hierarchical bf16", "hierarchical feedback", "hierarchical feedback"]
    assert "feedback(int4)" in reason


def test_on_one_host_there_is_nothing_to_measure(group: Any) -> None:
    text, exchange, reason = chosen(group, (0, 0))
    assert "codec" not in text
    assert exchange == "allreduce by hierarchical"
    assert reason == "codec=none: all ranks are on one host, and two levels compress only between hosts"
