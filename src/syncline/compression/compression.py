"""Applies a codec to the buckets of one model and owns all state that the codec keeps between steps.

There is one state per parameter and process for its own encoding, and one for the second encoding by owners. The engine
asks for a bucket's reducers (``pieces``) and reports their end (``finish``). Codecs compute in float32; buckets of
other types are converted before and after.

Checkpoints. ``saved`` returns this process's state as flat arrays by name. The owners' residuals are partitioned among
them: together they hold one value per element. On two levels the ranks of a host partition the host's residuals in the
same way, because each encodes a part of the host's gradients. ``load`` takes the states of all workers. If the number
of encoders (workers or hosts) has changed, every encoder gets an equal share of the summed residuals, so that no
residual is lost.

Buckets may be replaced between two steps (``on``). The replacement keeps the state. Elements then change owners, so
owners exchange their residuals (``kept_by_owner``, ``take_over``), and so do the ranks of a host (``kept_for_host``,
``take_over_for_host``).

If steps overlap, the gradients of two consecutive steps are in memory at once; both use the same state (``beside``).

If owners hold the weights, they keep the summed gradients and encode updates of the weights instead (``updates``).

Gradients on a device (``Device``). Their codecs' own state is there too, and so is the state of the second encoding. A
checkpoint is the same as without a device.

Cuts. A schedule cuts tensors by size, but scales and selections belong to whole tensors or blocks, so a compressed
tensor may only be cut at multiples of the codec's block. If a schedule cuts elsewhere, the tensor is rejoined
(``join_cuts``): it travels in one bucket, whose payload is sent in segments that more urgent buckets can overtake.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..codecs import Codec, Floats, State, Stochastic, TakesTensors, codec_of, relay_of
from ..codecs._device import floats, on_device, on_host, overwrite, room_for, to_device
from ..errors import UsageError
from ..nouns import Bucket, Layer, Slice, Spec
from .reducers import Operand, Participant, Queue, Reducer, levels
from .reducers.owners import collecting, pushing, share_out
from .reducers.ways import codec_at, pieces, way_of
from .saved import Array, Saved, arrays_of, by_encoder, join, range_of, whole_array

log = logging.getLogger("syncline")

RELAY_RANK = -1
"""The rank in the states of owners: constant, so that random numbers do not depend on who owns a part."""

_FLOATS = ("float32", "float64", "float16", "bfloat16")


class Divided(NamedTuple):
    """A bucket's parts, their reducers, and how many tensors the codec does not compress yet (``warming``)."""

    parts: list[Operand]
    reducers: Sequence[Callable[[], Reducer]]
    warming: int


class Compression:
    """The codec of one model's buckets.

    ``arrays`` are the buckets' gradients, tensors if they are on the ``device`` of ``me``. ``name`` is this rank's name
    in messages. ``served`` sends all gradients through the owners, which are servers, whatever the codec. ``held``
    means that the owners hold the weights and keep the sums of gradients for themselves. ``alone`` means that each
    worker pushes by itself and nothing is summed. Raises UsageError for gradients that the codec cannot take and for
    buckets that cut a tensor which it must see whole.
    """

    def __init__(
        self,
        codec: Codec,
        layers: Sequence[Layer],
        buckets: Sequence[Bucket],
        arrays: Sequence[Array],
        me: Participant,
        *,
        served: bool,
        held: bool = False,
        alone: bool = False,
        name: str,
    ) -> None:
        self._codec, self._layers = codec, layers
        self._specs = [replace(layer.spec, dtype="float32") for layer in layers]
        self._buckets, self._arrays = buckets, arrays
        self._not_finite: list[str] = []
        self._warned: set[str] = set()
        self._me = me
        device = me.device if len(arrays) > 0 and on_device(arrays[0]) else None
        room = me.room if device is None else device.room
        self._where: Any = None if device is None else arrays[0].device  # in the framework's words
        self.participant = replace(me, report=self._not_finite.append, device=device, room=room)
        self._served, self._held, self._alone, self._name = served, held, alone, name
        self._clock = [0] * len(buckets)
        self._error_every = 0
        self._gradients: dict[int, float] = {}  # squared norms of buckets whose error is being measured
        self.errors: dict[int, tuple[float, float]] = {}
        """The squared norms of each bucket's gradients and residuals in the last measured step."""
        self._converted: dict[int, Floats] = {}
        self._pieces: dict[int, Divided] = {}  # made with the first exchange
        self._codecs = [codec_of(codec, spec) for spec in self._specs]
        self._warmup = max((one.warmup for one in self._codecs), default=0)
        for layer in layers:
            if layer.spec.dtype not in _FLOATS:
                raise UsageError(
                    f"{codec} compresses real floating-point gradients, but the gradient of {layer.spec.name!r} is"
                    f" {layer.spec.dtype}: freeze the parameter, or use codec=none"
                )
        self._states, self._again = [], []
        for index, (one, feedback, _) in enumerate(self._codecs):
            self._states.append(self._state(one, index, me.encoder if me.works else me.index, feedback))
            self._again.append(self._state(relay_of(one), index, RELAY_RANK, feedback and not held))
        self.check_cuts(buckets)

    @property
    def _servers(self) -> Sequence[int]:
        """The owners of the sums on two levels; empty if the hosts of every rail own them."""
        return self.participant.owners if self._served else ()

    @property
    def keeps(self) -> bool:
        """Whether a resumed run needs the state of earlier steps to go on with the same bits."""
        drawn = any(isinstance(one.codec, Stochastic) and one.codec.stochastic for one in self._codecs)
        return drawn or any(one.feedback for one in self._codecs) or any(state.memory for state in self._states)

    @property
    def owns(self) -> bool:
        """Whether this process encodes any part of the model a second time."""
        return next(self._owned(), None) is not None

    @property
    def warms_up(self) -> bool:
        """Whether the first steps have other payloads. Servers must then know the number of the step."""
        return self._warmup > 0

    @property
    def forgets(self) -> bool:
        """Whether servers that only sum keep residuals. Such servers take part in no checkpoint."""
        elsewhere = self._served and not self._held and max(self.participant.owners) >= self.participant.workers
        return elsewhere and any(one.feedback for one in self._codecs)

    @property
    def names(self) -> list[str]:
        """The parameters' names, in order."""
        return [spec.name for spec in self._specs]

    @property
    def buckets(self) -> int:
        """The number of buckets."""
        return len(self._buckets)

    @property
    def elements(self) -> int:
        """The number of elements in all buckets."""
        return sum(bucket.elements for bucket in self._buckets)

    def pieces(self, number: int) -> Sequence[Callable[[], Reducer]]:
        """The reducers of a bucket whose gradients are complete."""
        array, working = self._arrays[number], self._working(number)
        if working is not array:
            _convert(array, working, self.participant.encoding)
        step = self._clock[number]
        warming = self.warming(step)
        # The parts, and so the reducers, change only when a tensor's warm-up ends.
        if number not in self._pieces or self._pieces[number].warming != warming:
            self._pieces[number] = self._divided(self.parts(number, working, step), working, warming)
        parts, made, _ = self._pieces[number]
        for part in parts:
            part.state.step = step
        if not self._held:
            self.set_answered_step(number, parts)
        if self._error_every and step % self._error_every == 0:
            self._gradients[number] = squared(working)
        return made

    def measure_errors(self, every: int) -> None:
        """From now on measure ``errors`` every ``every`` steps, by a pass over gradients and residuals; 0: never.

        Only where this process encodes whole gradients on the host with error feedback.
        """
        feeds_back = any(state.residual is not None for state in self._states)
        whole = not self.participant.hosts and self.participant.device is None
        self._error_every = every if feeds_back and whole else 0

    def _divided(self, parts: list[Operand], array: Floats, warming: int) -> Divided:
        me = self.participant
        if self._held:
            between: levels.Pieces = pushing if self._alone else collecting
        else:
            between = partial(pieces, served=self._served)
        if me.hosts:
            found = levels.pieces(parts, array, me, between, servers=self._servers, down=not self._held)
        else:
            found = between(parts, me)
        return Divided(parts, found, warming)

    def warming(self, step: int) -> int:
        """How many tensors are not compressed yet at a step. The parts stay the same as long as this number does."""
        return sum(step < one.warmup for one in self._codecs) if step < self._warmup else 0

    def set_answered_step(self, number: int, parts: Sequence[Operand]) -> None:
        """Set the step of a bucket's second encodings to the step of the gradients that they answer."""
        step = self.answered(number)
        for part in parts:
            part.again.step = step

    def answered(self, number: int) -> int:
        """The step whose gradients the owners answer.

        If they hold the weights, ``finish`` has already counted that step.
        """
        return max(0, self._clock[number] - 1) if self._held else self._clock[number]

    def finish(self, number: int) -> None:
        """Record that the reducers of a bucket have finished."""
        self._clock[number] += 1
        if number in self._gradients:
            kept = ((part, self._states[part.tensor].residual) for part in self._buckets[number].slices)
            residual = sum(squared(one[part.start : part.stop]) for part, one in kept if one is not None)
            self.errors[number] = self._gradients.pop(number), residual
        array, working = self._arrays[number], self._working(number)
        if working is not array and (self.participant.owner >= 0 or not self._held):
            _convert(working, array, self.participant.decoding)
        if self._not_finite:
            self._report_not_finite()

    def _report_not_finite(self) -> None:
        """Warn once per parameter: the search for a scale by GradScaler produces many infinities."""
        found = list(dict.fromkeys(self._not_finite))
        fresh = [name for name in found if name not in self._warned]
        self._warned.update(fresh)
        self._not_finite.clear()
        names = ", ".join(repr(name) for name in (fresh or found)[:3])
        more = f" and {len(fresh or found) - 3} more" if len(fresh or found) > 3 else ""
        log.log(
            logging.WARNING if fresh else logging.DEBUG,
            "%s: the gradient of %s has a NaN or infinity; so has the average on every rank (reported once per"
            " parameter)",
            self._name,
            names + more,
        )

    def resume_at(self, step: int) -> None:
        """Continue at that step, counted from 0; the seeds of random numbers depend on it."""
        self._clock[:] = [step] * len(self._buckets)
        for state in (*self._states, *self._again):
            state.step = step

    def forget(self) -> None:
        """Reset all state to that before the first step. Call between two steps."""
        empty = self.fresh(self._buckets, self._arrays)
        for mine, theirs in zip(self._states + self._again, empty._states + empty._again, strict=True):
            first = dict(arrays_of(theirs))
            for what, array in arrays_of(mine):
                array[...] = first[what]

    def fresh(self, buckets: Sequence[Bucket], arrays: Sequence[Array]) -> Compression:
        """The same codec at the same step on other buckets or arrays, without state."""
        options: dict[str, Any] = {"served": self._served, "held": self._held, "alone": self._alone, "name": self._name}
        made = Compression(self._codec, self._layers, buckets, arrays, self._me, **options)
        made.resume_at(self.step)
        return made

    def beside(self, arrays: Sequence[Array]) -> Compression:
        """The same compression, sharing state and step counts, for gradients in other arrays.

        The exchanges of a bucket are in the order of steps, whichever arrays hold its gradients.
        """
        made = copy.copy(self)
        made._arrays, made._converted, made._pieces = arrays, {}, {}
        return made

    def on(self, buckets: Sequence[Bucket], arrays: Sequence[Array], step: int) -> Compression:
        """The compression that replaces this one from ``step`` on, with the state of this process's own encoding."""
        made = self.fresh(buckets, arrays)
        made._states, made._warned = self._states, self._warned
        made.resume_at(step)
        return made

    @property
    def step(self) -> int:
        """The next step, counted from 0. Valid between steps."""
        return max(self._clock)

    @property
    def owners_keep(self) -> bool:
        """Whether owners keep residuals; the same on all processes."""
        return any(state.residual is not None for state in self._again)

    def kept_by_owner(self) -> Saved:
        """This process's residuals as an owner, keyed by parameter and first element."""
        found: Saved = {}
        for part in self._owned():
            if part.again.residual is not None:
                kept = on_host(part.again.residual[part.start : part.start + part.elements])
                found[f"again/{part.name}/{part.start}"] = kept.copy()
        return found

    def take_over(self, kept: Mapping[str, Array]) -> None:
        """Copy those elements of an owner's former residuals that this process owns now."""
        for part in self._owned():
            if part.again.residual is not None:
                join(part.again.residual, kept, f"again/{part.name}/", part.start, part.start + part.elements)

    @property
    def ranks_keep(self) -> bool:
        """Whether the ranks of a host keep state for each other; the same on all workers."""
        me = self.participant
        return bool(me.hosts) and me.works and any(True for state in self._states for _ in arrays_of(state))

    def kept_for_host(self) -> Saved:
        """This process's parts of its host's state."""
        found: Saved = {}
        for part in self._encoded():
            for what, array in arrays_of(part.state):
                of_part, start = range_of(part, array)
                found[f"own/{part.name}/{what}/{start}"] = of_part.copy()
        return found

    def take_over_for_host(self, kept: Mapping[str, Array]) -> None:
        """Copy those elements of a host rank's former state that this process encodes now."""
        for part in self._encoded():
            for what, array in arrays_of(part.state):
                of_part, start = range_of(part, array)
                join(array.reshape(-1), kept, f"own/{part.name}/{what}/", start, start + of_part.size)

    def saved(self) -> Saved:
        """This process's part of a checkpoint."""
        found: Saved = {"clock": np.array(self._clock, np.int64)}
        if self.participant.hosts:
            if self.participant.works:
                found["host"] = np.array([self.participant.encoder], np.int64)
            return found | self.kept_for_host() | self.kept_by_owner()
        for state in self._states:
            for what, array in arrays_of(state):
                found[f"own/{state.spec.name}/{what}"] = on_host(array).copy()
        return found | self.kept_by_owner()

    def load(self, saved: Sequence[Mapping[str, Array]]) -> None:
        """Restore the states that all workers saved; raises UsageError if they belong to another model or codec."""
        me = self.participant
        clock = saved[0].get("clock")
        if clock is None or (len(saved) == me.workers and clock.size != len(self._clock)):
            raise UsageError("the codec's part of this state belongs to another model or schedule")
        self._clock[:] = clock.tolist() if clock.size == len(self._clock) else [int(clock.max())] * len(self._clock)
        before = by_encoder(saved)
        for state in self._states if me.works else ():
            for what, array in arrays_of(state):
                found = [whole_array(one, f"own/{state.spec.name}/{what}", on_host(array)) for one in before]
                mine = found[me.encoder] if len(before) == me.encoders else np.sum(found, axis=0) / me.encoders
                overwrite(array, mine)
        for part in self._owned():
            if part.again.residual is not None:
                # elements without a saved residual start at 0
                part.again.residual[part.start : part.start + part.elements] = 0
        for one in saved:
            self.take_over(one)

    def warn_of_loss(self, strategy: str, lost: bool, stacklevel: int) -> None:
        """Warn if a run cannot go on with the same bits: its residuals are ``lost`` or belong to no checkpoint.

        ``stacklevel`` counts from the caller, as in ``warnings.warn``.
        """
        if lost:
            warnings.warn(
                f"this state lacks the residuals of the codec in {strategy!r}: they are lost, and training does not"
                " continue bit for bit; save a state_dict() under this strategy, called by all ranks",
                stacklevel=stacklevel + 1,
            )
        if self.forgets:
            warnings.warn(
                "checkpoints lack the residuals of servers that only sum, so training does not continue bit for bit:"
                " use ps(on=workers, update=worker) or ps(update=server)",
                stacklevel=stacklevel + 1,
            )

    def _working(self, number: int) -> Floats:
        """A bucket's gradients in float32: its own array or memory for a converted copy."""
        array = self._arrays[number]
        if self._buckets[number].dtype == "float32":
            return array
        if number not in self._converted:
            self._converted[number] = floats(room_for(len(array), array))
        return self._converted[number]

    def _state(self, codec: Codec, index: int, rank: int, feedback: bool) -> State:
        state = codec.init(self._specs[index], rank, feedback)
        state.world = self.participant.encoders
        return state if self._where is None else to_device(state, self._where)

    def parts(self, number: int, array: Array, step: int | None = None) -> list[Operand]:
        """The parts of a bucket at ``step``, over an array of its size. Without a step, all warm-ups have ended."""
        found, at = [], 0
        for part in self._buckets[number].slices:
            name, one = self._specs[part.tensor].name, self._codecs[part.tensor]
            here = array[at : at + part.elements]
            states = self._states[part.tensor], self._again[part.tensor]
            if part.elements < self._specs[part.tensor].elements:  # buckets of one tensor may be at different steps
                states = copy.copy(states[0]), copy.copy(states[1])
            found.append(Operand(name, codec_at(one, step), here, *states, part.start))
            at += part.elements
        return found

    def parts_of(self, worker: int, number: int, array: Array) -> list[Operand]:
        """The parts of a bucket that a worker pushes by itself, over an array of its size, as owners decode them."""
        world = self.participant.workers
        return [replace(part, state=State(part.state.spec, worker, world=world)) for part in self.parts(number, array)]

    def keeps_rest(self, tensor: int) -> bool:
        """Whether an owner of weights keeps the error of an encoded update; the error must not grow.

        It does not keep the error of a biased codec whose feedback the user has turned off.
        """
        codec, feedback, _ = self._codecs[tensor]
        return codec.contraction and (feedback or not codec.biased)

    def _encoded(self) -> Iterator[Operand]:
        """The slices that this process encodes for its host."""
        for number, bucket in enumerate(self._buckets if self.participant.hosts else ()):
            parts = self.parts(number, np.empty(bucket.elements, np.float32))
            yield from levels.encoded(parts, self.participant, self._servers)

    def _owned(self) -> Iterator[Operand]:
        """The slices that this process encodes a second time."""
        if self.participant.owner < 0:
            return
        for number in range(len(self._buckets)):
            parts = self.parts(number, np.empty(self._buckets[number].elements, np.float32))
            if self.participant.hosts and not self._served:
                yield from levels.owned(parts, self.participant)
                continue
            wanted = [part for part in parts if self._served or way_of(part.codec).again]
            yield from share_out(wanted, len(self.participant.owners))[self.participant.owner]

    def check_cuts(self, buckets: Sequence[Bucket]) -> None:
        """Raise UsageError if a bucket cuts a tensor where its codec cannot be cut."""
        for part in [part for bucket in buckets for part in bucket.slices]:
            codec, spec = self._codecs[part.tensor].codec, self._specs[part.tensor]
            if not may_cut(codec, part, spec):
                what = f"blocks of {codec.block} elements" if codec.block else "whole tensors"
                raise UsageError(
                    f"{codec} compresses {what}, but this schedule cuts {spec.name!r} at element {part.start}: use"
                    " schedule=fixed"
                )


def squared(values: Floats) -> float:
    """The squared norm of an array."""
    return float(np.dot(values, values))


def computes_on_device(codec: Codec, layers: Sequence[Layer]) -> bool:
    """Whether the gradients of all ``layers`` can be encoded and decoded on a device."""
    found = (codec_of(codec, replace(layer.spec, dtype="float32")).codec for layer in layers)
    return all(isinstance(one, TakesTensors) and one.takes_tensors for one in found)


def _convert(values: Array, into: Array, queue: Queue | None) -> None:
    """Copy values to an array of another type."""
    if queue is None:
        np.copyto(into, values, casting="same_kind")
    else:
        queue.run(lambda: overwrite(into, values))


def may_cut(codec: Codec, part: Slice, spec: Spec) -> bool:
    """Whether a codec can compress a slice of a tensor without the rest of the tensor."""
    if part.start == 0 and part.stop == spec.elements:
        return True
    unit = codec.block
    return bool(unit) and part.start % unit == 0 and (part.stop % unit == 0 or part.stop == spec.elements)


def join_cuts(codec: Codec, layers: Sequence[Layer], buckets: Sequence[Bucket]) -> list[Bucket]:
    """The same buckets, with every tensor that must stay whole moved to the first bucket that holds a part of it."""
    parts = [part for bucket in buckets for part in bucket.slices]
    whole: set[int] = set()
    for part in parts:
        spec = layers[part.tensor].spec
        if not may_cut(codec_of(codec, replace(spec, dtype="float32")).codec, part, spec):
            whole.add(part.tensor)
    made, placed = [], set[int]()
    for bucket in buckets:
        slices = []
        for part in bucket.slices:
            if part.tensor not in whole:
                slices.append(part)
            elif part.tensor not in placed:
                placed.add(part.tensor)
                slices.append(Slice(part.tensor, 0, layers[part.tensor].spec.elements))
        if slices:
            made.append(replace(bucket, slices=tuple(slices)))
    return made
