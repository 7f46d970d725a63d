"""Checkpoints of models whose weights are flat arrays: everything that a resumed run needs, as plain values and arrays.

One dictionary, the same on all workers (but for the step, where each makes its own), which NumPy or pickle can keep:
weights and what the optimizer keeps of each, by name; the step; what a codec has not sent yet; where owners hold the
weights, theirs; where workers train by themselves, what they agreed on, and each worker's own. It resumes under as
many workers, or more, or fewer: what each of them had is shared out, or their mean.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import UsageError
from ..nouns import Slice, Spec, numpy_dtype
from ..serving.records import Elements, Record, State, pack, states_of, unpack
from ..serving.shard import WEIGHTS
from ..session.layout import reading_state
from ..session.session import Session
from ..strategy.choice import Choice
from ..training.owners import OwnedModel
from ..training.weights import WeightExchange
from ._flat import FlatModel
from ._weights import Array, Weights

_STATE = "state/"
_MODEL = "this state is of another model"


def save(model: FlatModel) -> dict[str, Any]:
    """The state of a run; all workers call it, between two steps."""
    model.check_between("state_dict()")
    session, owned = model.session, model.owned
    specs = model.specs
    if owned is not None:
        session.consolidates[model.key]()  # the newest weights, where workers do not go in step
    weights, kept = _read(specs, model.weights)
    found = _of_every_run(session, specs, weights, kept, model.steps)
    if session.choice is not None:
        found["algorithms"] = [list(row) for row in session.choice.table]
    if owned is not None:
        found["optimizer"] = _by_name(specs, _states(specs, owned.owners.ask("state")))
        if owned.keeps:
            found["owners"] = _basic(specs, *_of_records(specs, owned.weights()))["weights"]
        session.barrier()  # nobody goes on before all have asked
    found |= model.exchange.saved()
    if model.averaging is not None:
        found["agreed"] = model.averaging.travelling.saved() | {"follows": model.follows}
        each = session.gather(pack([*_of_weights(weights), *_of_states(weights, kept, _STATE)]))
        name, number = session.name, session.member.number
        own = [_of_records(specs, unpack(one, name(rank), number(rank))) for rank, one in enumerate(each)]
        found["ranks"] = [_basic(specs, *one) for one in own]
    return found


def load(model: FlatModel, state: Mapping[str, Any]) -> None:
    """Take up what ``save`` gave; all workers call it, between two steps, with the same.

    Raises UsageError for the state of another strategy or model; warns, as the caller's caller, of what it lacks.
    """
    with reading_state():
        model.check_between("load_state_dict()")
        session, owned = model.session, model.owned
        before = session.as_here(state["strategy"])
        if before != str(session.strategy) and owned is None and session.resume_codec(before):
            model.exchange.compress()
        if before != str(session.strategy):
            raise UsageError(
                f"this state is of a run with {state['strategy']!r}, this run has {str(session.strategy)!r}: give"
                " syncline.init() the former"
            )
        if model.exchange.compression is not None and model.exchange.compression.warms_up and session.group.servers:
            raise UsageError(
                f"servers cannot be told in which step a resumed run under {str(session.strategy)!r} is,"
                " whose first steps travel otherwise: use feedback without warmup=, ps(on=workers) or ring"
            )
        arrays, states = checked(model.specs, state, session.rank, session.world_size)
        if state["algorithms"] and state["world_size"] == session.world_size:
            session.resume_with(Choice.read(state["algorithms"]))
        model.resume(int(state["steps"]), state)
        compression = model.exchange.compression
        if compression is not None:
            lost = state.get("codec") is None and compression.keeps
            compression.warn_of_loss(str(session.strategy), lost, 3)
        model.take_weights(arrays)
        if owned is None:
            model.weights.keep(states)
        else:
            _load_owners(model, owned, state, arrays, states)
        if model.averaging is not None:
            _load_agreed(model.averaging, state)


def _load_agreed(averaging: WeightExchange, state: Mapping[str, Any]) -> None:
    """A state of one worker has no agreed weights: all begin with its weights."""
    averaging.forget()
    averaging.follows = True
    if "agreed" in state:
        averaging.travelling.load(state["agreed"])
        averaging.follows = bool(state["agreed"]["follows"])


def _load_owners(
    model: FlatModel, owned: OwnedModel, state: Mapping[str, Any], weights: Sequence[Array], kept: Sequence[State]
) -> None:
    """Give owners their weights and what their optimizers keep."""
    records = _of_weights(weights)
    owned.load(_of_states(weights, kept))
    theirs = state.get("owners")
    if theirs is not None:
        told, _ = _checked(model.specs, {"weights": theirs, "optimizer": {}})
        theirs = _of_weights(told)
    if model.session.strategy.sync_mode().merges:
        digest = 0
        for flat in weights:
            digest = zlib.crc32(flat.view(np.uint8), digest)
        owned.change(records, digest or 1)
        if model.exchange.compression is not None or owned.keeps:
            owned.resume(model.steps, theirs or [])
    else:
        owned.resume(model.steps, theirs or records)


# What all runs keep, one worker's too.


def save_alone(session: Session, specs: Sequence[Spec], weights: Weights, steps: int) -> dict[str, Any]:
    """The state of one worker that trains by itself, as several would have it."""
    return _of_every_run(session, specs, *_read(specs, weights), steps)


def load_alone(specs: Sequence[Spec], weights: Weights, state: Mapping[str, Any]) -> int:
    """Load a state into one worker; returns the number of steps. It ignores the state of codecs."""
    with reading_state():
        arrays, states = checked(specs, state, 0, 1)
        weights.write(arrays)
        weights.keep(states)
        return int(state["steps"])


def _read(specs: Sequence[Spec], weights: Weights) -> tuple[list[Array], list[State]]:
    """Copies of a framework's weights, flat, and what its optimizer keeps."""
    flat = [np.empty(spec.elements, numpy_dtype(spec.dtype)) for spec in specs]
    weights.read(flat)
    return flat, weights.kept()


def _of_every_run(
    session: Session, specs: Sequence[Spec], weights: Sequence[Array], kept: Sequence[State], steps: int
) -> dict[str, Any]:
    return _basic(specs, weights, kept) | {
        "strategy": str(session.strategy),
        "algorithms": [],
        "world_size": session.world_size,
        "steps": steps,
    }


def _basic(specs: Sequence[Spec], weights: Sequence[Array], kept: Sequence[State]) -> dict[str, Any]:
    """The part of a state that has weights and what the optimizer keeps."""
    shaped = {spec.name: flat.reshape(spec.shape) for spec, flat in zip(specs, weights, strict=True)}
    return {"weights": shaped, "optimizer": _by_name(specs, kept)}


def checked(
    specs: Sequence[Spec], state: Mapping[str, Any], rank: int, workers: int
) -> tuple[list[Array], list[State]]:
    """Weights, flat, and what the optimizer keeps, for a worker; raises UsageError for those of another model.

    Where workers had weights of their own, worker ``rank`` has its own, or the mean where their number was another.
    """
    ranks = state.get("ranks") or [state]
    each = [_checked(specs, one) for one in ranks]
    if len(ranks) == workers:
        return each[rank]
    if len(ranks) == 1:
        return each[0]
    flats = [np.mean(of_all, axis=0, dtype=of_all[0].dtype) for of_all in zip(*(one[0] for one in each), strict=True)]
    return flats, [_mean(of_all) for of_all in zip(*(one[1] for one in each), strict=True)]


def _checked(specs: Sequence[Spec], state: Mapping[str, Any]) -> tuple[list[Array], list[State]]:
    weights, kept = state["weights"], state["optimizer"]
    if sorted(weights) != sorted(spec.name for spec in specs):
        raise UsageError(f"{_MODEL}: it has {', '.join(map(repr, weights))}")
    flats, states = [], []
    for spec in specs:
        array = weights[spec.name]
        if array.shape != spec.shape or str(array.dtype) != spec.dtype:
            raise UsageError(f"{_MODEL}: its {spec.name!r} is {array.dtype} of shape {array.shape}, not"
                             f" {spec.dtype} of {spec.shape}")  # fmt: skip
        flats.append(np.array(array).reshape(-1))
        one = kept.get(spec.name, {})
        states.append({key: Elements.of(np.array(v)) if isinstance(v, np.ndarray) else v for key, v in one.items()})
    return flats, states


def _mean(states: Sequence[State]) -> State:
    """The mean of what workers' optimizers keep of a tensor; what has no mean is the first worker's."""
    found: State = dict(states[0])
    for key, value in states[0].items():
        others = [state.get(key) for state in states]
        arrays = [one.array for one in others if isinstance(one, Elements)]
        alike = len(arrays) == len(states) and len({(one.dtype, one.shape) for one in arrays}) == 1
        if alike and arrays[0].dtype.kind == "f":
            found[key] = Elements.of(np.mean(arrays, axis=0, dtype=arrays[0].dtype))
        else:
            found[key] = value
    return found


def _states(specs: Sequence[Spec], records: Sequence[Record]) -> list[State]:
    """Records of any slices, by tensor."""
    return states_of(records, [Slice(number, 0, spec.elements) for number, spec in enumerate(specs)])


def _by_name(specs: Sequence[Spec], states: Sequence[State]) -> dict[str, dict[str, Any]]:
    """Copies of what the optimizer keeps, by tensor and key."""
    return {
        spec.name: {key: v.array.copy() if isinstance(v, Elements) else v for key, v in state.items()}
        for spec, state in zip(specs, states, strict=True)
    }


def _of_weights(weights: Sequence[Array]) -> list[Record]:
    return [Record(Slice(number, 0, one.size), WEIGHTS, Elements.of(one)) for number, one in enumerate(weights)]


def _of_states(weights: Sequence[Array], kept: Sequence[State], before: str = "") -> list[Record]:
    return [
        Record(Slice(number, 0, one.size), before + key, value)
        for number, (one, state) in enumerate(zip(weights, kept, strict=True))
        for key, value in state.items()
    ]


def _of_records(specs: Sequence[Spec], records: Sequence[Record]) -> tuple[list[Array], list[State]]:
    """Weights, flat, and what optimizers keep, of the records of a worker or of owners."""
    weights: list[Array] = []
    kept: list[State] = []
    for spec, state in zip(specs, _states(specs, records), strict=True):
        found = state.pop(WEIGHTS, None)  # which tensors without elements do not have
        weights.append(found.array if isinstance(found, Elements) else np.empty(0, numpy_dtype(spec.dtype)))
        kept.append({key.removeprefix(_STATE): value for key, value in state.items()})
    return weights, kept
