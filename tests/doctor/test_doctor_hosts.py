"""What is judged of planted observations, and ranks that check each other over real connections."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import GroupError
from syncline.launch.environment import Environment
from syncline.launch.rendezvous import Rendezvous
from syncline.wire.handshake import run_id
from syncline.wire.listener import Listener, bind_here
from syncline.wire.meeting import Member
from syncline.wire.meeting_sockets import MeetingClient
from syncline_bench.doctor import hosts
from syncline_bench.doctor.checks import Finding, Way
from syncline_bench.doctor.hosts import Links, Offset, Seen, judged, partners

GBIT = 1e9


def way(host: int, **changes: Any) -> Way:
    return replace(Way(f"10.0.0.{host}", "eth0", 1500, "it leads to rank 0", f"eth0 (10.0.0.{host})"), **changes)


def seen(count: int) -> list[Seen]:
    return [
        Seen(
            host, f"h{host}", way(host), {"Python": "3.12.1", "torch": "2.13.0"}, [Finding("memory", "ok", "much")], {}
        )
        for host in range(count)
    ]


def links(
    count: int, rate: Callable[[int, int], float | None] = lambda *_: GBIT, clock_s: dict[int, float] | None = None
) -> Links:
    """Links between all hosts, whose clocks are ahead by ``clock_s``."""
    ahead = clock_s or {}
    pairs = list(itertools.permutations(range(count), 2))
    return Links(
        {pair: rate(*pair) for pair in pairs},
        {pair: Offset(ahead.get(pair[1], 0.0) - ahead.get(pair[0], 0.0), 1e-4) for pair in pairs},
    )


def judge(told: list[Seen], links: Links) -> list[Finding]:
    """Of hosts that have all answered."""
    return judged(told, links, len(told))


def faults(found: list[Finding]) -> list[Finding]:
    wrong = [one for one in found if one.status != "ok"]
    assert all(one.remedy[0].isupper() and one.remedy.endswith(".") for one in wrong)
    return wrong


@pytest.mark.parametrize("count", [2, 3, 5])
def test_sound_hosts_have_no_fault_and_each_check_says_so(count: int) -> None:
    found = judge(seen(count), links(count, lambda source, _: GBIT * (1 - 0.05 * source)))
    assert not faults(found)
    assert [one.check for one in found] == ["memory", "reach", "bandwidth", "clocks", "mtu"]
    assert found[0].text == f"h0: much; ok too: {', '.join(f'h{host}' for host in range(1, count))}"


def test_one_host_is_said_to_be_alone_only_if_it_is() -> None:
    (memory, reach) = judged(seen(1), Links(), 1)
    assert (memory.check, reach.check, reach.status) == ("memory", "reach", "ok")
    assert "all ranks are on this host" in reach.text
    assert judged(seen(1), Links(), 2) == [memory]


def test_a_fault_of_a_host_is_told_with_its_name() -> None:
    told = seen(3)
    told[1].findings = [Finding("shm", "warn", "small", "Enlarge it.")]
    (one,) = faults(judge(told, links(3)))
    assert one == Finding("shm", "warn", "h1: small", "Enlarge it.")


def test_an_interface_that_others_do_not_reach_is_named_with_one_that_they_do() -> None:
    told = seen(3)
    told[1].way = way(1, address="10.9.9.9", interface="vpn0", asked=True, mtu=1280)
    for one in (told[0], told[2]):
        one.unreached = {1: "No route to host"}
    reached = links(3)
    reached.rates = {pair: rate for pair, rate in reached.rates.items() if pair[1] != 1}
    (one,) = faults(judge(told, reached))  # its MTU is not compared with that of the others
    assert (one.check, one.status) == ("reach", "fail")
    assert "h0, h2 cannot reach h1 at 10.9.9.9 (vpn0" in one.text
    assert "eth0 (10.0.0.1)" in one.remedy


def test_a_closed_port_is_no_matter_of_the_interface() -> None:
    told = seen(2)
    told[0].unreached = {1: "timed out"}
    assert "firewall of h1" in faults(judge(told, links(2)))[0].remedy


@given(st.integers(3, 6), st.data())
def test_slow_hosts_are_named_and_no_others(count: int, data: st.DataObject) -> None:
    slow = data.draw(st.sets(st.integers(0, count - 1), max_size=count - 2))
    found = faults(judge(seen(count), links(count, lambda *pair: GBIT / 10 if slow & {*pair} else GBIT)))
    assert [one.text.split()[0] for one in found] == [f"h{host}" for host in sorted(slow)]
    assert all("sends at most 100 Mbit/s and receives at most 100 Mbit/s on eth0" in one.text for one in found)


def test_a_slow_direction_and_a_slow_pair_are_named() -> None:
    (one,) = faults(judge(seen(3), links(3, lambda source, _: GBIT / 10 if source == 2 else GBIT)))
    assert one.text.startswith("h2 sends at most 100 Mbit/s on eth0")
    (one,) = faults(judge(seen(4), links(4, lambda *pair: GBIT / 10 if pair == (1, 2) else GBIT)))
    assert one.text.startswith("h1 sends 100 Mbit/s to h2")
    (one,) = faults(judge(seen(2), links(2, lambda *pair: GBIT / 10 if pair == (1, 0) else GBIT)))
    assert one.text.startswith("h1 sends 100 Mbit/s to h0")


@pytest.mark.parametrize(
    ("clock_s", "says"),
    [
        ({2: 5.0}, ["the clock of h2 is 5.00 s ahead of that of most others"]),
        ({0: 5.0}, ["the clock of h0 is 5.00 s ahead of that of most others"]),
        ({1: -0.5, 2: 0.05}, ["the clock of h1 is 500 ms behind that of most others"]),
    ],
)
def test_a_wrong_clock_is_named(clock_s: dict[int, float], says: list[str]) -> None:
    assert [one.text for one in faults(judge(seen(4), links(4, clock_s=clock_s)))] == says


def test_of_two_clocks_the_difference_is_told() -> None:
    (one,) = faults(judge(seen(2), links(2, clock_s={1: 5.0})))
    assert one.text == "the clock of h1 is 5.00 s ahead of that of h0"


def test_a_clock_is_not_blamed_for_a_slow_answer() -> None:
    slow = links(3)
    slow.clocks = {pair: Offset(0.2, 0.5) for pair in slow.clocks}
    assert not faults(judge(seen(3), slow))


def test_another_mtu_and_a_stream_that_stalls_are_named() -> None:
    told = seen(4)
    told[3].way = way(3, mtu=9000)
    (one,) = faults(judge(told, links(4)))
    assert one.text == "eth0 of h3 has MTU 9000, other hosts have 1500"
    assert one.remedy == "Run ip link set eth0 mtu 1500 on h3."
    stalled, *_ = faults(judge(told, links(4, lambda *pair: None if pair == (3, 0) else GBIT)))
    assert (stalled.check, stalled.status) == ("mtu", "fail")
    assert "h0 receives small messages of h3" in stalled.text
    for host in (0, 1):
        told[host].way = way(host, mtu=9000)
    _, *others = faults(judge(told, links(4, lambda *pair: None if pair == (3, 0) else GBIT)))
    assert [one.remedy for one in others] == [f"Run ip link set eth0 mtu 1500 on h{host}." for host in (0, 1, 3)]


def test_versions_that_differ_are_named() -> None:
    told = seen(3)
    told[2].versions = {"Python": "3.12.1"}
    (one,) = faults(judge(told, links(3)))
    assert one.text == "torch differs: 2.13.0 on h0, h1; missing on h2"


def test_hosts_of_one_name_are_told_apart() -> None:
    told = [replace(one, host="box") for one in seen(2)]
    told[1].way = way(1, mtu=9000)
    assert "box (rank 1)" in faults(judge(told, links(2)))[0].text


@given(st.integers(1, 12))
def test_each_pair_meets_once_in_turns_without_conflict(count: int) -> None:
    ranks = [3 * number for number in range(count)]
    turns = {rank: list(partners(rank, ranks)) for rank in ranks}
    for rank, met in turns.items():
        assert sorted(met) == [other for other in ranks if other != rank]
    # No pair waits for a pair that waits for it: in an order of pairs in which both ends agree, all come to an end.
    left = {rank: list(met) for rank, met in turns.items()}
    while any(left.values()):
        ready = [(one, met[0]) for one, met in left.items() if met and left[met[0]][:1] == [one]]
        assert ready
        for one, _ in ready:
            left[one].pop(0)


def test_notes_are_read_as_they_are_written() -> None:
    (one, _) = seen(2)
    one.unreached = {1: "timed out"}
    assert Seen.from_json(one.to_json(), range(2)) == one
    told, read = links(3, lambda *pair: None if pair == (0, 1) else GBIT), Links()
    for rank in range(3):  # each tells of the streams that come to it, and of the clocks that it has asked for
        rates = {pair: rate for pair, rate in told.rates.items() if pair[1] == rank}
        clocks = {pair: offset for pair, offset in told.clocks.items() if pair[0] == rank}
        read.add_json(Links(rates, clocks).to_json(), rank, range(3))
    assert read == told


@pytest.mark.parametrize(
    ("what", "note"),
    [
        ("seen", b"{}"),
        ("seen", b"[" * 60_000),
        ("seen", b'{"rank": 0, "host": "h1", "way": {}, "versions": {}, "findings": [], "unreached": {"-1": "x"}}'),
        ("links", b"[[[0, 1, NaN]], []]"),
        ("links", b"[[[0, 2, 1e9]], []]"),
    ],
)
@pytest.mark.usefixtures("apart")
def test_a_note_that_makes_no_sense_is_a_finding_and_the_others_count(
    monkeypatch: pytest.MonkeyPatch, what: str, note: bytes
) -> None:
    told = MeetingClient.set

    def planted(self: MeetingClient, key: str, value: bytes) -> None:
        told(self, key, note if key == f"{what}/1" else value)

    monkeypatch.setattr(MeetingClient, "set", planted)
    with ThreadPoolExecutor(3) as pool:
        found, *others = pool.map(lambda one: hosts.findings(one, 20.0), environments(3))
    assert others == [None, None]
    assert found is not None
    senseless = [one for one in found if "makes no sense" in one.text]
    assert [(one.status, one.text.startswith("what rank 1 (h1, pid")) for one in senseless] == [("fail", True)]
    assert any(one.text.startswith("h0: much; ok too: ") and "h2" in one.text for one in found)


# Real ranks, in threads, each of which says that it is on a host of its own.


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    describe = Listener.describe

    def described(self: Listener, terms: dict[str, str]) -> Member:
        me = describe(self, terms)
        return replace(me, host=f"h{me.index}", machine=f"m{me.index}", pid_space=f"p{me.index}")

    monkeypatch.setattr(Listener, "describe", described)
    monkeypatch.setattr(hosts, "examined", lambda _: [Finding("memory", "ok", "much")])
    monkeypatch.setattr(hosts, "_SLICE_S", 0.01)


def environments(world: int) -> list[Environment]:
    with bind_here() as probe:
        port = probe.getsockname()[1]
    return [Environment("arguments", rank, world, address="127.0.0.1", port=port, secret=b"s") for rank in range(world)]


@pytest.mark.usefixtures("apart")
def test_ranks_check_each_other() -> None:
    with ThreadPoolExecutor(3) as pool:
        found, *others = pool.map(lambda one: hosts.findings(one, 20.0), environments(3))
    assert others == [None, None]
    assert found is not None
    by_check = {one.check: one for one in found}
    assert by_check["reach"].text.startswith("all 3 hosts reach each other, in at most ")
    assert {"memory", "clocks", "mtu"} <= {one.check for one in found if one.status == "ok"}
    assert "bandwidth" in by_check


@pytest.mark.usefixtures("apart")
def test_a_host_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes to the meeting, and says nothing then."""
    monkeypatch.setattr(hosts, "LIMIT_S", 0.4)
    monkeypatch.setattr(hosts, "_SPARE_S", 0.0)
    monkeypatch.setattr(hosts, "_STALL_S", 0.1)

    def silent(environment: Environment) -> None:
        run = f"{environment.run_id}/doctor"
        with Rendezvous(environment).join(run, None, None, 20.0) as joined:
            doors = Listener("127.0.0.1", run_id(run), joined.secret, environment.rank, environment.world)
            terms = {"version": hosts.__version__, "command": "doctor"}
            joined.client.call_roll(doors.describe(terms), run, joined.secret)
            with closing(doors), suppress(GroupError):
                joined.client.through()

    places = environments(3)
    with ThreadPoolExecutor(3) as pool:
        quiet = pool.submit(silent, places[2])
        answers = [pool.submit(hosts.findings, one, 20.0) for one in places[:2]]
        found = answers[0].result(20.0)
        answers[1].result(20.0)
        quiet.result(20.0)
    assert found is not None
    missing = [one for one in found if one.status == "fail"]
    assert any("rank 2 (h2, pid" in one.text and "not answered within" in one.text for one in missing)
    assert any(one.text.startswith("h0: much; ok too: h1") for one in found)


def test_a_rank_that_does_not_come_is_named() -> None:
    begun = time.monotonic()
    found = hosts.findings(environments(2)[0], 0.2)
    assert time.monotonic() - begun < 20
    assert found is not None
    (missing,) = [one for one in found if one.check == "reach"]
    assert missing.status == "fail"
    assert "rank 1" in missing.text
    assert {"cores", "memory", "shm", "network"} <= {one.check for one in found}
