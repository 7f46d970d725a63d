"""The failure detector: one control connection per pair of processes, and a thread that finds the first failure.

* A peer that dies closes its control connection without a goodbye: it is the culprit.
* A stopped peer (SIGSTOP) on this machine, in the same PID namespace, shows in /proc. All other peers send
  ``Heartbeats``, which stop if the peer is stopped, its machine hangs or the link fails. After the liveness limit
  without a sign of life a peer counts as lost. The limit is checked once a second, or four times within it. A busy
  interpreter never counts as dead.
* A process that finds a culprit, or fails itself, tells everyone. The abort message names the *first* culprit, so that
  no process blames a neighbour that has ended as a consequence. A process that ends the view of an elastic run tells
  everyone too: then nobody is to blame.
* A process in a stall asks the others for their waits (``culprit``). The watcher answers, whatever the script does.

Compiled code sends the heartbeats without the interpreter lock: otherwise a call that holds the lock for longer than
the limit would look like a death. It cannot encrypt: over TLS the watcher sends them, and such a call is one. The
kernel's keepalive probes are no alternative, since it answers them for a stopped process too. A connection has one
writer at a time, so a message ends the heartbeats first. After a goodbye or an abort no peer expects them. After a
question or an answer the watcher sends them itself until its message is out, and then starts new ones.

The error is printed at once. If the user's thread has not returned to Syncline within ``GRACE_S``, for instance from a
data loader that waits for a dead process, the process ends.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import select
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from ..errors import PeerLost, SynclineError, ViewEnds
from .bell import DescriptorBell
from .culprit import ANSWER_BYTES, Answer, pack, unpack
from .meeting import Member, Roll, printable
from .reports import FAILED, FAILED_STATUS, blame, first_time, in_bytes, needed, say
from .tls import Sealed

_POLLFD = struct.Struct("=ihh")

START_S = 5.0
"""The time to wait for the heartbeat thread, which needs the interpreter lock until it runs compiled code."""


class Heartbeats:
    """Sends ``frame`` over every connection once per ``period_s``, from ``start`` until ``end``."""

    def __init__(self, socks: Mapping[int, socket.socket], frame: bytes, period_s: float) -> None:
        from ..kernels.streams import beat  # compiled code: loaded where it is used

        self._peers = tuple(socks)
        self._frame = np.frombuffer(frame, np.uint8)
        self._descriptors = np.array([sock.fileno() for sock in socks.values()], np.int64)
        self._begun = np.zeros(len(socks), np.int64)
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = np.frombuffer(bytearray(_POLLFD.pack(self.bell, select.POLLIN, 0)), np.uint8)
        self._running = np.zeros(1, np.int64)
        arguments = (
            self._descriptors,
            self._begun,
            self._running,
            self._frame.ctypes.data,
            self._frame.nbytes,
            self._poll.ctypes.data,
            max(1, int(period_s * 1000)),
        )
        self._thread = threading.Thread(target=beat, args=arguments, name="syncline-heartbeats", daemon=True)
        self._ended = False

    def start(self) -> None:
        """Start to send; from then on a thread that holds the interpreter lock cannot delay heartbeats."""
        self._thread.start()
        deadline = time.monotonic() + START_S
        while not self._running[0] and time.monotonic() < deadline:
            time.sleep(0.0001)

    def end(self) -> dict[int, bytes]:
        """Stop sending. Returns the rest of each frame that was sent in part, by peer. For one thread at a time."""
        if self._ended:
            return {}
        self._ended = True
        os.eventfd_write(self.bell, 1)
        if self._thread.ident is not None:
            self._thread.join()
        bell, self.bell = self.bell, -1  # the number may be another file's from here on
        os.close(bell)
        begun = zip(self._peers, self._begun.tolist(), strict=True)
        return {peer: self._frame[count:].tobytes() for peer, count in begun if count}


LIVENESS_S = 8.0
"""The default time without a sign of life after which a peer counts as lost."""

GRACE_S = 5.0
"""The time for the user's thread to return to Syncline after a failure, before the process ends."""

_STOPPED = "is stopped for {:.0f} s (SIGSTOP, or a debugger)"
_SILENT = "has given no sign of life for {:.0f} s (SIGSTOP, its machine hangs, or the link to it is dead)"

ANSWER_S = 2.0
"""The time limit for the answer of a process that is asked for its waits."""

_LINGER_S = 0.5

_FRAME = struct.Struct("<BxH")
_CULPRIT = struct.Struct("<I")
_NUMBER = struct.Struct("<I")  # of a question, and in its answer
_HEARTBEAT, _GOODBYE, _ABORT, _QUESTION, _ANSWER = 1, 2, 3, 4, 5
_REASON_BYTES = 4000
_VIEW_ENDS = str(ViewEnds())
_SIZES = {
    _HEARTBEAT: range(1),
    _GOODBYE: range(1),
    _ABORT: range(_CULPRIT.size, _CULPRIT.size + _REASON_BYTES + 1),
    _QUESTION: range(_NUMBER.size, _NUMBER.size + 1),
    _ANSWER: range(_NUMBER.size + ANSWER_BYTES.start, _NUMBER.size + ANSWER_BYTES.stop),
}


def sees(one: Member, other: Member) -> bool:
    """Whether /proc shows one process every failure of another: no link between them can fail."""
    return (one.machine, one.pid_space) == (other.machine, other.pid_space)


def prepare(roll: Roll) -> None:
    """Load the code for watching this group, before connections stand and peers begin to expect heartbeats."""
    if not all(sees(roll.members[roll.index], member) for member in roll.members):
        importlib.import_module("syncline.kernels.streams")


class Watcher:
    """Watches all peers from its own thread until closed.

    That thread calls ``on_failure`` once, with the error that names the first culprit. It calls ``on_left`` with the
    index of a peer that has said goodbye, and ``answer`` for the waits of this process.
    """

    def __init__(
        self,
        roll: Roll,
        socks: Mapping[int, socket.socket],
        on_failure: Callable[[SynclineError], None],
        on_left: Callable[[int], None],
        liveness_s: float = LIVENESS_S,
        answer: Callable[[], Answer] = lambda: Answer({}),
    ) -> None:
        self.failure: PeerLost | ViewEnds | None = None
        self.failed = threading.Event()
        self.left: set[int] = set()
        self._roll, self._socks = roll, dict(socks)
        self._on_failure, self._on_left, self._answer = on_failure, on_left, answer
        self._liveness_s = liveness_s
        self._lock = threading.RLock()
        self._closing = False
        self._linger_until = 0.0
        self._open = set(socks)
        self._told = self._told_own = False  # this process has reported a failure; it has reported its own
        self.insists = True
        """Whether the process ends if the user's thread does not return to Syncline after a failure."""
        self._insists_from = 0.0  # when the process ends; 0 before a failure
        self._last_said = False  # a failure or the goodbye was sent, after which no peer expects heartbeats
        self._unsent: dict[int, bytes] = {}
        self._asked = dict.fromkeys(socks, 0)  # how often this process has asked each
        self._asked_by = dict.fromkeys(socks, 0)
        self._answers: dict[int, tuple[int, Answer | None]] = dict.fromkeys(socks, (0, None))  # by question's number
        self._answered = threading.Condition()
        self._came_back = threading.Event()
        self._partial = dict.fromkeys(socks, b"")
        self._heard = dict.fromkeys(socks, time.monotonic())
        self._bell = DescriptorBell()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell, selectors.EVENT_READ)
        me = roll.members[roll.index]
        self._local = {peer: roll.members[peer].pid for peer in socks if sees(me, roll.members[peer])}
        self._tick_s = min(1.0, liveness_s / 4)
        far = {peer: sock for peer, sock in socks.items() if peer not in self._local}
        self._far = far
        self._sealed = any(isinstance(sock, Sealed) for sock in far.values())
        self._beats_here = self._sealed  # this thread sends the heartbeats instead of compiled code
        self._beats = self._new_beats() if far and not self._sealed else None
        for peer, sock in self._socks.items():
            sock.setblocking(False)
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(sock, selectors.EVENT_READ, peer)
        self._thread = threading.Thread(target=self._watch, name="syncline-watcher", daemon=True)

    def start(self) -> None:
        """Start to watch; separate from the constructor, so that ``on_failure`` can already refer to this watcher."""
        if self._beats is not None:
            self._beats.start()
        self._thread.start()

    def verdict(self, timeout: float) -> PeerLost | ViewEnds | None:
        """The error that names the first culprit, after a wait of up to ``timeout``; None if no process has failed."""
        self.failed.wait(timeout)
        return self.failure

    def came_back(self) -> None:
        """Note that the user's thread has seen the failure, so that it may end the process in its own way."""
        self._came_back.set()

    @property
    def over(self) -> bool:
        """Whether this process knows of a failure, including its own."""
        return self.failure is not None or self._told

    def abort(self, reason: str, culprit: int | None = None) -> None:
        """Tell all processes and the launcher that the run is over because of ``culprit``, by default this process."""
        index = self._roll.index if culprit is None else culprit
        with self._lock:  # once this process reports its own failure, a later one of a peer must not replace it
            if culprit is None and self.failure is not None:
                return
            self._told = True
            self._told_own = self._told_own or index == self._roll.index
        self._tell_all(_ABORT, _CULPRIT.pack(index) + in_bytes(reason)[:_REASON_BYTES])
        if reason != _VIEW_ENDS:
            # After the messages: every process that has received one notes the same culprit.
            blame(index, self._roll.name(index), reason, own=index == self._roll.index)

    def ask(self, peer: int) -> Answer | None:
        """A peer's waits; None if it does not answer within ``ANSWER_S``. Called by one thread at a time."""
        if peer in self.left:
            return Answer({})
        number = self._asked[peer] = self._asked[peer] + 1
        self._say(peer, _QUESTION, _NUMBER.pack(number))
        with self._answered:
            self._answered.wait_for(lambda: self._answers[peer][0] == number or self.failure is not None, ANSWER_S)
            answered, answer = self._answers[peer]
        return answer if answered == number else None

    def goodbye(self) -> None:
        """Tell all processes that this one has finished its part."""
        self._tell_all(_GOODBYE)

    def close(self) -> None:
        """End the thread and close the connections.

        It first reads pending messages for a moment: closing at once would reset the connection, and a peer could lose
        the goodbye.
        """
        if self._closing:
            return
        self._end_beats()
        for sock in self._socks.values():
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
        self._linger_until = time.monotonic() + _LINGER_S
        self._closing = True
        self._bell.ring()
        if self._thread.ident is None:
            self.close_descriptors()  # the thread, which would close them, was never started
        elif threading.current_thread() is not self._thread:
            self._thread.join()

    def close_descriptors(self) -> None:
        """In a forked child: close the parent's connections without a goodbye."""
        for sock in self._socks.values():
            sock.close()
        self._bell.close()
        if self._beats is not None and self._beats.bell >= 0:
            with contextlib.suppress(OSError):
                os.close(self._beats.bell)
        with contextlib.suppress(OSError):
            self._selector.close()

    def _say(self, peer: int, kind: int, text: bytes = b"") -> None:
        """Send a message that does not end the conversation. Heartbeats continue after it, unless the last message
        was sent."""
        with self._lock:
            self._beats_here = not self._last_said
            self._end_beats()
            self._tell(peer, kind, text)

    def _tell_all(self, kind: int, text: bytes = b"") -> None:
        with self._lock:
            self._beats_here, self._last_said = False, True
            self._end_beats()
            for peer in list(self._socks):
                self._tell(peer, kind, text)

    def _end_beats(self) -> None:
        """Stop the compiled heartbeats. Messages are written here from now on, after the rest of a frame."""
        with self._lock:
            if self._beats is not None:
                self._unsent.update(self._beats.end())

    def _beat_again(self) -> bool:
        """Restart the compiled heartbeats once all messages are sent completely. Returns whether they run."""
        with self._lock:
            for peer, sock in self._far.items():
                self._push(peer, sock)
            unsent = any(self._unsent.get(peer) for peer in self._far)
            if self._sealed or unsent or self._told or not self._beats_here:
                return False
            self._beats_here = False
            if self._far:
                self._beats = self._new_beats()
                self._beats.start()
            return True

    def _new_beats(self) -> Heartbeats:
        return Heartbeats(self._far, _FRAME.pack(_HEARTBEAT, 0), self._tick_s)

    def _push(self, peer: int, sock: socket.socket) -> None:
        """Send as much of the unsent bytes as the socket accepts; the rest is sent before the next message."""
        # A full control buffer belongs to a peer that has not read for a long time; ``_look`` finds its silence.
        rest = self._unsent.get(peer, b"")
        with contextlib.suppress(OSError):
            self._unsent[peer] = rest[sock.send(rest, socket.MSG_NOSIGNAL) :] if rest else b""

    def _tell(self, peer: int, kind: int, text: bytes = b"") -> None:
        sock = self._socks.get(peer)
        # A peer that has left may still read, and would blame this process for ending without a goodbye.
        if sock is None or (peer in self.left and kind not in (_GOODBYE, _ABORT)):
            return
        with self._lock:
            self._unsent[peer] = self._unsent.get(peer, b"") + _FRAME.pack(kind, len(text)) + text
            self._push(peer, sock)

    @needed
    def _watch(self) -> None:
        tick, last = self._tick_s, time.monotonic()
        try:
            while not self._closing or self._lingering():
                for key, _ in self._selector.select(_LINGER_S if self._closing else tick):
                    if key.data is not None:
                        self._read(key.data)
                    else:
                        self._bell.rang()
                now = time.monotonic()
                if self._insists_from and now > self._insists_from + _LINGER_S and not self._came_back.is_set():
                    self._insist()  # its own thread has not begun, or has failed
                if now - last >= tick and not self._closing:
                    # This process itself may have been stopped: then the silence of its peers does not count.
                    if now - last > 2 * tick + 1:
                        self._heard = dict.fromkeys(self._heard, now)
                    last = now
                    self._look(now)
        finally:
            self._end_beats()  # before a descriptor becomes another file's
            self._selector.close()
            for sock in self._socks.values():
                sock.close()
            self._bell.close()

    def _lingering(self) -> bool:
        return self.failure is None and bool(self._open) and time.monotonic() < self._linger_until

    def _read(self, peer: int) -> None:
        sock = self._socks[peer]
        try:
            data = sock.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._heard[peer] = time.monotonic()
        buffer = self._partial[peer] + data
        while len(buffer) >= _FRAME.size:
            kind, size = _FRAME.unpack_from(buffer)
            if len(buffer) < _FRAME.size + size:
                break
            text, buffer = buffer[_FRAME.size : _FRAME.size + size], buffer[_FRAME.size + size :]
            self._understand(peer, kind, text)
        self._partial[peer] = buffer
        if not data:
            self._selector.unregister(sock)
            self._open.discard(peer)
            if peer not in self.left:
                # Name both ends: if only this connection has failed, nobody can tell which of them is broken.
                self._fail(peer, f"died: its connection to rank {self._roll.index} closed without a goodbye")

    def _understand(self, peer: int, kind: int, text: bytes) -> None:
        if not self._makes_sense(peer, kind, text):
            self._fail(
                peer, f"broke the protocol: a control message of kind {kind} with {len(text)} bytes came from it"
            )
        elif kind == _GOODBYE:
            self.left.add(peer)
            self._on_left(peer)
        elif kind == _ABORT:
            (culprit,) = _CULPRIT.unpack_from(text)
            reason = printable(text[_CULPRIT.size :].decode(errors="ignore"))
            if culprit != self._roll.index or not self._told_own:  # otherwise it is the echo of our own message
                self._fail(culprit, reason)
        elif kind == _QUESTION and not self._told:  # otherwise the peer has been told the culprit already
            said = text + pack(self._answer())
            with self._lock:
                if not self._unsent.get(peer):  # a peer that does not read gets one answer at most
                    self._say(peer, _ANSWER, said)

    def _makes_sense(self, peer: int, kind: int, text: bytes) -> bool:
        """Whether this is a valid message of this version. Keeps a valid answer."""
        members = len(self._roll.members)
        if len(text) not in _SIZES.get(kind, ()):
            return False
        if kind == _ABORT:
            return bool(_CULPRIT.unpack_from(text)[0] < members)
        if kind == _QUESTION:
            (number,) = _NUMBER.unpack(text)
            self._asked_by[peer] += 1
            return bool(number == self._asked_by[peer])
        return kind != _ANSWER or self._take_answer(peer, text)

    def _take_answer(self, peer: int, text: bytes) -> bool:
        """Keep an answer. False for an answer without a question, for a second answer to one question, and for
        invalid bytes."""
        (number,) = _NUMBER.unpack_from(text)
        if not self._answers[peer][0] < number <= self._asked[peer]:
            return False
        try:
            answer = unpack(text[_NUMBER.size :], len(self._roll.members))
        except ValueError:
            return False
        with self._answered:
            self._answers[peer] = number, answer
            self._answered.notify()
        return True

    def _look(self, now: float) -> None:
        """Check every peer for signs of life, and send heartbeats if compiled code does not."""
        if self._beats_here and not self._beat_again():
            for peer in self._far:
                if not self._unsent.get(peer):
                    self._tell(peer, _HEARTBEAT)
        for peer in self._socks:
            if peer in self.left:
                continue
            if peer in self._local and not _is_stopped(self._local[peer]):
                self._heard[peer] = now
            silent = now - self._heard[peer]
            if silent > self._liveness_s:
                self._fail(peer, (_STOPPED if peer in self._local else _SILENT).format(silent))

    def _fail(self, culprit: int, reason: str) -> None:
        host = self._roll.members[culprit].host
        who = "this process, " if culprit == self._roll.index else ""
        error = PeerLost(f"{who}{self._roll.name(culprit)} {reason}", rank=culprit, host=host)
        ends = reason == _VIEW_ENDS
        with self._lock:
            # After its own report this process sees echoes of it and closing connections until it has ended.
            if self.failure is not None or (self._closing and self._told):
                return
            if not self._told_own:
                self.failure = ViewEnds() if ends else error
        if self.failure is not None:  # else the others end because of this process, so it must end too
            self.abort(reason, culprit)
            self.failed.set()
            with self._answered:
                self._answered.notify()
            self._on_failure(self.failure)
        if ends:
            return
        if self.insists and not self._insists_from:
            self._insists_from = time.monotonic() + GRACE_S
            with contextlib.suppress(RuntimeError):  # without memory for a thread ``_watch`` insists
                threading.Thread(target=self._insist, name="syncline-insist", daemon=True).start()
        if self.failure is None:
            return
        # Printing may block on the reader of stderr, so it comes last, when all processes are informed.
        if not reason.startswith(FAILED) or first_time(reason.removeprefix(FAILED)):
            say(f"syncline: {self._roll.name(self._roll.index)}: {error}\n")

    @needed
    def _insist(self) -> None:
        """End the process if the user's thread does not return."""
        if not self._came_back.wait(max(0.0, self._insists_from - time.monotonic())):
            self._insists_from = math.inf
            index = self.failure.rank if isinstance(self.failure, PeerLost) else self._roll.index
            culprit = "this process" if index == self._roll.index else self._roll.name(index)
            self._end(
                f"syncline: {self._roll.name(self._roll.index)}: the script did not return to Syncline within"
                f" {GRACE_S:.0f} s after the failure of {culprit}, ending"
            )

    def _end(self, text: str) -> None:
        say(f"{text}\n")
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(FAILED_STATUS)


class Stops:
    """Finds processes on this machine that are stopped for longer than ``liveness_s``, before the watcher runs."""

    def __init__(self, roll: Roll, liveness_s: float) -> None:
        me = roll.members[roll.index]
        self._roll, self._liveness_s, self._tick_s = roll, liveness_s, min(1.0, liveness_s / 4)
        self._near = [member for member in roll.members if member is not me and sees(me, member)]
        self._since: dict[int, float] = {}
        self._looked = time.monotonic()

    def check(self) -> None:
        """Raise PeerLost if there is such a process. Does not wait."""
        now = time.monotonic()
        if now - self._looked < self._tick_s:
            return
        if now - self._looked > 2 * self._tick_s + 1:  # this process may have been stopped itself
            self._since.clear()
        self._looked = now
        for member in self._near:
            if not _is_stopped(member.pid):
                self._since.pop(member.index, None)
            elif (silent := now - self._since.setdefault(member.index, now)) > self._liveness_s:
                name, why = self._roll.name(member.index), f"{_STOPPED.format(silent)} while the group was connecting"
                blame(member.index, name, why, own=False)
                raise PeerLost(f"{name} {why}", rank=member.index, host=member.host)


def _is_stopped(pid: int) -> bool:
    """Whether a process on this machine is stopped by a signal."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False  # its closed connection tells that it died
    return stat[stat.rindex(b")") + 2 : stat.rindex(b")") + 3] == b"T"
