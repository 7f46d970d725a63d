"""Laws of transports: messages arrive once, whole and in order; priorities, ends and faults follow the protocol.

The ends' classes (``Adds``, ``HasAllreduce``) and the declarations determine the laws that apply. A law drives all ends
of a few networks, which are in this process unless the caller provides others.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from ... import registry
from ...strategy.grammar import read_part
from ..laws import Laws
from ..network import Network, network_of
from . import ends, messages, sums, urgency
from .cases import Case, Subject

LAWS: Laws[Subject, Case] = Laws(messages.LAWS, urgency.LAWS, ends.LAWS, sums.LAWS)

_AHEAD_BYTES = 1 << 20


def check_transport(
    transport: str | Network,
    *,
    ahead_bytes: float = _AHEAD_BYTES,
    adds: Iterable[str] = ("float32",),
    seed: int = 0,
    examples: int = 30,
) -> tuple[str, ...]:
    """Check a transport, or the registered one of a text such as ``"tcp(rate=1Gbit)"``, against all laws that apply.

    A transport whose ends cannot be in one process, as under mpirun, is given as a function from the number of
    processes to a context manager with the ends. ``ahead_bytes`` limits the bytes that may precede a more urgent
    message submitted later; inf for transports that ignore priorities (``priority=False``). ``adds`` are the element
    types that its own allreduce must support. Returns the names of the laws. Raises BrokenLaw, an AssertionError with
    the law, the transport and the failing example. ``examples`` are drawn for a law, from ``seed``.
    """
    if not isinstance(transport, str):
        shown, network = getattr(transport, "__name__", str(transport)), transport
    else:
        shown, network = transport, network_of(transport)
        if not registry.get("transports", read_part(transport).name).capabilities.get("priority", True):
            ahead_bytes = inf
    return LAWS.hold(Subject(network, ahead_bytes, tuple(adds)), f"transport {shown}", seed, examples)
