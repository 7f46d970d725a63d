"""A server's part of the model: slices of every bucket, updated by a real torch optimizer.

The optimizer is the user's own, with flat slices in place of the tensors. That is the same update only for optimizers
that treat every element by itself; ``probe`` finds out, on small tensors, whether one does.

A shard's optimizer state leaves and enters as records of whole tensors' pieces, so that a checkpoint looks exactly as
if one process had trained.

Which slices these are, and where their weights lie, follows from the plan (``planned``), or, where a codec carries
gradients and updates, from its blocks (``coded``): the weights are then others than those that the workers have.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...compression.updates import Updates
from ...engine.messages import chunk_edges
from ...errors import UsageError
from ...plans.plan import Plan
from .storage import Storage, as_torch, view_like


@dataclass(frozen=True)
class Piece:
    """Elements ``start`` to ``stop`` of tensor ``tensor``, in the order in which they lie in memory."""

    tensor: int
    start: int
    stop: int


@dataclass(frozen=True)
class Record:
    """One entry of the optimizer's state of a piece: a flat tensor, or a plain value."""

    piece: Piece
    key: str
    value: Any


Slices = Sequence[tuple[Piece, torch.Tensor]]
"""Pieces of tensors and their weights, flat."""

WEIGHTS = "weights"
"""The key of records of weights."""


class Shard:
    """The pieces that a process owns, with their optimizer; it updates ``slices`` in place."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[torch.Tensor],
        slices: Slices,
        gradients: Storage,
    ) -> None:
        self.pieces = tuple(piece for piece, _ in slices)
        self._slices = [part.requires_grad_() for _, part in slices]
        self._gradients = [_slice(gradients, piece) for piece in self.pieces]
        for part, gradient in zip(self._slices, self._gradients, strict=True):
            part.grad = gradient
        self._optimizer = on_slices(optimizer, parameters, self.pieces, self._slices)

    def squared_norm(self) -> float:
        """The sum of squares of the gradients here, in float64."""
        return float(sum(gradient.double().square().sum() for gradient in self._gradients))

    def apply(self, groups: Sequence[Mapping[str, Any]], scale: float) -> None:
        """One optimizer step with these group values, gradients multiplied by ``scale`` first."""
        if scale != 1.0:
            for gradient in self._gradients:
                gradient.mul_(scale)
        for group, values in zip(self._optimizer.param_groups, groups, strict=True):
            group.update(values)
        self._optimizer.step()

    def state(self) -> list[Record]:
        """The optimizer's state, piece by piece."""
        return [
            Record(piece, key, value)
            for piece, part in zip(self.pieces, self._slices, strict=True)
            for key, value in self._optimizer.state.get(part, {}).items()
        ]

    def weights(self) -> list[Record]:
        """The weights, piece by piece."""
        return [Record(piece, WEIGHTS, part.detach()) for piece, part in zip(self.pieces, self._slices, strict=True)]

    def load_weights(self, records: Iterable[Record]) -> None:
        """Replace the weights by records of whole tensors or of any pieces that cover these."""
        found = _by_tensor(records)
        with torch.no_grad():
            for piece, part in zip(self.pieces, self._slices, strict=True):
                for record in found[piece.tensor]:
                    _copy_common(record, piece, part)

    def load(self, records: Iterable[Record]) -> None:
        """Replace the optimizer's state by records of whole tensors or of any pieces that cover these."""
        found = _by_tensor(records)
        for piece, part in zip(self.pieces, self._slices, strict=True):
            self._optimizer.state[part] = state = {}
            for record in found[piece.tensor]:
                if not _is_elementwise(record):
                    state[record.key] = copy.deepcopy(record.value)
                    continue
                if max(piece.start, record.piece.start) < min(piece.stop, record.piece.stop):
                    target = state.setdefault(record.key, torch.zeros(len(part), dtype=record.value.dtype))
                    _copy_common(record, piece, target)


def on_slices(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.Tensor],
    pieces: Sequence[Piece],
    slices: Sequence[torch.Tensor],
) -> torch.optim.Optimizer:
    """A copy of an optimizer, without state, whose groups hold slices in place of their tensors."""
    number = {id(parameter): index for index, parameter in enumerate(parameters)}
    of_tensor: dict[int, list[torch.Tensor]] = defaultdict(list)
    for piece, part in zip(pieces, slices, strict=True):
        of_tensor[piece.tensor].append(part)
    clone = copy.copy(optimizer)
    left_out = ("state", "param_groups", "step", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    vars(clone).update({key: value for key, value in vars(optimizer).items() if key not in left_out})
    # The user's hooks belong to the user's optimizer and run once per step, on the worker.
    clone._optimizer_step_pre_hooks, clone._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    clone.state = defaultdict(dict)
    clone.param_groups = [
        {
            **group,
            "params": [part for tensor in group["params"] for part in of_tensor[number.get(id(tensor), -1)]],
        }
        for group in optimizer.param_groups
    ]
    return clone


def probe(optimizer: torch.optim.Optimizer) -> bool:
    """Raise UsageError unless the optimizer gives the same result on slices as on whole tensors; whether it has state.

    Three steps with the values of each parameter group, on a matrix and a vector of random numbers, once whole and
    once cut into flat slices.
    """
    tried, keeps_state = [], False
    for group in optimizer.param_groups:
        values = {key: value for key, value in group.items() if key not in ("params", "lr", "initial_lr", "names")}
        if values not in tried:
            tried.append(values)
            # The learning rate may be 0 now, under a warm-up, when every optimizer would look the same.
            keeps_state |= _probe_group(optimizer, {**group, "lr": 0.1} if "lr" in group else group)
    return keeps_state


_SHAPES = ((6, 4), (9,))
_CUT = (Piece(0, 0, 5), Piece(0, 5, 24), Piece(1, 0, 4), Piece(1, 4, 9))


def _probe_group(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    name = type(optimizer).__name__
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in _SHAPES]
    whole = [tensor.clone().requires_grad_() for tensor in start]
    flat = [start[piece.tensor].reshape(-1)[piece.start : piece.stop].clone().requires_grad_() for piece in _CUT]
    template = copy.copy(optimizer)
    vars(template).update({key: value for key, value in vars(optimizer).items() if key not in ("state", "step")})
    template.param_groups = [{**group, "params": whole}]
    everything = [Piece(index, 0, tensor.numel()) for index, tensor in enumerate(whole)]
    try:
        a, b = on_slices(template, whole, everything, whole), on_slices(template, whole, _CUT, flat)
        for tensors, of in ((whole, a), (flat, b)):
            for tensor in tensors:
                of.state[tensor] = _state_like(optimizer, group, tensor)
        for _ in range(3):
            gradients = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in _SHAPES]
            for tensor, gradient in zip(whole, gradients, strict=True):
                tensor.grad = gradient.clone()
            for piece, part in zip(_CUT, flat, strict=True):
                part.grad = gradients[piece.tensor].reshape(-1)[piece.start : piece.stop].clone()
            a.step()
            b.step()
    except Exception as error:
        raise _refusal(name, f"it does not work on flat slices ({type(error).__name__}: {error})") from error
    for piece, part in zip(_CUT, flat, strict=True):
        expected = whole[piece.tensor].detach().reshape(-1)[piece.start : piece.stop]
        if not torch.allclose(part.detach(), expected, rtol=1e-9, atol=1e-12):
            raise _refusal(name, "its update of an element depends on the rest of the tensor")
    return any(a.state.values())


def _state_like(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], tensor: torch.Tensor) -> dict[str, Any]:
    """State as the optimizer has it for a parameter of that group (Adagrad makes it at construction), if it has any."""
    for parameter in group["params"]:
        state = optimizer.state.get(parameter)
        if state:
            return {
                key: torch.full_like(tensor, float(value.double().mean()), requires_grad=False)
                if isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == parameter.shape
                else copy.deepcopy(value)
                for key, value in state.items()
            }
    return {}


def _refusal(name: str, why: str) -> UsageError:
    return UsageError(
        f"{name} cannot run on a parameter server that holds slices of the weights: {why};"
        " use ps(update=worker), ring or another allreduce, or an element-wise optimizer such as SGD or Adam"
    )


def records_of(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> list[Record]:
    """A whole optimizer's state as records: what a user loaded or trained before."""
    found = []
    for index, parameter in enumerate(parameters):
        piece = Piece(index, 0, parameter.numel())
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim() > 0:
                value = in_memory_order(value, parameter)
            found.append(Record(piece, key, value))
    return found


def whole_state(records: Iterable[Record], parameters: Sequence[torch.Tensor]) -> dict[torch.Tensor, dict[str, Any]]:
    """Records of all pieces put together: the state one process would have, by parameter."""
    flat: dict[tuple[int, str], torch.Tensor] = {}
    state: dict[torch.Tensor, dict[str, Any]] = {}
    for record in records:
        parameter = parameters[record.piece.tensor]
        entry = state.setdefault(parameter, {})
        if not _is_elementwise(record):
            entry.setdefault(record.key, record.value)
            continue
        key = record.piece.tensor, record.key
        if key not in flat:
            flat[key] = torch.zeros(parameter.numel(), dtype=record.value.dtype, device=parameter.device)
            entry[record.key] = view_like(flat[key], parameter)
        flat[key][record.piece.start : record.piece.stop] = record.value
    return state


def in_memory_order(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor, flat, in the order in which ``like``'s lie in its storage."""
    flat = torch.empty(value.numel(), dtype=value.dtype)
    view_like(flat, like).copy_(value)
    return flat


def _is_elementwise(record: Record) -> bool:
    value, size = record.value, record.piece.stop - record.piece.start
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == size


def _by_tensor(records: Iterable[Record]) -> dict[int, list[Record]]:
    found: dict[int, list[Record]] = defaultdict(list)
    for record in records:
        found[record.piece.tensor].append(record)
    return found


def _copy_common(record: Record, piece: Piece, target: torch.Tensor) -> None:
    """Copy what a record and a piece have in common to the piece's flat ``target``."""
    start, stop = max(piece.start, record.piece.start), min(piece.stop, record.piece.stop)
    if start < stop:
        source = record.value[start - record.piece.start : stop - record.piece.start]
        target[start - piece.start : stop - piece.start] = source


def planned(weights: Storage, push: Plan, index: int) -> Slices:
    """What ``index`` owns of each bucket under a push plan, tensor by tensor; the workers' weights are its own."""
    found = []
    for bucket in weights.buckets:
        edges = chunk_edges(bucket.elements, push.chunks)
        for chunk, owner in enumerate(push.owners):
            if owner != index:
                continue
            at = 0
            for part in bucket.slices:
                low, high = max(edges[chunk], at), min(edges[chunk + 1], at + part.elements)
                if low < high:
                    piece = Piece(part.tensor, part.start + low - at, part.start + high - at)
                    found.append((piece, _slice(weights, piece)))
                at += part.elements
    return found


def coded(weights: Storage, updates: Updates) -> Slices:
    """What this process owns of each bucket where a codec's blocks stay together, with weights of its own."""
    return [
        (
            Piece(one.tensor, one.start, one.stop),
            as_torch(one.weights, getattr(torch, weights.placed[one.tensor].dtype)),
        )
        for one in updates.owned
    ]


def _slice(storage: Storage, piece: Piece) -> torch.Tensor:
    placed = storage.placed[piece.tensor]
    return storage.flat[placed.dtype][placed.start + piece.start : placed.start + piece.stop]
