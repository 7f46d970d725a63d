"""One worker's copy of the model: gradients go into buckets during backward and come back averaged when it ends.

What goes when, and what is waited for, is decided by the state machine of ``engine.step``: ``passes`` tell it what
backward does, ``training.model`` does what it says. Schedules whose results are applied by the optimizer's step have
all arrived when backward ends, so that what follows ``backward()`` (clipping, GradScaler, the step) sees averaged
gradients.

Owns which step it is, and what belongs to the model: its hooks, and the storages in which its gradients lie. How
buckets travel is the affair of ``training.exchange``, how batch statistics do that of ``buffers``. Buckets of a model
on a GPU are staged through pinned memory of the transport (``staging``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch

from ...engine.step import Apply
from ...errors import GradientError
from ...session.layout import Layout, decide_layout
from ...session.session import Session
from ...session.tickets import STEP, Meeting
from ...sync import alone, exchanges_gradients
from ...training.exchange import BucketExchange, storages_of
from ...training.model import Framework, TrainedModel
from .batch_norm import SyncBatchNorm
from .buffers import Buffers
from .crossing import Crossing
from .guard import Guard
from .hooks import Hooks, Listeners, nothing
from .options import Named, Options, Selection
from .passes import Passes
from .staging import Copier, device_of, staging_for
from .storage import Storage, layers_of
from .timing import LayerTimes, clock_of

if TYPE_CHECKING:
    from .averaging import Averaging


class Replica:
    """One model as this worker trains it, from when it is prepared until it is detached.

    ``first_key`` begins the range of keys that tell this model's exchanges from those of others.
    """

    def __init__(
        self,
        session: Session,
        model: torch.nn.Module,
        options: Options,
        *,
        first_key: int = 0,
        copier: Copier | None = None,
    ) -> None:
        self.session, self.model = session, model
        self.selection = Selection(model, options)
        self.named = self.selection.trained()
        layout, device = decide_layout(session, layers_of(self.named)), device_of(self.named)
        staging = staging_for(device, session.engine, session.fail, copier)
        self.storages = [
            Storage(self.named, layout.buckets, staging.allocate, staging.device)
            for _ in range(storages_of(session.strategy))
        ]
        self.storage = self.storages[0]
        """Where the gradients of the present backward pass are, or those of the last one."""
        self.exchange = BucketExchange(
            session, first_key, layout, self.storages, staging, measuring=partial(_measuring, model, self.named)
        )
        self._mode = self.exchange.mode
        self.trained = TrainedModel(
            session,
            self.exchange,
            len(self.named),
            Framework(
                check=self.check_start,
                begin=self._begin,
                weight=self._weight,
                met=self._met,
                apply=self._apply,
                averaged=self._averaged,
            ),
        )
        self.guard = Guard(model, self.named, self.selection, self.storages, self.fault)
        self.first_key = first_key
        self.exchanged = False  # True between the end of an exchange and the next backward
        self.steps = 0
        self.made_local_steps = False  # which were not exchanged
        self.listeners = Listeners()
        self.passes = Passes(self, options, 1.0 if alone(self._mode) else 1.0 / session.world_size)
        self.buffers = Buffers(session, self.selection, staging, first_key, self.fault)
        self.hooks = Hooks(session, model, self.named, self.passes, outputs=self.passes.looks_at_outputs)
        self.normalises_over_ranks = any(isinstance(module, SyncBatchNorm) for module in model.modules())

    # The user's side.

    @property
    def steps(self) -> int:
        """How many steps have been made."""
        return self._steps

    @steps.setter
    def steps(self, value: int) -> None:
        self._steps = value
        self.trained.resume_at(value)

    def storage_of(self, step: int) -> Storage:
        """Where the gradients of a step are, or how weights differ after it."""
        return self.storages[self.exchange.place(step)]

    def turn(self, step: int) -> None:
        """The gradients of this step are made from now on."""
        self.storage = self.storage_of(step)

    crossing: Crossing | None = None
    """Where steps end in the next iteration."""

    averaging: Averaging | None = None
    """Where workers train by themselves and exchange weights."""

    @property
    def synchronous_at_first(self) -> bool:
        """Whether weights are exchanged, and gradients in other steps."""
        return self.averaging is not None and exchanges_gradients(self._mode)

    def flush(self) -> None:
        """Wait for whatever is under way between two steps, and update what the optimizer was called for."""
        if self.crossing is not None:
            self.crossing.flush()

    def settle(self) -> None:
        """The same, for what is ours: it is no sign of a script that looks."""
        if self.crossing is not None:
            self.crossing.settle()
        if self.averaging is not None:
            self.averaging.settle()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside accumulate local gradients; the next one outside exchanges their sum."""
        before, self.passes.synchronising = self.passes.synchronising, False
        try:
            yield
        finally:
            self.passes.synchronising = before

    def shadow(self, meeting: Meeting, number: int) -> None:
        """Take part in the others' step of that number with zeros."""
        self.turn(number)
        self._zero()
        self.trained.shadow(STEP, meeting, number)
        self.buffers.finish()
        self.exchange.exchanged(meeting)
        self.passes.reset()

    def _zero(self) -> None:
        """Let the gradients of the present step be zeros."""
        self.exchange.staging.synchronize()  # the last step's copies may still read what is now overwritten
        with torch.no_grad():
            for flat in self.storage.resident.values():
                flat.zero_()

    def replace_layout(self) -> None:
        """As ``BucketExchange.replace_layout``."""
        self.settle()
        self.exchange.replace_layout()
        self.begin_anew()  # the state machine goes by the buckets

    def resume_with(self, layout: Layout, measured: bool) -> None:
        """As ``BucketExchange.resume_with``."""
        self.settle()
        self.exchange.resume_with(layout, measured)
        self.begin_anew()

    def detach(self) -> None:
        """Remove the hooks; gradients keep their values."""
        self.hooks.remove()
        if self.averaging is not None:
            self.averaging.detach()
        if self.crossing is not None:
            self.crossing.detach()
        self.exchange.close()

    # For passes and exchanges.

    def on_state_loaded(self) -> None:
        """The script has loaded a state into the model."""
        self.guard.check_same_parameters()
        self.listeners.loaded()

    def begin_anew(self) -> None:
        """Nothing is left of a step that was begun."""
        self.steps = self._steps

    def made_alone(self) -> None:
        """A step of the rank's own was made, whose gradients are left as they are."""
        self.trained.made_alone()
        self._steps += 1

    def made_step(self, meeting: Meeting | None, due: bool) -> None:
        """A step was made, which was exchanged where that was ``due``."""
        self._steps += 1
        if due:
            self.exchange.exchanged(meeting)
            if self._mode.merges or self.session.alone:
                self.session.coordination.begun()
        if self.exchange.times is not None:
            self.exchange.times.end_step()
        self.made_local_steps |= not due
        self.exchanged = True
        if self.averaging is not None:
            self.averaging.exchanged()

    def _begin(self) -> None:
        self.listeners.begin()

    def _weight(self) -> float:
        return self.passes.weight()

    def _met(self, kind: int, meeting: Meeting, step: int) -> None:
        if kind == STEP:
            self.buffers.start(meeting)
        elif self.averaging is not None:
            self.averaging.met(kind, meeting, step)

    def _apply(self, action: Apply) -> None:
        if self.crossing is not None:
            self.crossing.apply(action)

    def _averaged(self, kind: int) -> None:
        if self.averaging is not None:
            self.averaging.averaged(kind)

    def check_start(self) -> None:
        """A step that is exchanged begins."""
        if self.exchanged:
            self.listeners.second_backward()
        self.guard.check_trained(self.steps)
        self.listeners.first_exchange()
        self.listeners.first_exchange = nothing

    def fault(self, text: str) -> GradientError:
        """As ``Session.fault``."""
        return self.session.fault(text)


def _measuring(model: torch.nn.Module, named: Named, steps: int, forward: bool) -> LayerTimes:
    return LayerTimes(model, named, steps, clock_of(device_of(named)), forward=forward)
