"""TLS between processes: who gets in, what passes the wire, and sockets that behave as plain ones do."""

from __future__ import annotations

import datetime
import ipaddress
import logging
import re
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest
from strangers import LIMIT_S, RUN, SECRET
from watching import Table, member

from syncline.errors import HandshakeError, SecretError, UsageError
from syncline.wire import handshake
from syncline.wire.links import Link, Loop
from syncline.wire.listener import Listener, dial
from syncline.wire.shaped import Line, Shape
from syncline.wire.tls import FILES, Credentials, Sealed, credentials

pytest.importorskip("cryptography", reason="makes certificates")

WORLD = 4
RECORD_BYTES = 16 * 1024
MARK = b"a gradient that nobody else may read"


def of(rank: int, secret: bytes = SECRET, run: bytes = RUN, asked: str = "on") -> Credentials:
    return Credentials(asked, secret, run, rank)


def opened(tls: Credentials | None) -> closing[Listener]:
    return closing(Listener("127.0.0.1", RUN, SECRET, 0, WORLD, tls=tls))


def called(door: Listener, tls: Credentials | None, source: int = 1) -> socket.socket:
    return dial((door.address, door.port), RUN, SECRET, source, 0, "data", LIMIT_S, tls=tls)


@pytest.fixture
def pair() -> Iterator[tuple[Sealed, Sealed]]:
    """Both ends of a TLS connection, non-blocking."""
    with opened(of(0)) as door, called(door, of(1)) as there, door.take([1], "data", LIMIT_S)[1] as here:
        assert isinstance(here, Sealed)
        assert isinstance(there, Sealed)
        here.setblocking(False)
        there.setblocking(False)
        yield here, there


def test_a_rank_with_the_secret_gets_in_by_tls_13_and_unix_sockets_stay_plain() -> None:
    with opened(of(0)) as door, ExitStack() as stack:
        there = stack.enter_context(called(door, of(1)))
        here = stack.enter_context(door.take([1], "data", LIMIT_S)[1])
        assert isinstance(there, Sealed)
        assert there.version() == "TLSv1.3"
        there.sendall(b"ping")
        assert here.recv(4) == b"ping"
        near = stack.enter_context(dial(door.unix, RUN, SECRET, 2, 0, "data", LIMIT_S, tls=of(2)))
        assert type(near) is type(stack.enter_context(door.take([2], "data", LIMIT_S)[2])) is socket.socket


@pytest.mark.parametrize("listening", [True, False])
def test_one_end_without_tls_is_told_so_on_both_sides(listening: bool, caplog: pytest.LogCaptureFixture) -> None:
    with opened(of(0) if listening else None) as door, caplog.at_level(logging.WARNING, "syncline.wire"):
        its, own = ("with", "without") if listening else ("without", "with")
        with pytest.raises(HandshakeError, match=f"it runs {its} TLS, but this process {own} TLS: give all the same"):
            called(door, None if listening else of(1))
        deadline = time.monotonic() + LIMIT_S  # the door's thread answers first
        while "127.0.0.1" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "127.0.0.1" in caplog.text


def test_the_secret_is_checked_before_any_tls() -> None:
    with opened(of(0)) as door, pytest.raises(SecretError):
        dial((door.address, door.port), RUN, b"another", 1, 0, "data", LIMIT_S, tls=of(1, b"another"))


@pytest.mark.parametrize(
    ("mine", "says"),
    [
        (lambda: of(2), r"its certificate is for URI syncline:rank:2, not for URI syncline:rank:1"),
        (lambda: of(1, run=b"another run 1234"), "its certificate is not valid in this run|no TLS connection"),
    ],
    ids=["another rank", "another run"],
)
def test_a_certificate_of_another_rank_or_run_is_refused(
    mine: Callable[[], Credentials], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(of(0)) as door, caplog.at_level(logging.WARNING, "syncline.wire"):
        with pytest.raises((HandshakeError, OSError)):
            called(door, mine())
        assert not door.take([1], "data", 0.05)
    assert re.search(says, caplog.text)


def test_a_listener_that_is_another_rank_is_refused() -> None:
    with opened(of(3)) as door, pytest.raises(HandshakeError, match=r"for URI syncline:rank:3, not for .*rank:0"):
        called(door, of(1))


def test_a_caller_that_falls_silent_within_tls_is_refused_in_time(caplog: pytest.LogCaptureFixture) -> None:
    door = Listener("127.0.0.1", RUN, SECRET, 0, WORLD, handshake_s=0.2, tls=of(0))
    with closing(door), socket.create_connection((door.address, door.port)) as silent:
        said = handshake.hello(RUN, 1, 0, "data")
        silent.sendall(said.raw)
        reply = silent.recv(handshake.ANSWER_BYTES, socket.MSG_WAITALL)
        silent.sendall(handshake.check_answer(SECRET, said, reply, tls=True))
        with called(door, of(2), source=2), door.take([2], "data", LIMIT_S)[2]:
            assert silent.recv(1) == b""
    assert "it fell silent during the handshake, in its TLS part" in caplog.text


def test_no_byte_passes_the_wire_as_it_is() -> None:
    """Through a relay that keeps what it sees."""
    seen = bytearray()
    with opened(of(0)) as door, socket.create_server(("127.0.0.1", 0)) as relay:

        def carry(source: socket.socket, target: socket.socket) -> None:
            while data := source.recv(65536):
                seen.extend(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

        def stand_between() -> None:
            end = socket.create_connection((door.address, door.port))
            with relay.accept()[0] as caller, end, ThreadPoolExecutor(2) as both:
                both.submit(carry, caller, end)
                both.submit(carry, end, caller)

        with ThreadPoolExecutor(1) as pool:
            between = pool.submit(stand_between)
            with dial(relay.getsockname()[:2], RUN, SECRET, 1, 0, "data", LIMIT_S, tls=of(1)) as there:
                here = door.take([1], "data", LIMIT_S)[1]
                there.sendall(MARK)
                assert here.recv(len(MARK)) == MARK
                here.sendall(MARK[::-1])
                assert there.recv(len(MARK)) == MARK[::-1]
                here.close()
            between.result(LIMIT_S)
    assert len(seen) > 2 * len(MARK)
    assert MARK not in seen
    assert MARK[::-1] not in seen


def test_an_altered_byte_ends_the_connection(pair: tuple[Sealed, Sealed]) -> None:
    here, there = pair
    socket.socket.send(here, b"\x17\x03\x03\x00\x20" + bytes(32))  # a record of zeros, past OpenSSL
    wait_readable(there)
    with pytest.raises(ssl.SSLError):
        there.recv(100)


def wait_readable(sock: socket.socket) -> None:
    assert select.select([sock], [], [], LIMIT_S)[0]


def test_a_call_that_cannot_proceed_raises_as_on_a_plain_socket(pair: tuple[Sealed, Sealed]) -> None:
    here, there = pair
    for call in (
        lambda: here.recv(10),
        lambda: here.recv_into(bytearray(10)),
        lambda: here.recvmsg_into([bytearray(1)]),
    ):
        with pytest.raises(BlockingIOError):
            call()
    assert sent_until_full(here, bytes(100_000_000)) < 100_000_000
    with pytest.raises(BlockingIOError):
        here.send(b"more")
    assert here.pending() == there.pending() == 0


def sent_until_full(sock: Sealed, data: bytes) -> int:
    """The bytes that the kernel has accepted."""
    sent = 0
    with suppress(BlockingIOError):
        while True:
            sent += sock.sendmsg([memoryview(data)[sent:]])
    return sent


@pytest.mark.parametrize("less", [1, 100, RECORD_BYTES])
def test_bytes_arrive_in_order_when_a_full_buffer_is_offered_less_the_next_time(
    pair: tuple[Sealed, Sealed], less: int
) -> None:
    """OpenSSL wants the record again that did not fit; a shaped line may then offer fewer bytes of it."""
    here, there = pair
    text = bytes(range(256)) * 40_000
    sent, got = sent_until_full(here, text), bytearray()
    assert sent < len(text)
    while len(got) < len(text):
        try:
            got += there.recv(65536)
        except BlockingIOError:
            assert sent < len(text)
        try:
            sent += here.sendmsg([text[sent : sent + less]] if less < RECORD_BYTES else [text[sent:]])
            less = RECORD_BYTES
        except BlockingIOError:
            pass
    assert bytes(got) == text


def test_a_queue_of_which_less_may_leave_the_next_time_loses_no_byte(pair: tuple[Sealed, Sealed]) -> None:
    """A record that was refused is larger than what may leave then."""
    here, there = pair
    line = Line(here, Shape())
    text, sent, got = bytes(range(256)) * 48_000, 0, bytearray()
    for turn in range(10_000):
        with suppress(BlockingIOError):
            sent += line.sendmsg([text[sent : sent + 50_000], text[sent + 50_000 :]])
        line.send(100)
        while line.queue and line.send(len(text)):
            pass
        if turn < 3:  # until the kernel is full
            continue
        with suppress(BlockingIOError):
            got += there.recv(65536)
        if len(got) >= len(text):
            break
    assert bytes(got) == text


def test_a_caller_that_is_gone_after_its_proof_ends_nobody_elses_handshake() -> None:
    with opened(of(0)) as door:
        for number in range(20):
            with socket.create_connection((door.address, door.port)) as gone:
                said = handshake.hello(RUN, 2, 0, "data")
                gone.sendall(said.raw)
                reply = gone.recv(handshake.ANSWER_BYTES, socket.MSG_WAITALL)
                gone.sendall(handshake.check_answer(SECRET, said, reply, tls=True))
                if number % 2:
                    gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with called(door, of(1)), door.take([1], "data", LIMIT_S)[1]:
            pass


def test_what_openssl_has_read_is_never_left_behind(pair: tuple[Sealed, Sealed]) -> None:
    """A selector would not tell of it: recv returns all of a record, even beyond what it was asked for."""
    here, there = pair
    here.sendmsg([bytes(RECORD_BYTES)])
    wait_readable(there)
    assert len(there.recv(10)) == RECORD_BYTES
    assert there.pending() == 0


def test_one_direction_may_end_before_the_other(pair: tuple[Sealed, Sealed]) -> None:
    here, there = pair
    here.sendall(b"goodbye")
    here.shutdown(socket.SHUT_WR)
    wait_readable(there)
    assert there.recv(100) == b"goodbye"
    wait_readable(there)
    assert there.recv(100) == b""
    there.sendall(b"and to you")
    wait_readable(here)
    assert here.recv(100) == b"and to you"


@pytest.mark.parametrize("sizes", [[0, 1, 23, 24], [RECORD_BYTES - 24, RECORD_BYTES - 23, 3], [3_000_000, 0, 100_000]])
def test_frames_of_links_arrive_as_they_are(pair: tuple[Sealed, Sealed], sizes: list[int]) -> None:
    """Of all sizes about a record, and larger than what is read in one turn."""
    bodies = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    rooms = [bytearray(size) for size in sizes]
    come: list[int] = []
    links = [
        Link(end, number, lambda _, frame: memoryview(rooms[frame.tag]), lambda _, frame: come.append(frame.tag))
        for number, end in enumerate(pair)
    ]
    with ExitStack() as stack:
        loops = [Loop([link], lambda _: None) for link in links]
        for loop in loops:
            stack.callback(loop.close)
        for number, body in enumerate(bodies):
            links[0].push(1, number, body=memoryview(body) if body else None)
        for _ in range(10_000):
            loops[0].write()
            for loop in loops:
                loop.turn(0.001)
            if len(come) == len(sizes):
                break
    assert come == [*range(len(sizes))]
    assert [bytes(room) for room in rooms] == bodies


def test_over_tls_the_watcher_sends_the_heartbeats_and_hears_of_a_silent_peer(
    table: Table, pair: tuple[Sealed, Sealed]
) -> None:
    """Of another machine, where /proc shows nothing."""
    there, here = pair
    members = [member(0), member(1, machine="another")]
    liveness_s = 0.4
    one = table.seat(0, members, {1: here}, liveness_s)
    other = table.seat(1, members, {0: there}, liveness_s)
    assert not one.failed.wait(3 * liveness_s)
    assert not other.failures
    other.watcher.abort("failed: ValueError: the data are wrong")
    assert one.culprit() == 1
    assert "the data are wrong" in str(one.failures[0])


def test_over_tls_a_peer_without_heartbeats_counts_as_lost(table: Table, pair: tuple[Sealed, Sealed]) -> None:
    seat = table.seat(0, [member(0), member(1, machine="another")], {1: pair[1]}, 0.2)
    assert seat.culprit() == 1
    assert "no sign of life" in str(seat.failures[0])


# Certificates that are given.


def write(folder: Path, *names: Any, password: bytes | None = None, ends: datetime.datetime | None = None) -> str:
    """A folder of certificates, signed by the authority beside it."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        NoEncryption,
        PrivateFormat,
    )

    root, key = Ed25519PrivateKey.from_private_bytes(bytes(32)), Ed25519PrivateKey.generate()
    issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a site")])
    begins = datetime.datetime(2020, 1, 1)

    def signed(public: Any, *extensions: x509.ExtensionType) -> bytes:
        made = x509.CertificateBuilder(issuer, issuer if public == root.public_key() else x509.Name([]), public, 7)
        made = made.not_valid_before(begins).not_valid_after(ends or datetime.datetime(2120, 1, 1))
        for extension in extensions:
            made = made.add_extension(extension, critical=False)
        return made.sign(root, None).public_bytes(Encoding.PEM)

    folder.mkdir()
    (folder / FILES[0]).write_bytes(signed(root.public_key(), x509.BasicConstraints(True, None)))
    (folder / FILES[1]).write_bytes(signed(key.public_key(), x509.SubjectAlternativeName(names)))
    locked = NoEncryption() if password is None else BestAvailableEncryption(password)
    (folder / FILES[2]).write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, locked))
    return str(folder)


def named(rank: int) -> Any:
    from cryptography import x509

    return x509.UniformResourceIdentifier(f"syncline:rank:{rank}")


def at(address: str) -> Any:
    from cryptography import x509

    return x509.IPAddress(ipaddress.ip_address(address))


def test_given_certificates_name_the_rank_or_the_host(tmp_path: Path) -> None:
    host, rank = write(tmp_path / "host", at("127.0.0.1")), write(tmp_path / "rank", named(1))
    with opened(of(0, asked=host)) as door, called(door, of(1, asked=rank)), door.take([1], "data", LIMIT_S)[1]:
        pass
    elsewhere = write(tmp_path / "elsewhere", at("127.0.0.9"), named(2))
    with opened(of(0, asked=elsewhere)) as door, pytest.raises(HandshakeError, match=r"IP Address 127\.0\.0\.9"):
        called(door, of(1, asked=rank))


def test_an_expired_certificate_is_named(tmp_path: Path) -> None:
    old = write(tmp_path / "old", named(0), ends=datetime.datetime(2021, 1, 1))
    with opened(of(0, asked=old)) as door, pytest.raises(HandshakeError, match="certificate has expired"):
        called(door, of(1, asked=write(tmp_path / "new", named(1))))


def test_certificates_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    whole = Path(write(tmp_path / "whole", named(0)))
    with pytest.raises(UsageError, match=r"there is no ca\.pem and no cert\.pem and no key\.pem; the folder needs"):
        of(0, asked=str(tmp_path / "nowhere"))
    (whole / FILES[2]).write_text("no key")
    with pytest.raises(UsageError, match=r"tls=.*whole: .*the folder needs"):
        of(0, asked=str(whole))
    with pytest.raises(UsageError, match=r"key\.pem is encrypted"):
        of(0, asked=write(tmp_path / "locked", named(0), password=b"secret"))


@pytest.mark.parametrize("asked", [None, "", "off"])
def test_tls_is_off_unless_asked_for(asked: str | None) -> None:
    assert credentials(asked, b"", RUN, 0) is None


def test_without_a_secret_there_are_no_certificates() -> None:
    with pytest.raises(UsageError, match="there is none: set SYNCLINE_SECRET"):
        credentials("on", b"", RUN, 0)
