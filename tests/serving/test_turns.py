"""Pushes are in the weights once, whoever is lost: the order of several owners, and the samples that they count."""

from __future__ import annotations

import copy
import json
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.sampling import Pool
from syncline.serving.owner import HeldParts, HeldShards, decide_parts
from syncline.serving.protocol import ALL, Add, Apply, Ledger, Release, Request
from syncline.serving.turns import SAMPLES, Account, Take, Tell, Turns, counted_in
from syncline.sync import backup_of
from syncline.sync.bsp import Bsp
from syncline.sync.ssp import Ssp

# The account.

pieces = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(1, 6)), max_size=12)


@given(pieces, st.integers(1, 40))
def test_an_account_has_each_sample_once_and_knows_the_rest(given: list[tuple[int, int, int]], samples: int) -> None:
    account, known = Account(), {epoch: set[int]() for epoch in range(3)}
    for epoch, start, size in given:
        if known[epoch].isdisjoint(range(start, start + size)):
            account.count(epoch, start, start + size)
            known[epoch] |= set(range(start, start + size))
        else:
            with pytest.raises(ValueError, match="in the weights already"):
                account.count(epoch, start, start + size)
    assert {(e, i) for e, start, stop in account.counted for i in range(start, stop)} == {
        (epoch, i) for epoch, found in known.items() for i in found
    }
    again = Account(account.counted)
    assert again.counted == account.counted
    for epoch, found in known.items():
        inside = [i for part in again.left(epoch, samples) for i in part if i < samples]
        assert inside == sorted(set(range(samples)) - found)
    first = again.first_left(0, samples)
    assert not any(set(range(samples)) - known[epoch] for epoch in range(first))


def test_added_pushes_count_with_the_update_that_contains_them() -> None:
    account, values = Account(), [{SAMPLES: [0, start, start + 2]} for start in (0, 2, 4)]
    account.note(Add(0, 1, ALL, values[0], 0))
    account.note(Add(1, 1, ALL, values[1], 0))
    assert not account.counted
    account.note(Apply(ALL, 1, 1, ALL, values[1], values[1]))
    assert account.counted == [(0, 0, 4)]
    account.note(Apply(2, 1, 2, ALL, values[2], values[2]))
    assert account.counted == [(0, 0, 6)]
    account.note(Apply(2, 2, 3, ALL, {}, {}))  # of a run that does not count
    assert counted_in(json.loads(json.dumps(account.counted))) == account.counted
    for text in ("{}", "[1]", "[[0, 0]]", "[[0, 2, 1]]", "[[0, 0, true]]", "[[0, 0, 2], [0, 1, 3]]"):
        with pytest.raises(ValueError, match=r"no list of samples|are no range"):
            counted_in(json.loads(text))


# All together: workers, owners and the pool of batches, in any order of events, with losses.

SAMPLES_OF_AN_EPOCH, PIECE = 5, 2


class Owner:
    """One server process: its own part of the weights is the list of updates, each of some pushes, and so is the part
    that it follows. ``kept`` are its parts of earlier views, and ``begun`` says whether it has those of this one."""

    def __init__(self, process: int, me: int, run: Run, before: Any, kept: HeldParts) -> None:
        self.process, self.me, self.kept, self.begun = process, me, kept, False
        self.view, count, workers = run.view, run.count, len(run.workers)
        self.turns, self.ledger = Turns(me, range(count), workers), Ledger(workers, run.rule)
        self.account = Account(before[1])
        self.updates: list[tuple[tuple[int, ...], ...]] = list(before[0])
        self.added: list[tuple[int, ...]] = []
        self.held: dict[int, Request] = {}
        self.roles = SimpleNamespace(
            owners=count, places=lambda _: range(count), followers=lambda _: [*range(1, count), *range(count > 1)]
        )

    def take(self, worker: int) -> list[Release]:
        self.turns.take(worker)
        return self.catch_up(self.held.pop(worker))

    def catch_up(self, request: Request) -> list[Release]:
        released = []
        for action in self.ledger.handle(request):
            self.account.note(action)
            if isinstance(action, Add):
                self.added.append(tuple(action.values[SAMPLES]))
            elif isinstance(action, Apply) and action.worker == ALL:
                self.updates.append(tuple(self.added))
                self.added = []
            elif isinstance(action, Apply):
                self.updates.append((tuple(action.values[SAMPLES]),))
            elif isinstance(action, Release):
                released.append(action)
        return released

    def outlive(self, workers: list[int]) -> None:
        """The pushes of these workers have arrived as a whole."""

    def contents(self) -> list[Any]:
        return [list(self.updates)] * 2

    @property
    def counted(self) -> Any:
        return self.account.counted

    def hold(self) -> HeldParts:
        """What it has once the session is over."""
        if not self.begun:
            return self.kept
        strategy = SimpleNamespace(roles=self.roles)
        session: Any = SimpleNamespace(view=self.view, strategy=strategy, group=None, index=self.me)
        mine: Any = self
        return HeldShards(session, mine, self.turns, self.held).beside(self.kept)


class Worker:
    """A worker: the batch in its hands, the owners that have answered its push, and the steps that it has made."""

    def __init__(self) -> None:
        self.epoch, self.piece, self.made = 0, range(0), 0
        self.pushed = self.over = self.met = False
        self.answers: set[int] = set()


class Run:
    """A run whose messages travel in any order between different processes."""

    def __init__(self, workers: int, owners: int, rule: Ssp | Bsp, epochs: int) -> None:
        self.rule, self.epochs = rule, epochs
        self.view, self.fresh = 0, 0  # the number of the view, and of the next process
        self.whole: list[int] = []  # the owners of the last view that all have begun
        self.lost: set[int] = set()
        self.finished: set[tuple[int, ...]] = set()  # pushes whose workers have gone on
        self.begin(workers, [HeldParts()] * owners, ([], ()))
        for owner in self.owners.values():
            self.begins(owner)

    def begin(self, workers: int, kept: list[HeldParts], before: Any, numbers: tuple[int, ...] = ()) -> None:
        """Begin a view with so many workers, and owners who have ``kept`` parts; the last ones may be new."""
        self.pool = Pool(SAMPLES_OF_AN_EPOCH, PIECE, workers, Account(before[1]))
        self.workers = {number: Worker() for number in range(workers)}
        self.view, self.count = self.view + 1, len(kept)
        names = [*numbers, *range(self.fresh, self.fresh + len(kept) - len(numbers))]
        self.fresh = max([self.fresh, *(name + 1 for name in names)])
        self.owners = {me: Owner(names[me], me, self, before, parts) for me, parts in enumerate(kept)}
        first = Account(before[1]).first_left(0, SAMPLES_OF_AN_EPOCH)
        for worker in self.workers.values():
            worker.epoch, worker.over = first, first >= self.epochs
        self.under_way: dict[tuple[str, int, int], deque[Any]] = {}

    def begins(self, owner: Owner) -> None:
        owner.begun = True
        if all(one.begun for one in self.owners.values()):
            self.whole, self.lost = [one.process for one in self.owners.values()], set()

    def events(self) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = [("begins", me) for me, one in self.owners.items() if not one.begun]
        for number, worker in self.workers.items():
            if not worker.piece and not worker.over:
                found.append(("batch", number))
            elif not worker.pushed and not worker.met:
                found.append(("push" if worker.piece else "meet", number))
        ways = [way for way, messages in self.under_way.items() if messages]
        return [*found, *(("arrives", *way) for way in ways if way[0] == "answer" or self.owners[way[2]].begun)]

    def send(self, kind: str, source: int, to: int, message: Any) -> None:
        self.under_way.setdefault((kind, source, to), deque()).append(message)

    def do(self, event: tuple[Any, ...]) -> None:
        if event[0] == "arrives":
            self.arrives(*event[1:])
            return
        if event[0] == "begins":
            self.begins(self.owners[event[1]])
            return
        number, worker = event[1], self.workers[event[1]]
        if event[0] == "batch":
            worker.piece = self.pool.take(number, worker.epoch)
            if not worker.piece:
                worker.epoch += 1
                worker.over = worker.epoch == self.epochs
            return
        worker.pushed = True
        worker.made += 1
        values = {SAMPLES: [worker.epoch, worker.piece.start, worker.piece.stop]} if event[0] == "push" else {}
        if isinstance(self.rule, Ssp) and values:
            slowest = min(one.ledger.clock_of(w) for one in self.owners.values() for w in self.busy())
            assert worker.made - 1 - slowest <= self.rule.staleness
        for owner in self.owners:
            self.send("push", number, owner, Request(event[0], number, worker.made, values))

    def busy(self) -> list[int]:
        return [number for number, worker in self.workers.items() if not worker.over]

    def arrives(self, kind: str, source: int, to: int) -> None:
        message = self.under_way[kind, source, to].popleft()
        if kind == "answer":
            worker = self.workers[to]
            worker.answers.add(source)
            if worker.answers == set(self.owners):
                worker.pushed, worker.met = False, not worker.piece
                if worker.piece:
                    self.finished.add((worker.epoch, worker.piece.start, worker.piece.stop))
                worker.piece, worker.answers = range(0), set()
            return
        owner = self.owners[to]
        if kind == "push":
            owner.held[source] = message
            actions = owner.turns.hold(source)
        else:
            actions = owner.turns.hear(source, message)
        for action in actions:
            if isinstance(action, Tell):
                self.send("turn", to, action.to, action.worker)
            else:
                assert isinstance(action, Take)
                for released in owner.take(action.worker):
                    for worker in released.workers:
                        self.send("answer", to, worker, None)

    def lose(self, worker: int | None, owner: int | None, joins: tuple[int, int] = (0, 0)) -> bool:
        """Go on without them, and with so many new workers and owners. A part of a lost owner comes from the next one,
        which follows it. False if the run ends, because both are lost."""
        left = [one for me, one in self.owners.items() if me != owner]
        self.lost |= set() if owner is None else {self.owners[owner].process}
        kept = [*(one.hold() for one in left), *(HeldParts() for _ in range(joins[1]))]
        told = json.loads(json.dumps([{"parts": one.keys(0), "turns": one.told} for one in kept]))
        givers, missing, ahead = decide_parts(told)
        if missing:
            gone = [process in self.lost for process in self.whole]
            assert any(one and after for one, after in zip(gone, gone[1:] + gone[:1], strict=True))
            return False
        assert ahead is not None
        for one in kept:
            one.catch_up(ahead)
        (updates,) = {tuple(kept[process].after(0)[part]) for part, process in givers.items()}  # in the same order
        counted, pushes = counted_in(ahead["counted"]), [push for update in updates for push in update]
        assert self.finished <= set(pushes) or isinstance(self.rule, Bsp)  # which answers before the update
        assert Account(pushes).counted == list(counted)
        workers = len(self.workers) - (worker is not None) + joins[0]
        self.begin(workers, kept, (list(updates), counted), tuple(one.process for one in left))
        return True

    def check_end(self) -> None:
        whole = [(epoch, 0, SAMPLES_OF_AN_EPOCH) for epoch in range(self.epochs)]
        assert [one.account.counted for one in self.owners.values()] == [whole] * len(self.owners)


@given(
    st.data(), st.integers(2, 3), st.integers(1, 3), st.sampled_from([*map(Ssp, range(3)), Bsp(1)]), st.integers(1, 2)
)
def test_every_sample_is_in_all_parts_once_whoever_is_lost_when(
    data: st.DataObject, workers: int, owners: int, rule: Ssp | Bsp, epochs: int
) -> None:
    """Also if a process joins, and if a view breaks when some owners have begun it."""
    run = Run(workers, owners, rule, epochs)
    breaks = data.draw(st.lists(st.integers(0, 40), max_size=4))
    for number in range(10_000):
        events = run.events()
        if not events:
            break
        if number in breaks:
            some = len(run.workers) > 1 + backup_of(rule)
            worker = data.draw(st.sampled_from([None, *run.workers])) if some else None
            owner = data.draw(st.sampled_from([None, *run.owners])) if len(run.owners) > 1 else None
            if not run.lose(worker, owner, data.draw(st.sampled_from([(0, 0), (1, 0), (0, 1)]))):
                return
            continue
        run.do(data.draw(st.sampled_from(events)))
    run.check_end()


def test_nobody_goes_back_to_parts_that_lack_an_answered_push() -> None:
    """Two of three owners are lost. The third had all parts of the view before, until the first push."""
    run = Run(2, 2, Ssp(0), 1)
    assert run.lose(None, None, (0, 1))
    while not run.finished:
        run.do(run.events()[0])
    assert run.lose(None, 1)
    assert not run.lose(None, 1)


@pytest.mark.parametrize("rule", [Ssp(0), Bsp(1)])
def test_one_loss_at_every_point_of_every_order_of_two_pushes(rule: Ssp | Bsp) -> None:
    """Two workers push once each to two owners: all orders of all messages, and any process is lost, or one joins, at
    any point. Then any process is lost while the owners begin the next view, in any order."""
    seen: set[str] = set()
    ends = 0

    def state(run: Run) -> str:
        return repr(
            (
                [(w.epoch, w.piece, w.made, w.pushed, w.over, sorted(w.answers)) for w in run.workers.values()],
                [(o.updates, sorted(o.held), o.turns.taken, o.turns._holders, o.begun) for o in run.owners.values()],
                [(o.added, sorted(o.ledger._met)) for o in run.owners.values()],
                [(run.view, run.whole, run.lost), *(o.kept.after(0) for o in run.owners.values())],
                sorted((way, list(map(str, messages))) for way, messages in run.under_way.items()),
            )
        )

    def branches(run: Run) -> Iterator[Callable[[Run], Any]]:
        for event in run.events():
            if run.view == 1 or event[0] == "begins":
                yield lambda one, event=event: one.do(event)
        for number in run.workers if len(run.workers) > 1 + backup_of(rule) else ():
            yield lambda one, number=number: one.lose(number, None)
        for number in run.owners if len(run.owners) > 1 else ():
            yield lambda one, number=number: one.lose(None, number)
        for joins in ((1, 0), (0, 1)) if run.view == 1 else ():
            yield lambda one, joins=joins: one.lose(None, None, joins)

    todo = [Run(2, 2, rule, 1)]
    while todo:
        run = todo.pop()
        if any(worker.made > 1 for worker in run.workers.values()) or state(run) in seen:
            continue
        seen.add(state(run))
        if run.view > 2 or (run.view == 2 and all(one.begun for one in run.owners.values())):
            while events := run.events():
                run.do(events[0])
            run.check_end()
            ends += 1
            continue
        for branch in branches(run):
            after = copy.deepcopy(run)
            if branch(after) is not False:
                todo.append(after)
    assert ends > 50


def test_turns_that_nobody_can_have_are_refused() -> None:
    first = Turns(3, [3, 4], workers=2)
    assert first.hold(0) == []
    with pytest.raises(ValueError, match="twice"):
        first.hold(0)
    assert first.hear(4, 0) == [Tell(4, 0), Take(0)]
    other = Turns(4, [3, 4], workers=2)
    assert other.hold(1) == [Tell(3, 1)]
    assert other.hear(3, 1) == [Take(1)]
    with pytest.raises(ValueError, match="3 turns ahead"):
        other.missing(3, [0])
    assert Turns(3, [3], workers=1).hold(0) == [Take(0)]
