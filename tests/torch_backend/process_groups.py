"""What tests of process groups share: a rank's group on its session, and options as torch gives them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from syncline.session.session import Session
from syncline.torch_backend.group import SynclineGroup

WORLD = 3
LIMIT = timedelta(seconds=60)


def of(session: Session) -> SynclineGroup:
    return SynclineGroup(None, session, LIMIT)


def options(kind: Any, wait: bool = True, **given: Any) -> Any:
    made = kind()
    if hasattr(made, "asyncOp"):  # an older PyTorch waits by itself
        made.asyncOp = not wait
    for name, value in given.items():
        setattr(made, name, value)
    return made
