"""Instructions and C functions for kernels: raw memory, atomic words, system calls.

Each is one instruction or one call and exists in machine code only; ``compiler`` implements the instructions. Addresses
are int64. Memory orders are those of C11: after ``load`` has read a word that ``store`` wrote, everything that its
writer wrote earlier is visible.
"""

from __future__ import annotations

from typing import Any

from .compiled import external, instruction

write = external("write", "(int32, int64, int64) -> int64")
"""write(2); the buffer is an address."""

read = external("read", "(int32, int64, int64) -> int64")
"""read(2); the buffer is an address."""

send = external("send", "(int32, int64, int64, int32) -> int64")
"""send(2); the buffer is an address."""

poll = external("poll", "(int64, int64, int32) -> int32")
"""poll(2); the array of descriptors is an address, the timeout is in milliseconds."""

epoll_wait = external("epoll_wait", "(int32, int64, int32, int32) -> int32")
"""epoll_wait(2); the array of events is an address, the timeout is in milliseconds."""

clock_gettime = external("clock_gettime", "(int32, int64) -> int32")
"""clock_gettime(2); the struct timespec is an address."""

memcpy = external("memcpy", "(int64, int64, int64) -> int64")
"""memcpy(3) between addresses."""

malloc = external("malloc", "(int64) -> int64")
"""malloc(3); pass the address to ``free`` on every way out."""

free = external("free", "(int64)")
"""free(3) of an address."""

sched_yield = external("sched_yield", "() -> int32")
"""sched_yield(2): offers the core to other threads."""

sched_getcpu = external("sched_getcpu", "() -> int32")
"""sched_getcpu(3): the core that this thread runs on."""


@instruction
def view(address: int, like: Any, size: int) -> Any:
    """The one-dimensional array at ``address`` of ``size`` elements that have the type of ``like``."""


@instruction
def table(address: int, like: Any, rows: int, columns: int) -> Any:
    """The two-dimensional array at ``address`` whose elements have the type of ``like``."""


@instruction
def load(address: int) -> Any:
    """The word at ``address``, read with acquire order."""


@instruction
def store(address: int, value: int) -> Any:
    """Set the word at ``address`` with release order."""


@instruction
def add(address: int, value: int) -> Any:
    """Add to the word at ``address`` atomically; return its old value."""


@instruction
def fence() -> Any:
    """Order all earlier loads and stores before all later ones, even a store before a load."""


@instruction
def float_of_bits(bits: Any) -> Any:
    """The float32 that has these 32 bits."""


@instruction
def bits_of_float(value: Any) -> Any:
    """The 32 bits of a float32, as a uint32."""
