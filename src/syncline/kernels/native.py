"""What compiled code needs of the machine: raw memory, atomic words, a pause, ringing an eventfd.

Each is one instruction or one call. Addresses are int64. Orders are those of C11: what was written before a word was
stored with ``store`` is seen by whoever reads the word with ``load``.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_WORD = ir.IntType(64)

write = types.ExternalFunction("write", types.intp(types.int32, types.intp, types.intp))
"""write(2); the buffer is given as an address."""

read = types.ExternalFunction("read", types.intp(types.int32, types.intp, types.intp))
"""read(2); the buffer is given as an address."""

send = types.ExternalFunction("send", types.intp(types.int32, types.intp, types.uintp, types.int32))
"""send(2); the buffer is given as an address."""

poll = types.ExternalFunction("poll", types.int32(types.intp, types.uintp, types.int32))
"""poll(2); the array of descriptors is given as an address, the limit in milliseconds."""

memcpy = types.ExternalFunction("memcpy", types.intp(types.intp, types.intp, types.uintp))
"""memcpy(3), with addresses."""

sched_yield = types.ExternalFunction("sched_yield", types.int32())
"""sched_yield(2)."""


@intrinsic
def pointer(typing: Any, address: Any, like: Any) -> Any:  # noqa: ARG001
    """``address`` as a pointer to elements of the type of ``like``, for ``numba.carray``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(like)(address, like), generate


@intrinsic
def load(typing: Any, address: Any) -> Any:  # noqa: ARG001
    """The word at ``address``; what its writer wrote before it is visible after."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        return builder.load_atomic(builder.inttoptr(args[0], _WORD.as_pointer()), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def store(typing: Any, address: Any, value: Any) -> Any:  # noqa: ARG001
    """Set the word at ``address``, after everything written before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        builder.store_atomic(args[1], builder.inttoptr(args[0], _WORD.as_pointer()), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def add(typing: Any, address: Any, value: Any) -> Any:  # noqa: ARG001
    """Add to the word at ``address`` in one indivisible step; its old value."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        return builder.atomic_rmw("add", builder.inttoptr(args[0], _WORD.as_pointer()), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def fence(typing: Any) -> Any:  # noqa: ARG001
    """Order everything before against everything after, stores against later loads too."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def float_of_bits(typing: Any, bits: Any) -> Any:  # noqa: ARG001
    """The float32 with these 32 bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic
def bits_of_float(typing: Any, value: Any) -> Any:  # noqa: ARG001
    """The 32 bits of a float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), generate
