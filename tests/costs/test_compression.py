"""The model of whether compression pays, held to what it has to say whatever the numbers are."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.codecs import Combine
from syncline.compression.reducers.ways import WAYS
from syncline.costs.compression import ANY_LINK_BIT_PER_S, CodedAllreduce, dense

N = 1_000_000
HEAD_BYTES = 12  # of a message

seconds = st.floats(1e-5, 1.0)
workers = st.integers(2, 64)
combines = st.sampled_from(list(WAYS))


def allreduce(combine: Combine = "owner", **changes: Any) -> CodedAllreduce:
    values = {"nbytes": N, "encode_s": 8e-4, "decode_s": 4e-4, "add_s": 4e-4}
    return CodedAllreduce(WAYS[combine], N, **{**values, **changes})


@given(combines, workers, seconds, seconds, seconds, st.integers(1, 4 * N))
def test_it_pays_exactly_below_the_speed_that_is_named(
    combine: Combine, count: int, encode_s: float, decode_s: float, add_s: float, nbytes: int
) -> None:
    mine = CodedAllreduce(WAYS[combine], N, nbytes, encode_s, decode_s, add_s)
    other = dense(N, add_s)
    limit = mine.pays_below_bit_per_s(count)
    assert limit is None or 0 < limit <= ANY_LINK_BIT_PER_S
    if limit is None:
        assert mine.sent_bits(count) >= other.sent_bits(count)
        return

    def seconds_of(one: CodedAllreduce, bit_per_s: float) -> float:
        return one.sent_bits(count) / bit_per_s + one.computing_s(count)

    assert seconds_of(mine, limit * 0.999) < seconds_of(other, limit * 0.999)
    if limit < ANY_LINK_BIT_PER_S:
        assert seconds_of(mine, limit * 1.001) > seconds_of(other, limit * 1.001)


@given(combines, workers, st.floats(1.01, 10))
def test_cheaper_computing_or_fewer_bytes_pay_on_faster_links(combine: Combine, count: int, factor: float) -> None:
    def limit(**changes: Any) -> float:
        return allreduce(combine, **{"nbytes": N / 100, **changes}).pays_below_bit_per_s(count) or 0.0

    usual = limit()
    assert limit(encode_s=8e-4 * factor) <= usual
    assert limit(decode_s=4e-4 * factor) <= usual
    assert limit(nbytes=N / 100 * factor) <= usual


def test_an_exchange_that_sends_as_much_never_pays() -> None:
    assert allreduce(nbytes=4 * N).pays_below_bit_per_s(4) is None
    # Everybody gets everybody's payload: with enough ranks that is more than the dense allreduce sends.
    assert allreduce("gather", nbytes=N / 10).pays_below_bit_per_s(4) is not None
    assert allreduce("gather", nbytes=N / 10).pays_below_bit_per_s(1000) is None


def test_computing_less_than_the_dense_allreduce_pays_on_any_link() -> None:
    assert allreduce(encode_s=1e-6, decode_s=1e-6).pays_below_bit_per_s(4) == ANY_LINK_BIT_PER_S


def test_two_ranks_and_owners_by_hand() -> None:
    # Sent: one array each; 24 of 32 bits saved, but for the heads of two messages,. Computing: 1.5
    # encodes and 2 decodes instead of half an addition.
    limit = allreduce("owner").pays_below_bit_per_s(2)
    assert limit == pytest.approx((24 * N - 2 * 8 * HEAD_BYTES) / (1.5 * 8e-4 + 2 * 4e-4 - 0.5 * 4e-4))


def test_a_merge_on_a_tree_sends_two_payloads_per_level() -> None:
    for count, levels in ((2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4)):
        assert allreduce("merge").sent_bits(count) == 2 * levels * 8 * (N + HEAD_BYTES)
