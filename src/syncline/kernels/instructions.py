"""How the instructions of ``native`` are made; loaded where machine code is made, and nowhere else."""

# ruff: noqa: D103 - what each does is said in ``native``
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array

_WORD = ir.IntType(64)


@intrinsic
def view(typing: Any, address: Any, like: Any, size: Any) -> Any:  # noqa: ARG001
    return _array(address, like, [size])


@intrinsic
def table(typing: Any, address: Any, like: Any, rows: Any, columns: Any) -> Any:  # noqa: ARG001
    return _array(address, like, [rows, columns])


def _array(address: Any, like: Any, sizes: list[Any]) -> Any:
    # numba.carray would return the array from a function of its own, which code without a runtime cannot do.
    made = types.Array(like, len(sizes), "C")

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        element = context.get_data_type(like)
        itemsize = context.get_constant(types.intp, context.get_abi_sizeof(element))
        array = make_array(made)(context, builder)
        shape, strides = args[2:], [itemsize]
        for extent in reversed(shape[1:]):
            strides.insert(0, builder.mul(extent, strides[0]))
        data = builder.inttoptr(args[0], element.as_pointer())
        populate_array(array, data=data, shape=shape, strides=strides, itemsize=itemsize, meminfo=None)
        return array._getvalue()

    return made(address, like, *sizes), generate


@intrinsic
def load(typing: Any, address: Any) -> Any:  # noqa: ARG001
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        return builder.load_atomic(builder.inttoptr(args[0], _WORD.as_pointer()), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def store(typing: Any, address: Any, value: Any) -> Any:  # noqa: ARG001
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        builder.store_atomic(args[1], builder.inttoptr(args[0], _WORD.as_pointer()), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def add(typing: Any, address: Any, value: Any) -> Any:  # noqa: ARG001
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        return builder.atomic_rmw("add", builder.inttoptr(args[0], _WORD.as_pointer()), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def fence(typing: Any) -> Any:  # noqa: ARG001
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def float_of_bits(typing: Any, bits: Any) -> Any:  # noqa: ARG001
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic
def bits_of_float(typing: Any, value: Any) -> Any:  # noqa: ARG001
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), generate
