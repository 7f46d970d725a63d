"""The values of a training under JAX, which lie in no object: what an elastic run hands over, and a repeated log needs.

JAX executes a step after it was called, and its results may be those of a step that failed. ``Kept.update`` waits for
them, and keeps the results of a finished step only. Those from before a step that broke are therefore still there.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import jax

from ...errors import UsageError
from ...session.session import Session
from .._supported import LastsWhole
from .run import run_of
from .trees import broadcast, named, of_run, state_of


class Kept(LastsWhole):
    """Values that outlive the sessions of an elastic run (``recovery.lasting``). UsageError without Syncline's state in
    them."""

    def __init__(self, session: Session, values: Any) -> None:
        self._values, self._run = values, run_of(values)
        self.finished: Callable[[], object] = lambda: None
        session.lasting.append(self)

    @property
    def values(self) -> Any:
        """The results of the last finished step, for the next one."""
        return self._values

    def update(self, values: Any) -> None:
        """Wait for a step, and keep its results. Raises the step's error, and keeps what was there.

        Raises UsageError for a step that overwrites the values that it is given (``donate_argnums``).
        """
        values = jax.block_until_ready(values)
        for name, leaf in named(self._values):
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                raise UsageError(
                    f"the step has overwritten {name or 'the value'}, from which the run goes on if a step breaks:"
                    " leave donate_argnums and donate_argnames of jax.jit out"
                )
        state_of(values)
        if not self._run.repeats_part:
            self._values = values
            self.finished()

    # What an elastic run does with it.

    framework = "JAX"

    @property
    def described(self) -> str:
        """A text that differs between values of other names, shapes or types, and between other rules."""
        leaves = [(name, jax.numpy.shape(leaf), str(jax.numpy.result_type(leaf))) for name, leaf in named(self._values)]
        return f"{len(leaves)} values of JAX ({zlib.crc32(str(leaves).encode()):08x}), {self._run.rule}"

    def keep_values(self) -> Callable[[], None]:
        """Remember the values, which are never changed in place. The returned call puts them back."""
        values = self._values

        def put_back() -> None:
            self._values = values

        return put_back

    def copy_again(self, session: Session, root: int, whole: bool) -> None:  # noqa: ARG002 - each worker has it whole
        """Take over the values of ``root``."""
        self._values = of_run(broadcast(session, self._values, root), self._run.number)

    def prepare_again(self, session: Session) -> None:
        """Let the transformation exchange in another session, from the present values on."""
        self._run.begin_again(session, int(state_of(self._values).step))
        session.lasting.append(self)
