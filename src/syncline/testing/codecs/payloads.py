"""Laws for every payload: writes stay in bounds, sizes are as declared, and pieces equal the whole."""

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise

import numpy as np

from ...codecs import Codec
from ..laws import Laws, require, same
from ..tensors import KINDS, LARGE, SIZES, values
from .cases import Case, arrays_of, crossed, decoded, drawn, encoded, same_state

LAWS: Laws[Codec, Case] = Laws()


@LAWS.law(drawn())
def nothing_is_written_elsewhere(case: Case) -> None:
    """Encoding and decoding write only to the payload and the output."""
    state, x = case.state(), case.x
    payload = encoded(case.codec, x, state)
    decoded(case.codec, payload, x.size, state)
    decoded(case.codec, payload, x.size, state, onto=x)


@LAWS.law(drawn())
def sizes_are_as_declared(case: Case) -> None:
    """``wire_bytes`` predicts the size, exactly for payloads that are added or cut among owners."""
    expected, greatest = case.codec.wire_bytes(case.spec)
    require(0 <= expected <= greatest, f"wire_bytes expects {expected} bytes, and at most {greatest}")
    require(greatest % 4 == 0, f"the greatest payload, of {greatest} bytes, is no whole number of words")
    sent = 4 * encoded(case.codec, case.x, case.state(feedback=False)).size
    require(sent <= greatest, f"{sent} bytes were made where wire_bytes says {greatest} at most")
    if case.codec.combine in ("sum", "owner"):
        require(sent == expected == greatest, f"{sent} bytes were made where wire_bytes says {expected} to {greatest}")


@LAWS.law(crossed(["zeros"], [0], 0))
def an_empty_tensor_is_no_payload(case: Case) -> None:
    """It can be decoded."""
    x = case.x
    require(case.codec.wire_bytes(case.spec)[0] == 0, "wire_bytes expects a payload of an empty tensor")
    for feedback in {False, case.codec.contraction}:
        state = case.state(feedback=feedback)
        payload = encoded(case.codec, x, state)
        require(payload.size == 0, f"{payload.size} words were made of an empty tensor")
        decoded(case.codec, payload, 0, state)
        decoded(case.codec, payload, 0, state, onto=x)


@LAWS.law(drawn(sizes=(*SIZES[1:], *LARGE)), lambda case: case.codec.block > 0)
def pieces_that_begin_at_blocks_are_the_whole(case: Case) -> None:
    """Payloads and residuals are equal, and every piece can be decoded alone."""
    codec, x, draw = case.codec, case.x, case.draw()
    whole_state = case.state(rank=3)
    state = deepcopy(whole_state)
    whole = encoded(codec, x, whole_state)
    said = decoded(codec, whole, x.size, whole_state)
    blocks = -(-x.size // codec.block)
    inner = draw.permutation(np.arange(1, blocks))[: draw.integers(0, 4)]
    pieces = []
    for start, stop in pairwise([0, *(int(cut) * codec.block for cut in sorted(inner)), x.size]):
        piece = encoded(codec, x[start:stop], state, start)
        same(decoded(codec, piece, stop - start, state, start), said[start:stop], f"what is decoded from {start} on")
        pieces.append(piece)
    same(np.concatenate(pieces), whole, "the words of the pieces")
    same_state(state, whole_state)


@LAWS.law(drawn())
def the_same_state_makes_the_same_payload(case: Case) -> None:
    """Two runs agree, with feedback if possible. The state's arrays are float32, as checkpoints require."""
    x = case.x
    state = case.state(rank=1, step=int(case.draw().integers(0, 10)))
    again = deepcopy(state)
    for _ in range(2):
        same(encoded(case.codec, x, state), encoded(case.codec, x, again), "the words of the second run")
        same_state(state, again)
        for name, array in arrays_of(state).items():
            require(array.dtype == np.float32, f"{name} has elements of {array.dtype}: checkpoints keep float32")
            require(array.flags.c_contiguous, f"{name} is not contiguous")
        state.step += 1
        again.step += 1


@LAWS.law(drawn())
def decoding_adds_what_it_would_write(case: Case) -> None:
    """``add=True`` adds what would be written without it."""
    state = case.state(feedback=False)
    payload = encoded(case.codec, case.x, state)
    before = values(str(case.draw().choice(KINDS)), case.size, case.seed + 1)
    with np.errstate(over="ignore"):
        wanted = decoded(case.codec, payload, case.size, state) + before
    same(decoded(case.codec, payload, case.size, state, onto=before), wanted, "what is added")


@LAWS.law(drawn(kinds=["huge"]))
def huge_numbers_are_sent_or_reported(case: Case) -> None:
    """Finite inputs decode to finite values or count as not finite as a whole block."""
    codec, x = case.codec, case.x
    state = case.state(step=case.seed % 4)
    out = np.empty(codec.wire_bytes(case.spec)[1] // 4, np.uint32)
    with np.errstate(all="ignore"):
        words, finite = codec.encode(x, out, state)
        sent = decoded(codec, out[:words], x.size, state)
    require(not finite or bool(np.isfinite(sent).all()), "encode says finite=True, and what is decoded is not finite")
    for name, array in arrays_of(state).items():
        require(np.isfinite(array).all(), f"{name} is not finite afterwards")
