"""Searches all interleavings of a small run's events for states that break a rule of ``syncline.membership``.

A state of the search has the processes' keepers, the messages under way, the launcher's choices, and the faults that
may still happen. Messages have no order. A fault is a crash, a false suspicion, or the loss or duplication of a
message.

Keepers, messages and transitions of single keepers are stored once and then known by their numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from syncline.membership import (
    JOINING,
    Action,
    AskLauncher,
    Commit,
    Halt,
    Peer,
    Send,
    Stop,
    Train,
    View,
    ViewKeeper,
)

TERMS = {"version": "1", "strategy": "ring"}
LAUNCHER = -1


def founders(count: int, kind: type[ViewKeeper] = ViewKeeper, servers: int = 0, **limits: Any) -> list[ViewKeeper]:
    """The members of a first view. The last ones are servers."""
    peers = tuple(Peer(number, f"p{number}", number >= count - servers) for number in range(count))
    return [kind(peer, View(1, peers, count), TERMS, servers=servers, **limits) for peer in peers]


def joiner(name: str, contacts: Sequence[Peer], **limits: Any) -> ViewKeeper:
    """A process that asks these to let it join."""
    return ViewKeeper.joining(name, contacts, TERMS, **limits)


class World(NamedTuple):
    """A state of the search; keepers, messages and halves are numbers of stored values."""

    keepers: tuple[int, ...]
    dead: int  # a bit for each process
    net: tuple[tuple[int, int, int], ...]  # from, to, message; sorted
    favoured: tuple[tuple[int, frozenset[int]], ...]  # by view
    committed: tuple[int, ...]  # the views that were decided, ascending
    faults: int
    timeouts: int


class Broken(AssertionError):
    """A rule that a state breaks, with the events that led there."""


class Explorer:
    """All states that a group of keepers can reach."""

    def __init__(
        self, keepers: Sequence[ViewKeeper], *, faults: int, timeouts: int, steps: int = 1, kinds: str = "cfld"
    ) -> None:
        """``steps`` is the most that a member finishes in a view. ``kinds`` of faults: c(rash), f(alse suspicion),
        l(oss), d(uplication), and r(enewal): a member ends the view without a fault.
        """
        self._keepers: list[ViewKeeper] = []
        self._watched: list[tuple[tuple[int, int], ...]] = []  # for each keeper whom it may suspect: process and number
        self._known: dict[Any, int] = {}
        self._values: list[Any] = []
        self._numbers: dict[Any, int] = {}
        self._moves: dict[tuple[int, str, Any], tuple[int, tuple[Any, ...], tuple[int, ...]]] = {}
        self._index = {keeper.me.name: i for i, keeper in enumerate(keepers)}
        self._steps, self._kinds = steps, kinds
        self._checked: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        self._settled: set[World] = set()
        made = tuple(self._store(keeper) for keeper in keepers)
        self.first = World(made, 0, (), (), (self._number(keepers[0].view),), faults, timeouts)
        for i, keeper in enumerate(keepers):
            if keeper.me.number == JOINING:
                self.first = self._after(self.first, i, "timeout", None, self.first.net)  # it asks

    # Stored values.

    def _store(self, keeper: ViewKeeper) -> int:
        key = tuple((name, _hashable(value)) for name, value in sorted(vars(keeper).items()))
        if key not in self._known:
            self._known[key] = len(self._keepers)
            self._keepers.append(keeper)
            watched = [peer for peer in keeper.view.members if peer.number not in {*keeper.suspected, keeper.me.number}]
            if keeper.me.number == JOINING or keeper.stopped:
                watched = []
            self._watched.append(tuple((self._index[peer.name], peer.number) for peer in watched))
        return self._known[key]

    def _number(self, value: Any) -> int:
        if value not in self._numbers:
            self._numbers[value] = len(self._values)
            self._values.append(value)
        return self._numbers[value]

    def keeper(self, world: World, index: int) -> ViewKeeper:
        """A process's keeper in a state."""
        return self._keepers[world.keepers[index]]

    def living(self, world: World) -> list[int]:
        """The processes that have neither crashed nor stopped."""
        return [i for i in range(len(world.keepers)) if not world.dead >> i & 1 and not self.keeper(world, i).stopped]

    # Events.

    def _move(self, number: int, event: str, argument: Any) -> tuple[int, tuple[Any, ...], tuple[int, ...]]:
        """A keeper after an event, its messages (receiver, and sender with text), and the views it calls decided."""
        key = number, event, argument
        if key not in self._moves:
            keeper = copy.copy(self._keepers[number])
            self._moves[key] = self._store_after(keeper, self._happen(keeper, event, argument))
        return self._moves[key]

    def _happen(self, keeper: ViewKeeper, event: str, argument: Any) -> list[Action]:
        match event:
            case "finish":
                keeper.finish()
                return []
            case "restore":
                keeper.restored()
                return []
            case "suspect":
                return keeper.suspect([argument])
            case "timeout":
                return keeper.timeout()
            case "renew":
                return keeper.renew()
            case "favoured":
                view, half = self._values[argument]
                return keeper.favoured(view, half)
            case _:
                sender, message = self._values[argument]
                return keeper.hear(sender, message)

    def _store_after(self, keeper: ViewKeeper, actions: list[Action]) -> tuple[int, tuple[Any, ...], tuple[int, ...]]:
        told: list[tuple[int, int]] = []
        decided: list[int] = []
        if not self._steps and not keeper.halted and not keeper.ready:
            keeper.restored()  # at once, where no steps are made
        for action in actions:
            match action:
                case Send():
                    if action.to.name in self._index:
                        told.append((self._index[action.to.name], self._number((keeper.me, action.message))))
                    if isinstance(action.message, Commit):
                        decided.append(self._number(action.message.view))
                case AskLauncher():
                    told.append((LAUNCHER, self._number((action.view, action.half))))
                case Train(view):
                    decided.append(self._number(view))
                case Halt() | Stop():
                    pass
        return self._store(keeper), tuple(told), tuple(decided)

    def _after(self, world: World, index: int, event: str, argument: Any, net: tuple[Any, ...]) -> World:
        number, told, decided = self._move(world.keepers[index], event, argument)
        keepers = (*world.keepers[:index], number, *world.keepers[index + 1 :])
        new = [
            (index, to, message)
            for to, message in told
            if to == LAUNCHER or not (world.dead >> to & 1 or self._keepers[keepers[to]].stopped)
        ]
        for view in decided:
            world = self._decide(world, view)
        return world._replace(keepers=keepers, net=tuple(sorted((*net, *new))) if new else net)

    def _decide(self, world: World, view: int) -> World:
        """Note a decided view: the successor of the last one, or one that was decided before."""
        if view in world.committed:
            return world
        made, last = self._values[view], self._values[world.committed[-1]]
        assert made.number == last.number + 1, f"{made} was decided after {last}"
        stay, half = last.numbers & made.numbers, dict(world.favoured).get(last.number)
        assert 2 * len(stay) > len(last.members) or (2 * len(stay) == len(last.members) and stay == half), (
            f"{made} has no quorum of {last}"
        )
        assert made.source in stay
        for number in made.numbers - last.numbers:
            assert last.fresh <= number < made.fresh, f"{made} has a number that {last} does not leave"
        return world._replace(committed=(*world.committed, view))

    def deliver(self, world: World, place: int, keep: bool = False) -> World:
        """The state after a message has arrived; ``keep`` leaves a second copy under way."""
        sender, to, message = world.net[place]
        net = world.net if keep else world.net[:place] + world.net[place + 1 :]
        if to == LAUNCHER:
            view, half = self._values[message]
            chosen = dict(world.favoured)
            if chosen.setdefault(view, half) != half:
                return world._replace(net=net)
            world = world._replace(favoured=tuple(sorted(chosen.items())), net=net)
            return self._after(world, sender, "favoured", message, net) if sender in self.living(world) else world
        if to not in self.living(world):
            return world._replace(net=net)
        return self._after(world, to, "hear", message, net)

    def suspicions(self, world: World) -> Iterator[tuple[int, int, bool]]:
        """Who may suspect whom: the process, the suspected number, and whether its connection is open.

        A process closes its connections when it dies or stops, and those to members that it has left behind.
        """
        for i, number in enumerate(world.keepers):
            if world.dead >> i & 1:
                continue
            me = self._keepers[number].me
            for other, suspect in self._watched[number]:
                there = self._keepers[world.keepers[other]]
                is_open = not (world.dead >> other & 1 or there.stopped) and there.me.number in (suspect, JOINING)
                if is_open and there.view.number > self._keepers[number].view.number:
                    is_open = me in there.view.members
                yield i, suspect, is_open

    def successors(self, world: World) -> Iterator[tuple[str, World]]:
        """All events that can happen next, with the states after them."""
        for place, (sender, to, message) in enumerate(world.net):
            if place and world.net[place - 1] == world.net[place]:
                continue
            what = f"{sender} -> {to}: {self._values[message]}"
            yield what, self.deliver(world, place)
            if world.faults and "l" in self._kinds:
                lost = world._replace(net=world.net[:place] + world.net[place + 1 :], faults=world.faults - 1)
                yield f"lost {what}", lost
            if world.faults and "d" in self._kinds:
                yield f"doubled {what}", self.deliver(world._replace(faults=world.faults - 1), place, keep=True)
        for i in self.living(world):
            keeper = self.keeper(world, i)
            if not keeper.halted and not keeper.ready:
                yield f"{i} restores the weights", self._after(world, i, "restore", None, world.net)
            elif not keeper.halted and not keeper.me.serves and keeper.finished - keeper.view.step < self._steps:
                yield f"{i} finishes a step", self._after(world, i, "finish", None, world.net)
            if world.timeouts and keeper.halted:
                later = world._replace(timeouts=world.timeouts - 1)
                yield f"timeout of {i}", self._after(later, i, "timeout", None, world.net)
            if world.faults and "r" in self._kinds and not keeper.halted:
                later = world._replace(faults=world.faults - 1)
                yield f"{i} renews its view", self._after(later, i, "renew", None, world.net)
            if world.faults and "c" in self._kinds:
                yield f"{i} crashes", self._crash(world._replace(faults=world.faults - 1), i)
        for i, number, is_open in self.suspicions(world):
            if not is_open:
                yield f"{i} suspects {number}", self._after(world, i, "suspect", number, world.net)
            elif world.faults and "f" in self._kinds:
                wrong = world._replace(faults=world.faults - 1)
                yield f"{i} suspects {number}, which lives", self._after(wrong, i, "suspect", number, world.net)

    def _crash(self, world: World, index: int) -> World:
        net = tuple(one for one in world.net if one[1] != index)
        return world._replace(dead=world.dead | 1 << index, net=net)

    # The search, and the rules.

    def search(self, most: int = 10_000_000) -> set[World]:
        """All states that can be reached. Raises Broken, with the events, for one that breaks a rule or has no end."""
        came: dict[World, tuple[World | None, str]] = {self.first: (None, "")}
        open_states = [self.first]
        while open_states:
            world = open_states.pop()
            try:
                self.settle(world)
                for event, after in self.successors(world):
                    if after not in came:
                        came[after] = world, event
                        open_states.append(after)
            except (AssertionError, ValueError) as error:
                raise Broken(f"{error}, after: {self._history(came, world)}") from error
            if len(came) > most:
                raise Broken(f"more than {most} states")
        return set(came)

    @staticmethod
    def _history(came: dict[World, tuple[World | None, str]], world: World) -> str:
        events = []
        at: World | None = world
        while at is not None:
            at, event = came[at]
            events.append(event)
        return "; ".join(reversed(events))

    def check(self, world: World) -> None:
        """The rules of a single state."""
        if (world.keepers, world.committed) in self._checked:
            return
        self._checked.add((world.keepers, world.committed))
        keepers = [self._keepers[number] for number in world.keepers]
        for keeper in keepers:
            view = keeper.view
            if not view.number or keeper.me.number == JOINING:
                continue
            assert keeper.me in view.members
            assert self._numbers[view] in world.committed
            if keeper.halted or keeper.stopped:
                continue
            for other in keepers:  # nobody who belongs to a view trains under an earlier one
                if other.me in view.members and other.view.number < view.number:
                    assert other.halted, f"{other.me} trains under view {other.view.number} and {view.number} exists"
                    if not keeper.newest:  # a step back at most: the one before the last is known too
                        assert view.step in (other.finished, other.finished - 1) or other.finished < 0
                    else:
                        assert other.finished <= view.step, f"{other.me} has finished a step that {view} repeats"
                    if other.me.number == view.source:
                        assert other.finished == view.step, f"{other.me} is the source of {view} without its weights"

    def settle(self, world: World) -> None:
        """Check how it ends if no further fault happens: all living members are in one view, or have stopped.

        Messages arrive, the dead are suspected, and the first of those that wait then has a timeout. Raises Broken if
        that has no end.
        """
        world, timeouts, went = world._replace(faults=0, timeouts=0), 0, []
        while world not in self._settled:
            went.append(world)
            self.check(world)
            after = self._calm(world)
            if after is None:
                waiting = [i for i in self.living(world) if self.keeper(world, i).halted]
                if not waiting:
                    self._check_end(world)
                    break
                timeouts += 1
                assert timeouts < 60, f"no end: {[vars(self.keeper(world, i)) for i in self.living(world)]}"
                after = self._after(world, waiting[0], "timeout", None, world.net)
            world = after
        self._settled.update(went)

    def _calm(self, world: World) -> World | None:
        """The state after the next message or right suspicion; None if there is neither."""
        if world.net:
            return self.deliver(world, 0)
        found = next((one for one in self.suspicions(world) if not one[2]), None)
        return found and self._after(world, found[0], "suspect", found[1], world.net)

    def _check_end(self, world: World) -> None:
        living = self.living(world)
        views = {self.keeper(world, i).view for i in living}
        assert len(views) <= 1, f"living members have several views: {views}"
        for view in views:
            assert view.numbers == {self.keeper(world, i).me.number for i in living}


def _hashable(value: Any) -> Any:
    if value.__class__.__name__ == "_Round":
        promises = tuple(sorted(value.promises.items()))
        return value.ballot, promises, value.view, value.accepted, value.resent, value.asked
    return value
