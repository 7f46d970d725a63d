"""Checkpoints of models with flat weights: everything that a resumed run needs, as plain values and arrays.

A checkpoint is one dictionary that NumPy or pickle can store. It is the same on all workers, except for the step number
if each worker makes its own steps. It contains by name the weights and the optimizer's state, the step, and the
residuals of a codec. If owners hold the weights, it has the owners' weights. If workers train alone between exchanges,
it has the agreed weights and each worker's own. A run may resume with any number of workers: their states are
redistributed or averaged.
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
from ._flat import Array, FlatModel, Weights

_STATE = "state/"
_MODEL = "this state belongs to another model"


def save(model: FlatModel) -> dict[str, Any]:
    """The state of a run; all workers must call it between two steps."""
    model.check_between("state_dict()")
    session, owned = model.session, model.owned
    specs = model.specs
    if owned is not None:
        session.consolidates[model.key]()  # the newest weights, if workers do not train in lockstep
    weights, kept = _read(specs, model.weights)
    found = _of_every_run(session, specs, weights, kept, model.steps)
    if session.choice is not None:
        found["algorithms"] = [list(row) for row in session.choice.table]
    if owned is not None:
        found["optimizer"] = _by_name(specs, _states(specs, owned.owners.ask("state")))
        if owned.keeps:
            found["owners"] = _basic(specs, *_of_records(specs, owned.weights()))["weights"]
        session.barrier()  # a later push must not change the owners' state before every worker has read it
    found |= model.exchange.saved()
    if model.averaging is not None:
        found["agreed"] = model.averaging.saved() | {"follows": model.follows}
        each = session.gather(pack([*_of_weights(weights), *_of_states(weights, kept, _STATE)]))
        name, number = session.name, session.member.number
        own = [_of_records(specs, unpack(one, name(rank), number(rank))) for rank, one in enumerate(each)]
        found["ranks"] = [_basic(specs, *one) for one in own]
    return found


def load(model: FlatModel, state: Mapping[str, Any]) -> None:
    """Load a state of ``save``; all workers must call it between two steps, with the same state.

    Raises UsageError for the state of another strategy or model, and warns of missing parts.
    """
    with reading_state():
        model.check_between("load_state_dict()")
        session, owned = model.session, model.owned
        before = session.as_here(state["strategy"])
        if before != str(session.strategy) and owned is None and session.resume_codec(before):
            model.exchange.compress()
        if before != str(session.strategy):
            raise UsageError(
                f"this state belongs to a run with {state['strategy']!r}, but this run has {str(session.strategy)!r}:"
                " give syncline.init() the strategy of the state"
            )
        if model.exchange.compression is not None and model.exchange.compression.warms_up and session.group.servers:
            raise UsageError(
                f"the first steps under {str(session.strategy)!r} are exchanged without the codec, and servers cannot"
                " learn the step of a resumed run: use feedback without warmup=, ps(on=workers) or ring"
            )
        arrays, states = checked(model.specs, state, session.rank, session.world_size)
        if state["algorithms"] and state["world_size"] == session.world_size:
            session.resume_with(Choice.read(state["algorithms"]))
        model.resume(int(state["steps"]), state)
        compression = model.exchange.compression
        if compression is not None:
            lost = state.get("codec") is None and compression.keeps
            compression.warn_of_loss(str(session.strategy), lost, 3)
        else:
            session.warn_of_residuals(state.get("codec") is not None, 3)
        model.take_weights(arrays)
        if owned is None:
            model.weights.keep(states)
        else:
            _load_owners(model, owned, state, arrays, states)
        if model.averaging is not None:
            _load_agreed(model.averaging, state)


def _load_agreed(averaging: WeightExchange, state: Mapping[str, Any]) -> None:
    """Load agreed weights. A state of one worker has none: then all workers continue from its weights."""
    averaging.forget()
    averaging.follows = True
    if "agreed" in state:
        averaging.load(state["agreed"])
        averaging.follows = bool(state["agreed"]["follows"])


def _load_owners(
    model: FlatModel, owned: OwnedModel, state: Mapping[str, Any], weights: Sequence[Array], kept: Sequence[State]
) -> None:
    """Send the weights and the optimizer's state to the owners."""
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


def copy_states(session: Session, specs: Sequence[Spec], weights: Weights, root: int) -> None:
    """Take over the optimizer's state of worker ``root``. All workers call it."""
    slices = [Slice(number, 0, spec.elements) for number, spec in enumerate(specs)]
    mine = [
        Record(piece, key, one)
        for piece, state in zip(slices, weights.kept(), strict=True)
        for key, one in state.items()
    ]
    data = session.tell_all(pack(mine) if session.rank == root else b"", root)
    if session.rank != root:
        weights.keep(states_of(unpack(data, session.name(root), session.member.number(root)), slices))


# The common part of all states, including a single worker's.


def save_alone(session: Session, specs: Sequence[Spec], weights: Weights, steps: int) -> dict[str, Any]:
    """The state of a run with one worker, in the same form as for several."""
    return _of_every_run(session, specs, *_read(specs, weights), steps)


def load_alone(specs: Sequence[Spec], weights: Weights, state: Mapping[str, Any]) -> int:
    """Load a state into a run with one worker, without the state of codecs. Returns the number of steps."""
    with reading_state():
        arrays, states = checked(specs, state, 0, 1)
        weights.write(arrays)
        weights.keep(states)
        return int(state["steps"])


def _read(specs: Sequence[Spec], weights: Weights) -> tuple[list[Array], list[State]]:
    """Flat copies of a framework's weights, and its optimizer's state."""
    flat = [np.empty(spec.elements, numpy_dtype(spec.dtype)) for spec in specs]
    weights.read(flat)
    return flat, weights.kept()


def _of_every_run(
    session: Session, specs: Sequence[Spec], weights: Sequence[Array], kept: Sequence[State], steps: int
) -> dict[str, Any]:
    return _basic(specs, weights, kept) | {
        "strategy": session.recorded,
        "algorithms": [],
        "world_size": session.world_size,
        "steps": steps,
    }


def _basic(specs: Sequence[Spec], weights: Sequence[Array], kept: Sequence[State]) -> dict[str, Any]:
    """The part of a state with the weights and the optimizer's state."""
    shaped = {spec.name: flat.reshape(spec.shape) for spec, flat in zip(specs, weights, strict=True)}
    return {"weights": shaped, "optimizer": _by_name(specs, kept)}


def checked(
    specs: Sequence[Spec], state: Mapping[str, Any], rank: int, workers: int
) -> tuple[list[Array], list[State]]:
    """A worker's flat weights and optimizer state. Raises UsageError for a state of another model.

    If workers had weights of their own, worker ``rank`` gets its own, or the mean if the number of workers has changed.
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
        raise UsageError(f"{_MODEL}, with {', '.join(map(repr, weights))}")
    flats, states = [], []
    for spec in specs:
        array = weights[spec.name]
        if array.shape != spec.shape or str(array.dtype) != spec.dtype:
            raise UsageError(f"{_MODEL}: its {spec.name!r} is {array.dtype} of shape {array.shape}, but this model's"
                             f" is {spec.dtype} of shape {spec.shape}")  # fmt: skip
        flats.append(np.array(array).reshape(-1))
        one = kept.get(spec.name, {})
        states.append({key: Elements.of(np.array(v)) if isinstance(v, np.ndarray) else v for key, v in one.items()})
    return flats, states


def _mean(states: Sequence[State]) -> State:
    """The mean of workers' optimizer states of a tensor. Values without a mean are the first worker's."""
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
    """The states by tensor, from records of any slices."""
    return states_of(records, [Slice(number, 0, spec.elements) for number, spec in enumerate(specs)])


def _by_name(specs: Sequence[Spec], states: Sequence[State]) -> dict[str, dict[str, Any]]:
    """Copies of the optimizer's states, by tensor and key."""
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
    """Flat weights and optimizer states from the records of a worker or of owners."""
    weights: list[Array] = []
    kept: list[State] = []
    for spec, state in zip(specs, _states(specs, records), strict=True):
        found = state.pop(WEIGHTS, None)  # absent for tensors without elements
        weights.append(found.array if isinstance(found, Elements) else np.empty(0, numpy_dtype(spec.dtype)))
        kept.append({key.removeprefix(_STATE): value for key, value in state.items()})
    return weights, kept
