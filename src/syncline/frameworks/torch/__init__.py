"""The PyTorch adapter: ``adapt`` makes a ``torch.nn.Module``, and its optimizer if there is one, part of a run.

``frameworks.adapter_of`` imports it for models of PyTorch; ``api``, ``checkpoint`` and ``torch_backend`` use its files.
Start reading in ``prepare``, which builds everything else. ``passes`` turns backward passes into steps on a ``replica``
with gradients in ``storage``. ``averaging`` exchanges weights, ``deferred`` defers updates into the next forward pass,
and ``served`` trains with weights that parameter servers hold.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from ...errors import UsageError
from ...launch.environment import REPEATS
from ...session.session import Session
from .. import Handed
from .._supported import check_packages, warn_of_plain_steps

OLDEST = (2, 7)
check_packages("torch", {"torch": OLDEST})  # before the other files, which use what an older version does not have

from .options import Options  # noqa: E402
from .prepare import (  # noqa: E402
    Given,
    Prepared,
    let_go,
    prepare,
    release,
)

__all__ = [
    "Given",
    "Options",
    "Prepared",
    "adapt",
    "prepare",
    "release",
]


def adapt(session: Session, model: Any, optimizer: Any, options: Mapping[str, Any]) -> Handed | None:
    """Attach hooks to the model and its optimizer; the result holds the same objects. UsageError for other objects."""
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"a model of PyTorch is a torch.nn.Module, but this is {type(model).__name__}")
    ignored = options["ignore"]
    names = frozenset([ignored] if isinstance(ignored, str) else ignored)
    chosen = Options(options["unused"], options["weight"], names, options["broadcast_buffers"])
    result = model if optimizer is None else (model, optimizer)
    if session.alone:
        warn_of_plain_steps(session)
        let_go(session, model)
        if os.environ.get(REPEATS):
            from .repeating import Repeating

            Repeating(session, model, optimizer, chosen)
        if session.lone is not None:
            before = [given for given in session.lone if given.model is not model]
            session.lone[:] = [*before, Given(model, optimizer, chosen)]
        return Handed(result)
    made = prepare(session, model, optimizer, chosen)
    return None if made is None else Handed(result, made)
