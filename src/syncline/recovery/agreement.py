"""This process's part in the agreement on members: the packets of its line to the launcher, and what they mean.

``ViewKeeper`` decides (``membership``); an ``Agreement`` carries out its actions and waits for others. It also knows
which processes have ended, who asks to join, and on servers the calls of ``syncline.elastic`` of which the launcher has
told. It knows no session and no model.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any

from ..errors import GroupError, PeerLost, SynclineError
from ..launch.relay import Name, RelayLine
from ..membership import (
    JOINING,
    Action,
    AskLauncher,
    Join,
    Message,
    Peer,
    Prepare,
    Refused,
    Send,
    View,
    ViewKeeper,
    from_plain,
    to_plain,
)
from ..version import __version__

_TICK_S = 2.0
"""The time after which a worker that waits for others' messages sends its own again."""
_PATIENCE = 60
"""How often it does so before it suspects the others: they may be busy for as long outside Syncline."""
_POLL_S = 0.02
LOOK_S = 0.5
"""The time between two looks of rank 0 for a worker that asks to join."""
_LAUNCHER = Peer(0, "launcher")
"""Whom a worker that joins asks: the launcher knows the members."""


class AllDone(Exception):
    """A member has seen that all have finished their training."""


class LeftOut(Exception):
    """This process does not go on, for the reason in the text."""


class Agreement:
    """Carries out a keeper's actions over a line; ``servers`` processes of the first view serve.

    ``serves``: this process does, if it joins a run that has begun.
    """

    def __init__(self, line: RelayLine, servers: int, serves: bool) -> None:
        self.line = line
        workers = line.processes - servers
        peers = tuple(Peer(number, line.name(number), number >= workers) for number in range(line.processes))
        limits: dict[str, Any] = {"least": line.least, "most": max(line.most, workers), "servers": servers}
        limits["patience"] = _PATIENCE
        if line.joins:
            self.keeper = ViewKeeper.joining(line.name(line.number), [_LAUNCHER], {}, serves=serves, **limits)
        else:
            self.keeper = ViewKeeper(peers[line.number], View(1, peers, len(peers)), {}, **limits)
        self.calls = 0
        """The calls of ``syncline.elastic`` of this process."""
        self.earlier = 0
        """On a server: the steps that workers had finished before its clock began."""
        self._over: set[int] = set()  # the numbers of processes that have ended
        self._asked, self._look_s = False, 0.0
        self._told = self._done = 0  # the calls that a server knows, and those that are over

    @property
    def joins(self) -> bool:
        """Whether this process is no member yet."""
        return self.keeper.me.number == JOINING

    @property
    def me(self) -> str:
        """This process in messages."""
        return "this server" if self.keeper.me.serves else "this worker"

    # Calls of ``syncline.elastic``.

    def tell_begun(self, earlier: int) -> None:
        """Tell servers that a call has begun, after so many finished steps."""
        self.line.send({"begun": self.calls, "in": self.keeper.view.number, "earlier": earlier})

    def tell_done(self) -> None:
        """Tell the others that all have finished their training."""
        self.line.send({"done": self.line.number, "call": self.calls})

    def has_joined(self) -> None:
        """On a server: it has joined in the first call, as nobody joins a later one."""
        self._told = 1

    @property
    def in_call(self) -> bool:
        """On a server: whether the workers are in a call, which goes on after a loss."""
        self._look_for_ends()
        for packet in self.line.kept:
            self._note_call(packet)
        return self._told > self._done

    def is_in_call(self, within_s: float) -> bool:
        """As ``in_call``, at the latest after this time: the launcher's word may come after the loss."""
        deadline = time.monotonic() + within_s
        while not self.in_call and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return self.in_call

    def _note_call(self, packet: dict[str, Any]) -> None:
        """On a server: note a call of the workers, and how their count of steps differs from this server's clock."""
        begun, earlier = packet.get("begun"), packet.get("earlier")
        if _is_number(begun) and type(earlier) is int and packet.get("in") == self.keeper.view.number:
            self._told, self.earlier = max(self._told, packet["begun"]), earlier
        elif "done" in packet and _is_number(packet.get("call")):
            self._done = max(self._done, packet["call"])

    # Processes that join, and those that end.

    def is_asked(self) -> bool:
        """Whether a process asks to join that the members will take. Others are answered. Looks now and then."""
        now_s = time.monotonic()
        if now_s >= self._look_s:
            self._look_s = now_s + LOOK_S
            self.line.look()
            packets = [*self.line.kept]
            self.line.kept.clear()
            for packet in packets:
                self._note_end(packet)
            for packet in packets:
                join = join_in(packet)
                if join is None or self.keeper.admits(join):
                    self.line.kept.append(packet)  # until the view ends
                else:
                    self._tell(self._heard(packet))
                self._asked |= join is not None and self.keeper.admits(join) and _process(join.name) not in self._over
        return self._asked

    def ask_no_more(self) -> None:
        """Forget that somebody asks."""
        self._asked = False

    def is_followed(self) -> bool:
        """Whether another member proposes the next view: one more worker has asked to join. Does not wait."""
        self._look_for_ends()
        for packet in self.line.kept:
            with suppress(ValueError):
                message = _message_in(packet) if "from" in packet else None
                if isinstance(message, Prepare) and message.base.number == self.keeper.view.number:
                    return True
        return False

    def check_members(self) -> None:
        """Raise PeerLost if a member has ended, and GroupError if another view follows: nobody waits for the others."""
        if self.is_followed():
            raise GroupError("the next view is proposed already")
        for rank, peer in enumerate(self.keeper.view.seated):
            if _process(peer.name) in self._over:
                raise PeerLost(f"process {peer.name} has ended before all were connected", rank=rank)

    def blamed(self, view: View, new: frozenset[int], error: SynclineError) -> frozenset[int]:
        """Whom to leave out after a view broke before it began: those that have ended, or else those that were ``new``.

        Nobody if an older member is lost whose end is not known yet: without the new ones too few might be left. Nobody
        either if the next view is proposed already.
        """
        self._look_for_ends()
        over = frozenset(peer.number for peer in view.members if _process(peer.name) in self._over)
        if isinstance(error, PeerLost) and 0 <= error.rank < len(view.members):
            new = new if view.seated[error.rank].number in new else frozenset()
        return over or (frozenset() if self.is_followed() else new)

    # Views.

    def lost(self, rank: int) -> list[Action]:
        """The process of that rank seems to be dead, or somebody whose rank is not known."""
        members = self.keeper.view.seated
        suspects = [members[rank].number] if 0 <= rank < len(members) else []
        return [*self.keeper.suspect(suspects), *self.keeper.broken()]

    def renew(self) -> list[Action]:
        """End the view after a step that all have finished, for a process that joins."""
        actions, view = self.keeper.broken(), self.keeper.view
        while self.line.kept:
            actions += self._heard(self.line.kept.popleft())
        return actions if self.keeper.view != view else [*actions, *self.keeper.renew()]

    def reach(self, actions: list[Action]) -> View:
        """Carry out actions and wait for packets, until a view is decided. Raises LeftOut or AllDone."""
        keeper = self.keeper
        while True:
            self._tell(actions)
            if keeper.stopped:
                raise LeftOut(keeper.stopped)
            if not keeper.halted:
                view = keeper.view
                actions = keeper.suspect(peer.number for peer in view.members if _process(peer.name) in self._over)
                if not actions:
                    self.line.send({"view": view.number, "members": [_process(peer.name) for peer in view.seated]})
                    return view
                continue
            actions = self._heard(self.line.receive(_TICK_S))

    def _tell(self, actions: Sequence[Action]) -> None:
        """Send what actions ask for."""
        for action in actions:
            if isinstance(action, Send) and action.to == _LAUNCHER:
                self.line.send({"join": to_plain(action.message)})
            elif isinstance(action, Send):
                self.line.send({"to": _process(action.to.name), "message": to_plain(action.message)})
            elif isinstance(action, AskLauncher):
                self.line.send({"ask": action.view, "half": sorted(action.half)})

    def _heard(self, packet: dict[str, Any] | None) -> list[Action]:
        """Handle a packet, or None for a timeout."""
        keeper = self.keeper
        if packet is None:
            return keeper.timeout()
        if _is_number(packet.get("from")):
            sender = self._member(packet["from"]) or Peer(JOINING, str(Name(packet["from"], "elsewhere", 0)))
            try:
                message = _message_in(packet)
            except ValueError:  # only a process that joins may have another version
                return [Send(sender, Refused(f"this run has version {__version__}, and not yours"))]
            if isinstance(message, Join) and (join_in(packet) is None or _process(message.name) in self._over):
                return []  # it has died since, or names another process
            return keeper.hear(sender, message)
        half = packet.get("half")
        if _is_number(packet.get("view")) and isinstance(half, list) and all(type(one) is int for one in half):
            return keeper.favoured(packet["view"], half)
        self._note_call(packet)
        if keeper.me.serves and not self.joins and self._told <= self._done:
            raise AllDone
        if "done" in packet and (self.joins or (self._member(packet["done"]) and packet.get("call") == self.calls)):
            raise AllDone
        self._note_end(packet)
        peer = self._member(packet.get("ended"))
        return [] if peer is None else keeper.suspect([peer.number])

    def _member(self, process: object) -> Peer | None:
        """The member with that number of a process."""
        return next((peer for peer in self.keeper.view.members if _process(peer.name) == process), None)

    def _look_for_ends(self) -> None:
        """Note the ends of processes of which the launcher has told. Does not wait."""
        self.line.look()
        for packet in self.line.kept:
            self._note_end(packet)

    def _note_end(self, packet: dict[str, Any]) -> None:
        """Note the end of a process, if the packet tells one."""
        if _is_number(packet.get("ended")):
            self._over.add(packet["ended"])


def join_in(packet: dict[str, Any]) -> Join | None:
    """The request to join in a packet, if it has one."""
    with suppress(ValueError):
        message = _message_in(packet) if "from" in packet else None
        if isinstance(message, Join) and _process(message.name) == packet["from"]:
            return message
    return None


def _process(name: str) -> int:
    """The number of the process with that name; -1 if no launcher gives such a name."""
    found = Name.read(name)
    return -1 if found is None else found.number


def _is_number(value: Any) -> bool:
    return type(value) is int and value >= 0


def _message_in(packet: dict[str, Any]) -> Message:
    """The message in a packet. ValueError for another one, and if a process in it has a name that no launcher gives."""
    message = from_plain(packet.get("message"))
    for name in _names_in(message):
        if Name.read(name) is None:
            raise ValueError(f"no launcher gives the name {name!r:.40}")
    return message


def _names_in(value: Any) -> Iterator[str]:
    """The names of all processes in a message, or in a part of one."""
    if isinstance(value, Peer | Join):
        yield value.name
    elif is_dataclass(value):
        for one in fields(value):
            yield from _names_in(getattr(value, one.name))
    elif isinstance(value, tuple):
        for item in value:
            yield from _names_in(item)
