"""What is said when a run starts with a codec and an optimizer that learn little together at first.

Optimizers such as Adam divide a gradient by the size that those before it had. Of a codec that sends one element in a
hundred an element's gradients are zeros, and then the sum of a hundred: each moves the weight by about one step where
a hundred would have. With SGD nothing is lost by that, since sums count as sums.
"""

from __future__ import annotations

import logging

import torch

from ...codecs import Codec, Sparse, codec_of
from ...nouns import Spec
from ...session.session import Session
from ...strategy.parts import write
from ...strategy.words import NONE
from .options import Named
from .storage import layers_of

log = logging.getLogger("syncline")

RARELY = 0.1
"""The share of elements below which the first steps suffer: at a tenth they do not."""


def tell_of_slow_start(session: Session, named: Named, optimizer: torch.optim.Optimizer | None) -> None:
    """A warning on rank 0 where a codec sends few elements from the first step on, and the optimizer is adaptive."""
    if session.index or session.strategy.codec == NONE or optimizer is None or not _adaptive(optimizer):
        return
    ratio = _rarest(session.strategy.codec_object(), [layer.spec for layer in layers_of(named)])
    if ratio >= RARELY:
        return
    steps, name = round(1 / ratio), type(optimizer).__name__
    log.warning(
        "%s: codec=%s sends an element once in %d steps or so, and %s learns little from that in the first ones: let"
        " the share fall slowly with codec=threshold(ratio=%s, warmup=%d), choose ratio=%s or more, or use SGD with"
        " momentum",
        session.name(session.index),
        write("codecs", session.strategy.codec),
        steps,
        name,
        ratio,
        steps,
        RARELY,
    )


def _adaptive(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it divides gradients by their size: that is what an ``eps`` is added to."""
    return any("eps" in group for group in optimizer.param_groups)


def _rarest(codec: Codec, specs: list[Spec]) -> float:
    """The smallest share of a tensor's elements that is sent in the first step."""
    found = [codec_of(codec, spec) for spec in specs]
    shares = (one.codec.ratio_at(0) for one in found if isinstance(one.codec, Sparse) and not one.warmup)
    return min(shares, default=1.0)
