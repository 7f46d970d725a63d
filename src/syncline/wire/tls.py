"""TLS 1.3 for the connections between processes: certificates, and sockets with the calls of plain ones.

Both ends authenticate as ever (``handshake``), then start TLS, in which each proves its rank by a certificate.
``tls=on`` derives a certificate authority from the run's secret, so nothing has to be distributed: a process that knows
the secret issues its own certificate, for its own rank. Certificates may be given instead, in a folder.

UNIX sockets, and the shared memory behind them, stay on their host and are not encrypted.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import hashlib
import hmac
import ipaddress
import os
import socket
import ssl
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..errors import HandshakeError, UsageError

OFF, ON = "off", "on"

FILES = ("ca.pem", "cert.pem", "key.pem")
"""The files of a folder of certificates: those that sign, this process's certificate, and its key."""

_NAME = "syncline:rank:{}"
"""The name of a rank in a certificate, a URI."""

_RECORD_BYTES = 16 * 1024
"""The most bytes of one TLS record. OpenSSL accepts a record as a whole, or nothing of it."""

_INSTALL = "pip install 'syncline[tls]'"


class Sealed(ssl.SSLSocket):
    """A TLS connection with the calls of a plain socket that the links, the watcher and the meeting use.

    A call that cannot proceed raises BlockingIOError, as on a plain socket. One thread may send while another receives.
    """

    turn: threading.Lock
    """Held in every call of OpenSSL, which lets two threads not use a connection at once."""
    _broken: bool = False  # a blocking call has given up in the middle of a record
    _promised: bytes = b""
    """A record that the kernel did not take: OpenSSL must be given the same bytes again."""

    def __new__(cls, *arguments: Any, **options: Any) -> Sealed:
        """A connection. ``ssl`` itself calls ``recv`` while it makes one to a peer that has gone."""
        made = super().__new__(cls, *arguments, **options)
        made.turn = threading.Lock()
        return made

    def send(self, data: Any, flags: int = 0) -> int:  # noqa: ARG002  # TLS has no flags
        """Send up to one record. Returns its size, which may exceed ``data`` after a call that offered more."""
        if self._broken:
            raise BrokenPipeError(errno.EPIPE, "a record of TLS was sent in part")
        record = self._promised or memoryview(data).cast("B")[:_RECORD_BYTES]
        try:
            with self.turn:
                sent = super().send(record)
        except TimeoutError:
            self._broken = True
            raise
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            self._promised = bytes(record)
            raise BlockingIOError from None
        self._promised = b""
        return sent

    def sendmsg(self, buffers: Iterable[Any], *_: Any) -> int:  # type: ignore[override]
        """Send the buffers as far as the kernel accepts records. Small ones share a record."""
        if self._promised:
            return self.send(b"")
        sent = 0
        for record in _records(buffers):
            try:
                sent += self.send(record)
            except BlockingIOError:
                if sent:
                    return sent
                raise
        return sent

    def recv(self, buflen: int = _RECORD_BYTES, flags: int = 0) -> bytes:  # noqa: ARG002
        """The bytes that have arrived, at least those of the record that has begun: possibly more than ``buflen``.

        A selector sees only the kernel's bytes, so none that OpenSSL has read may be left.
        """
        try:
            with self.turn:
                data = super().recv(buflen)
                while data and (left := self.pending()):
                    data += super().recv(left)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        return data

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:  # noqa: ARG002
        """Read the bytes of one record."""
        try:
            with self.turn:
                return super().recv_into(buffer, nbytes)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def recvmsg_into(self, buffers: Iterable[Any], *_: Any) -> tuple[int, list[Any], int, Any]:  # type: ignore[override]
        """Fill the buffers with the bytes of all records that have arrived."""
        got = 0
        for buffer in buffers:
            room = memoryview(buffer)
            while room.nbytes:
                try:
                    come = self.recv_into(room)
                except OSError:  # nothing more has come, or an error: the next call raises it again
                    if got:
                        return got, [], 0, None
                    raise
                if not come:
                    return got, [], 0, None  # the end; if bytes came before it, the next call finds it again
                got += come
                room = room[come:]
        return got, [], 0, None

    def shutdown(self, how: int) -> None:
        """Shut the connection down without the end of TLS: the bytes of the other direction are still decrypted."""
        socket.socket.shutdown(self, how)


def _records(buffers: Iterable[Any]) -> Iterator[bytes | memoryview]:
    """The same bytes in records: of a large buffer its parts, of small ones their concatenation."""
    small: list[memoryview] = []
    size = 0
    for buffer in buffers:
        rest = memoryview(buffer).cast("B")
        while rest.nbytes:
            part, rest = rest[: _RECORD_BYTES - size], rest[_RECORD_BYTES - size :]
            small.append(part)
            size += part.nbytes
            if size == _RECORD_BYTES:
                yield small[0] if len(small) == 1 else b"".join(small)
                small, size = [], 0
    if small:
        yield small[0] if len(small) == 1 else b"".join(small)


class Credentials:
    """The certificates and contexts of process ``index`` of a run.

    ``asked`` is ``on``, or a folder with ``FILES``; ``run`` are the bytes of the run's name. Raises UsageError if there
    is no secret to make certificates from, or those of the folder are unusable.
    """

    def __init__(self, asked: str, secret: bytes, run: bytes, index: int) -> None:
        self._given = asked != ON
        self._sides = {
            side: ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if side else ssl.PROTOCOL_TLS_CLIENT) for side in (True, False)
        }
        for context in self._sides.values():
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False  # ranks are checked instead
            context.verify_mode = ssl.CERT_REQUIRED
            context.sslsocket_class = Sealed
            # A peer may end its own direction first and still read; OpenSSL would treat that as an error of both. The
            # watcher tells a peer that has left from one that has died by its goodbye.
            context.options |= ssl.OP_IGNORE_UNEXPECTED_EOF
        self._sides[True].num_tickets = 0
        if self._given:
            self._load(Path(asked))
        elif not secret:
            raise UsageError(
                "tls=on makes its certificates from the run's secret, and there is none: set SYNCLINE_SECRET to the"
                " same random text on all hosts, or give tls= a folder with " + ", ".join(FILES)
            )
        else:
            self._issue(secret, run, index)

    def wrap(self, sock: socket.socket, *, listening: bool) -> Sealed:
        """The TLS connection over ``sock``, which is detached, before its handshake. OSError if the peer has gone."""
        sock.getpeername()  # raises for a peer that has gone; ``ssl`` would leave the connection open
        sealed = self._sides[listening].wrap_socket(sock, server_side=listening, do_handshake_on_connect=False)
        assert isinstance(sealed, Sealed)
        return sealed

    def check(self, sealed: Sealed, rank: int) -> None:
        """Raise HandshakeError unless the other end's certificate is that of ``rank``, or of the host that it is on."""
        names: Any = (sealed.getpeercert() or {}).get("subjectAltName", ())
        if ("URI", _NAME.format(rank)) in names:
            return
        address = sealed.getpeername()[0].partition("%")[0]
        hosts = [ipaddress.ip_address(name) for kind, name in names if kind == "IP Address"]
        if self._given and ipaddress.ip_address(address) in hosts:
            return
        found = ", ".join(f"{kind} {name}" for kind, name in names) or "nothing"
        wanted = f"URI {_NAME.format(rank)}" + (f" or IP Address {address}" if self._given else "")
        raise HandshakeError(f"its certificate is for {found}, not for {wanted}")

    def _load(self, folder: Path) -> None:
        """Take the certificates of a folder."""

        def no_password() -> str:
            raise UsageError(f"tls={folder}: {FILES[2]} is encrypted: give a key without a password")

        signed_by, certificate, key = (str(folder / name) for name in FILES)
        for context in self._sides.values():
            try:
                context.load_verify_locations(signed_by)
                context.load_cert_chain(certificate, key, no_password)
            except UsageError:
                raise
            except (OSError, ValueError) as error:  # ssl.SSLError is an OSError; ValueError: no name of a file
                missing = [name for name in FILES if not _is_file(folder / name)]
                why = f"there is no {' and no '.join(missing)}" if missing else str(error)
                raise UsageError(
                    f"tls={folder!s:.200}: {why}; the folder needs {', '.join(FILES)} in PEM format (or tls=on, which"
                    " needs no files)"
                ) from error

    def _issue(self, secret: bytes, run: bytes, index: int) -> None:
        """Derive the run's authority from its secret, and issue this process's certificate."""
        try:
            from cryptography import x509
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
            from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
        except ImportError as error:
            raise UsageError(f"tls=on needs the package cryptography: {_INSTALL}") from error

        authority = Ed25519PrivateKey.from_private_bytes(
            hmac.new(secret, b"tls authority" + run, hashlib.sha256).digest()
        )
        issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "syncline run")])

        def certificate(name: x509.Name, public: Any, serial: int, *extensions: x509.ExtensionType) -> bytes:
            # Valid for as long as the secret is, whatever the clocks of the hosts show.
            builder = x509.CertificateBuilder(issuer, name, public, serial)
            builder = builder.not_valid_before(datetime.datetime(2000, 1, 1))
            builder = builder.not_valid_after(datetime.datetime(2199, 1, 1))
            for extension in extensions:
                builder = builder.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
            return builder.sign(authority, None).public_bytes(Encoding.PEM)

        root = certificate(issuer, authority.public_key(), 1, x509.BasicConstraints(ca=True, path_length=0))
        key = Ed25519PrivateKey.generate()
        names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(_NAME.format(index))])
        own = certificate(
            x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"rank {index}")]),
            key.public_key(),
            x509.random_serial_number(),
            x509.BasicConstraints(ca=False, path_length=None),
            names,
        )
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        with _in_memory(private + own) as path:
            for context in self._sides.values():
                context.load_verify_locations(cadata=root.decode())
                context.load_cert_chain(path)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # its name is too long, or none
        return False


@contextlib.contextmanager
def _in_memory(data: bytes) -> Iterator[str]:
    """The path of a file that is on no disk: ``ssl`` reads keys from files only."""
    descriptor = os.memfd_create("syncline-key")
    try:
        os.write(descriptor, data)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def credentials(asked: str | None, secret: bytes, run: bytes, index: int) -> Credentials | None:
    """The credentials that ``tls=`` asks for, None for ``off``."""
    return None if asked in (None, "", OFF) else Credentials(str(asked), secret, run, index)


def refusal(error: Exception) -> str:
    """The reason why a TLS handshake failed, in plain words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not valid in this run: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"no TLS connection: {error.reason or error}"
    return str(error)
