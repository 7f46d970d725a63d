"""Every law of codecs can be broken: a codec that does so is caught, by the name of the law."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from syncline.codecs import Codec, Encoded, Floats, Payload, PayloadError, State
from syncline.nouns import Spec
from syncline.strategy.grammar import read_part
from syncline.strategy.words import build
from syncline.testing import BrokenLaw, check_codec
from syncline.testing.codecs import LAWS


def broken(text: str, **replaced: Any) -> Codec:
    """A right codec, of which something is replaced for those who ask it; functions find it under ``right``."""
    right: Codec = build("codecs", read_part(text))
    same = {name: property(lambda _, name=name: getattr(right, name)) for name in dir(right) if name[0] != "_"}
    made: Codec = type("Broken", (), same | {"right": right, "__str__": lambda _: "broken"} | replaced)()
    return made


def overrun(array: np.ndarray) -> None:
    """Write one word behind the end, as compiled code may."""
    as_strided(array, (array.size + 1,), array.strides)[-1] = 7


def encode(change: Callable[..., Encoded | None]) -> Callable[..., Encoded]:
    """An encode around the right one: ``change`` sees what that has made and may say something else."""

    def broken(self: Any, x: Floats, out: Payload, state: State, start: int = 0) -> Encoded:
        made = self.right.encode(x, out, state, start)
        return change(made, x, out, state) or made

    return broken


def on_other_input(change: Callable[[Floats, State], Floats]) -> Callable[..., Encoded]:
    """An encode that encodes something else."""

    def broken(self: Any, x: Floats, out: Payload, state: State, start: int = 0) -> Encoded:
        return self.right.encode(change(x, state).astype(np.float32), out, state, start)

    return broken


def writes_beyond(made: Encoded, x: Floats, out: Payload, state: State) -> None:  # noqa: ARG001
    overrun(out)


def writes_its_input(made: Encoded, x: Floats, out: Payload, state: State) -> None:  # noqa: ARG001
    x[:1] = 3


def forgets(made: Encoded, x: Floats, out: Payload, state: State) -> None:  # noqa: ARG001
    if state.residual is not None and made.finite:
        state.residual[:] = 0


def says_finite(made: Encoded, x: Floats, out: Payload, state: State) -> Encoded:  # noqa: ARG001
    return made._replace(finite=True)


def says_finite_of_one(made: Encoded, x: Floats, out: Payload, state: State) -> Encoded:  # noqa: ARG001
    return made._replace(finite=made.finite or (x.size == 1 and state.residual is None))


def too_small(self: Any, spec: Spec) -> tuple[int, int]:
    return 0, self.right.wire_bytes(spec)[1]


def a_word_of_nothing(self: Any, spec: Spec) -> tuple[int, int]:
    sizes = self.right.wire_bytes(spec)
    return sizes if spec.elements else (0, 4)


def encode_a_word_of_nothing(self: Any, x: Floats, out: Payload, state: State, start: int = 0) -> Encoded:
    return self.right.encode(x, out, state, start) if x.size else Encoded(1, True)


def decode_what_may_be_empty(
    self: Any, payload: Payload, out: Floats, state: State, *, add: bool = False, start: int = 0
) -> None:
    if out.size:
        self.right.decode(payload, out, state, add=add, start=start)


def from_the_start(self: Any, x: Floats, out: Payload, state: State, start: int = 0) -> Encoded:  # noqa: ARG001
    return self.right.encode(x, out, state, 0)


def never_twice(x: Floats, state: State) -> Floats:  # noqa: ARG001
    return x * never_twice.draw.choice([1, 2, 4]) if x.size else x  # type: ignore[attr-defined]


never_twice.draw = np.random.default_rng(0)  # type: ignore[attr-defined]


def decode(change: Callable[[Floats, bool], Any]) -> Callable[..., None]:
    """A decode around the right one that changes what is said."""

    def broken(self: Any, payload: Payload, out: Floats, state: State, *, add: bool = False, start: int = 0) -> None:
        self.right.decode(payload, out, state, add=add, start=start)
        with np.errstate(all="ignore"):
            change(out, add)

    return broken


def adds_twice(out: Floats, add: bool) -> None:
    if add:
        out += 1


def bursts(out: Floats, add: bool) -> None:  # noqa: ARG001
    out[np.abs(out) > 1e38] *= 4


def decode_that_stumbles(
    self: Any, payload: Payload, out: Floats, state: State, *, add: bool = False, start: int = 0
) -> None:
    try:
        self.right.decode(payload, out, state, add=add, start=start)
    except PayloadError:
        overrun(out)
        raise


def decode_anything(
    self: Any, payload: Payload, out: Floats, state: State, *, add: bool = False, start: int = 0
) -> None:
    try:
        self.right.decode(payload, out, state, add=add, start=start)
    except PayloadError:
        out[:] = 0


def forgets_later(made: Encoded, x: Floats, out: Payload, state: State) -> None:
    if state.step == 20:
        forgets(made, x, out, state)


def decode_by_rank(
    self: Any, payload: Payload, out: Floats, state: State, *, add: bool = False, start: int = 0
) -> None:
    """Every rank reads something else in a payload."""
    self.right.decode(payload, out, state, add=add, start=start)
    out *= 1 + 0.001 * state.rank


def expects_little(self: Any, spec: Spec) -> tuple[int, int]:
    expected, greatest = self.right.wire_bytes(spec)
    return expected // 16, greatest


def after_another(x: Floats, state: State) -> Floats:
    """What comes out depends on what was encoded last."""
    last, after_another.last = after_another.last, state.spec.name  # type: ignore[attr-defined]
    return x if last == state.spec.name else 1.5 * x


after_another.last = "layer.weight"  # type: ignore[attr-defined]


def merge_and_forget(self: Any, mine: Payload, theirs: Payload, out: Payload, state: State) -> int:
    """What a merge drops is lost."""
    words: int = self.right.merge(mine, theirs, out, state)
    if state.residual is not None:
        state.residual[:] = 0
    return words


def average(
    after: Callable[[Floats, State], object], before: Callable[[Floats, State], object] = lambda *_: None
) -> Callable[..., Generator[Floats, None, bool]]:
    """An average around the right one that changes what it is given, or what it has made."""

    def broken(self: Any, x: Floats, state: State, world: int) -> Generator[Floats, None, bool]:
        before(x, state)
        finite = yield from self.right.average(x, state, world)
        after(x, state)
        return finite  # type: ignore[no-any-return]

    return broken


def says_yes(self: Any, x: Floats, state: State, world: int) -> Generator[Floats, None, bool]:
    yield from self.right.average(x, state, world)
    return True


def by_rank(x: Floats, state: State) -> None:
    x *= 1 + 0.001 * state.rank


def empty(x: Floats, state: State) -> None:  # noqa: ARG001
    if state.residual is not None:
        state.residual[:] = 0


def threefold(x: Floats, state: State) -> None:
    if state.residual is None:
        x *= 3


def sometimes_more(x: Floats, state: State) -> None:
    if state.rank == 0:
        x[:] = never_twice(x, state)


def without_feedback(self: Any, spec: Spec, rank: int, feedback: bool = False) -> State:  # noqa: ARG001
    return self.right.init(spec, rank)


IN_ROUNDS = "powersgd(rank=2)"

BROKEN: dict[str, list[Codec]] = {
    "nothing is written elsewhere": [
        broken("none", encode=encode(writes_beyond)),
        broken("topk(ratio=0.3)", encode=encode(writes_its_input)),
        broken("int8", decode=decode(lambda out, add: overrun(out))),  # noqa: ARG005
    ],
    "sizes are as declared": [broken("int8", wire_bytes=too_small)],
    "an empty tensor is no payload": [
        broken(
            "topk(ratio=0.3)",
            wire_bytes=a_word_of_nothing,
            encode=encode_a_word_of_nothing,
            decode=decode_what_may_be_empty,
        )
    ],
    "pieces that begin at blocks are the whole": [broken("natural", encode=from_the_start)],
    "the same state makes the same payload": [broken("none", encode=on_other_input(never_twice), block=0)],
    "decoding adds the values that it would write": [broken("none", decode=decode(adds_twice))],
    "huge numbers are sent or reported": [broken("none", decode=decode(bursts))],
    "non finite values are reported and not kept": [broken("none", encode=encode(says_finite))],
    "one non finite element is reported": [broken("none", encode=encode(says_finite_of_one))],
    "an altered payload writes nothing elsewhere": [
        broken("int8", decode=decode_that_stumbles),
        broken("int8", decode=decode_anything),
    ],
    "a payload of another length is refused": [broken("topk(ratio=0.3)", decode=decode_anything)],
    "unsent parts are kept": [broken("topk(ratio=0.3)", encode=encode(forgets))],
    "the mean of many steps is the input": [
        broken("natural", contraction=False, encode=on_other_input(lambda x, _: 0.9 * x)),
        broken("ternary(rounding=nearest)", contraction=False, biased=False, stochastic=True),
    ],
    "numbers that are added are the nearest of their type": [
        broken("fp16", contraction=False, encode=on_other_input(lambda x, _: x * 1.01)),
        broken("fp16", contraction=False, number="bfloat16"),
    ],
    "a contraction is one": [
        broken("ternary(clip=0)", contraction=True),
        broken("none", biased=True, init=without_feedback, encode=on_other_input(lambda x, _: 3 * x)),
    ],
    "feedback makes the mean of many steps right": [broken("topk(ratio=0.3)", encode=encode(forgets_later))],
    "rounds are as declared": [
        broken(IN_ROUNDS, rounds=lambda self, spec: (*self.right.rounds(spec), 1)),
        broken(IN_ROUNDS, wire_bytes=too_small),
        broken(IN_ROUNDS, average=None),
    ],
    "all ranks have the same bits after rounds": [broken(IN_ROUNDS, average=average(by_rank))],
    "rounds repeat themselves": [broken(IN_ROUNDS, average=average(lambda *_: None, before=sometimes_more))],
    "rounds keep unsent parts": [broken(IN_ROUNDS, average=average(empty))],
    "rounds are a contraction": [broken(IN_ROUNDS, average=average(threefold))],
    "non finite values reach all ranks and no memory": [broken(IN_ROUNDS, average=says_yes)],
    "all workers get the same bits": [broken("topk(ratio=0.3)", decode=decode_by_rank)],
    "the traffic is predicted": [broken("threshold(ratio=0.3)", wire_bytes=expects_little)],
    "the result does not depend on the buckets": [broken("none", encode=on_other_input(after_another))],
    "with feedback nothing is lost among ranks": [broken("gtopk(ratio=0.1)", merge=merge_and_forget)],
}


@pytest.mark.parametrize("law", LAWS.names)
def test_a_broken_codec_is_caught_by_the_law(law: str) -> None:
    for codec in BROKEN[law]:
        with pytest.raises(BrokenLaw) as caught:
            check_codec(codec, examples=20)
        assert caught.value.law == law
        assert str(caught.value).startswith(f"codec broken breaks the law {law!r} with ")


def test_what_a_codec_raises_breaks_the_law_that_was_tried() -> None:
    def stumbles(*_: Any) -> Encoded:
        raise IndexError("out of bounds")

    with pytest.raises(BrokenLaw, match=r"'nothing is written elsewhere' with 0 elements .*: IndexError: out of") as it:
        check_codec(broken("int8", encode=stumbles))
    assert isinstance(it.value.__cause__, IndexError)
