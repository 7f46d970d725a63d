"""Topologies: which links messages use, and what these carry."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import UsageError
from syncline_bench.predict.topology import FatTree, Switch, Torus, route, topology_of


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
