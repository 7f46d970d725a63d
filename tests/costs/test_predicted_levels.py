"""The model of one level or two, held to what it has to say whatever the numbers are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.codecs import Combine
from syncline.compression.reducers.ways import WAYS
from syncline.costs.compression import ANY_LINK_BIT_PER_S, CodedAllreduce
from syncline.costs.levels import OnHosts

N = 1_000_000

seconds = st.floats(1e-5, 1.0)
combines = st.sampled_from(list(WAYS))
sizes = st.integers(2, 6)


def on_hosts(combine: Combine, hosts: int, per_host: int, *costs_s: float, nbytes: int = N) -> OnHosts:
    return OnHosts(CodedAllreduce(WAYS[combine], N, nbytes, *(costs_s or (8e-4, 4e-4, 4e-4))), hosts, per_host)


@given(combines, sizes, sizes, seconds, seconds, seconds, st.sampled_from([N // 8, N, 2 * N]))
def test_two_levels_pay_exactly_below_the_speed_that_is_named(
    combine: Combine, hosts: int, per_host: int, encode_s: float, decode_s: float, add_s: float, nbytes: int
) -> None:
    found = on_hosts(combine, hosts, per_host, encode_s, decode_s, add_s, nbytes=nbytes)
    limit = found.two_levels_pay_below_bit_per_s()
    assert limit is None or 0 < limit <= ANY_LINK_BIT_PER_S
    if limit is None:
        assert found.port_bits(2) >= found.port_bits(1) * 0.999
        return
    assert found.allreduce_s(2, limit * 0.999) < found.allreduce_s(1, limit * 0.999)
    if limit < ANY_LINK_BIT_PER_S:
        assert found.allreduce_s(2, limit * 1.001) > found.allreduce_s(1, limit * 1.001)


@pytest.mark.parametrize("combine", ["owner", "gather"])
@pytest.mark.parametrize(("hosts", "per_host"), [(2, 2), (2, 8), (4, 4), (3, 2)])
def test_payloads_of_all_ranks_or_of_hosts(combine: Combine, hosts: int, per_host: int) -> None:
    """What goes through a host's port, but for the heads of messages."""
    found = on_hosts(combine, hosts, per_host)
    more = per_host if combine == "owner" else per_host**2
    assert found.port_bits(1) == pytest.approx(more * found.port_bits(2), rel=0.01)
    times = 2 * (hosts - 1) / hosts if combine == "owner" else hosts - 1
    assert found.port_bits(2) == pytest.approx(8 * N * times, rel=0.01)


@pytest.mark.parametrize("combine", WAYS)
def test_one_rank_on_each_host_is_one_level(combine: Combine) -> None:
    found = on_hosts(combine, 4, 1)
    assert found.port_bits(2) == pytest.approx(found.port_bits(1), rel=1e-3)
    assert found.computing_s(2) == pytest.approx(found.computing_s(1))


@pytest.mark.parametrize("combine", WAYS)
@pytest.mark.parametrize(("hosts", "per_host"), [(2, 2), (4, 8)])
def test_codecs_that_cost_two_additions_are_faster_on_two_levels_on_any_link(
    combine: Combine, hosts: int, per_host: int
) -> None:
    """So ``auto`` sends them this way: encoding with feedback costs about an addition, decoding most of one."""
    found = on_hosts(combine, hosts, per_host, 1.2e-3, 8e-4, 1e-3)
    assert found.two_levels_pay_below_bit_per_s() == ANY_LINK_BIT_PER_S


def test_two_by_two_and_owners_by_hand() -> None:
    """Of 8 bits per element half crosses; a codec that costs next to nothing pays below the link that memory is."""
    found = on_hosts("owner", 2, 2, 1e-5, 1e-5, 1e-3)
    limit = found.two_levels_pay_below_bit_per_s()
    extra_s = ((1.5 + 2) / 2 - (1.25 + 2)) * 1e-5 + 1e-3
    assert limit == pytest.approx(8 * N / extra_s, rel=0.01)
