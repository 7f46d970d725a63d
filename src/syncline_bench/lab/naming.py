"""Owns the names of labs and hosts, and the addresses of hosts. Pure.

Everything follows from the lab's name, so a host's name identifies its lab. Labs cannot reach each other, so two labs
may have the same addresses; different addresses only keep logs readable.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from ipaddress import IPv4Network

from syncline.errors import UsageError

MAX_HOSTS = 200

_NAME = re.compile(r"[a-z][a-z0-9-]{0,30}")
_HOST = re.compile(r"(?P<lab>[a-z][a-z0-9-]{0,30})-h(?P<host>\d{1,3})")


def check_name(name: str) -> str:
    """Return ``name`` if host names can contain it, else raise UsageError."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot be a lab's name: use up to 31 small letters, digits and hyphens, beginning with a letter"
        )
    return name


def free_name(taken: Collection[str]) -> str:
    """The first of lab0, lab1, ... that is not taken."""
    return next(name for name in (f"lab{number}" for number in range(len(taken) + 1)) if name not in taken)


def host_name(lab: str, host: int) -> str:
    """The name of a host, also its UTS name."""
    return f"{lab}-h{host}"


def read_host_name(text: str) -> tuple[str, int]:
    """The lab and the number of the host with this name. Raises UsageError if it is not a host's name."""
    found = _HOST.fullmatch(text)
    if found is None:
        raise UsageError(f"{text!r} is not a host of a lab: hosts are called NAME-h0, NAME-h1, ...")
    return found["lab"], int(found["host"])


def network(lab: str) -> IPv4Network:
    """The network of a lab: 256 addresses of the private range 10.0.0.0/8."""
    digest = hashlib.sha256(lab.encode()).digest()
    return IPv4Network(f"10.{digest[0]}.{digest[1]}.0/24")


def address(lab: str, host: int) -> str:
    """A host's address in its lab's network."""
    return str(network(lab)[host + 1])


def hosts_file(lab: str, hosts: int) -> str:
    """The text of /etc/hosts on every host of a lab.

    Programs that serve both versions of IP on one socket (PyTorch's store) look up IPv4 addresses in their mapped form.
    A lab has no name server to answer, so mapped addresses have lines of their own.
    """
    lines = ["127.0.0.1 localhost", "::1 localhost"]
    for host in range(hosts):
        lines.append(f"{address(lab, host)} {host_name(lab, host)}")
        lines.append(f"::ffff:{address(lab, host)} {host_name(lab, host)}.mapped")
    return "\n".join(lines) + "\n"
