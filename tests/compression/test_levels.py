"""Two levels, for every codec of the registry: a host counts as one worker, whoever of it does what."""

from __future__ import annotations

from functools import partial
from itertools import cycle, islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reducing import ELEMENTS, TEXTS, can_be_served, codec, gradients, moved_bytes
from telling import Served

from syncline.algorithms import spread
from syncline.compression.reducers import levels, owners, ways
from syncline.compression.reducers.owners import pull_traffic, push_traffic, share_out
from syncline.compression.reducers.ways import parts_of
from syncline.nouns import Group, Slice, numpy_dtype
from syncline.testing.reducing import Ranks, as_predicted

Hosts = list[tuple[int, ...]]

PLACES: list[Hosts] = [[(0, 1), (2, 3)], [(0,), (1, 2, 3)], [(0, 2, 4), (1, 3), (5, 6, 7)]]
TWO_BY_TWO = PLACES[0]
ONE_EACH = [[Slice(0, 0, 3), Slice(1, 0, 2000)], [Slice(2, 0, 7), Slice(3, 0, 1), Slice(4, 0, 2112), Slice(5, 0, 5000)]]


@pytest.fixture
def cuts(cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets in several pieces, where they are ``cut``."""
    if cut:
        monkeypatch.setattr(owners, "PIECE_BYTES", 2000)
        monkeypatch.setattr(owners, "PIECE_ELEMENTS", 1500)


def summed(given: list[list[np.ndarray]], hosts: Hosts) -> list[list[np.ndarray]]:
    """The gradients of hosts, added up in the order of ranks."""
    found = []
    for first, *others in hosts:
        total = given[first][0].copy()
        for rank in others:
            total += given[rank][0]
        found.append([total])
    return found


def on_hosts(text: str, hosts: Hosts, **options: object) -> Ranks:
    return Ranks(codec(text), sum(map(len, hosts)), hosts=hosts, **options)  # type: ignore[arg-type]


@pytest.mark.every(2)
@pytest.mark.usefixtures("cuts")
@pytest.mark.parametrize(
    ("text", "hosts", "cut", "native"),
    [
        (text, PLACES[(number + turn) % 3], bool((number + turn) % 2), native and (number + turn) % 3 == 2)
        for number, text in enumerate(TEXTS)
        for turn, native in ((0, False), (1, True))
    ],
    ids=str,
)
def test_a_host_counts_as_one_worker(text: str, hosts: Hosts, native: bool) -> None:
    """The bits of as many workers as there are hosts, whose gradients are the hosts' sums; and what is kept back."""
    group, alone = on_hosts(text, hosts, native=native), Ranks(codec(text), len(hosts))
    for step in range(3):
        given = gradients(group.workers, ELEMENTS, step)
        group.step(given)
        alone.step(summed(given, hosts))
        assert group.given_back
        for result in group.results:
            assert result.tobytes() == alone.results[0].tobytes()
    np.testing.assert_array_equal(group.residuals(), alone.residuals())


@pytest.mark.every(2)
@pytest.mark.usefixtures("cuts")
@pytest.mark.parametrize(
    ("text", "hosts", "cut", "native"),
    [
        (text, *case)
        for text, case in zip(
            TEXTS, cycle([(PLACES[1], False, False), (PLACES[2], True, False), (PLACES[2], True, True)])
        )
    ],
    ids=str,
)
def test_what_travels_is_known_without_data(text: str, hosts: Hosts, native: bool) -> None:
    group = on_hosts(text, hosts, native=native)
    for step in (0, 2):  # some codecs warm up
        for rank in group.ranks:
            rank.resume_at(step)
        for arrays, (values,) in zip(group.arrays, gradients(group.workers, ELEMENTS, step), strict=True):
            arrays[0][:] = values
        parts = parts_of(group.codec, group.layers, group.buckets[0], step)
        foreseen = levels.traffic(parts, hosts, up=not native, down=not native)
        as_predicted([rank.pieces(0) for rank in group.ranks], foreseen, group.library)
        for rank in group.ranks:
            rank.finish(0)


@pytest.mark.parametrize("text", ["int8", "onebit", "fp16", "powersgd(rank=2)", "adaptive(topk(ratio=0.1), small=64B)"])
@pytest.mark.parametrize("per_host", [1, 2, 4])
def test_payloads_cross_between_hosts_once_for_each_host(text: str, per_host: int) -> None:
    """Whatever the number of ranks on each; without a codec's levels it would be as often as there are ranks."""
    hosts: Hosts = [tuple(range(first, first + per_host)) for first in (0, per_host)]
    group = on_hosts(text, hosts, shapes=[(300, 400), (70,), (128, 256)])
    traffic = levels.traffic(parts_of(group.codec, group.layers, group.buckets[0]), hosts)
    moved = moved_bytes(traffic, 2 * per_host, lambda _: pytest.fail("a plan sums"))
    between = moved[:per_host, per_host:].sum()
    payload = sum(group.codec.wire_bytes(layer.spec)[0] for layer in group.layers)
    assert between == pytest.approx(payload, rel=0.02)
    inside = moved[:per_host, :per_host].sum()
    assert inside == pytest.approx(2 * (per_host - 1) * 4 * group.buckets[0].elements)


@pytest.mark.every(2)
@pytest.mark.parametrize("text", TEXTS)
def test_the_result_does_not_depend_on_buckets(text: str) -> None:
    one, two = on_hosts(text, TWO_BY_TWO), on_hosts(text, TWO_BY_TWO, buckets=ONE_EACH)
    for step in range(3):
        given = gradients(4, ELEMENTS, step)
        one.step(given)
        two.step([[part[:2003], part[2003:]] for (part,) in given])
        for result in two.results:
            assert result.tobytes() == one.results[0].tobytes()


@pytest.mark.every(2)
@pytest.mark.parametrize("text", TEXTS)
def test_a_resumed_run_goes_on_with_the_same_bits(text: str) -> None:
    hosts = PLACES[2]
    first, other = on_hosts(text, hosts), on_hosts(text, hosts)
    for step in range(2):
        first.step(gradients(8, ELEMENTS, step))
    saved = [rank.saved() for rank in first.ranks]
    for rank in other.ranks:
        rank.load(saved)
    for step in range(2, 4):
        for group in (first, other):
            group.step(gradients(8, ELEMENTS, step))
        assert first.results[0].tobytes() == other.results[0].tobytes()


@pytest.mark.every(2)
@pytest.mark.parametrize(("text", "hosts"), [*zip(TEXTS, cycle([PLACES[1], PLACES[2], []]))], ids=str)
def test_other_hosts_and_workers_without_levels_take_all_that_was_kept(text: str, hosts: Hosts) -> None:
    """Ranks that sit elsewhere, more hosts, and the other way round one level."""
    first = on_hosts(text, TWO_BY_TWO)
    first.step(gradients(4, ELEMENTS, 0))
    other = on_hosts(text, hosts) if hosts else Ranks(codec(text), 3)
    for one, two in ((first, other), (other, first)):
        for rank in two.ranks:
            rank.load([each.saved() for each in one.ranks])
        np.testing.assert_allclose(two.residuals(), one.residuals(), atol=1e-4)


@pytest.mark.parametrize("text", ["int8", "onebit", "sign(vote=on)", "topk(ratio=0.1)", "powersgd(rank=2)"])
def test_a_checkpoint_has_one_value_per_element_and_host(text: str) -> None:
    group = on_hosts(text, PLACES[2])
    group.step(gradients(8, ELEMENTS, 0))
    saved = [rank.saved() for rank in group.ranks]
    for host, ranks in enumerate(PLACES[2]):
        sizes = [
            array.size for rank in ranks for key, array in saved[rank].items() if "own/" in key and "residual" in key
        ]
        assert sum(sizes) in (0, ELEMENTS)
        assert all(saved[rank]["host"][0] == host for rank in ranks)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("text", ["int8", "fp16"])
def test_gradients_of_other_types_are_summed_in_float32(text: str, dtype: str) -> None:
    group = on_hosts(text, TWO_BY_TWO, dtype=dtype)
    given = [[one[0].astype(dtype)] for one in gradients(4, ELEMENTS, 0)]
    group.step(given)
    alone = Ranks(codec(text), 2)
    alone.step(summed([[one[0].astype(np.float32)] for one in given], TWO_BY_TWO))
    for result in group.results:
        assert result.dtype == numpy_dtype(dtype)
        assert result.tobytes() == alone.results[0].astype(dtype).tobytes()


@pytest.mark.parametrize("text", TEXTS)
def test_what_is_not_finite_reaches_everyone_and_stays_in_no_state(text: str, caplog: pytest.LogCaptureFixture) -> None:
    group = on_hosts(text, TWO_BY_TWO)
    given = gradients(4, ELEMENTS, 1)
    given[3][0][1000] = np.nan  # in p1
    group.step(given)
    for result in group.results:
        assert not np.isfinite(result[3:2003]).all()
    assert "'p1'" in caplog.text
    for rank in group.ranks:
        assert all(np.isfinite(array).all() for array in rank.saved().values())
    group.step(gradients(4, ELEMENTS, 2))
    assert all(np.isfinite(result).all() for result in group.results)


def test_tensors_that_are_seen_whole_do_not_all_fall_to_one_rank_of_a_host() -> None:
    """Each in a bucket of its own, as large ones are: who encodes it is drawn by its name."""
    shapes = [(64, 64)] * 12
    buckets = [[Slice(number, 0, 4096)] for number in range(12)]
    group = on_hosts("topk(ratio=0.01)", TWO_BY_TWO, shapes=shapes, buckets=buckets)
    group.step([[one[0].copy() for _ in buckets] for one in gradients(4, 4096, 0)])
    for ranks in TWO_BY_TWO:
        counts = [sum(key.startswith("own/") for key in group.ranks[rank].saved()) for rank in ranks]
        assert sum(counts) == 12
        assert min(counts) >= 2


def test_arrays_are_added_in_one_order_whoever_adds() -> None:
    from syncline.kernels.cpu import BLOCK_BYTES, add_in_order

    draw = np.random.default_rng(0)
    for dtype in ("float32", "float16"):
        arrays = [draw.standard_normal(BLOCK_BYTES // 4 + 1000).astype(dtype) for _ in range(5)]
        wanted = arrays[0].copy()
        for other in arrays[1:]:
            wanted += other
        for place in range(5):
            mine = arrays[place].copy()
            add_in_order(mine, arrays[:place], arrays[place + 1 :])
            assert mine.tobytes() == wanted.tobytes()


# Servers.

SERVABLE = [text for text in TEXTS if can_be_served(text) and "warmup" not in text]


def places_of(hosts: Hosts, servers: int, apart: bool) -> tuple[int, ...]:
    """Where the servers are: processes after the workers, or workers on different hosts."""
    workers = sum(map(len, hosts))
    nodes = tuple(number for rank in range(workers) for number, ranks in enumerate(hosts) if rank in ranks)
    return tuple(range(workers, workers + servers)) if apart else spread(Group(workers, nodes=nodes), servers)


@st.composite
def hosts_and_servers(draw: st.DrawFn) -> tuple[Hosts, tuple[int, ...]]:
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    ranks = iter(draw(st.permutations(range(sum(sizes)))))
    hosts = sorted(tuple(sorted(islice(ranks, size))) for size in sizes)
    apart = draw(st.booleans())
    return hosts, places_of(hosts, draw(st.integers(1, 3 if apart else min(3, sum(sizes)))), apart)


def on_servers(text: str, hosts: Hosts, at: tuple[int, ...]) -> Ranks:
    workers = sum(map(len, hosts))
    return on_hosts(text, hosts, servers=sum(place >= workers for place in at), serving=at)


def holding(text: str, hosts: Hosts, at: tuple[int, ...], **options: object) -> Served:
    workers = sum(map(len, hosts))
    servers = sum(place >= workers for place in at)
    return Served(text, workers, servers, hosts=hosts, serving=at, **options)  # type: ignore[arg-type]


@given(hosts_and_servers(), st.sampled_from(SERVABLE), st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_servers_add_up_what_hosts_push(placed: tuple[Hosts, tuple[int, ...]], text: str, seed: int) -> None:
    """The bits and the residuals of as many workers as there are hosts, whose servers are processes of their own."""
    hosts, at = placed
    group, alone = on_servers(text, hosts, at), Ranks(codec(text), len(hosts), servers=1)
    for step in range(2):
        pushed = gradients(group.workers, ELEMENTS, seed + step)
        group.step(pushed)
        alone.step(summed(pushed, hosts))
        assert group.given_back
        for result in group.results:
            assert result.tobytes() == alone.results[0].tobytes()
    np.testing.assert_allclose(group.residuals(), alone.residuals(), atol=1e-6)


@given(hosts_and_servers(), st.sampled_from(SERVABLE), st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_servers_that_hold_the_weights_answer_every_host(
    placed: tuple[Hosts, tuple[int, ...]], text: str, seed: int
) -> None:
    """All workers have the bits that one worker for each host has, and so have the owners."""
    hosts, at = placed
    group, alone = holding(text, hosts, at), Served(text, len(hosts), 1)
    for step in range(2):
        pushed = gradients(group.workers, ELEMENTS, seed + step)
        group.descend(pushed)
        alone.descend(summed(pushed, hosts))
        for known in group.known[: group.workers]:
            assert known.tobytes() == alone.known[0].tobytes()
        assert group.held.tobytes() == alone.held.tobytes()


@given(hosts_and_servers(), st.sampled_from(SERVABLE))
@settings(max_examples=15, deadline=None)
def test_what_travels_to_servers_and_back_is_known_without_data(
    placed: tuple[Hosts, tuple[int, ...]], text: str
) -> None:
    hosts, at = placed
    group = on_servers(text, hosts, at)
    pushed = gradients(group.workers, ELEMENTS, 0)
    for arrays, (values,) in zip(group.arrays, pushed, strict=False):
        arrays[0][:] = values
    parts = parts_of(group.codec, group.layers, group.buckets[0])
    foreseen = levels.traffic(parts, hosts, partial(ways.traffic, served=True), servers=at)
    as_predicted([rank.pieces(0) for rank in group.ranks], foreseen)
    served = holding(text, hosts, at)
    for gradient, (values,) in zip(served.gradients, pushed, strict=False):
        gradient[:] = values
    as_predicted(
        [made.pieces(0) for made in served.codecs], levels.traffic(parts, hosts, push_traffic, servers=at, down=False)
    )
    for made in served.codecs:
        made.finish(0)
    for updates in served.updates:
        for one in updates.owned:
            one.weights[:] += np.random.default_rng(one.start).standard_normal(one.weights.size, np.float32)
    as_predicted(
        [made.pieces(0) for made in served.updates], levels.traffic(parts, hosts, pull_traffic, servers=at, up=False)
    )


@pytest.mark.parametrize("cut", [True])
@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("text", ["int8", "onebit", "topk(ratio=0.1)"])
@pytest.mark.usefixtures("cuts")
def test_buckets_in_many_pieces_reach_the_servers(text: str, apart: bool) -> None:
    hosts = PLACES[2]
    at = places_of(hosts, 3, apart)
    group, alone = on_servers(text, hosts, at), Ranks(codec(text), 3, servers=1)
    held, held_alone = holding(text, hosts, at), Served(text, 3, 1)
    for step in range(2):
        pushed = gradients(8, ELEMENTS, step)
        group.step(pushed)
        alone.step(summed(pushed, hosts))
        held.descend(pushed)
        held_alone.descend(summed(pushed, hosts))
    assert (len(group.ranks[0].pieces(0)) > 1) == ("topk" not in text)  # which has all of the largest tensor
    assert all(result.tobytes() == alone.results[0].tobytes() for result in group.results)
    assert all(known.tobytes() == held_alone.known[0].tobytes() for known in held.known[:8])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("text", ["int8", "ternary", "topk(ratio=0.3)"])
def test_weights_of_other_types_go_round_inside_hosts(text: str, dtype: str) -> None:
    served = holding(text, PLACES[2], (0, 2), dtype=dtype)
    start = served.known[0].copy()
    for seed in range(3):
        served.step(seed)
        assert all(known.tobytes() == served.known[0].tobytes() for known in served.known)
    assert (served.known[0] != start).any()


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("per_host", [1, 2, 4])
def test_a_host_pushes_and_pulls_one_payload(per_host: int, apart: bool) -> None:
    """Whatever its number of workers, less the parts of servers on the host itself."""
    hosts: Hosts = [tuple(range(first, first + per_host)) for first in (0, per_host)]
    workers, at = 2 * per_host, places_of([tuple(range(per_host)), tuple(range(per_host, 2 * per_host))], 2, apart)
    group = on_hosts("int8", hosts, shapes=[(300, 400), (70,), (128, 256)])
    parts = parts_of(group.codec, group.layers, group.buckets[0])
    payload = sum(group.codec.wire_bytes(layer.spec)[0] for layer in group.layers)
    for half, ends in ((push_traffic, {"down": False}), (pull_traffic, {"up": False})):
        traffic = levels.traffic(parts, hosts, half, servers=at, **ends)
        moved = moved_bytes(traffic, workers + 2 * apart, lambda _: pytest.fail("a plan sums"))
        moved = moved if half is push_traffic else moved.T
        outside = moved[:per_host].sum() - moved[:per_host, :per_host].sum()
        assert outside == pytest.approx(payload if apart else payload / 2, rel=0.02)
        inside = moved[:per_host, :per_host].sum()
        assert inside == pytest.approx((per_host - 1) * 4 * group.buckets[0].elements)


@given(st.lists(st.integers(1, 9000), min_size=1, max_size=8), st.integers(1, 6), st.integers(1, 6), st.booleans())
@settings(max_examples=50, deadline=None)
def test_the_rails_of_a_server_carry_its_part(sizes: list[int], servers: int, rails: int, whole: bool) -> None:
    """However often parts are shared out: an owner's parts in many shares are its parts in one."""
    made = Ranks(codec("topk(ratio=0.1)" if whole else "int8"), 1, shapes=[(size,) for size in sizes])
    parts = parts_of(made.codec, made.layers, made.buckets[0])

    def ends(shares: list[list[owners.Operand]]) -> list[list[tuple[str, int, int]]]:
        """Each owner's ranges of tensors, neighbouring ones joined."""
        found = []
        for share in shares:
            joined: list[tuple[str, int, int]] = []
            for part in share:
                name, start = part.name, part.start
                if joined and joined[-1][0] == name:
                    assert joined[-1][2] == start
                    start = joined.pop()[1]
                joined.append((name, start, part.start + part.array.size))
            found.append(joined)
        return found

    once, finer = share_out(parts, servers), share_out(parts, servers * rails)
    again = share_out([part for share in once for part in share], servers * rails)
    assert ends(again) == ends(finer)
    together = [[part for share in finer[at : at + rails] for part in share] for at in range(0, len(finer), rails)]
    assert ends(together) == ends(once)


@pytest.mark.parametrize("text", ["int8", "topk(ratio=0.1)", "randomk(ratio=0.3)"])
@pytest.mark.parametrize("other", [PLACES[2], [tuple(range(8))]], ids=str)
def test_runs_with_servers_are_resumed_on_the_same_and_on_other_hosts(text: str, other: Hosts) -> None:
    at = places_of(PLACES[2], 2, apart=False)
    first, again, moved = (on_servers(text, hosts, at) for hosts in (PLACES[2], PLACES[2], other))
    for step in range(2):
        first.step(gradients(8, ELEMENTS, step))
    for group in (again, moved):
        for rank in group.ranks:
            rank.load([one.saved() for one in first.ranks])
        np.testing.assert_allclose(group.residuals(), first.residuals(), atol=1e-4)
    for group in (first, again):
        group.step(gradients(8, ELEMENTS, 2))
    assert first.results[0].tobytes() == again.results[0].tobytes()
