"""Links and topologies: constants by sizes, LogGP, which links messages share, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.costs.cluster import FatTree, LinkCost, Piece, Switch, Torus, loggp, piecewise, route, topology_of
from syncline.errors import UsageError

NUMBERS = st.floats(0, 1, allow_subnormal=False)


def test_a_message_takes_its_own_piece():
    link = piecewise([(1000, 3.0, 0.5), (0, 1.0, 0.25)])
    assert [link.busy_s(size) for size in (0, 999, 1000)] == [1.0, 1.0 + 999 / 4, 3.0 + 500]
    assert [link.bytes_s(size) for size in (0, 999, 1000)] == [0.0, 999 / 4, 500]


@given(st.lists(st.tuples(st.integers(1, 10**9), NUMBERS, NUMBERS), unique_by=lambda row: row[0]), st.data())
def test_arrays_are_as_numbers_one_by_one(rows, data):
    link = piecewise([(0, 0.5, 0.25), *rows])
    sizes = data.draw(st.lists(st.floats(0, 2e9), min_size=1, max_size=5))
    for call in (link.busy_s, link.bytes_s):
        assert call(np.array(sizes)).tolist() == [call(size) for size in sizes]


@pytest.mark.parametrize("pieces", [(), (Piece(1, 0, 0),), (Piece(0, 0, 0), Piece(9, 0, 0), Piece(9, 1, 1))])
def test_pieces_begin_at_zero_and_ascend(pieces):
    with pytest.raises(UsageError, match="start at 0"):
        LinkCost(pieces)


@pytest.mark.parametrize("number", [-1e-6, math.inf, math.nan])
@pytest.mark.parametrize("place", range(3))
def test_seconds_are_finite_and_not_negative(number, place):
    numbers = [0.0, 0.0, 0.0]
    numbers[place] = number
    with pytest.raises(UsageError, match="not negative"):
        LinkCost.linear(*numbers)


@given(NUMBERS, NUMBERS, NUMBERS, st.floats(0, 1), st.integers(1, 10**6), st.integers(1, 50))
def test_loggp(latency, overhead, gap, share, nbytes, messages):
    """m messages of k bytes, one behind the other: o + (m-1) (max(o, g) + (k-1) G) + (k-1) G + L + o."""
    begins = max(overhead, gap)
    latency += begins  # the flight is longer than what a port waits
    per_byte = share * begins
    link = loggp(latency, overhead, gap, per_byte)
    text = (nbytes - 1) * per_byte
    expected = overhead + (messages - 1) * (begins + text) + text + latency + overhead
    assert messages * link.busy_s(nbytes) + link.flight_s == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(("overhead", "gap", "per_byte"), [(1e-6, 1e-6, 2e-6), (0.0, 9e-6, 1e-9)])
def test_what_is_no_loggp_network_is_refused(overhead, gap, per_byte):
    with pytest.raises(UsageError, match="needs G <= max"):
        loggp(5e-6, overhead, gap, per_byte)


def test_a_switch_shares_nothing():
    assert route(Switch(), 0, 5, 8) == ()


def test_a_fat_tree_shares_what_leaves_a_leaf():
    tree = FatTree(4, oversubscription=2)
    assert route(tree, 0, 3, 16) == ()
    assert route(tree, 0, 4, 16) == (0, 3)
    assert route(tree, 13, 2, 16) == (6, 1)
    assert tree.capacity(0) == 2


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
def test_a_torus_goes_the_shortest_way_from_neighbour_to_neighbour(dims, data):
    torus, hosts = Torus(tuple(dims)), int(np.prod(dims))
    src, dst = (data.draw(st.integers(0, hosts - 1)) for _ in range(2))
    at = list(np.unravel_index(src, dims))
    goal = np.unravel_index(dst, dims)
    distance = sum(min((b - a) % size, (a - b) % size) for a, b, size in zip(at, goal, dims, strict=True))
    links = route(torus, src, dst, hosts)
    assert len(links) == distance
    for link in links:
        host, axis, back = link // 2 // len(dims), link // 2 % len(dims), link % 2
        assert host == np.ravel_multi_index(at, dims)
        at[axis] = (at[axis] + (-1 if back else 1)) % dims[axis]
    assert tuple(at) == tuple(goal)


@pytest.mark.parametrize("topology", [FatTree(3, 2), Torus(), Torus((3, 4)), Switch()], ids=str)
def test_many_messages_at_once_go_as_each_alone(topology):
    src, dst = (ends.reshape(-1) for ends in np.meshgrid(np.arange(12), np.arange(12)))
    which, links = topology.crossings(src, dst, 12)
    for message in range(len(src)):
        assert tuple(links[which == message].tolist()) == route(topology, src[message], dst[message], 12)


def test_the_busiest_link_of_a_ring_whose_hosts_all_send_far():
    hosts = np.arange(16)
    _, links = Torus().crossings(hosts, (hosts + 4) % 16, 16)
    assert np.bincount(links).max() == 4


@pytest.mark.parametrize(
    "text", ["switch", "ring", "torus(dims=4x4x2)", "fat_tree(hosts_per_leaf=16, oversubscription=3)"]
)
def test_texts(text):
    assert str(topology_of(text)) == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("torsu(dims=2x2)", "did you mean 'torus'"),
        ("torus", "torus takes dims="),
        ("ring(4)", "ring takes nothing"),
        ("torus(dims=0x4)", "at least one host"),
        ("fat_tree(hosts_per_leaf=0)", "at least one host"),
        ("fat_tree(hosts_per_leaf=4, oversubscription=0)", "above 0"),
    ],
)
def test_texts_that_are_no_topology(text, says):
    with pytest.raises(UsageError, match=says):
        topology_of(text)


def test_a_torus_that_is_too_small():
    with pytest.raises(UsageError, match="give larger dimensions"):
        route(Torus((2, 2)), 0, 1, 5)
