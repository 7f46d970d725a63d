"""Models of an elastic run as they outlive a session, and the values to which their workers go back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import UsageError
from ..saving import packed, unpacked
from ..serving.owner import HeldParts
from ..serving.turns import Counted
from ..session.session import Session
from ..strategy.strategy import Strategy


class Stateful(Protocol):
    """An object whose state the survivors share, such as a learning-rate scheduler: what a checkpoint may contain."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values, tensors and arrays."""
        ...

    def load_state_dict(self, state: Any) -> object:
        """Go on from the state of another worker."""
        ...


class Lasting(Protocol):
    """A model and its optimizer as they outlive the sessions of a run. Each framework has its own."""

    @property
    def described(self) -> str:
        """A text that differs between models that cannot be trained together."""
        ...

    @property
    def shared(self) -> Sequence[Stateful]:
        """Objects whose states workers take over besides weights and the optimizer's state, such as its rate."""
        ...

    def check_lasting(self, strategy: Strategy) -> None:
        """Raise NotBuiltError if the model cannot go on in another session under this strategy."""
        ...

    def count(self, finished: Callable[[], object]) -> Callable[[], None]:
        """Call ``finished`` after every update of the weights, until the returned call."""
        ...

    def keep_values(self) -> Callable[[], None]:
        """Copy weights and state, between two sessions. The returned call puts them back."""
        ...

    def copy_again(self, session: Session, root: int, whole: bool) -> None:
        """Take over the weights of ``root``, and the optimizer's state if each worker has the ``whole`` of it."""
        ...

    def hold_whole(self, view: int, step: int, counted: Counted) -> HeldParts:
        """The model of a worker that is alone, as the only part of its view, with the samples that it has counted.

        Called only if other owners may follow.
        """
        ...

    def put_together_again(self, session: Session, held: HeldParts, step: int) -> list[int]:
        """Give the model all parts as they were after that step. Returns the parts that nobody has."""
        ...

    def prepare_again(self, session: Session) -> Any:
        """Make the model part of another session. Returns a prepared model of PyTorch, if it is one."""
        ...


@dataclass(frozen=True)
class Mark:
    """The values to which a worker goes back if its next step breaks, or an exchange of weights after several.

    ``models`` has the marks of its prepared models (``frameworks.torch.prepare.Mark``).
    """

    finished: int
    models: Sequence[Any]
    positions: Sequence[Callable[[], None]]
    shared: Sequence[Stateful]
    states: bytes

    def put_back(self) -> None:
        """Go back, between two sessions."""
        for model in self.models:
            model.put_back()
        for go_back in self.positions:
            go_back()
        states = unpacked(self.states) if self.shared else ()
        for one, state in zip(self.shared, states, strict=True):
            one.load_state_dict(state)


def check_shareable(one: Stateful) -> None:
    """Raise UsageError for an object whose state other workers could not take over."""
    try:
        packed(one.state_dict())
    except UsageError as error:
        raise UsageError(f"syncline.elastic() cannot share the state of a {type(one).__name__}: {error}") from error
