"""Records a session: from the first span until its timeline is written or its parts are left in the folder.

A launcher that started all processes merges their parts itself, whatever happens to them. Otherwise rank 0 merges them
at the end of a run without faults. Every process first says goodbye, so that no process is kept from ending, and then
sends its part while the connections are still open. A process that does not reach rank 0 within ``PATIENCE_S`` leaves
its part in its folder, where rank 0 finds it later if they share files. Otherwise, and after a fault, the command
``syncline timeline`` merges the parts in the folder.

 rank 0                                another process
 ------                                ---------------
 goodbye                               goodbye
 come, to all  ------------------->
               <-------------------    what time is it? (several times, where it has another clock)
               ------------------->
               <-------------------    its part, compressed
"""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..engine.order import Work
from ..errors import PeerTimeout, SynclineError
from ..kernels.private import new_file
from ..session.session import Session
from ..wire.reports import first_time, say
from .chrome import RecordedRun, write
from .folder import PARTS, VARIABLE, checked_target, folder_of, open_part, part_name
from .spans import LIMIT, SUFFIXES, Reading, SpanFile, best, identity, parse, parse_names

PATIENCE_S = 10.0
"""The time for which processes wait for each other at the end of a run."""

_HANDING_S = 60.0
"""The time limit for a part, including the wait for the parts before it."""

_TURN_S = 1.0
"""The time for a process that was ready while another one sent its part: its message has arrived, or will not."""

_EXCHANGES = 16
"""The number of clock readings; the one with the shortest round trip counts."""

_TOPIC = 2
_TIME = struct.Struct("<d")
_SIZES = struct.Struct("<QQ")
_MOST_BYTES = 64 * (LIMIT + 1), 1 << 26
"""The size limits of a part's rows and names."""


_Part = tuple[bytes, bytes]
"""The rows file and the names file of a process."""


class _Post:
    """Messages about a recording. A process that has left or does not answer is no fault."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def send(self, to: int, *bodies: bytes) -> list[Work]:
        """Start to send messages."""
        label = f"a timeline's message to {self._session.name(to)}"
        return [self._session.send(to, body, label, _TOPIC, tolerant=True) for body in bodies]

    def receive(self, of: int, timeout_s: float, *sizes: int) -> list[bytes]:
        """The next messages, of at most ``nbytes`` each. Raises PeerTimeout, or the fault that ended the run."""
        label = f"a timeline's message of {self._session.name(of)}"
        works = [self._session.recv(of, label, size, tolerant=True, topic=_TOPIC) for size in sizes]
        self.wait(works, timeout_s)
        return [work.result for work in works]

    def wait(self, works: Sequence[Work], timeout_s: float) -> None:
        """Wait for the works. Raises PeerTimeout, or the fault that ended the run."""
        self._session.engine.wait(*works, timeout=max(0.0, timeout_s))


class _Cores:
    """The use of this process's cores from now on, by this process and by all: busy cores make a run slow."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._stat, self._usable = proc / "stat", sorted(os.sched_getaffinity(0))
        self._before = self._now()

    def used(self) -> dict[str, Any]:
        """The numbers of the cores, and the seconds since the start, of this process and of all on these cores."""
        wall_s, own_s, busy_s = (after - before for after, before in zip(self._now(), self._before, strict=True))
        return {"usable": self._usable, "wall_s": wall_s, "own_s": own_s, "busy_s": busy_s}

    def _now(self) -> tuple[float, float, float]:
        """OSError or ValueError if the kernel does not tell."""
        names, ticks = {f"cpu{core}" for core in self._usable}, 0
        for line in self._stat.read_text().splitlines():
            name, _, counts = line.partition(" ")
            if name in names:
                user, nice, system, _, _, *others = map(int, counts.split()[:8])  # without idle, and waits for disks
                ticks += user + nice + system + sum(others)
        return time.perf_counter(), time.process_time(), ticks / os.sysconf("SC_CLK_TCK")


class SessionSpans:
    """This process's part in the recording of session ``number``; ``target`` is None if a launcher collects parts."""

    def __init__(self, file: SpanFile, folder: Path, target: Path | None, number: int) -> None:
        self.file, self._number = file, number
        self._folder, self._target = folder, target
        self._run, self._identities = "", tuple[str, ...]()
        self._readings: list[Reading] = []
        self._session: Session | None = None
        self._cores: _Cores | None = None

    def attach(self, session: Session) -> None:
        """Start with an established session. Collective."""
        self._session, workers = session, session.group.workers
        role, number = ("rank", session.index) if session.index < workers else ("server", session.index - workers)
        host = "" if session.roll is None else f" ({session.roll.members[session.index].host})"
        self.file.note(name=f"{role} {number}{host}", process=session.index, workers=workers)
        self.file.note(strategy=str(session.strategy))
        with contextlib.suppress(OSError, ValueError, AttributeError):
            self._cores = _Cores()
        session.process.at_end = self.end
        if session.alone:
            return
        everyone, post = range(session.group.processes), _Post(session)
        mine = f"{secrets.token_hex(8)} {identity()}"  # rank 0 names the run
        shared = session.everyone.share(everyone, mine.encode(), "the clocks of a timeline")
        names, _, self._identities = zip(
            *(text.decode(errors="replace").partition(" ") for text in shared), strict=True
        )
        self._run = names[0]
        self.file.note(run=self._run)
        for process in everyone:
            if self._differs(process) and session.index == 0:
                self._tell_time(post, process, _HANDING_S)
            elif self._differs(process) and session.index == process:
                self._ask_time(post)

    def _differs(self, process: int) -> bool:
        """Whether that process has another clock than rank 0."""
        return self._identities[process] != self._identities[0]

    def _tell_time(self, post: _Post, process: int, patience_s: float) -> None:
        for number in range(_EXCHANGES):
            post.receive(process, _HANDING_S if number else patience_s, 1)
            post.send(process, _TIME.pack(self.file.clock()))

    def _ask_time(self, post: _Post) -> None:
        readings = []
        for _ in range(_EXCHANGES):
            asked_s = self.file.clock()
            post.send(0, b"?")
            (answer,) = post.receive(0, _HANDING_S, _TIME.size)
            readings.append(Reading.of(asked_s, _TIME.unpack(answer)[0], self.file.clock()))
        self._readings.append(best(readings))
        self.file.note(clock=[[one.at_s, one.offset_s, one.round_trip_s] for one in self._readings])

    # The end

    def end(self, well: bool) -> None:
        """End the recording, ``well`` or after a fault: send the part, or merge all parts, or leave the part."""
        session, target = self._session, self._target
        with contextlib.suppress(OSError, ValueError):
            if self._cores is not None:
                self.file.note(cores=self._cores.used())
        if session is None or target is None or not well:
            self.file.close()
            if target is not None:
                self._leave(f"the run failed; each process left its part of the timeline in {self._folder}")
            return
        try:
            if session.index == 0:
                self._collect(session, target)
            else:
                self._hand_over(_Post(session), session.index)
        except Exception as error:  # a fault of the recording must not fail the run
            self.file.close()
            if not isinstance(error, PeerTimeout):  # rank 0 reports the parts that it has not found
                me = session.name(session.index)
                why = f"{type(error).__name__}: {error}"
                self._leave(f"{me}: its part of the timeline stays in {self._folder}: {why}")

    def _leave(self, text: str) -> None:
        if first_time(text):
            say(f"syncline: {text}; `syncline timeline {self._folder}` merges the parts that exist\n")

    def _hand_over(self, post: _Post, process: int) -> None:
        post.receive(0, PATIENCE_S, 1)
        if self._differs(process):
            self._ask_time(post)
        self.file.close()
        bodies = [zlib.compress(path.read_bytes(), 1) for path in self.file.paths]
        post.wait(post.send(0, _SIZES.pack(*map(len, bodies)), *bodies), _HANDING_S)
        self.remove()

    def _collect(self, session: Session, target: Path) -> None:
        others, until = range(1, session.group.processes), time.monotonic() + PATIENCE_S
        post, missing = _Post(session), dict[int, Exception]()
        parts = {process: part for process in others if (part := self._left_here(process)) is not None}
        coming = [process for process in others if process not in parts]
        for process in coming:
            post.send(process, b"!")
        for process in coming:
            try:
                parts[process] = self._receive(post, process, until)
            except (SynclineError, ValueError, zlib.error, struct.error) as error:
                left = self._left_here(process)
                parts |= {} if left is None else {process: left}
                missing |= {process: error} if left is None else {}
        self.file.close()
        parts[0] = _bytes_of(self.file.paths)
        whole = False
        try:
            written = write(target, [RecordedRun([parse(*parts[process]) for process in sorted(parts)])])
            whole = not missing
        finally:
            for process, part in parts.items():
                self._keep(process, None if whole else part)
        say(f"syncline: timeline: {target} ({written.text})\n")
        for process, why in missing.items():
            self._leave(f"the timeline lacks {session.name(process)}, whose part stays on its host: {why}")
        if whole:
            self.remove()

    def _receive(self, post: _Post, process: int, until: float) -> _Part:
        """The part of another process. Raises SynclineError, or another error for invalid data."""
        patience_s = max(_TURN_S, until - time.monotonic())
        if self._differs(process):
            self._tell_time(post, process, patience_s)
            patience_s = _HANDING_S
        sizes = _SIZES.unpack(*post.receive(process, patience_s, _SIZES.size))
        if any(size > most for size, most in zip(sizes, _MOST_BYTES, strict=True)):
            raise ValueError(f"it claims an impossible size of {sizes} bytes")
        bodies = post.receive(process, _HANDING_S, *sizes)
        rows, names = (_expanded(body, most) for body, most in zip(bodies, _MOST_BYTES, strict=True))
        if parse(rows, names).notes["process"] != process:
            raise ValueError("it is another process's")
        return rows, names

    def _left_here(self, process: int) -> _Part | None:
        """The part of an ended process, if it is in this host's folder."""
        paths = self._paths_of(process)
        try:
            notes, _ = parse_names(paths[1].read_bytes())
            found = _bytes_of(paths) if notes.get("run") == self._run and notes.get("ended") else None
            return found if found is None or parse(*found).notes["process"] == process else None
        except (OSError, ValueError):
            return None

    def _paths_of(self, process: int) -> list[Path]:
        return [self._folder / f"{part_name(process, self._number)}{suffix}" for suffix in SUFFIXES]

    def _keep(self, process: int, part: _Part | None) -> None:
        """Keep the part of a process in the folder, or remove it."""
        for path, data in zip(self._paths_of(process), part or (b"", b""), strict=True):
            path.unlink(missing_ok=True)
            if part is not None:
                with os.fdopen(new_file(path), "wb") as file:
                    file.write(data)

    def remove(self) -> None:
        """Remove the files and the folder."""
        self.file.remove()
        with contextlib.suppress(OSError):  # the folder has other files
            self._folder.rmdir()


def _bytes_of(paths: Sequence[Path]) -> _Part:
    rows, names = (path.read_bytes() for path in paths)
    return rows, names


def _expanded(data: bytes, most: int) -> bytes:
    """Decompress to at most ``limit`` bytes. Raises zlib.error or ValueError for anything else."""
    expander = zlib.decompressobj()
    found = expander.decompress(data, most)
    if not expander.eof:
        raise ValueError("it is too long or incomplete")
    return found


def begin_recording(process: int, number: int) -> SessionSpans | None:
    """Start to record this process's session ``number``, counted from 0, if recording is on.

    Raises UsageError, which names the host, if the files cannot be written.
    """
    parts, path = os.environ.get(PARTS), os.environ.get(VARIABLE)
    if parts:
        folder = Path(parts)
        return SessionSpans(open_part(folder, process, number), folder, None, number)
    if not path:
        return None
    target = checked_target(path)
    if number:  # each of a process's successive sessions has its own timeline
        stem, dot, suffix = target.name.partition(".json")
        target = target.with_name(f"{stem}-{number + 1}{dot}{suffix}")
    folder = folder_of(target)
    return SessionSpans(open_part(folder, process, number), folder, target, number)
