"""Pushes are in the weights once, whoever is lost: the order of several owners, and the samples that they count."""

from __future__ import annotations

import copy
import json
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.sampling import Pool
from syncline.serving.protocol import ALL, Add, Apply, Ledger, Release, Request
from syncline.serving.turns import SAMPLES, Account, Take, Tell, Turns, counted_in
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
    """One server process: its own part of the weights is the list of pushes in it, and so is the part that it
    follows."""

    def __init__(self, me: int, owners: list[int], workers: int, staleness: int, before: Any) -> None:
        self.me, self.before = me, before
        self.turns, self.ledger = Turns(me, owners, workers), Ledger(workers, Ssp(staleness))
        self.account = Account(before[1])
        self.pushes: list[tuple[int, ...]] = list(before[0])
        self.held: dict[int, Request] = {}

    def take(self, worker: int) -> list[Release]:
        self.turns.take(worker)
        released = []
        for action in self.ledger.handle(self.held.pop(worker)):
            self.account.note(action)
            if isinstance(action, Apply):
                self.pushes.append(tuple(action.values[SAMPLES]))
            elif isinstance(action, Release):
                released.append(action)
        return released


class Worker:
    """A worker: the batch in its hands, the owners that have answered its push, and the steps that it has made."""

    def __init__(self) -> None:
        self.epoch, self.piece, self.made = 0, range(0), 0
        self.pushed = self.over = False
        self.answers: set[int] = set()


class Run:
    """A run whose messages travel in any order between different processes."""

    def __init__(self, workers: int, owners: int, staleness: int, epochs: int) -> None:
        self.staleness, self.epochs = staleness, epochs
        self.begin(workers, owners, ([], ()))

    def begin(self, workers: int, owners: int, before: Any) -> None:
        self.pool = Pool(SAMPLES_OF_AN_EPOCH, PIECE, workers, Account(before[1]))
        self.workers = {number: Worker() for number in range(workers)}
        self.owners = {me: Owner(me, list(range(owners)), workers, self.staleness, before) for me in range(owners)}
        first = Account(before[1]).first_left(0, SAMPLES_OF_AN_EPOCH)
        for worker in self.workers.values():
            worker.epoch, worker.over = first, first >= self.epochs
        self.under_way: dict[tuple[str, int, int], deque[Any]] = {}

    def events(self) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = []
        for number, worker in self.workers.items():
            if not worker.piece and not worker.over:
                found.append(("batch", number))
            elif worker.piece and not worker.pushed:
                found.append(("push", number))
        return [*found, *(("arrives", *way) for way, messages in self.under_way.items() if messages)]

    def send(self, kind: str, source: int, to: int, message: Any) -> None:
        self.under_way.setdefault((kind, source, to), deque()).append(message)

    def do(self, event: tuple[Any, ...]) -> None:
        if event[0] == "arrives":
            self.arrives(*event[1:])
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
        values = {SAMPLES: [worker.epoch, worker.piece.start, worker.piece.stop]}
        slowest = min([one.ledger.clock_of(w) for one in self.owners.values() for w in self.busy()] or [0])
        assert worker.made - 1 - slowest <= self.staleness
        for owner in self.owners:
            self.send("push", number, owner, Request("push", number, worker.made, values))

    def busy(self) -> list[int]:
        return [number for number, worker in self.workers.items() if not worker.over]

    def arrives(self, kind: str, source: int, to: int) -> None:
        message = self.under_way[kind, source, to].popleft()
        if kind == "answer":
            worker = self.workers[to]
            worker.answers.add(source)
            if worker.answers == set(self.owners):
                worker.pushed, worker.piece, worker.answers = False, range(0), set()
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

    def meet(self) -> None:
        """Workers without batches wait for the others, whom the bound then lets go on."""
        for number, worker in self.workers.items():
            if worker.over and not worker.pushed:
                for me, owner in self.owners.items():
                    if number in owner.ledger._moving() and len(owner.ledger._moving()) > 1:
                        for action in owner.ledger.handle(Request("meet", number, owner.ledger.clock_of(number) + 1)):
                            if isinstance(action, Release):
                                for released in action.workers:
                                    self.send("answer", me, released, None)

    def lose(self, worker: int | None, owner: int | None) -> None:
        """Go on without them. A part of a lost owner comes from the next one, which follows it."""
        answered = {
            (w.epoch, w.piece.start, w.piece.stop)
            for w in self.workers.values()
            if w.pushed and w.answers == set(self.owners)
        }
        left = [one for me, one in self.owners.items() if me != owner]
        taken, recent = max((one.turns.taken, one.turns.recent) for one in left)
        for one in left:
            for missing in one.turns.missing(taken, recent):
                one.take(missing)
        (pushes,) = {tuple(one.pushes) for one in left}  # all parts have the same, in the same order
        (counted,) = {tuple(one.account.counted) for one in left}
        assert answered <= set(pushes)
        assert Account(pushes).counted == list(counted)
        workers = len(self.workers) - (worker is not None)
        self.begin(workers, len(left), (list(pushes), counted))

    def check_end(self) -> None:
        whole = [(epoch, 0, SAMPLES_OF_AN_EPOCH) for epoch in range(self.epochs)]
        assert [one.account.counted for one in self.owners.values()] == [whole] * len(self.owners)


@given(st.data(), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2), st.integers(1, 2))
def test_every_sample_is_in_all_parts_once_whoever_is_lost_when(
    data: st.DataObject, workers: int, owners: int, staleness: int, epochs: int
) -> None:
    run = Run(workers, owners, staleness, epochs)
    losses = data.draw(st.lists(st.integers(0, 40), max_size=4))
    for number in range(10_000):
        run.meet()
        events = run.events()
        if not events:
            break
        if number in losses:
            worker = data.draw(st.sampled_from([None, *run.workers])) if len(run.workers) > 1 else None
            owner = data.draw(st.sampled_from([None, *run.owners])) if len(run.owners) > 1 else None
            run.lose(worker, owner)
            continue
        run.do(data.draw(st.sampled_from(events)))
    run.check_end()


def test_one_loss_at_every_point_of_every_order_of_two_pushes() -> None:
    """Two workers push once each to two owners: all orders of all messages, and any process is lost at any point."""
    seen: set[str] = set()
    ends = 0

    def state(run: Run) -> str:
        return repr(
            (
                [(w.epoch, w.piece, w.made, w.pushed, w.over, sorted(w.answers)) for w in run.workers.values()],
                [(o.pushes, sorted(o.held), o.turns.taken, o.turns._holders) for o in run.owners.values()],
                sorted((way, list(map(str, messages))) for way, messages in run.under_way.items()),
            )
        )

    def branches(run: Run) -> Iterator[Callable[[Run], None]]:
        for event in run.events():
            yield lambda one, event=event: one.do(event)
        for number in (0, 1):
            yield lambda one, number=number: one.lose(number, None)
            yield lambda one, number=number: one.lose(None, number)

    start = Run(2, 2, 0, 1)
    start.lose(None, None)
    todo = [start]
    while todo:
        run = todo.pop()
        if len(run.workers) + len(run.owners) < 4:
            while events := run.events():
                run.do(events[0])
                run.meet()
            run.check_end()
            ends += 1
            continue
        if any(worker.made > 1 for worker in run.workers.values()) or state(run) in seen:
            continue
        seen.add(state(run))
        for branch in branches(run):
            after = copy.deepcopy(run)
            branch(after)
            todo.append(after)
    assert ends > 100


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
