"""How much of a lab's rate one TCP stream gets.

Measured by iperf3 where it is installed, so that the figure is one that others can check; else by a stream of our own.
Both leave the first second out, in which TCP finds the rate.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
import socket
import subprocess
import sys
import termios
import threading
import time
from typing import Protocol

from syncline.errors import SynclineError

_SKIP_S = 1.0
_MARGIN_S = 20.0
_BLOCK_BYTES = 1 << 18


class Hosts(Protocol):
    """What of a lab is needed here."""

    def address(self, host: int) -> str:
        """The address of a host."""
        ...

    def enter(self, host: int) -> list[str]:
        """The arguments before a command to run it on a host."""
        ...

    def bind(self, host: int) -> socket.socket:
        """A TCP socket on a host, bound and not listening."""
        ...


def measure(hosts: Hosts, seconds: float) -> float:
    """Bytes per second of payload that one stream from host 0 to host 1 gets."""
    return _iperf3(hosts, seconds) if shutil.which("iperf3") else stream(hosts, seconds)


def _iperf3(hosts: Hosts, seconds: float) -> float:
    # It knows whole seconds only.
    span = str(max(1, round(seconds)))
    with hosts.bind(1) as reserved:
        port = str(reserved.getsockname()[1])
    where = ["-B", hosts.address(1), "-p", port]
    server = subprocess.Popen(
        [*hosts.enter(1), "iperf3", "--server", "--one-off", "--forceflush", *where],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
    )
    try:
        _wait_until_listening(server)
        client = [*hosts.enter(0), "iperf3", "--client", hosts.address(1), "-p", port, "--json"]
        client += ["--time", span, "--omit", str(round(_SKIP_S))]
        try:
            done = subprocess.run(client, capture_output=True, text=True, timeout=seconds + _MARGIN_S, check=False)
            found = json.loads(done.stdout)
            return float(found["end"]["sum_received"]["bits_per_second"]) / 8
        except subprocess.TimeoutExpired:
            raise SynclineError(f"iperf3 did not end within {seconds + _MARGIN_S:.0f} s") from None
        except (ValueError, KeyError):
            raise SynclineError(f"iperf3 failed: {(done.stdout + done.stderr).strip()}") from None
    finally:
        server.kill()
        server.communicate()


def _wait_until_listening(server: subprocess.Popen[str]) -> None:
    """Until it says so; a server that has ended closes its output, and the client will report it."""
    watch = threading.Timer(_MARGIN_S, server.kill)
    watch.start()
    try:
        for line in server.stdout or ():
            if "listening" in line:
                return
    finally:
        watch.cancel()


def stream(hosts: Hosts, seconds: float) -> float:
    """The same by a stream between two threads of this process; bytes per second at the receiver."""
    with hosts.bind(1) as listener, hosts.bind(0) as sender:
        listener.listen(1)
        listener.settimeout(_MARGIN_S)
        sender.settimeout(_MARGIN_S)
        sender.connect(listener.getsockname())
        receiver, _ = listener.accept()
        receiver.settimeout(_MARGIN_S)
        with receiver:
            thread = threading.Thread(target=_send, args=(sender,), name="syncline-lab-stream", daemon=True)
            thread.start()
            try:
                _receive(receiver, _SKIP_S)
                return _receive(receiver, seconds)
            finally:
                receiver.close()
                with contextlib.suppress(OSError):  # the closed receiver may have ended it already
                    sender.shutdown(socket.SHUT_RDWR)
                thread.join(_MARGIN_S)


def _send(sock: socket.socket) -> None:
    block = bytes(_BLOCK_BYTES)
    try:
        while True:
            sock.sendall(block)
    except OSError:  # the receiver has what it wants
        return


def _receive(sock: socket.socket, seconds: float) -> float:
    """Bytes per second that arrive, whether or not they are read at once: a busy machine may leave them lying."""
    block = bytearray(_BLOCK_BYTES)
    count = -_lying(sock)
    start = now = time.monotonic()
    while now - start < seconds:
        received = sock.recv_into(block)
        if not received:
            raise SynclineError("the stream that measures the link has ended early")
        count += received
        now = time.monotonic()
    return (count + _lying(sock)) / (now - start)


def _lying(sock: socket.socket) -> int:
    """The bytes that have arrived and are not read."""
    found = bytearray(4)
    fcntl.ioctl(sock, termios.FIONREAD, found)
    return int.from_bytes(found, sys.byteorder)
