"""The network between the hosts of a lab, as lines for ``ip -batch`` and ``tc -batch``. Pure.

The switch is a bridge in namespaces of its own. A pair of virtual interfaces joins each host to it: ``eth0`` in the
host, ``pN`` at the switch. Both ends limit the rate of outgoing frames, so every host can send and receive at the rate
at the same time, as over a full-duplex link. If several hosts send to one host, their frames queue at its port.

A token bucket (tc-tbf(8)) lets ``burst`` bytes pass at once after the link was idle. Its timer fires some 50 to 100 us
late, more on a busy machine, and tokens that do not fit into the bucket meanwhile are lost. A bucket small enough to
limit a 64 KiB message therefore loses rate, and a bucket large enough to keep the rate lets that message pass in no
time. Links that are slow enough for this to matter have two buckets. The large one, some milliseconds deep, keeps the
mean rate. The small one lets bytes out at no more than ``PEAK`` times the rate; this margin absorbs its timer's delay.

Segments of TCP travel through the machine in one piece until they reach a wire (GSO); a bucket smaller than such a
piece would cut it, packet by packet, at the cost of a core. Their size is therefore limited to a share of the small
bucket. Queues are 5 ms deep, like those of a switch's port, and at least 32 frames; frames that do not fit are dropped.

The rate counts Ethernet frames without preamble and gap: at an MTU of 1500, TCP carries at most 1448/1514 of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from syncline.errors import UsageError
from syncline.nouns import Rate
from syncline.strategy.grammar import write_value

from .records import address, network

LEAST, MOST = Rate(1e6), Rate(100e9)

PEAK = 1.2
"""The greatest momentary rate, over the rate."""

_FRAME_BYTES = 1514
_BURST_S = 2.5e-3
_PIECE_S = 260e-6  # a piece of TCP's segments, at the link's rate
_PEAK_S = 320e-6  # the small bucket
_QUEUE_S = 5e-3
_PEAK_UP_TO = 2e9  # above, the small bucket would wake the timer more often than it can come
_MOST_PIECE_BYTES = 65_000  # just under the kernel's 64 KiB
_LEAST_QUEUE_BYTES = 32 * _FRAME_BYTES


@dataclass(frozen=True)
class Shape:
    """One direction of a link: bits per second, and the depth of its buckets and its queue in bytes.

    ``peak_bits`` and ``peak_bytes`` are None for a link without a small bucket. ``piece_bytes`` is the largest piece
    that TCP may pass to the link.
    """

    rate: Rate
    burst_bytes: int
    queue_bytes: int
    piece_bytes: int
    peak_bits: float | None
    peak_bytes: int | None

    def tc(self, device: str) -> str:
        """The line of ``tc -batch`` that limits outgoing frames of ``device``."""
        text = (
            f"qdisc add dev {device} root tbf rate {_bits(self.rate)} burst {self.burst_bytes} limit {self.queue_bytes}"
        )
        if self.peak_bits is not None and self.peak_bytes is not None:
            text += f" peakrate {_bits(self.peak_bits)} minburst {self.peak_bytes}"
        return text


def shape(rate: Rate) -> Shape:
    """The shape of a link with this rate. Raises UsageError outside 1 Mbit/s to 100 Gbit/s."""
    if not LEAST <= rate <= MOST:
        raise UsageError(
            f"a lab's links carry {write_value(LEAST, Rate)} to {write_value(MOST, Rate)}, not"
            f" {write_value(rate, Rate)}; the rate none sets no limit"
        )
    per_s = rate / 8
    slow = rate <= _PEAK_UP_TO
    piece = math.ceil(min(_MOST_PIECE_BYTES, max(2 * _FRAME_BYTES, per_s * _PIECE_S)))
    peak = math.ceil(max(piece + _FRAME_BYTES, per_s * _PEAK_S)) if slow else None
    return Shape(
        rate=rate,
        burst_bytes=math.ceil(max(2 * (peak or piece), per_s * _BURST_S)),
        queue_bytes=math.ceil(max(_LEAST_QUEUE_BYTES, per_s * _QUEUE_S)),
        piece_bytes=piece,
        peak_bits=PEAK * rate if slow else None,
        peak_bytes=peak,
    )


def _bits(rate: float) -> str:
    return f"{round(rate)}bit"


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
