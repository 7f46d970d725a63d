"""Options that take several values."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from syncline_bench.cli._options import spread


@given(st.lists(st.sampled_from(["--o", "--o=a", "-x", "b", "c", "--"]), max_size=8))
def test_spreading_keeps_every_word_in_order(args: list[str]) -> None:
    found = spread(args, {"--o"})
    assert [arg for arg in found if arg != "--o"] == [arg for arg in args if arg != "--o"]
    assert spread(args, set()) == args


def test_spreading_repeats_the_option() -> None:
    assert spread(["v", "--o", "a", "b", "--p", "c", "--o=d", "e", "--", "f"], {"--o"}) == [
        "v", "--o", "a", "--o", "b", "--p", "c", "--o=d", "--o", "e", "--", "f",
    ]  # fmt: skip
