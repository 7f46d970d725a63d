"""The network between the hosts of a lab, as lines for ``ip -batch`` and ``tc -batch``. Pure.

The switch is a bridge in namespaces of its own. A pair of virtual interfaces joins each host to it: ``eth0`` in the
host, ``pN`` at the switch. Both ends limit the rate of outgoing frames, so every host can send and receive at the rate
at the same time, as over a full-duplex link. Frames of several hosts to one queue at the switch's port.
"""

from __future__ import annotations

from .naming import address, network
from .shaping import Shape

INTERFACE = "eth0"

_BRIDGE = "br0"
_MTU = 1500


def switch(hosts: tuple[int, ...]) -> list[str]:
    """The lines of ``ip`` at the switch: the bridge and a link to each host. ``hosts`` are the hosts' processes."""
    # No spanning tree and no multicast snooping: with one bridge, their frames would only disturb measurements.
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
    """The lines of ``ip`` at a host: its address, and the largest piece that TCP may pass to the link."""
    lines = [
        f"link set {INTERFACE} addrgenmode none",  # an IPv6 address would send announcements
        f"address add {address(lab, number)}/{network(lab).prefixlen} dev {INTERFACE}",
    ]
    if shape is not None:
        lines.append(f"link set {INTERFACE} gso_max_size {shape.piece_bytes}")
    return [*lines, f"link set {INTERFACE} up"]


def port_of(host: int) -> str:
    """The name of the switch's interface to a host."""
    return f"p{host}"
