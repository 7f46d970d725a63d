"""Laws about values that are not finite, and about corrupted payloads: they are reported or refused, and harmless."""

from __future__ import annotations

from copy import deepcopy

import numpy as np

from ...codecs import Codec, PayloadError
from ..laws import Laws, require, same
from ..tensors import LARGE, SIZES, Room
from .cases import Case, arrays_of, crossed, decoded, drawn, encoded

_NOT_FINITE = (np.nan, np.inf, -np.inf)


LAWS: Laws[Codec, Case] = Laws()


@LAWS.law(drawn(sizes=(*SIZES[1:], *LARGE)))
def what_is_not_finite_is_reported_and_not_kept(case: Case) -> None:
    """The block (or one element of the tensor) decodes to a non-finite value; the state is unchanged."""
    codec, x, draw, state = case.codec, case.x, case.draw(), case.state()
    for array in arrays_of(state).values():
        array[...] = draw.standard_normal(array.size)
    before = deepcopy(state)
    spots = draw.integers(0, x.size, draw.integers(1, 4))
    x[spots] = draw.choice(_NOT_FINITE)
    with np.errstate(all="ignore"):
        payload = encoded(codec, x, state, finite=False)
        sent = decoded(codec, payload, x.size, state)
        total = decoded(codec, payload, x.size, state, onto=np.ones(x.size, np.float32))
    for said in (sent, total):
        finite = np.isfinite(said)
        gone = finite[spots].any() if codec.block else finite.all()
        require(not gone, f"{x[spots[0]]} at element {spots[0]} decodes to {said[spots[0]]}")
    for name, array in arrays_of(state).items():
        require(np.isfinite(array).all(), f"{name} is not finite afterwards")
        kept = ~np.isfinite(sent) if codec.block else slice(None)
        same(array[kept], arrays_of(before)[name][kept], f"{name} of what was not finite")


@LAWS.law(crossed(["normal"], [1], 0))
def one_element_that_is_not_finite_is_reported(case: Case) -> None:
    """For codecs that encode a tensor as a whole."""
    for bad in _NOT_FINITE:
        state = case.state(feedback=False)
        payload = encoded(case.codec, np.array([bad], np.float32), state, finite=False)
        said = decoded(case.codec, payload, 1, state)
        require(not np.isfinite(said).any(), f"{bad} decodes to {said[0]}")


@LAWS.law(drawn())
def an_altered_payload_writes_nothing_elsewhere(case: Case) -> None:
    """A wrong length is refused; wrong words are refused or change numbers; writes stay inside ``out``."""
    codec, draw, state = case.codec, case.draw(), case.state(feedback=False)
    payload = encoded(codec, case.x, state)
    altered = payload.copy()
    if altered.size:
        count = int(draw.integers(1, altered.size + 1)) if draw.random() < 0.5 else 1
        altered[draw.integers(0, altered.size, count)] = draw.integers(0, 2**32, count, np.uint32)
        extreme = draw.choice(np.array([0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF], np.uint32))
        altered[draw.integers(0, min(4, altered.size))] = extreme
    cut = altered[: int(draw.integers(0, altered.size + 1))]
    longer = np.concatenate([altered, draw.integers(0, 2**32, int(draw.integers(1, 9)), np.uint32)])
    fixed = codec.combine in ("sum", "owner")
    for wrong in (altered, cut, longer):
        for add in (False, True):
            room = Room.of(case.size)
            room.floats[...] = 0
            try:
                with np.errstate(all="ignore"):
                    codec.decode(wrong.copy(), room.floats, state, add=add)
            except PayloadError:
                pass
            else:
                fault = f"{wrong.size} words were decoded where encode makes {payload.size}"
                require(not fixed or wrong.size == payload.size, fault)
            room.check()


@LAWS.law(crossed(["normal"], [1, 5, 3000], 0))
def a_payload_of_another_length_is_refused(case: Case) -> None:
    state = case.state(feedback=False)
    payload = encoded(case.codec, case.x, state)
    for wrong in (payload[:0], payload[:-1], np.append(payload, np.uint32(0))):
        try:
            case.codec.decode(wrong, np.zeros(case.size, np.float32), state)
        except PayloadError:
            continue
        raise AssertionError(f"{wrong.size} words were decoded where encode makes {payload.size}")
