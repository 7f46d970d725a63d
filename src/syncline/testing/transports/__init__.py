"""Laws of transports: messages arrive once, whole and in order; urgency, ends and faults are as the protocol says.

What concerns a transport follows from what its ends are (``Adds``, ``HasAllreduce``) and from what it declares. A law
drives all ends of a few networks, which are in this process unless somebody else makes them.
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
    """Hold a transport, or the registered one of a text such as ``"tcp(rate=1Gbit)"``, to all laws that concern it.

    A transport whose ends cannot be in one process, as under mpirun, comes as a function: of the number of processes,
    to a context with their ends. ``ahead_bytes`` may be sent before what is more urgent and was handed over later; inf
    where priorities are not honoured, as a registered transport declares with ``priority=False``. ``adds`` are the
    element types that an allreduce of its own has to add. Returns the names of the laws. Raises BrokenLaw, an
    AssertionError with the law, the transport and the example that it fails for. So many ``examples`` are drawn for a
    law, from the ``seed``.
    """
    if not isinstance(transport, str):
        shown, network = getattr(transport, "__name__", str(transport)), transport
    else:
        shown, network = transport, network_of(transport)
        if not registry.get("transports", read_part(transport).name).capabilities.get("priority", True):
            ahead_bytes = inf
    return LAWS.hold(Subject(network, ahead_bytes, tuple(adds)), f"transport {shown}", seed, examples)
