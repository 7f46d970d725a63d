"""A space lists each candidate once, without choices that do not matter, and refuses axes that make no sense."""

from __future__ import annotations

import pytest
from hypothesis import given
from spaces import AXES, FASTEST, spaces, valid

from syncline.errors import UsageError
from syncline_bench import searchers
from syncline_bench.searchers import Axis, Space, chances_to_run, flags


@given(spaces())
def test_candidates_have_the_axes_that_apply_and_no_others(space: Space) -> None:
    assert len(set(space.candidates)) == len(space.candidates)
    for index, candidate in enumerate(space.candidates):
        for axis in space.axes:
            assert (axis.name in candidate) == axis.applies(candidate)
        assert space.candidate(candidate) == candidate
        assert space.index(dict(candidate)) == index
        assert [
            axis.choices[place] for axis, place in zip(space.axes, space.columns[index], strict=True) if place >= 0
        ] == [*candidate.values()]


def test_equal_strategies_are_one_candidate() -> None:
    space = Space(AXES, valid)
    assert len(space.candidates) == (4 * 3 + 3 * 3) * (5 + 1 + 2)
    assert space.candidate({**FASTEST, "slice": 4, "ratio": 0.1}) == FASTEST
    assert hash(space.candidate({**FASTEST, "slice": 1})) == hash(space.candidate(FASTEST))
    assert str(space.candidate(FASTEST)) == "architecture=ring codec=int8 schedule=fixed bucket=4"


def test_a_prediction_is_asked_for_once_a_candidate() -> None:
    seen = []
    space = Space(AXES, valid, lambda candidate: seen.append(candidate))
    assert not seen
    for _ in range(2):
        assert len(space.predicted_s) == len(space.candidates)
    assert len(seen) == len(space.candidates)


@pytest.mark.parametrize(
    ("axes", "text"),
    [
        ([], "at least one axis"),
        ([Axis("a", ())], "a needs at least one choice"),
        ([Axis("a", (1, 1))], "each only once"),
        ([Axis("a", (1,)), Axis("a", (2,))], "two axes"),
        ([Axis("a", (1,), when={"b": (1,)}), Axis("b", (1,))], "list that axis before"),
        ([Axis("a", (1,)), Axis("b", (1,), when={"a": (2,)})], "a has no such choice"),
    ],
)
def test_axes_that_make_no_sense_are_refused(axes: list[Axis], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        Space(axes)


def test_a_space_without_candidates_or_with_too_many_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="every combination of the axes"):
        Space(AXES, lambda _: False)
    monkeypatch.setattr(searchers, "MOST_CANDIDATES", 100)
    with pytest.raises(UsageError, match="too many to search"):
        Space(AXES)


def test_choices_that_are_unknown_or_missing_are_named() -> None:
    space = Space(AXES, valid)
    with pytest.raises(UsageError, match="no axis 'colour'"):
        space.candidate({**FASTEST, "colour": "red"})
    with pytest.raises(UsageError, match="choice of bucket is missing"):
        space.candidate({name: choice for name, choice in FASTEST.items() if name != "bucket"})
    with pytest.raises(UsageError, match="bucket=3 is not a choice"):
        space.candidate({**FASTEST, "bucket": 3})


def test_blame_goes_to_the_choice_that_never_ran() -> None:
    space = Space(AXES, valid)
    tried = [FASTEST, {**FASTEST, "architecture": "ps"}, {**FASTEST, "codec": "none"}, {**FASTEST, "codec": "fp16"}]
    indices = [space.index(each) for each in tried]
    import numpy as np

    found = chances_to_run(space.columns, np.array(indices), np.array([True, True, False, False]))
    failing = flags(space.columns)[:, 4 + 2] == 1  # four architectures, then int8
    assert found[failing].max() < 0.5 < found[~failing].min()
    assert (chances_to_run(space.columns, np.array(indices), np.zeros(4, bool)) == 1).all()
