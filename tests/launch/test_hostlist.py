"""Slurm's lists of hosts and counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import UsageError
from syncline.launch.environment import expand_counts, expand_hosts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node7", ["node7"]),
        ("a,b-1,c.d", ["a", "b-1", "c.d"]),
        ("n[1-3,7]", ["n1", "n2", "n3", "n7"]),
        ("n[008-011]", ["n008", "n009", "n010", "n011"]),
        ("login,gpu[1,3]-ib,x", ["login", "gpu1-ib", "gpu3-ib", "x"]),
        ("r[1-2]n[08-09]", ["r1n08", "r1n09", "r2n08", "r2n09"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
    ],
)
def test_hosts(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@given(st.lists(st.integers(0, 9999), min_size=1, unique=True), st.integers(1, 6))
def test_numbers_keep_their_width(numbers: list[int], width: int) -> None:
    written = [f"{number:0{width}}" for number in numbers]
    assert expand_hosts(f"node[{','.join(written)}]") == [f"node{number}" for number in written]


@pytest.mark.parametrize("text", ["", "a,,b", "n[", "n[1-", "n[3-1]", "n[a-c]", "n]1", "n[]", "n[1]]"])
def test_no_list_of_hosts(text: str) -> None:
    with pytest.raises(UsageError, match="is no list of hosts"):
        expand_hosts(text)


def test_counts() -> None:
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    assert expand_counts("4") == [4]
    for text in ("", "2(x)", "x3", "2,,1"):
        with pytest.raises(UsageError, match="is no list of counts"):
            expand_counts(text)
