"""Serves the counters of this process to Prometheus while a run goes on, through the library prometheus-client.

``SYNCLINE_METRICS`` has the address: ``PORT``, ``HOST:PORT`` or, with the codec's error in every n-th step,
``PORT,error=n``. The first process of a host serves at PORT and each further process of it at the next port. With port
0 each gets a free one. The default host is 127.0.0.1, which other machines cannot reach: whoever reaches the port can
read everything.

Training pays nothing per message: a scrape reads the counters that exist anyway. A file in this user's cache, locked
while the process serves, tells ``syncline top`` the address.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from socketserver import TCPServer, ThreadingMixIn
from typing import Any

from .errors import UsageError
from .kernels.private import NotPrivateError, cache_home, new_file, path_of, private_folder, read_file
from .session.session import Session
from .session.stats import Stats, total_of
from .version import __version__
from .wire.reports import say

VARIABLE = "SYNCLINE_METRICS"
PATH = "/metrics"
FOLDER = "syncline", "metrics"
"""The folder below the user's cache with a file for each serving process."""

_MOST_PORT = 65535
_MOST_FILES = 4096
_TIMEOUT_S = 10.0
"""The time that a reader may take for its request."""
_READERS = 8
"""The readers that are answered at once; more are turned away."""
_GIVES_WAY_S = 1.0
"""The time after which a reader gives way if all places are taken: it is silent, or sends a byte now and then."""
_FRESH_S = 0.1
"""The time for which an answer is sent again, so that many readers read the counters no more often than ten."""


@dataclass(frozen=True)
class Serving:
    """Where metrics are asked to be served, and the number of steps between measures of a codec's error (0: never)."""

    host: str
    port: int
    error_every: int = 0

    def begin(self, session: Session) -> Metrics:
        """Serve the metrics of a session until ``close``. Raises UsageError if that is impossible."""
        place, count = _place(session)
        port = self.port + place if self.port else 0
        name = session.name(session.index)
        if self.port + count - 1 > _MOST_PORT:
            raise UsageError(
                f"{VARIABLE}: {count} processes on this host need the ports {self.port} to {self.port + count - 1}, but"
                f" the last one is {_MOST_PORT}: choose a lower port"
            )
        try:
            server = _Server(self.host, port)
        except OSError as error:
            raise UsageError(
                f"{name} cannot serve metrics at {_address(self.host, port)} ({error.strerror or error}): choose"
                f" another port for --metrics or {VARIABLE} (each process of a host takes the next one), or 0 for any"
                " free one"
            ) from error
        session.error_every = self.error_every
        ports = (self.port, self.port + count - 1) if self.port else (server.port, server.port)
        made = Metrics(session, server, ports, _address(_reachable(self.host), server.port))
        if place == 0 or not self.port:
            more = f" to :{ports[1]}" if ports[1] > ports[0] else ""
            say(f"syncline: {name}: metrics at http://{_address(self.host, server.port)}{PATH}{more}\n")
        return made


def serving_of(environ: Mapping[str, str]) -> Serving | None:
    """The request in the variable; None if it is not set. Raises UsageError for other texts, or without the library."""
    text = environ.get(VARIABLE, "")
    return read_serving(text, VARIABLE) if text else None


def read_serving(text: str, name: str) -> Serving:
    """The request in a text. Raises UsageError, which begins with ``name``, or without the library."""
    address, *words = text.split(",")
    every = 0
    for word in words:
        key, _, value = word.partition("=")
        if key != "error" or not _is_number(value) or int(value) < 1:
            raise UsageError(f"{name}: {word!r} is unknown: the codec's error in every n-th step is error=n")
        every = int(value)
    host, colon, port = address.rpartition(":")
    if not _is_number(port) or int(port) > _MOST_PORT or (colon and not host):
        raise UsageError(f"{name} takes PORT or HOST:PORT, with a port from 0 to {_MOST_PORT}, not {address!r}")
    try:
        import prometheus_client  # noqa: F401 - whether it is there
    except ImportError as error:
        raise UsageError(
            f"{name} needs the package prometheus-client ({error}): pip install 'syncline[metrics]', or leave it out"
        ) from error
    return Serving(host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port), every)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def _place(session: Session) -> tuple[int, int]:
    """This process's number among those of its host, and how many there are."""
    roll = session.roll
    if roll is None:
        return 0, 1
    mine = roll.nodes[roll.index]
    return roll.nodes[: roll.index].count(mine), roll.nodes.count(mine)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _reachable(host: str) -> str:
    """The address by which this machine reaches a server at ``host``."""
    return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)


class Metrics:
    """The metrics of one session while they are served, at the ports from the first to the last of ``ports``."""

    def __init__(self, session: Session, server: _Server, ports: tuple[int, int], address: str) -> None:
        import prometheus_client

        self._server = server
        registry = prometheus_client.CollectorRegistry()
        registry.register(_Collector(session, ports))
        server.answer = partial(prometheus_client.generate_latest, registry)
        server.kind = prometheus_client.CONTENT_TYPE_LATEST
        self._announced = _announce(address)
        self._ours = True  # False in a forked child, which has no thread that serves
        self._thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 60.0}, name="syncline-metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the server, its thread and the announcement of its address."""
        if not self._ours:
            return
        self._server.close()
        self._thread.join(_TIMEOUT_S)
        if self._announced is not None:
            fd, path = self._announced
            with contextlib.suppress(OSError):
                path.unlink()
            os.close(fd)
            self._announced = None

    def forget(self) -> None:
        """In a forked child: close the parent's descriptors."""
        self._ours = False
        self._server.socket.close()
        if self._announced is not None:
            os.close(self._announced[0])
            self._announced = None


def _announce(address: str) -> tuple[int, Path] | None:
    """Write the address to a locked file for ``syncline top``. None if this user has no private folder."""
    try:
        folder = cache_home().joinpath(*FOLDER)
        with private_folder(cache_home(), *FOLDER) as inside:
            fresh = path_of(inside) / f".{os.getpid()}"
            with contextlib.suppress(FileNotFoundError):
                fresh.unlink()  # of a killed process with this number
            fd = new_file(fresh)
            fcntl.flock(fd, fcntl.LOCK_EX)  # before it has its name: an unlocked file is taken for a remainder
            text = json.dumps({"address": address, "network": network()})
            os.write(fd, text.encode())
            name = f"{os.getpid()}.json"
            fresh.rename(path_of(inside) / name)
        return fd, folder / name
    except (OSError, NotPrivateError):
        return None


def announced() -> list[str]:
    """The addresses of this user's serving processes in this network namespace, in order."""
    found = []
    with contextlib.suppress(OSError, NotPrivateError), private_folder(cache_home(), *FOLDER) as inside:
        for name in sorted(path.name for path in path_of(inside).iterdir())[:_MOST_FILES]:
            with contextlib.suppress(OSError, NotPrivateError, ValueError, KeyError, TypeError):
                told = json.loads(read_file(inside, name, Path(*FOLDER)))
                if _is_held(path_of(inside) / name) and told["network"] == network():
                    found.append(str(told["address"]))
    return found


def _is_held(path: Path) -> bool:
    """Whether a process has locked a file. One that no process has locked is removed: its process was killed."""
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        path.unlink()
        return False


def network() -> int:
    """The number of this process's network namespace: a loopback address means nothing in another one."""
    return Path("/proc/self/ns/net").stat().st_ino


class _Server(ThreadingMixIn, HTTPServer):
    """Listens at a port and answers with what ``answer`` returns, a few readers at a time."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int) -> None:
        self.answer: Any = bytes
        self.kind = "text/plain"
        self._free, self._reading = threading.Semaphore(_READERS), threading.Lock()
        self._came: dict[Any, float] = {}  # when each of the readers came that are being answered
        self._body, self._read_s = b"", -math.inf
        family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self.address_family = family
        super().__init__((str(where[0]), port), _Handler)
        self.port: int = self.socket.getsockname()[1]

    def server_bind(self) -> None:
        """Without the search for the host's name, which may wait for a name server."""
        TCPServer.server_bind(self)

    def close(self) -> None:
        """End ``serve_forever`` at once and close the door."""
        with contextlib.suppress(OSError):  # wakes the thread, which would look after its interval only
            self.socket.shutdown(socket.SHUT_RDWR)
        self.shutdown()
        self.server_close()

    def fresh(self) -> bytes:
        """The metrics, at most ``_FRESH_S`` old."""
        with self._reading:
            if time.monotonic() - self._read_s > _FRESH_S:
                self._body = self.answer()
                self._read_s = time.monotonic()
            return self._body

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, or not at all if too many are being answered."""
        if self._free.acquire(blocking=False) or self._make_room():
            self._came[request] = time.monotonic()
            try:
                super().process_request(request, client_address)
            except RuntimeError:  # no thread can be started
                self._gone(request)
                raise
        else:
            self.shutdown_request(request)

    def _make_room(self) -> bool:
        """Whether there is a place again, because the reader that came first has been there too long."""
        came = min(self._came.copy().items(), key=lambda one: one[1], default=None)
        if came is None or time.monotonic() - came[1] < _GIVES_WAY_S:
            return False
        with contextlib.suppress(OSError):
            came[0].shutdown(socket.SHUT_RDWR)  # wakes its thread, which closes it
        return self._free.acquire(timeout=_TIMEOUT_S)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer one reader, and let the next one come."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._gone(request)

    def _gone(self, request: Any) -> None:
        del self._came[request]
        self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that went away or asked nonsense is no news."""


class _Handler(BaseHTTPRequestHandler):
    timeout = _TIMEOUT_S

    def do_GET(self) -> None:
        """Send the metrics; any other path is not found."""
        assert isinstance(self.server, _Server)
        if self.path.partition("?")[0] not in (PATH, "/"):
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        body = self.server.fresh()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", self.server.kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing among the script's output."""


class _Collector:
    """Reads the counters of a session when Prometheus asks."""

    def __init__(self, session: Session, ports: tuple[int, int]) -> None:
        self._session, self._ports = session, ports

    def collect(self) -> Iterable[Any]:
        """All metrics, each with the rank as a label."""
        session = self._session
        stats = session.stats()
        rank = self._numbered(session.index)
        info = {
            "strategy": stats.strategy,
            "transport": stats.transport,
            "workers": str(session.world_size),
            "ports": "-".join(map(str, self._ports)),
            "version": __version__,
        }
        yield _made("Gauge", "syncline_info", "This process of the run.", rank, [(info, 1.0)])
        for name, text, values in counters_of(stats):
            yield _made("Counter", name, text, rank, [({}, value) for value in values])
        for name, text, peers in self._by_peer(stats):
            yield _made("Counter", name, text, rank, [({"peer": peer}, value) for peer, value in peers])
        for name, text, count, total in summaries_of(stats):
            yield _made("Summary", name, text, rank, [({}, (count, total))])
        if stats.compression_error is not None:
            text = "Norm of this rank's residuals divided by the norm of its gradients, in the last measured step."
            yield _made("Gauge", "syncline_compression_error", text, rank, [({}, stats.compression_error)])

    def _numbered(self, index: int) -> str:
        workers = self._session.world_size
        return str(index) if index < workers else f"server {index - workers}"

    def _by_peer(self, stats: Stats) -> Iterable[tuple[str, str, list[tuple[str, float]]]]:
        for name, text, found in (
            ("syncline_sent_bytes", "Bytes sent to a peer, with all headers.", stats.bytes_sent),
            ("syncline_received_bytes", "Bytes received from a peer, with all headers.", stats.bytes_received),
            ("syncline_waited_seconds", "Time that this rank waited for another before steps.", stats.waited_s),
        ):
            if found:
                yield name, text, [(self._numbered(peer), float(value)) for peer, value in sorted(found.items())]


def counters_of(stats: Stats) -> Iterable[tuple[str, str, list[float]]]:
    """The plain counters: name, meaning and value."""
    yield "syncline_steps", "Finished steps, including those before a resumed checkpoint.", [float(stats.steps)]
    yield "syncline_repairs", "Lost workers without which an elastic run has gone on.", [float(stats.repairs)]
    yield "syncline_blocked_seconds", "Time for which the training thread was blocked in Syncline.", [stats.blocked_s]
    if stats.samples is not None:
        yield "syncline_samples", "Weights of this rank's batches, summed.", [stats.samples]


def summaries_of(stats: Stats) -> Iterable[tuple[str, str, int, float]]:
    """The counters with a number and a sum: name, meaning, number and sum."""
    yield (
        "syncline_step_seconds",
        "Time from the end of a step to the end of the next.",
        stats.timed_steps,
        stats.timed_s,
    )
    if stats.version_lag:
        for name, text, counts in (
            ("syncline_staleness_steps", "This rank's lead over the slowest at the start of a step.", stats.staleness),
            ("syncline_version_lag", "Updates by others between a pull and the update by its push.", stats.version_lag),
        ):
            yield name, text, sum(counts.values()), float(total_of(counts))


def _made(kind: str, name: str, text: str, rank: str, values: list[tuple[dict[str, str], Any]]) -> Any:
    """A metric family of prometheus-client with one value, of a summary number and sum, for each set of labels."""
    from prometheus_client import core

    labels = list(values[0][0]) if values else []
    family = getattr(core, f"{kind}MetricFamily")(name, text, labels=["rank", *labels])
    for labelled, value in values:
        family.add_metric([rank, *labelled.values()], *(value if kind == "Summary" else [value]))
    return family
