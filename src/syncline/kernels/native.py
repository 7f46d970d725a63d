"""What compiled code needs of the machine and of C: raw memory, atomic words, calls of the system.

Each is one instruction or one call; nothing here runs outside of compiled code (``instructions`` says how each is
made). Addresses are int64. Orders are those of C11: what was written before a word was stored with ``store`` is seen
by whoever reads the word with ``load``.
"""

from __future__ import annotations

from typing import Any

from .marks import external, instruction

write = external("write", "(int32, int64, int64) -> int64")
"""write(2); the buffer is given as an address."""

read = external("read", "(int32, int64, int64) -> int64")
"""read(2); the buffer is given as an address."""

send = external("send", "(int32, int64, int64, int32) -> int64")
"""send(2); the buffer is given as an address."""

poll = external("poll", "(int64, int64, int32) -> int32")
"""poll(2); the array of descriptors is given as an address, the limit in milliseconds."""

epoll_wait = external("epoll_wait", "(int32, int64, int32, int32) -> int32")
"""epoll_wait(2); the array of events is given as an address, the limit in milliseconds."""

clock_gettime = external("clock_gettime", "(int32, int64) -> int32")
"""clock_gettime(2); the struct timespec is given as an address."""

memcpy = external("memcpy", "(int64, int64, int64) -> int64")
"""memcpy(3), with addresses."""

malloc = external("malloc", "(int64) -> int64")
"""malloc(3); the address, to be given to ``free`` on every way out."""

free = external("free", "(int64)")
"""free(3)."""

sched_yield = external("sched_yield", "() -> int32")
"""sched_yield(2)."""

sched_getcpu = external("sched_getcpu", "() -> int32")
"""sched_getcpu(3): the core that this thread runs on."""


@instruction
def view(address: int, like: Any, size: int) -> Any:
    """The one-dimensional array of ``size`` elements of the type of ``like`` at ``address``."""


@instruction
def table(address: int, like: Any, rows: int, columns: int) -> Any:
    """The two-dimensional one."""


@instruction
def load(address: int) -> Any:
    """The word at ``address``; what its writer wrote before it is visible after."""


@instruction
def store(address: int, value: int) -> Any:
    """Set the word at ``address``, after everything written before."""


@instruction
def add(address: int, value: int) -> Any:
    """Add to the word at ``address`` in one indivisible step; its old value."""


@instruction
def fence() -> Any:
    """Order everything before against everything after, stores against later loads too."""


@instruction
def float_of_bits(bits: Any) -> Any:
    """The float32 with these 32 bits."""


@instruction
def bits_of_float(value: Any) -> Any:
    """The 32 bits of a float32."""
