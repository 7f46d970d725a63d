"""Reduce to owners, encode again, give to all: for payloads that cannot be added.

Every owner (each worker, or the servers) has a part of every piece. All workers send it their payload of that part; it
decodes and adds them in rank order, encodes the sum, with a residual of its own where there is error feedback, and
sends that to all. Its own contribution takes the same way through the codec, so that the result does not depend on who
owns what. This is ``direct``, or a parameter server, with codes instead of numbers.

Cost per rank with N owners among N workers: 2(N-1)/N of the payload sent and received; one encoding and one decoding of
everything, one decoding and 1/N encoding of everything at the owner. Tang et al., "DoubleSqueeze", ICML 2019, has the
two residuals.

A bucket is cut into pieces, so that one piece is encoded while another travels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from ..codecs import Floats
from . import Message, Part, Place, Reducer, Round
from .letters import Letter, Post, name_of, spec_of

PIECE_BYTES = 2 * 1024 * 1024
PIECE_ELEMENTS = 1 << 22
"""The payload and the elements of a piece: several are under way in a large bucket, and a message's cost is small."""


def pieces(parts: Sequence[Part], place: Place) -> list[Callable[[], Reducer]]:
    """One reducer for every piece of the parts."""
    found: list[Callable[[], Reducer]] = []
    for shares in shared_pieces(parts, len(place.owners)):
        found.append(partial(reduce, shares, [Letter(share) for share in shares], place))
    return found


def shared_pieces(parts: Sequence[Part], owners: int) -> list[list[list[Part]]]:
    """The parts of each owner, for every piece of the parts."""
    elements = sum(part.array.size for part in parts)
    payload_bytes = sum(part.codec.wire_bytes(spec_of(part))[0] for part in parts)
    most = min(PIECE_ELEMENTS, PIECE_BYTES * elements // max(payload_bytes, 1))
    return [share_out(piece, owners) for piece in cut(parts, max(1, most))]


def cut(parts: Sequence[Part], elements: int) -> list[list[Part]]:
    """Consecutive pieces of up to ``elements``, cut at blocks; what cannot be cut may be larger."""
    found: list[list[Part]] = []
    left = 0
    for part in parts:
        at = 0
        while at < part.array.size:
            if left <= 0:
                found.append([])
                left = elements
            take = _to_block(part, at + left, up=True) - at
            found[-1].append(part.cut(at, at + take))
            at, left = at + take, left - take
    return found


def share_out(piece: Sequence[Part], owners: int) -> list[list[Part]]:
    """The parts of each owner: consecutive, cut at blocks, of about equal numbers of elements."""
    total = sum(part.array.size for part in piece)
    edges = [total * owner // owners for owner in range(1, owners)]
    found: list[list[Part]] = [[] for _ in range(owners)]
    passed = 0
    for part in piece:
        size = part.array.size
        cuts = [_to_block(part, min(max(edge - passed, 0), size)) for edge in edges]
        for owner, (start, stop) in enumerate(zip([0, *cuts], [*cuts, size], strict=True)):
            if start < stop:
                found[owner].append(part.cut(start, stop))
        passed += size
    return found


def _to_block(part: Part, at: int, up: bool = False) -> int:
    """The nearest place to ``at`` (or the next one) at which a part may be cut; parts begin at such places."""
    size, block = part.array.size, part.codec.block or part.array.size
    nearest = -(-at // block) * block if up else (at + block // 2) // block * block
    return min(nearest, size)


def reduce(shares: Sequence[Sequence[Part]], letters: Sequence[Letter], place: Place) -> Reducer:
    """One piece; ``shares`` are the parts of each owner, ``letters`` the forms of the messages about them."""
    mine = place.owners.index(place.index) if place.index in place.owners else -1
    owned = shares[mine] if mine >= 0 else ()
    posted = _written(letters, shares, place)
    own = {place.index: posted.pop(mine)} if mine in posted else {}
    came = _awaited(place, letters[mine]) if owned else {}
    sends = [Message(place.owners[owner], post.data) for owner, post in posted.items()]
    lengths = yield Round(sends, [Message(worker, post.data) for worker, post in came.items()])
    _note(came, lengths)
    _free(posted)
    answer = _sum_again(letters[mine], owned, {**came, **own}, place) if owned else None
    _free({**came, **own})
    others = [owner for owner in range(len(shares)) if place.works and shares[owner] and owner != mine]
    answers = {owner: letters[owner].room(place.room) for owner in others}
    sends = [Message(worker, answer.data) for worker in place.others()] if answer else []
    lengths = yield Round(sends, [Message(place.owners[owner], post.data) for owner, post in answers.items()])
    _note(answers, lengths)
    if answer:
        answers[mine] = answer
    for owner in answers if place.works else ():
        arrays, states = [part.array for part in shares[owner]], [part.again for part in shares[owner]]
        letters[owner].read(answers[owner], arrays, states, name_of(place.owners[owner], place), add=False)
    _free(answers)


def _written(letters: Sequence[Letter], shares: Sequence[Sequence[Part]], place: Place) -> dict[int, Post]:
    """This worker's payloads by owner, beginning after its own number."""
    found: dict[int, Post] = {}
    if place.works:
        count = len(place.owners)
        for k in range(1, count + 1):
            owner = (place.index + k) % count
            share = shares[owner]
            if share:
                arrays, states = [part.array for part in share], [part.state for part in share]
                found[owner] = letters[owner].write(place.room, arrays, states, place.report)
    return found


def _awaited(place: Place, letter: Letter) -> dict[int, Post]:
    """Room for the other workers' payloads of the own part."""
    return {worker: letter.room(place.room) for worker in range(place.workers) if worker != place.index}


def _note(came: dict[int, Post], lengths: Sequence[int]) -> None:
    for post, length in zip(came.values(), lengths, strict=True):
        post.nbytes = length


def _free(posts: dict[int, Post]) -> None:
    for post in posts.values():
        post.free()


def _sum_again(letter: Letter, owned: Sequence[Part], posts: dict[int, Post], place: Place) -> Post:
    """The owner's work: decode and add in rank order, encode the sum."""
    buffer = place.room.take(4 * sum(part.array.size for part in owned))
    sums: list[Floats] = []
    at = 0
    for part in owned:
        sums.append(buffer[4 * at : 4 * (at + part.array.size)].view(np.float32))
        at += part.array.size
    states = [part.state for part in owned]
    for worker in range(place.workers):
        letter.read(posts[worker], sums, states, name_of(worker, place), add=worker > 0)
    answer = letter.write(place.room, sums, [part.again for part in owned], lambda _: None)
    place.room.give(buffer)
    return answer
