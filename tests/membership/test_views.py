"""One view for all at every step: in all interleavings of small runs, in random ones of larger runs, and by example."""

from __future__ import annotations

import json
from typing import Any

import pytest
from explorer import TERMS, Explorer, founders, joiner
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.membership import (
    Accept,
    Accepted,
    Action,
    AskLauncher,
    Commit,
    Halt,
    Join,
    Message,
    Outbid,
    Peer,
    Prepare,
    Promise,
    Refused,
    Report,
    Send,
    Stop,
    Train,
    View,
    ViewKeeper,
    from_plain,
    to_plain,
)


def explored(explorer: Explorer, most: int = 1_000_000) -> set[Any]:
    """All states of a run: none breaks a rule, and from each the run comes to an end by itself."""
    return explorer.search(most)


CRASHES, ALL = "c", "cfld"


@pytest.mark.parametrize(
    ("members", "faults", "kinds", "timeouts", "steps"),
    [
        (2, 2, ALL, 2, 1),
        (3, 1, CRASHES, 1, 1),
        pytest.param(3, 2, CRASHES, 1, 1, marks=pytest.mark.deep),
        (3, 2, ALL, 0, 0),
        (4, 1, CRASHES, 0, 1),
        pytest.param(4, 2, CRASHES, 0, 0, marks=pytest.mark.deep),
        pytest.param(3, 1, ALL, 1, 0, marks=pytest.mark.deep),
        pytest.param(4, 1, CRASHES, 1, 0, marks=pytest.mark.deep),
    ],
)
def test_no_interleaving_breaks_a_rule(members: int, faults: int, kinds: str, timeouts: int, steps: int) -> None:
    explorer = Explorer(founders(members), faults=faults, timeouts=timeouts, kinds=kinds, steps=steps)
    found = explored(explorer)
    assert max(len(world.committed) for world in found) > min(faults, members - 1)  # each lost member costs a view


@pytest.mark.parametrize(
    ("members", "faults", "timeouts"),
    [(3, 1, 0), pytest.param(3, 2, 1, marks=pytest.mark.deep), pytest.param(4, 1, 0, marks=pytest.mark.slow)],
)
def test_members_go_back_by_one_step_at_most(members: int, faults: int, timeouts: int) -> None:
    """Where weights are in parts. Some course goes back: a member has finished a step that the next view repeats."""
    group = founders(members, newest=False)
    explorer = Explorer(group, faults=faults, timeouts=timeouts, kinds=CRASHES)
    found = explored(explorer)
    keepers = [explorer.keeper(world, i) for world in found for i in explorer.living(world)]
    assert any(keeper.finished > keeper.view.step for keeper in keepers if keeper.view.number > 1 and not keeper.ready)


def test_servers_are_members_without_weights() -> None:
    """Another one takes the place of a lost one. The only worker may be lost as well: then nobody goes on."""
    group = founders(2, servers=1, newest=False)
    group.append(joiner("new", [keeper.me for keeper in group], serves=True, servers=1, newest=False))
    explorer = Explorer(group, faults=2, timeouts=0, kinds=CRASHES)
    found = explored(explorer)
    assert any(explorer.keeper(world, 2).me == Peer(2, "new", serves=True) for world in found)


@pytest.mark.parametrize(
    ("members", "faults", "kinds", "steps"),
    [(1, 2, ALL, 1), (2, 1, CRASHES, 0), (1, 2, "cr", 1), (2, 1, "r", 0)],
)
def test_no_interleaving_of_a_join_breaks_a_rule(members: int, faults: int, kinds: str, steps: int) -> None:
    group = founders(members)
    group.append(joiner("new", [keeper.me for keeper in group]))
    explorer = Explorer(group, faults=faults, timeouts=0, kinds=kinds, steps=steps)
    found = explored(explorer)
    assert any(explorer.keeper(world, members).me == Peer(members, "new") for world in found)


class Halves(ViewKeeper):
    def _is_quorum(self, numbers: frozenset[int]) -> bool:
        return 2 * len(numbers) >= len(self.view.members)


class Forgetful(ViewKeeper):
    def _promise(self) -> Promise:
        return Promise(self.view.number, self._promised, self.finished, None)


class Faithless(ViewKeeper):
    def _answer(self, sender: Peer, message: Any) -> list[Action]:
        self._promised = (0, -1)
        return super()._answer(sender, message)


class Restless(ViewKeeper):
    def _halt(self) -> list[Action]:
        return []


class Selfish(ViewKeeper):
    def _next(self, made: Any, answered: frozenset[int]) -> View:
        view = super()._next(made, answered)
        return View(view.number, view.members, view.fresh, self.finished, self.me.number)


class Reused(ViewKeeper):
    def _next(self, made: Any, answered: frozenset[int]) -> View:
        view = super()._next(made, answered)
        return View(view.number, view.members, self.view.fresh - 1, view.step, view.source)


class Patient(ViewKeeper):
    def timeout(self) -> list[Action]:
        return []


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Halves, "was decided after|has no quorum"),
        (Forgetful, "was decided after"),
        (Faithless, "was decided after"),
        (Restless, "trains under view|finished a step"),
        (Selfish, "finished a step"),
        (Reused, "has a number that"),
        (Patient, "no end"),
    ],
)
def test_the_search_finds_broken_rules(kind: type[ViewKeeper], words: str) -> None:
    group = founders({Halves: 2, Reused: 1}.get(kind, 3), kind)
    if kind is Reused:
        group.append(joiner("new", [Peer(0, "p0")]))
    explorer = Explorer(group, faults=2, timeouts=1, steps=int(kind in (Restless, Selfish)), kinds="cfl")
    with pytest.raises(AssertionError, match=words):
        explored(explorer, 100_000)


@settings(max_examples=60)
@given(st.data(), st.integers(2, 6), st.integers(0, 2), st.integers(0, 4))
def test_random_courses_of_larger_runs(data: st.DataObject, members: int, joining: int, faults: int) -> None:
    group = founders(members)
    group += [joiner(f"new{number}", [keeper.me for keeper in group[:members]]) for number in range(joining)]
    explorer = Explorer(group, faults=faults, timeouts=6, steps=2)
    world = explorer.first
    for choice in data.draw(st.lists(st.integers(0, 999), max_size=60)):
        found = [after for _, after in explorer.successors(world)]
        if not found:
            break
        world = found[choice % len(found)]
        explorer.check(world)
    explorer.settle(world)


# By example.


class Run:
    """Keepers whose messages arrive at once, unless their receiver is gone."""

    def __init__(self, count: int, **limits: Any) -> None:
        self.keepers = {keeper.me.name: keeper for keeper in founders(count, **limits)}
        self.gone: set[str] = set()
        self.favours = self.restores = True
        self.last_promise = ""  # whose last message its first promise is
        self.said: list[tuple[str, Action]] = []

    def carry_out(self, name: str, actions: list[Action]) -> None:
        """Carry out a process's actions, and those that follow."""
        keeper = self.keepers[name]
        for action in actions:
            self.said.append((name, action))
            if isinstance(action, Send) and isinstance(action.message, Promise) and name == self.last_promise:
                self.gone.add(name)
            if isinstance(action, Send) and action.to.name not in self.gone and action.to.name in self.keepers:
                me = keeper.me
                self.carry_out(action.to.name, self.keepers[action.to.name].hear(me, action.message))
            if isinstance(action, Train) and self.restores and not keeper.halted:
                keeper.restored()
            if isinstance(action, AskLauncher) and self.favours:
                self.carry_out(name, keeper.favoured(action.view, action.half))

    def lose(self, *names: str) -> None:
        """Kill these members; all others notice."""
        self.gone.update(names)
        for name, keeper in self.keepers.items():
            if name not in self.gone:
                numbers = [peer.number for peer in keeper.view.members if peer.name in names]
                self.carry_out(name, keeper.suspect(numbers))

    def views(self) -> set[View]:
        """The views of the members that are left."""
        return {keeper.view for name, keeper in self.keepers.items() if name not in self.gone}

    def ask(self, name: str, serves: bool = False, **terms: str) -> ViewKeeper:
        """Let a process ask all members to join. A server knows the version only."""
        peers = [keeper.me for other, keeper in self.keepers.items() if other not in self.gone]
        known = {"version": TERMS["version"]} if serves else TERMS
        self.keepers[name] = ViewKeeper.joining(name, peers, known | terms, serves=serves)
        self.gone.discard(name)
        self.carry_out(name, self.keepers[name].timeout())
        return self.keepers[name]


def test_three_then_two_then_one() -> None:
    run = Run(3)
    for name in ("p0", "p1"):
        run.keepers[name].finish()  # p2 has not finished the step
    run.lose("p1")
    (view,) = run.views()
    assert [peer.name for peer in view.members] == ["p0", "p2"]
    assert (view.number, view.step, view.source) == (2, 1, 0)
    assert ("p2", Train(view)) in run.said
    run.keepers["p2"].finish()
    run.lose("p0")
    (view,) = run.views()
    assert [peer.name for peer in view.members] == ["p2"]
    assert (view.number, view.step, view.source) == (3, 2, 2)
    run.keepers["p2"].finish()


def test_the_source_is_lost_before_the_others_have_its_weights() -> None:
    run = Run(3)
    run.restores = False
    run.keepers["p0"].finish()
    run.lose("p1")
    (view,) = run.views()
    assert (view.step, view.source) == (1, 0)
    with pytest.raises(ValueError, match="before the weights were restored"):
        run.keepers["p2"].finish()
    run.lose("p0")
    (view,) = run.views()
    assert (view.number, view.step, view.source) == (3, 0, 2)


def test_nobody_goes_on_without_weights() -> None:
    run = Run(1)
    run.restores = False
    keeper = run.ask("new")
    run.lose("p0")
    assert keeper.stopped == "nobody who is left has the weights"
    with pytest.raises(ValueError, match="after Halt"):
        keeper.restored()


@pytest.mark.parametrize("members", [2, 4])
def test_half_of_a_view_goes_on_only_if_the_launcher_favours_it(members: int) -> None:
    run = Run(members)
    run.favours = False
    run.lose(*(f"p{number}" for number in range(members // 2)))
    first = run.keepers[f"p{members // 2}"]
    while not first.stopped:
        assert first.halted
        run.carry_out(first.me.name, first.timeout())
    assert f"of {members} are left" in first.stopped
    assert ("p" + str(members // 2), Stop(first.stopped)) in run.said


def test_a_death_after_the_promise_needs_no_timeout() -> None:
    run = Run(4)
    run.last_promise = "p1"
    run.lose("p3")
    assert all(run.keepers[name].halted for name in ("p0", "p2"))
    run.lose("p1")
    (view,) = run.views()
    assert (view.number, [peer.name for peer in view.members]) == (3, ["p0", "p2"])


def test_less_than_half_stops_at_once() -> None:
    run = Run(3)
    run.lose("p0", "p1")
    assert "only members 2 of 3 are left" in run.keepers["p2"].stopped
    with pytest.raises(ValueError, match="after Halt"):
        run.keepers["p2"].finish()
    assert run.keepers["p2"].timeout() == run.keepers["p2"].suspect([0]) == []


def test_a_run_stops_below_its_least_number_of_members() -> None:
    run = Run(3, least=3)
    run.lose("p1")
    assert "2 members are left, and this run needs 3" in run.keepers["p0"].stopped


def test_who_joins_begins_with_the_weights_of_the_others() -> None:
    run = Run(2)
    for name in ("p0", "p1"):
        run.keepers[name].finish()
    keeper = run.ask("new")
    (view,) = run.views()
    assert keeper.me == view.members[2] == Peer(2, "new")
    assert (view.number, view.step, view.source) == (2, 1, 0)
    assert keeper.finished == 1
    assert not keeper.halted
    assert ("p1", Halt()) in run.said


def test_a_view_is_renewed_after_a_step_with_who_has_asked() -> None:
    run = Run(2)
    for keeper in run.keepers.values():
        keeper.finish()
    join = Join("new", tuple(sorted(TERMS.items())))
    assert run.keepers["p0"].admits(join)
    run.carry_out("p1", run.keepers["p1"].renew())
    assert run.keepers["p1"].halted
    run.carry_out("p0", run.keepers["p0"].renew())
    (view,) = run.views()
    assert (view.number, view.step, len(view.members)) == (2, 1, 2)
    run.ask("new")
    assert not run.keepers["p0"].admits(join)  # it is a member
    assert not run.keepers["p0"].admits(Join("other", (("version", "2"),)))
    for keeper in run.keepers.values():
        keeper.state({"version": "2"})
    assert run.keepers["p0"].admits(Join("other", (("version", "2"),)))


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        ({"version": "2"}, "this run has version '1', but the process that joins has '2'"),
        ({"strategy": "tree"}, "this run has strategy 'ring', but the process that joins has 'tree'"),
        ({"model": "5"}, "this run has model None, but the process that joins has '5'"),
    ],
)
def test_who_has_other_terms_is_refused_and_the_run_goes_on(terms: dict[str, str], words: str) -> None:
    run = Run(2)
    keeper = run.ask("new", **terms)
    assert keeper.stopped == words
    assert not any(isinstance(action, Halt) for name, action in run.said if name != "new")
    run.keepers["p0"].finish()


def test_a_full_run_refuses() -> None:
    assert Run(2, most=2).ask("new").stopped == "the run has 2 workers already"
    assert not Run(2, most=3).ask("new").stopped


def test_servers_and_workers_are_counted_apart() -> None:
    run = Run(3, servers=1, most=2)
    assert run.ask("new").stopped == "the run has 2 workers already"
    assert run.ask("new", serves=True).stopped == "the run has 1 server already"
    run.lose("p2")
    assert run.ask("new", serves=True, version="2").stopped.startswith("this run has version '1', but the process")
    assert run.ask("new", serves=True).me == Peer(3, "new", serves=True)
    run.lose("p0")
    assert run.ask("newer").me == Peer(4, "newer")
    run.lose("p1")  # the worker proposes, not the server, whose number is less
    assert run.keepers["newer"].view.numbers == {3, 4}
    assert run.ask("newest").me == Peer(5, "newest")


def test_who_was_excluded_stops_and_joins_anew_under_another_number() -> None:
    run = Run(3)
    run.lose("p1")  # which lives, but the others believe it dead
    before = run.keepers["p1"]
    assert not before.halted
    run.gone.clear()
    run.carry_out("p1", before.suspect([0]))
    assert "the others go on without this process since step 0 (view 2)" in before.stopped
    claim = Join("p1", tuple(sorted(TERMS.items())), 1)
    (answer,) = run.keepers["p0"].hear(before.me, claim)
    assert isinstance(answer, Send)
    assert isinstance(answer.message, Refused)
    assert "number 1 belongs to a member that the others have excluded" in answer.message.reason
    assert run.ask("p1").me == Peer(3, "p1")
    assert len({keeper.view for keeper in run.keepers.values()}) == 1


peers = st.builds(Peer, st.integers(0, 99), st.text(max_size=3), st.booleans())
views = st.lists(peers, min_size=1, max_size=3, unique_by=lambda peer: peer.number).flatmap(
    lambda members: st.builds(
        View,
        st.integers(0, 9),
        st.just(tuple(sorted(members))),
        st.integers(100, 200),
        st.integers(-1, 9),
        st.sampled_from([peer.number for peer in members]),
    )
)
ballots = st.tuples(st.integers(0, 9), st.integers(-1, 9))
messages = st.one_of(
    st.builds(Prepare, views, ballots),
    st.builds(Promise, st.integers(0, 9), ballots, st.integers(-1, 9), st.none() | st.tuples(ballots, views)),
    st.builds(Accept, views, ballots, views),
    st.builds(Accepted, st.integers(0, 9), ballots),
    st.builds(Outbid, st.integers(0, 9), ballots),
    st.builds(Commit, views),
    st.builds(Report, st.integers(0, 9), st.frozensets(st.integers(0, 9))),
    st.builds(Join, st.text(), st.just((("a", "b"),)), st.integers(-1, 9), st.booleans()),
    st.builds(Refused, st.text()),
)


@given(messages)
def test_messages_are_the_same_after_a_way_as_text(message: Message) -> None:
    assert from_plain(json.loads(json.dumps(to_plain(message)))) == message


@pytest.mark.parametrize(
    "data",
    [
        None, [], {}, "Commit", ["Nothing"], ["Commit"], ["Commit", None], ["Accepted", "1", [1, 2]],
        ["Accepted", True, [1, 2]], ["Commit", [1, [[0, "a", False]], 1, 0, 5]], ["Commit", [1, [], 1, 0, 0]],
        ["Commit", [1, [[1, "a", False], [0, "b", False]], 2, 0, 0]], ["Commit", [1, [[0, "a", 0]], 1, 0, 0]],
        ["Refused", 3], ["Report", 1, ["x"]], ["Accepted", 1, [1]],
    ],
)  # fmt: skip
def test_nonsense_is_no_message(data: Any) -> None:
    with pytest.raises(ValueError, match="no message about members"):
        from_plain(data)


def test_nobody_who_joins_waits_for_ever() -> None:
    keeper = ViewKeeper.joining("new", [Peer(0, "p0")], TERMS)
    for _ in range(3):
        assert not keeper.stopped
        keeper.timeout()
    assert "no member of the run has answered" in keeper.stopped


def test_a_late_message_is_answered_with_the_view() -> None:
    run = Run(3)
    (first,) = run.views()
    run.lose("p1")
    (view,) = run.views()
    late = Prepare(first, (9, 1))
    assert run.keepers["p0"].hear(first.peer(1), late) == [Send(first.peer(1), Commit(view))]
    assert run.keepers["p0"].view == view


def test_a_silent_member_is_suspected_although_several_members_wait() -> None:
    peers = tuple(Peer(number, str(number)) for number in range(5))
    found = {n: ViewKeeper(peers[n], View(1, peers, 5), {}, patience=4) for n in (1, 2, 3)}  # 0 says nothing

    def carry_out(number: int, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send) and action.to.number in found:
                carry_out(action.to.number, found[action.to.number].hear(peers[number], action.message))

    for number, keeper in found.items():
        carry_out(number, [*keeper.suspect([4]), *keeper.broken()])
    for _ in range(12):
        for number in found:
            carry_out(number, found[number].timeout())
    assert [sorted(keeper.view.numbers) for keeper in found.values()] == [[1, 2, 3]] * 3


def test_one_member_is_left() -> None:
    run = Run(2, least=2)
    run.lose("p1")
    assert "1 member is left, and this run needs 2" in run.keepers["p0"].stopped
