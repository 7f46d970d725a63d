"""Ranks for ``benchmarks/same``: real processes that import Syncline from a given tree, ready at once.

Started as a program this file imports a framework once, which takes seconds, and forks ranks off for one combination
after the other, a fraction of one each. It imports what a first training turned out to need, and knows nothing of what
that is. Imported, it is the client: ``Side`` is a tree of sources, ``Ranks`` its processes under one framework.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import io
import json
import mmap
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from combinations import Combination, Scenarios, Words, combinations

HERE = Path(__file__).resolve().parent

MODULES = {"torch": "torch", "numpy": "numpy", "jax": "jax", "tensorflow": "keras", "distributed": "torch"}
"""What to import first for a framework."""

GRACE_S = 5.0
"""How long ranks have to end when one has been refused or has failed."""

# The client.


class Side:
    """A tree of sources, by the name that the summary calls it."""

    def __init__(self, name: str, source: Path, cache: Path) -> None:
        self.name, self._source, self._cache = name, source, cache

    def environ(self) -> dict[str, str]:
        """Of processes that import Syncline from this tree, alike on both sides."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SYNCLINE_")}
        return kept | {
            "PYTHONPATH": os.pathsep.join([str(self._source), str(HERE)]),
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "-1",
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # what is installed may be another tree
            "JAX_PLATFORMS": "cpu",
            "JAX_ENABLE_X64": "1",
            "JAX_COMPILATION_CACHE_DIR": str(self._cache),  # most of what ranks compile is what others have compiled
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "KERAS_BACKEND": "tensorflow",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "SYNCLINE_TUNING": "off",  # what is chosen by measuring is not the same twice
            "SYNCLINE_SECRET": "of benchmarks/same",
        }

    def combinations(self, scenarios: Scenarios) -> list[Combination]:
        """What this tree's vocabulary allows for."""
        ask = [sys.executable, "-m", "syncline", "strategies"]
        said = subprocess.run(ask, env=self.environ(), capture_output=True, text=True, timeout=120, check=False)
        if said.returncode:
            raise SystemExit(f"same: {self.name}: 'syncline strategies' fails:\n{said.stderr}")
        return list(dict.fromkeys(combinations(Words.read(said.stdout), scenarios)))


class Ranks:
    """The process that forks a side's ranks of one framework; begun when it is first needed, and again if it died."""

    def __init__(self, side: Side, framework: str) -> None:
        self._side, self._framework = side, framework
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def train(self, combination: Combination, limit_s: float) -> dict[str, Any]:
        """How a combination ends: ``kind``, and digests by rank, or the text of what went wrong."""
        try:
            line = self._begin()
            line.settimeout(limit_s + 120)  # it keeps to the limit by itself; the first time it imports besides
            line.send(json.dumps([asdict(combination), limit_s]).encode())
            answer = line.recv(1 << 20)
            if answer:
                return dict(json.loads(answer))
            self._printed.seek(0)
            why = f"the process that forks ranks ended: {self._printed.read().decode(errors='replace').strip()[-300:]}"
        except OSError as error:
            why = f"the process that forks ranks does not answer: {error}"
        self.close()
        return {"kind": "failed", "text": why}

    def _begin(self) -> socket.socket:
        if self._process is None:
            self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                command = [sys.executable, __file__, str(theirs.fileno()), self._framework]
                self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
                self._process = subprocess.Popen(
                    command,
                    stderr=self._printed,
                    env=self._side.environ(),
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is the walk's to act on
                )
        return self._line

    def close(self) -> None:
        """End it; its ranks end with it."""
        if self._process is not None:
            self._line.close()
            self._process.kill()
            self._process.wait()
            self._printed.close()
            self._process = None


# The server.


def serve(line: socket.socket, framework: str) -> None:
    """Train one combination after the other, until the other side hangs up."""
    warnings.simplefilter("ignore")  # JAX warns of forks; nothing of it runs here
    importlib.import_module(MODULES[framework])
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    importlib.import_module("trainings")
    load_parts()
    warm = False
    while request := line.recv(1 << 20):
        order, limit_s = json.loads(request)
        outcome, modules = group(Combination(**order), limit_s if warm else limit_s + 60, not warm)
        for name in modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        gc.collect()
        gc.freeze()  # what a collection in a rank touches would be copied
        warm = warm or bool(modules)
        line.send(json.dumps(outcome).encode())


def load_parts() -> None:
    """Load what a strategy may name, by asking for it, so that ranks need not."""
    arguments, sys.argv = sys.argv, ["syncline", "strategies"]
    with contextlib.suppress(Exception, SystemExit), contextlib.redirect_stdout(io.StringIO()):
        runpy.run_module("syncline", run_name="__main__")
    sys.argv = arguments


def group(made: Combination, limit_s: float, tell: bool) -> tuple[dict[str, Any], list[str]]:
    """Fork the ranks of a combination and wait for their end; how it was, and what rank 0 imported if it is to tell."""
    processes, addresses = made.workers + made.servers, [f"127.0.0.1:{free_port()}" for _ in range(2)]
    shared = mmap.mmap(-1, processes)
    deadline, said = time.monotonic() + limit_s, [b""] * processes
    pids: list[int] = []
    with tempfile.TemporaryFile() as output, selectors.DefaultSelector() as selector:
        try:
            for index in range(processes):
                mine, theirs = os.pipe()
                pid = os.fork()
                if pid == 0:
                    rank(made, index, addresses, shared, theirs, output.fileno(), tell and index == 0)
                pids.append(pid)
                os.close(theirs)
                selector.register(mine, selectors.EVENT_READ, index)
            while selector.get_map() and (ready := selector.select(max(0.0, deadline - time.monotonic()))):
                for key, _ in ready:
                    found = os.read(key.fd, 1 << 16)
                    said[key.data] += found
                    if not found:
                        selector.unregister(key.fd)
                        os.close(key.fd)
                        if b'"trained"' not in said[key.data]:
                            deadline = min(deadline, time.monotonic() + GRACE_S)
        finally:
            late = {key.data for key in selector.get_map().values()}
            for key in list(selector.get_map().values()):
                os.close(key.fd)
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        output.seek(0)
        printed = output.read().decode(errors="replace").strip()
    ends = [json.loads(text) if text.endswith(b"}") else {} for text in said]
    modules = ends[0].pop("modules", [])
    if all(end.get("kind") == "trained" for end in ends):
        return {"kind": "trained", "digests": [end["digests"] for end in ends]}, modules
    for kind in ("refused", "failed"):
        for end in ends:
            if end.get("kind") == kind:
                return {"kind": kind, "text": end["text"]}, modules
    died = [index for index, end in enumerate(ends) if not end and index not in late]
    what = f"ranks {died} died" if died else f"no end of ranks {sorted(late)} within {limit_s:.0f} s"
    return {"kind": "failed", "text": f"{what}; {printed[-300:]}"}, modules


def rank(
    made: Combination,
    index: int,
    addresses: Sequence[str],
    shared: mmap.mmap,
    line: int,
    output: int,
    tell: bool,
) -> None:
    """Be a rank: say how it ended, and end."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    for number in (1, 2):
        os.dup2(output, number)
    end: dict[str, Any] = {}
    try:
        if made.hosts > 1 and index * made.hosts >= 2 * made.workers - 1:
            move_to_another_host()
        import trainings

        place = trainings.Place(made.strategy, index, made.workers + made.servers, addresses[0], made.turns, shared)
        before = set(sys.modules)
        digests = trainings.train(made.framework, made.scenario, place, addresses)
        end = {"kind": "trained", "digests": digests}
        if tell:
            end["modules"] = [name for name in sys.modules if name not in before]
    except BaseException as error:
        refusals = {"UsageError", "NotImplementedError", "ImportError", "PermissionError"}
        refused = any(kind.__name__ in refusals for kind in type(error).__mro__)
        end = {"kind": "refused" if refused else "failed", "text": f"{type(error).__name__}: {error}"}
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException), open(line, "w") as answer:
            answer.write(json.dumps(end))
        os._exit(0)  # whatever happens, a rank is never the process that forks them


def move_to_another_host() -> None:
    """Show this process another boot id, by which hosts are told apart; raises PermissionError where it may not."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_user, new_mounts, bind, private = 0x10000000, 0x20000, 0x1000, 0x44000

    def call(function: Callable[..., int], *arguments: Any) -> None:
        if function(*arguments):
            why = os.strerror(ctypes.get_errno())
            raise PermissionError(f"a second host cannot be pretended here: {function.__name__}: {why}")

    call(libc.unshare, new_mounts if os.geteuid() == 0 else new_user | new_mounts)
    call(libc.mount, None, b"/", None, private, None)
    with tempfile.NamedTemporaryFile("w") as other:
        other.write("00000000-0000-0000-0000-000000000001\n")
        other.flush()
        call(libc.mount, other.name.encode(), b"/proc/sys/kernel/random/boot_id", None, bind, None)


def free_port() -> int:
    """A port of this machine that nothing listens at."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
