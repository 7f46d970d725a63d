"""The network between the hosts of a lab, as lines for ``ip -batch`` and ``tc -batch``. Pure.

A bridge in namespaces of its own is the switch. A pair of virtual interfaces joins every host to it: ``eth0`` in the
host, ``pN`` at the switch. What leaves either end is shaped, so that every host sends and receives at the rate, both at
once, as over a full-duplex link; what several hosts send to one queues at the switch's port to it.
"""

from __future__ import annotations

from .naming import address, network
from .shaping import Shape

INTERFACE = "eth0"

_BRIDGE = "br0"
_MTU = 1500


def switch(hosts: tuple[int, ...]) -> list[str]:
    """``ip``, at the switch: the bridge and a link to each host, given by the process that holds it."""
    # No spanning tree, no multicast snooping: there is one bridge, and nothing may travel that nobody sent.
    lines = [f"link add {_BRIDGE} type bridge stp_state 0 forward_delay 0 mcast_snooping 0"]
    lines += [f"link set {_BRIDGE} addrgenmode none", f"link set {_BRIDGE} up"]
    for host, pid in enumerate(hosts):
        port = port_of(host)
        lines += [
            f"link add {port} mtu {_MTU} type veth peer name {INTERFACE} mtu {_MTU} netns {pid}",
            f"link set {port} addrgenmode none",
            f"link set {port} master {_BRIDGE}",
            f"link set {port} up",
        ]
    return lines


def host(lab: str, number: int, shape: Shape | None) -> list[str]:
    """``ip``, at a host: its address, and how large a piece TCP may hand to the link."""
    lines = [
        f"link set {INTERFACE} addrgenmode none",  # no IPv6 address that would announce itself
        f"address add {address(lab, number)}/{network(lab).prefixlen} dev {INTERFACE}",
    ]
    if shape is not None:
        lines.append(f"link set {INTERFACE} gso_max_size {shape.piece_bytes}")
    return [*lines, f"link set {INTERFACE} up"]


def port_of(host: int) -> str:
    """The switch's interface that leads to a host."""
    return f"p{host}"
