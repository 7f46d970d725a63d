"""All processes start from the same model: compare its description, then copy worker 0's values.

The description (names, shapes, types, strides, what is trained) is compared before any value travels, and the first
parameter that differs is named. Values travel in pieces, so that the extra memory stays small.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from ...errors import MismatchError
from ...session.session import Session
from ...session.tickets import BUCKET_KEYS
from .own_values import name_of
from .storage import as_bytes, distinct

_PIECE_BYTES = 16 * 1024 * 1024
_KEY = BUCKET_KEYS


def check_same_model(session: Session, tensors: Sequence[tuple[str, torch.Tensor]], options: Sequence[object]) -> None:
    """Raise MismatchError on the process whose model or options differ from worker 0's, naming the first difference."""
    mine = [
        [name, list(tensor.shape), str(tensor.dtype), list(tensor.stride()), tensor.requires_grad]
        for name, tensor in tensors
    ]
    first = session.called(0)
    others, theirs = json.loads(session.everyone.tell(json.dumps([options, mine]).encode(), "comparing models"))
    for here, there in zip(options, others, strict=True):
        if here != there:
            error = MismatchError(
                f"{session.name(session.index)} has called syncline.prepare() with {here}, {first} with {there}: give"
                " the same on all ranks"
            )
            session.fail(error)
            raise error
    for here, there in zip(mine, theirs, strict=False):
        if here != there:
            error = MismatchError(
                f"{session.name(session.index)} has another model than {first}: {_describe(here)} here,"
                f" {_describe(there)} there"
            )
            session.fail(error)
            raise error
    if len(mine) != len(theirs):
        longer, where = (mine, "here only") if len(mine) > len(theirs) else (theirs, f"on {first} only")
        extra = longer[min(len(mine), len(theirs))]
        error = MismatchError(
            f"{session.name(session.index)} has another model than {first}: {_describe(extra)} is {where}"
        )
        session.fail(error)
        raise error


def check_same_own(session: Session, own: Sequence[frozenset[str]], changed: Sequence[frozenset[str]]) -> None:
    """Raise MismatchError where the optimizer changes other values itself than worker 0's does, naming the first.

    All processes ask together for such values, or none does. ``changed`` are those of ``own`` that were seen to change.
    """
    mine = [[(number, key) for number, keys in enumerate(one) for key in sorted(keys)] for one in (own, changed)]
    theirs = json.loads(session.everyone.tell(json.dumps(mine).encode(), "comparing optimizers"))
    (here, seen_here), (there, seen_there) = ([set(map(tuple, values)) for values in one] for one in (mine, theirs))
    if here == there:
        return
    if seen_here != seen_there:
        here, there = seen_here, seen_there
    number, key = min(here ^ there)
    one, other = session.name(session.index), session.called(0)
    if (number, key) not in here:
        one, other = other, one
    error = MismatchError(
        f"the optimizer of {one} changes {name_of(key, number, len(own))} itself in step(), and that of {other} does"
        " not: an optimizer has to keep the same values on all ranks; count in the script what one rank alone counts"
    )
    session.fail(error)
    raise error


def copy_from_worker(session: Session, tensors: Sequence[torch.Tensor], root: int = 0, everyone: bool = True) -> None:
    """Overwrite the tensors' values with worker ``root``'s, on all workers, or on servers too (from worker 0)."""
    for piece in _pieces([distinct(tensor) for tensor in tensors]):
        packed = np.empty(sum(tensor.nbytes for tensor in piece), np.uint8)
        pack_bytes(piece, torch.from_numpy(packed))
        if everyone:
            session.engine.wait(session.everyone.broadcast(packed, _KEY, f"copying the model from {session.called(0)}"))
        else:
            session.broadcast(packed, root)
        unpack_bytes(torch.from_numpy(packed), piece)


def pack_bytes(tensors: Sequence[torch.Tensor], into: torch.Tensor) -> None:
    """Copy tensors of any type one behind the other into bytes (a flat uint8 tensor, on whatever device)."""
    at = 0
    for tensor in tensors:
        into[at : at + tensor.nbytes].copy_(as_bytes(tensor.detach().contiguous()))
        at += tensor.nbytes


def unpack_bytes(packed: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copy them back."""
    at = 0
    with torch.no_grad():
        for tensor in tensors:
            raw = packed[at : at + tensor.nbytes]
            # Past autograd (``data`` has a version of its own): a graph that still waits for its backward does not mind
            # new batch statistics.
            if tensor.is_contiguous():
                as_bytes(tensor.data).copy_(raw)
            else:
                # Through a fresh tensor: a piece may begin at an address that does not suit the element type.
                tensor.data.copy_(raw.clone().view(tensor.dtype).view(tensor.shape))
            at += tensor.nbytes


def _describe(entry: list[object]) -> str:
    name, shape, dtype, stride, trained = entry
    return f"{name!r} with shape {tuple(shape)}, {dtype}, strides {tuple(stride)}{'' if trained else ', frozen'}"  # type: ignore[arg-type]


def _pieces(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    piece: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if piece and size + tensor.nbytes > _PIECE_BYTES:
            yield piece
            piece, size = [], 0
        piece.append(tensor)
        size += tensor.nbytes
    if piece:
        yield piece
