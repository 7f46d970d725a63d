"""Whether a GradScaler is about to call an optimizer, which it may then leave out.

It asks an optimizer whether that handles overflows itself, and where it does not calls it at once or, if a gradient has
overflown, not at all (``torch.amp.GradScaler.step``). So an optimizer that has been asked, and not been called since,
has been skipped; one that has not been asked may still be called. Optimizers that do handle overflows are called in
every step and need no telling.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_ASKED = "_step_supports_amp_scaling"


class _Asked:
    """In place of the answer, which is no: calls all of ``tells`` when it is looked at."""

    def __init__(self) -> None:
        self.tells: list[Callable[[], None]] = []

    def __bool__(self) -> bool:
        for tell in self.tells:
            tell()
        return False


class Telling:
    """Calls ``tell`` whenever a GradScaler comes with this optimizer, until it is removed."""

    def __init__(self, optimizer: torch.optim.Optimizer, tell: Callable[[], None]) -> None:
        self._optimizer, self._tell = optimizer, tell
        found = vars(optimizer).get(_ASKED)
        if isinstance(found, _Asked):
            found.tells.append(tell)
        elif not getattr(optimizer, _ASKED, False):
            vars(optimizer)[_ASKED] = asked = _Asked()
            asked.tells.append(tell)

    def remove(self) -> None:
        """The optimizer is as it was."""
        found = vars(self._optimizer).get(_ASKED)
        if isinstance(found, _Asked) and self._tell in found.tells:
            found.tells.remove(self._tell)
            if not found.tells:
                del vars(self._optimizer)[_ASKED]
