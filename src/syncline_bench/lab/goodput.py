"""Measures the goodput of one TCP stream between two hosts of a lab.

iperf3 measures if it is installed, because others can check its figure; else a stream between two threads does. Both
exclude the first second, in which TCP finds the rate.
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
    """The part of a lab that the measurement needs."""

    def address(self, host: int) -> str:
        """The IPv4 address of a host."""
        ...

    def enter(self, host: int) -> list[str]:
        """The command prefix that runs a command on a host."""
        ...

    def bind(self, host: int) -> socket.socket:
        """A TCP socket on a host, bound and not listening."""
        ...


def measure(hosts: Hosts, seconds: float) -> float:
    """Measure the goodput of one stream from host 0 to host 1, in bytes per second."""
    return _iperf3(hosts, seconds) if shutil.which("iperf3") else stream(hosts, seconds)


def _iperf3(hosts: Hosts, seconds: float) -> float:
    # iperf3 accepts whole seconds only.
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
            raise SynclineError(
                f"iperf3 between two hosts of the lab did not end within {seconds + _MARGIN_S:.0f} s: see whether the"
                " machine is overloaded, or remove iperf3 to measure without it"
            ) from None
        except (ValueError, KeyError):
            raise SynclineError(f"iperf3 failed: {(done.stdout + done.stderr).strip()}") from None
    finally:
        server.kill()
        server.communicate()


def _wait_until_listening(server: subprocess.Popen[str]) -> None:
    """Wait until the server listens. If it has ended instead, its output closes, and the client reports the failure."""
    watch = threading.Timer(_MARGIN_S, server.kill)
    watch.start()
    try:
        for line in server.stdout or ():
            if "listening" in line:
                return
    finally:
        watch.cancel()


def stream(hosts: Hosts, seconds: float) -> float:
    """Measure with a stream between two threads of this process. Returns the receiver's bytes per second."""
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
                with contextlib.suppress(OSError):  # the closed receiver may have ended the connection already
                    sender.shutdown(socket.SHUT_RDWR)
                thread.join(_MARGIN_S)


def _send(sock: socket.socket) -> None:
    block = bytes(_BLOCK_BYTES)
    try:
        while True:
            sock.sendall(block)
    except OSError:  # the receiver has closed the connection after the measurement
        return


def _receive(sock: socket.socket, seconds: float) -> float:
    """Measure the bytes per second that arrive, including unread ones, because a busy machine may read late."""
    block = bytearray(_BLOCK_BYTES)
    count = -_lying(sock)
    start = now = time.monotonic()
    while now - start < seconds:
        received = sock.recv_into(block)
        if not received:
            raise SynclineError("the stream that measures the lab's goodput ended early: its sender was interrupted")
        count += received
        now = time.monotonic()
    return (count + _lying(sock)) / (now - start)


def _lying(sock: socket.socket) -> int:
    """The number of bytes that have arrived but are not yet read."""
    found = bytearray(4)
    fcntl.ioctl(sock, termios.FIONREAD, found)
    return int.from_bytes(found, sys.byteorder)
