"""Weights and gradients that are nobody's, or anybody's, arrays: buffers, DLPack, devices, memory as it lies."""

from __future__ import annotations

import array
from collections.abc import Callable
from itertools import cycle
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest

from syncline.errors import UsageError
from syncline.frameworks import adapter_of
from syncline.frameworks._memory import host_array
from syncline.frameworks.numpy import adapt
from syncline.session.session import Session

OPTIONS = {"unused": "error", "weight": 1, "ignore": (), "broadcast_buffers": True}
CUDA = 2


class Exports:
    """An array of another framework, by DLPack alone."""

    def __init__(self, memory: Any, kind: int | None = None) -> None:
        self.memory, self.kind = memory, kind

    def __dlpack__(self, **options: Any) -> Any:
        return self.memory.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.memory.__dlpack_device__() if self.kind is None else (self.kind, 3)


class Old(Exports):
    """One that does not know of read-only memory, so that NumPy takes it for that."""

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        return self.memory.__dlpack__(stream=stream)


class Cuda:
    """A device array that says so in its own way."""

    __cuda_array_interface__: ClassVar[dict[str, Any]] = {
        "shape": (3,),
        "typestr": "<f8",
        "data": (0, False),
        "version": 3,
    }


def descend(weights: Any, gradient: Any, state: Any, *, lr: float = 0.5) -> None:  # noqa: ARG001
    weights -= lr * gradient


def fortran() -> Any:
    return np.asfortranarray(np.arange(6.0).reshape(2, 3))


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "array.array": (lambda: array.array("d", range(6)), np.array),
    "bytearray": (lambda: memoryview(bytearray(np.arange(6.0).tobytes())).cast("d", (2, 3)), np.array),
    "DLPack": (lambda: Exports(np.arange(6.0)), lambda one: one.memory),
    "Fortran": (fortran, np.array),
    "strided": (lambda: np.arange(12.0)[::2], np.array),
    "transposed": (lambda: np.arange(6.0).reshape(3, 2).T, np.array),
    "scalar": (lambda: np.asarray(3.0), np.array),
    "float32": (lambda: np.arange(6, dtype=np.float32), np.array),
    "bfloat16": (lambda: np.arange(6).astype(ml_dtypes.bfloat16), lambda one: np.array(one, np.float32)),
    "empty": (lambda: np.zeros((0, 4)), np.array),
}


@pytest.mark.parametrize(
    ("kind", "strategy"), [*zip(KINDS, cycle(["ring", "ps(servers=1)", "ring sync=local(steps=2)", "ring codec=fp16"]))]
)
def test_memory_of_any_kind_is_updated_where_it_lies(group: Any, strategy: str, kind: str) -> None:
    make, values = KINDS[kind]

    def body(session: Session) -> Any:
        given = {"it": make(), "beside": np.zeros(2)}
        shape, before = host_array(given["it"], "it").shape, np.array(values(given["it"]))
        handed = adapt(session, given, descend, OPTIONS)
        if handed is None:
            return
        weights, optimizer = handed.result
        for _ in range(2):
            optimizer.produced("beside", memoryview(np.full(2, 1.0)))
            optimizer.step({"it": Exports(np.full(shape, 2.0 * session.rank))})
        assert weights["it"].shape == shape
        np.testing.assert_array_equal(np.array(weights["it"], float), np.array(values(given["it"]), float))
        optimizer.load_state_dict(optimizer.state_dict())
        np.testing.assert_array_equal(values(given["it"]), before - 1.0)
        np.testing.assert_array_equal(given["beside"], np.full(2, -1.0))

    group(strategy, 2, body)


def test_one_worker_updates_them_too(group: Any) -> None:
    def body(session: Session) -> None:
        given = {"it": array.array("d", [1, 2, 3]), "other": np.ones(6)[::2]}
        handed = adapt(session, given, descend, OPTIONS)
        assert handed is not None
        handed.result[1].produced("it", array.array("f", [2, 2, 2]))
        handed.result[1].step({"other": Exports(np.full(3, 4.0))})
        assert list(given["it"]) == [0, 1, 2]
        assert list(given["other"]) == [-1, -1, -1]

    group("ring", 1, body)


def read_only() -> Any:
    found = np.zeros(3)
    found.flags.writeable = False
    return found


WRONG = {
    "read-only": ({"a": np.ones(2), "b": read_only()}, "the model's 'b' is in read-only memory"),
    "of bytes": ({"b": memoryview(bytes(24)).cast("d")}, "the model's 'b' is in read-only memory"),
    "exported read-only": ({"b": Exports(read_only())}, "the model's 'b' is in read-only memory"),
    "exported in an old way": ({"b": Old(np.zeros(3))}, "the model's 'b' is in read-only memory"),
    "on a GPU": ({"b": Exports(np.zeros(3), CUDA)}, r"'b' is a Exports on a CUDA device \(3\): .* cupy.asnumpy"),
    "on some device": ({"b": Exports(np.zeros(3), 99)}, r"on a device of kind 99 \(3\)"),
    "on CUDA": ({"b": Cuda()}, "'b' is a Cuda on a CUDA device"),
    "for integers": ({"b": array.array("i", [1])}, "the model's 'b' is int32: give floating-point"),
    "of another machine": ({"b": np.zeros(3, ">f8")}, "the model's 'b' is >f8"),
    "named by a number": ({1: np.zeros(3)}, "the model's 1 has a int as its name"),
    "strings": ({"b": np.zeros(3), "c": "words"}, "the model's 'c' is str"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_memory_that_cannot_be_updated_is_named(group: Any, kind: str) -> None:
    weights, says = WRONG[kind]

    def body(session: Session) -> None:
        with pytest.raises(UsageError, match=says):
            adapt(session, weights, descend, OPTIONS)

    group("ring", 2, body)


def test_memory_that_two_names_share_is_named(group: Any) -> None:
    memory = np.zeros(10)
    apart = {"a": memory[:5], "b": memory[5:]}

    def body(session: Session) -> None:
        with pytest.raises(UsageError, match="'a' and 'tied' share memory, which would be updated twice"):
            adapt(session, {"a": memory[:5], "tied": memory[4:]}, descend, OPTIONS)
        assert adapt(session, apart, descend, OPTIONS) is not None

    group("ring", 1, body)


OVERLAPS = {
    "columns": lambda big: {"a": big[:, :2], "b": big[:, 1:]},
    "inside": lambda big: {"a": big, "b": big[:, 1:3]},
    "reversed": lambda big: {"a": big[::-2], "b": big[1]},
    "far apart": lambda big: {"a": big, "c": big[0, :1], "b": big[-1]},
}
APART = {
    "columns": lambda big: {"a": big[:, :2], "b": big[:, 2:]},
    "interleaved": lambda big: {"a": big[::2], "b": big[1::2], "c": np.zeros((0, 3))},
    "transposed": lambda big: {"a": big.T[:2], "b": big.T[:1:-1]},
}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", OVERLAPS)
def test_memory_with_gaps_that_two_names_share_is_named(group: Any, workers: int, kind: str) -> None:
    def body(session: Session) -> None:
        with pytest.raises(UsageError, match=r"the model's '[abc]' and '[abc]' share memory"):
            adapt(session, OVERLAPS[kind](np.zeros((4, 4))), descend, OPTIONS)

    group("ring", workers, body)


@pytest.mark.parametrize("kind", APART)
def test_memory_that_lies_between_that_of_others_is_its_own(group: Any, kind: str) -> None:
    def body(session: Session) -> None:
        big = np.zeros((4, 4))
        handed = adapt(session, APART[kind](big), descend, OPTIONS)
        assert handed is not None
        weights, optimizer = handed.result
        optimizer.step({name: np.full(array.shape, 2.0) for name, array in weights.items()})
        assert (big == -1).all()

    group("ring", 2, body)


@pytest.mark.parametrize("strides", [(0,), (4,), (-4,)])
def test_elements_that_share_memory_are_named(group: Any, strides: tuple[int, ...]) -> None:
    memory = np.lib.stride_tricks.as_strided(np.zeros(8), (3,), strides, writeable=True)

    def body(session: Session) -> None:
        with pytest.raises(UsageError, match=r"elements of the model's 'a' share memory \(its strides are"):
            adapt(session, {"a": memory}, descend, OPTIONS)

    group("ring", 1, body)


def test_gradients_on_a_device_are_named_and_read_only_ones_are_read(group: Any) -> None:
    def body(session: Session) -> None:
        handed = adapt(session, {"w": np.ones(3)}, descend, OPTIONS)
        assert handed is not None
        weights, optimizer = handed.result
        optimizer.step({"w": read_only()})
        assert (weights["w"] == 1).all()
        optimizer.step({"w": Cuda()})

    with pytest.raises(Exception, match="the gradient of 'w' is a Cuda on a CUDA device"):
        group("ring", 2, body)


def test_memory_of_no_known_framework_is_numpys_affair() -> None:
    for weights in ({"a": array.array("d")}, {"a": Exports(np.zeros(2))}, {"a": Cuda(), "b": bytearray(8)}):
        assert adapter_of(weights) is adapt
    with pytest.raises(UsageError, match="the model is dict, which belongs to no framework that Syncline supports"):
        adapter_of({"a": [1.0]})
