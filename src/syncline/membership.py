"""Agreement on the members of an elastic run, as a state machine: events in, actions out.

A *view* is the list of the run's members, with the number of finished steps from which they go on. Views are numbered,
and every view decides its successor. Each member keeps a ``ViewKeeper``, which knows no sockets, threads or clocks: its
caller reports finished steps, suspected members, received messages and timeouts, and carries out the returned actions.

    coordinator                          another member
    -----------                          --------------
    suspects a member, or
      somebody asks to join
    Halt: the step under way ends
    Prepare(view, ballot)  ------------>  Halt
                           <------------  Promise(finished steps, accepted proposal)
    Accept(next view)      ------------>  keeps the proposal
                           <------------  Accepted
    a quorum has accepted:
    Commit(next view)      ------------>
    Train                                 Train

Each change of views is one decision of Paxos among the members of the present view: a proposal that a quorum may have
accepted is proposed again by every later coordinator. The coordinator is the worker with the lowest number that is not
suspected. If it is silent, a timeout makes another one propose with a higher ballot; two coordinators at once are safe.

Rules
* A quorum is a majority of the present view. Half of it is a quorum if the launcher has favoured that half. The
  launcher favours at most one half of a view. A member without a quorum stops.
* The members of the next view are a quorum of the present one, without the suspected, and those who join.
* A member that has promised trains no more in the present view. So the finished steps of a promise stay true, and the
  next view begins with the most that were finished: ``View.source`` has these weights, and gives them to the others.
  (With ``newest=False`` it begins with the fewest. Members differ by one step at most, and know the step before too.)
  A member counts these steps once it has them (``restored``): the source may be lost before.
* Numbers of members are never used twice. A member that the others have excluded learns that, and stops. Its process
  may join anew, and gets another number.
* Servers are members that train nothing: they never have the weights of a view, and do not count as left. A view has a
  number of workers between two limits, and up to a number of servers.
* Whoever asks to join states terms (version, model, strategy). Other terms are refused, and nothing changes for the
  run. A server may leave some out. The caller has authenticated every sender before: here a message's sender is who it
  says.

Members that fail stop: a process that has forgotten its promises must not come back under its number.

Theory: Lamport, "Paxos made simple", 2001; Oki and Liskov, "Viewstamped Replication", PODC 1988.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

Ballot = tuple[int, int]
"""A number that grows, and the number of the member that proposes."""

_NO_BALLOT = (0, -1)
JOINING = -1
"""The number of a process that is not a member yet."""


@dataclass(frozen=True, order=True)
class Peer:
    """A process. ``number`` is its own for the whole run; ``name`` says how to reach it. A server ``serves``."""

    number: int
    name: str
    serves: bool = False


@dataclass(frozen=True)
class View:
    """The members from a step on, by ascending numbers. Their ranks are their places in this order.

    ``fresh`` is the first number that no process has had. ``step`` is the number of finished steps, and ``source`` the
    number of a member that has the weights after them.
    """

    number: int
    members: tuple[Peer, ...]
    fresh: int
    step: int = 0
    source: int = 0

    @property
    def numbers(self) -> frozenset[int]:
        """The numbers of the members."""
        return frozenset(peer.number for peer in self.members)

    @property
    def servers(self) -> frozenset[int]:
        """The numbers of those members that are servers."""
        return frozenset(peer.number for peer in self.members if peer.serves)

    @property
    def seated(self) -> list[Peer]:
        """The members by their places in the session of the view: servers come last."""
        return sorted(self.members, key=lambda peer: (peer.serves, peer.number))

    def peer(self, number: int) -> Peer:
        """The member with that number."""
        return next(peer for peer in self.members if peer.number == number)

    def named(self, name: str) -> Peer | None:
        """The member with that name, if there is one."""
        return next((peer for peer in self.members if peer.name == name), None)


# Messages.


@dataclass(frozen=True)
class Prepare:
    """Promise to accept no proposal with a lower ballot for the successor of ``base``."""

    base: View
    ballot: Ballot


@dataclass(frozen=True)
class Promise:
    """The answer: the sender's finished steps, and the proposal with the highest ballot that it has accepted."""

    base: int
    ballot: Ballot
    finished: int
    accepted: tuple[Ballot, View] | None


@dataclass(frozen=True)
class Accept:
    """Accept ``view`` as the successor of ``base``."""

    base: View
    ballot: Ballot
    view: View


@dataclass(frozen=True)
class Accepted:
    """The answer to ``Accept``: the sender keeps the proposal."""

    base: int
    ballot: Ballot


@dataclass(frozen=True)
class Outbid:
    """The answer to a ``Prepare`` or ``Accept`` with a lower ballot than this, which the sender has promised."""

    base: int
    ballot: Ballot


@dataclass(frozen=True)
class Commit:
    """This view is decided. It also answers messages about earlier views."""

    view: View


@dataclass(frozen=True)
class Report:
    """The sender suspects these members of that view."""

    base: int
    suspects: frozenset[int]


@dataclass(frozen=True)
class Join:
    """A process asks to become a member, as a worker or as a server. ``number`` is ``JOINING``."""

    name: str
    terms: tuple[tuple[str, str], ...]
    number: int = JOINING
    serves: bool = False


@dataclass(frozen=True)
class Refused:
    """The answer to ``Join`` if the process cannot become a member."""

    reason: str


Message = Prepare | Promise | Accept | Accepted | Outbid | Commit | Report | Join | Refused


def to_plain(value: Any) -> Any:
    """A message, or a part of one, as plain values for JSON. The kind of a message is its first item."""
    if is_dataclass(value):
        found = [to_plain(getattr(value, field.name)) for field in fields(value)]
        return [type(value).__name__, *found] if isinstance(value, Message) else found
    if isinstance(value, frozenset):
        return sorted(value)
    return [to_plain(item) for item in value] if isinstance(value, tuple) else value


def from_plain(data: Any) -> Message:
    """The inverse of ``to_plain``. Raises ValueError for anything else."""
    try:
        kind, *values = data
        return _READ[kind](*values)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        shown = "it is nested too deeply" if isinstance(error, RecursionError) else f"{data!r:.200}"
        raise ValueError(f"no message about members: {shown}") from error


def _number(value: Any) -> int:
    if type(value) is not int:
        raise TypeError
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError
    return value


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise TypeError
    return value


def _view(data: Any) -> View:
    number, members, fresh, step, source = data
    peers = tuple(Peer(_number(one), _text(name), _flag(serves)) for one, name, serves in members)
    view = View(_number(number), peers, _number(fresh), _number(step), _number(source))
    if not peers or list(view.members) != sorted(view.members) or source not in view.numbers:
        raise ValueError
    return view


def _ballot(data: Any) -> Ballot:
    round_, proposer = data
    return _number(round_), _number(proposer)


_READ: Mapping[str, Callable[..., Message]] = {
    "Prepare": lambda base, ballot: Prepare(_view(base), _ballot(ballot)),
    "Promise": lambda base, ballot, finished, accepted: Promise(
        _number(base),
        _ballot(ballot),
        _number(finished),
        None if accepted is None else (_ballot(accepted[0]), _view(accepted[1])),
    ),
    "Accept": lambda base, ballot, view: Accept(_view(base), _ballot(ballot), _view(view)),
    "Accepted": lambda base, ballot: Accepted(_number(base), _ballot(ballot)),
    "Outbid": lambda base, ballot: Outbid(_number(base), _ballot(ballot)),
    "Commit": lambda view: Commit(_view(view)),
    "Report": lambda base, suspects: Report(_number(base), frozenset(map(_number, suspects))),
    "Join": lambda name, terms, number, serves: Join(
        _text(name),
        tuple(sorted({_text(key): _text(value) for key, value in terms}.items())),
        _number(number),
        _flag(serves),
    ),
    "Refused": lambda reason: Refused(_text(reason)),
}


# Actions.


@dataclass(frozen=True)
class Send:
    """Send a message to a process."""

    to: Peer
    message: Message


@dataclass(frozen=True)
class Halt:
    """End the step under way without a result, and begin no other one before ``Train``."""


@dataclass(frozen=True)
class Train:
    """Train under this view, from its step on, with the weights of its source."""

    view: View


@dataclass(frozen=True)
class AskLauncher:
    """Ask the launcher to favour this half of that view, if it sees no other member of it."""

    view: int
    half: frozenset[int]


@dataclass(frozen=True)
class Stop:
    """This process leaves the run, for that reason."""

    reason: str


Action = Send | Halt | Train | AskLauncher | Stop


@dataclass(frozen=True)
class _Round:
    """A coordinator's proposal under way: the promises, and then the view and who has accepted it."""

    ballot: Ballot
    promises: Mapping[int, Promise]
    view: View | None = None
    accepted: frozenset[int] = frozenset()
    resent: int = 0
    asked: bool = False  # whether the launcher was asked

    @property
    def answered(self) -> frozenset[int]:
        """The members that have answered the last message."""
        return frozenset(self.promises) if self.view is None else self.accepted


class ViewKeeper:
    """One process's knowledge of the views.

    A founder gets the first view, and trains. A process that joins gets an empty view whose members are those to ask
    (``joining``), and trains once ``Train`` comes. ``terms`` must be those of the other members. A view has ``least``
    to ``most`` workers, and at most ``servers`` servers. Messages without an answer are sent again at ``patience``
    timeouts before the silent members are suspected. With ``newest=False`` a view begins with the fewest steps that a
    member has finished.
    """

    def __init__(
        self,
        me: Peer,
        view: View,
        terms: Mapping[str, str],
        *,
        least: int = 1,
        most: int = 1 << 16,
        patience: int = 1,
        newest: bool = True,
        servers: int = 0,
    ) -> None:
        self.me, self.view, self.newest = me, view, newest
        self.halted = me.number == JOINING
        """Whether no step may be begun or finished."""
        self.stopped = ""
        """Why this process has left the run; empty for a member."""
        self.finished = -1 if me.number == JOINING or me.serves else view.step
        """The number of steps that this process's weights contain; -1 without weights."""
        self.ready = me.number != JOINING
        """Whether this process has the weights of the view's source."""
        self.suspected: frozenset[int] = frozenset()
        self.state(terms)
        self._least, self._most, self._servers, self._patience = least, most, servers, patience
        self._promised: Ballot = _NO_BALLOT
        self._accepted: tuple[Ballot, View] | None = None
        self._highest = 0  # the highest number of a ballot that this process has seen
        self._favoured: frozenset[int] = frozenset()
        self._joining: tuple[Peer, ...] = ()
        self._requests = 0  # of this process to join
        self._round: _Round | None = None
        self._leader = me.number  # the last one to propose, as far as this process has heard
        self._waited = 0  # timeouts for its decision

    @classmethod
    def joining(
        cls, name: str, contacts: Iterable[Peer], terms: Mapping[str, str], *, serves: bool = False, **limits: Any
    ) -> ViewKeeper:
        """A process that asks ``contacts`` to let it join. Its first timeout sends the first request."""
        return cls(Peer(JOINING, name, serves), View(0, tuple(contacts), 0), terms, **limits)

    @property
    def coordinator(self) -> int:
        """The number of the member that should propose: a worker, if one is left, because servers know no terms."""
        left = self.view.numbers - self.suspected
        return min(left - self.view.servers or left)

    def state(self, terms: Mapping[str, str]) -> None:
        """From now on a process that joins must have these terms in common with this one."""
        self._terms = tuple(sorted(terms.items()))

    # Events.

    def restored(self) -> None:
        """This process has the weights of the view's source. ValueError if it should not train."""
        if self.halted or self.stopped:
            raise ValueError("weights were restored after Halt")
        self.finished, self.ready = -1 if self.me.serves else self.view.step, True

    def finish(self) -> None:
        """A step is finished: the weights contain it. ValueError if it must not be."""
        if self.halted or self.stopped or not self.ready:
            raise ValueError("a step was finished after Halt, or before the weights were restored")
        self.finished += 1

    def suspect(self, numbers: Iterable[int]) -> list[Action]:
        """These members seem to be dead."""
        new = frozenset(numbers) & self.view.numbers - self.suspected - {self.me.number}
        if self.stopped or self.me.number == JOINING or not new:
            return []
        self.suspected |= new
        return [*self._halt(), *self._react()]

    def broken(self) -> list[Action]:
        """The step under way has failed, whoever is to blame. A timeout then proposes to go on."""
        return [] if self.stopped else self._halt()

    def renew(self) -> list[Action]:
        """End this view after a step that all have finished. The next one has the processes that have asked to join."""
        if self.stopped:
            return []
        proposes = self.coordinator == self.me.number and self._round is None
        return [*self._halt(), *(self._propose() if proposes else [])]

    def favoured(self, view: int, half: Iterable[int]) -> list[Action]:
        """The launcher favours this half of that view."""
        if self.stopped or view != self.view.number:
            return []
        self._favoured = frozenset(half)
        return self._advance()

    def timeout(self) -> list[Action]:
        """An answer or a decision has taken too long. Has no effect on a process that waits for neither."""
        if self.stopped or not self.halted:
            return []
        if self.me.number == JOINING:
            if self._requests > self._patience:
                return self._stop("no member of the run has answered the request to join")
            self._requests += 1
            join = Join(self.me.name, self._terms, serves=self.me.serves)
            return [Send(peer, join) for peer in self.view.members]
        if self._round is None:
            return [] if self._yields() else self._propose()
        silent = self.view.numbers - self.suspected - self._round.answered
        if self._round.resent < self._patience:
            self._round = replace(self._round, resent=self._round.resent + 1, asked=False)
            return [*self._send(silent), *self._advance()]
        self.suspected |= silent
        if self._round.view is not None:
            return self._propose()
        if silent:
            self._round = replace(self._round, asked=False, resent=0)
            return self._advance()
        return self._stop(self._without_quorum())

    def _yields(self) -> bool:
        """Whether another proposer may still need time to suspect the silent: a new ballot would end its round."""
        if self._patience == 1 or self._leader in {self.me.number, *self.suspected}:
            return False
        before = sum(number < self.me.number for number in self.view.numbers)
        self._waited += 1
        return self._waited <= self._patience + 1 + before

    def hear(self, sender: Peer, message: Message) -> list[Action]:
        """Handle a message that has arrived."""
        if self.stopped:
            return []
        if isinstance(message, Join):
            return self._join(message)
        if isinstance(message, Commit):
            return self._adopt(message.view) if message.view.number > self.view.number else []
        if isinstance(message, Refused):
            return self._stop(message.reason) if self.me.number == JOINING else []
        base = message.base if isinstance(message.base, int) else message.base.number
        learnt: list[Action] = []
        if not isinstance(message.base, int) and base > self.view.number:
            learnt = self._adopt(message.base)  # it was decided, although its Commit has not come
        if base < self.view.number:
            return [Send(sender, Commit(self.view))]
        if self.stopped or base > self.view.number or sender.number not in self.view.numbers:
            return learnt
        return [*learnt, *self._obey(sender, message)]

    def _obey(self, sender: Peer, message: Message) -> list[Action]:
        """Handle a member's message about the successor of the present view."""
        match message:
            case Report():
                return self.suspect(message.suspects)
            case Prepare() | Accept():
                return self._answer(sender, message)
            case Outbid():
                self._highest = max(self._highest, message.ballot[0])
                if self._round is not None and self._round.ballot < message.ballot:
                    self._leader, self._waited = message.ballot[1], 0
                    self._round = None  # a timeout begins the next one, unless the other coordinator is done by then
                return []
            case Promise() | Accepted():
                return self._count(sender.number, message)
        raise TypeError(f"{message!r} is no message about a view")

    # As a member.

    def _halt(self) -> list[Action]:
        if self.halted:
            return []
        self.halted = True
        return [Halt()]

    def _answer(self, sender: Peer, message: Prepare | Accept) -> list[Action]:
        self._highest = max(self._highest, message.ballot[0])
        if message.ballot < self._promised:
            return [Send(sender, Outbid(self.view.number, self._promised))]
        halt = self._halt()
        self._promised = message.ballot
        self._leader, self._waited = message.ballot[1], 0
        if self._round is not None and self._round.ballot < message.ballot:
            self._round = None
        if isinstance(message, Prepare):
            return [*halt, Send(sender, self._promise())]
        self._accepted = message.ballot, message.view
        return [*halt, Send(sender, Accepted(self.view.number, message.ballot))]

    def _promise(self) -> Promise:
        return Promise(self.view.number, self._promised, self.finished, self._accepted)

    def _adopt(self, view: View) -> list[Action]:
        """Go on under a view that was decided."""
        found = view.named(self.me.name) if self.me.number == JOINING else self.me
        if found is None:
            return []  # a joining process has heard of a view, but is not in it yet
        if found not in view.members:
            return self._stop(f"the others go on without this process since step {view.step} (view {view.number})")
        self.me, self.view = found, view
        self.halted = self.ready = False
        self.suspected &= view.numbers
        self._promised, self._accepted, self._highest = _NO_BALLOT, None, 0
        self._favoured, self._round, self._leader = frozenset(), None, found.number
        self._joining = tuple(peer for peer in self._joining if view.named(peer.name) is None)
        train: list[Action] = [Train(view)]
        if self.suspected or (self._joining and self.coordinator == self.me.number):
            return [*train, *self._halt(), *self._react()]
        return train

    def _stop(self, reason: str) -> list[Action]:
        self.stopped, self._round = reason, None
        return [*self._halt(), Stop(reason)]

    def admits(self, message: Join) -> bool:
        """Whether this member would let that process join. Otherwise ``hear`` only answers it."""
        return self.view.named(message.name) is None and not self._refusal(message)

    def _refusal(self, message: Join) -> str:
        """Why a process that is not a member cannot become one; empty if it can."""
        if message.number != JOINING:
            return f"number {message.number} belongs to a member that the others have excluded: join without a number"
        if difference := self._difference(message):
            return difference
        others = [peer for peer in self._joining if peer.name != message.name]
        others += [peer for peer in self.view.members if peer.number not in self.suspected]
        most, kind = (self._servers, "server") if message.serves else (self._most, "worker")
        if sum(peer.serves == message.serves for peer in others) >= most:
            return f"the run has {most} {kind}{'s' * (most != 1)} already"
        return ""

    def _join(self, message: Join) -> list[Action]:
        """Let a process join, or refuse it."""
        if self.me.number == JOINING:
            return []
        asker = Peer(message.number, message.name)
        if message.number == JOINING and self.view.named(message.name) is not None:
            return [Send(asker, Commit(self.view))]  # it has not heard that it has joined
        first = self.view.peer(self.coordinator)
        if self.me.serves and first != self.me:  # which knows the terms
            return [Send(first, message)]
        if reason := self._refusal(message):
            return [Send(asker, Refused(reason))]
        if first != self.me:
            return [Send(first, message)]
        if any(peer.name == message.name for peer in self._joining):
            return []
        self._joining += (Peer(JOINING, message.name, message.serves),)
        return [*self._halt(), *self._react()]

    def _difference(self, message: Join) -> str:
        """How the terms of a process that joins differ from those of this run; empty if they do not."""
        mine, theirs = dict(self._terms), dict(message.terms)
        for name in sorted(theirs.keys() if message.serves else mine.keys() | theirs.keys()):
            if mine.get(name) != theirs.get(name):
                return f"this run has {name} {mine.get(name)!r}, but the process that joins has {theirs.get(name)!r}"
        return ""

    # As coordinator.

    def _react(self) -> list[Action]:
        """Propose, or tell the coordinator who is suspected."""
        if self.coordinator != self.me.number:
            return [Send(self.view.peer(self.coordinator), Report(self.view.number, self.suspected))]
        if self._round is None:
            return self._propose()
        return self._advance()

    def _propose(self) -> list[Action]:
        """Begin a round with a new ballot."""
        self._highest = max(self._highest, self._promised[0]) + 1
        self._promised = self._highest, self.me.number
        self._leader = self.me.number
        self._round = _Round(self._promised, {self.me.number: self._promise()})
        return [*self._send(self.view.numbers - self.suspected - {self.me.number}), *self._advance()]

    def _send(self, numbers: Iterable[int]) -> list[Action]:
        """Send the message of the present round."""
        assert self._round is not None
        ballot, view = self._round.ballot, self._round.view
        message = Prepare(self.view, ballot) if view is None else Accept(self.view, ballot, view)
        return [Send(self.view.peer(number), message) for number in sorted(numbers)]

    def _count(self, number: int, message: Promise | Accepted) -> list[Action]:
        """Count an answer to the present round."""
        made = self._round
        if made is None or made.ballot != message.ballot or number in self.suspected:
            return []
        if isinstance(message, Promise) and made.view is None:
            self._round = replace(made, promises={**made.promises, number: message})
        elif isinstance(message, Accepted) and made.view is not None:
            self._round = replace(made, accepted=made.accepted | {number})
        return self._advance()

    def _advance(self) -> list[Action]:
        """Take the next step of the present round, if its answers suffice."""
        made = self._round
        if made is None:
            return []
        if made.view is not None:
            if self._is_quorum(made.accepted):
                return self._commit(made.view)
            waits = self.view.numbers - self.suspected - made.accepted
            return [] if waits else self._propose()  # all that are left have answered, and they are too few
        if self.view.numbers - self.suspected - made.answered:
            return []
        answered = made.answered - self.suspected
        if self._is_quorum(answered):
            return self._decide(made, answered)
        if 2 * len(answered) != len(self.view.members) or (self._favoured and self._favoured != answered):
            return self._stop(self._without_quorum())
        if made.asked:
            return []
        self._round = replace(made, asked=True)
        return [AskLauncher(self.view.number, answered)]

    def _is_quorum(self, numbers: frozenset[int]) -> bool:
        """Whether no other quorum of the present view can exist without any of these members."""
        twice = 2 * len(numbers)
        return twice > len(self.view.members) or (twice == len(self.view.members) and numbers == self._favoured)

    def _without_quorum(self) -> str:
        assert self._round is not None
        here = ", ".join(map(str, sorted(self._round.answered - self.suspected)))
        return (
            f"only members {here} of {len(self.view.members)} are left, and the others may go on elsewhere: a majority"
            " is needed, or the half that the launcher sees"
        )

    def _decide(self, made: _Round, answered: frozenset[int]) -> list[Action]:
        """Propose the next view: one that may have been accepted already, or else the members that have answered."""
        before = [promise.accepted for promise in made.promises.values() if promise.accepted is not None]
        view = max(before, key=lambda one: one[0])[1] if before else self._next(made, answered)
        if view.step < 0:
            return self._stop("nobody who is left has the weights")
        if (left := len(view.numbers - view.servers)) < self._least:
            return self._stop(f"{left} member{'s are' if left > 1 else ' is'} left, and this run needs {self._least}")
        self._accepted = made.ballot, view
        self._round = replace(made, view=view, accepted=frozenset({self.me.number}), resent=0)
        return [*self._send(self.view.numbers - self.suspected - {self.me.number}), *self._advance()]

    def _next(self, made: _Round, answered: frozenset[int]) -> View:
        steps = {number: made.promises[number].finished for number in answered}
        known = [step for step in steps.values() if step >= 0]  # others have no weights yet
        step = (max if self.newest else min)(known, default=-1)
        source = min(number for number in answered if steps[number] == step)
        fresh = self.view.fresh
        stay = tuple(peer for peer in self.view.members if peer.number in answered)
        come: list[Peer] = []
        for serves, most in ((False, self._most), (True, self._servers)):
            room = max(0, most - sum(peer.serves == serves for peer in stay))
            come += [peer for peer in self._joining if peer.serves == serves][:room]
        new = tuple(replace(peer, number=fresh + i) for i, peer in enumerate(come))
        return View(self.view.number + 1, stay + new, fresh + len(new), step, source)

    def _commit(self, view: View) -> list[Action]:
        everyone = {*self.view.members, *view.members} - {self.me}
        return [*(Send(peer, Commit(view)) for peer in sorted(everyone)), *self._adopt(view)]
