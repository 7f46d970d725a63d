"""Asynchronous parallel: no worker waits (Dean et al., "Large Scale Distributed Deep Networks", NeurIPS 2012).

A worker gets the weights back as soon as its own push has been applied. A slow worker contributes less but delays no
other. Nothing limits how far the others run ahead of it (``ssp`` does).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..registry import register
from . import Momentum, Rate
from ._apart import Apart


@register("sync", "asp", examples=("asp", "asp(rate=own)", "asp(compensate=0.04)", "asp(momentum=own)"))
@dataclass(frozen=True)
class Asp(Apart):
    """Asynchronous: every push is an update by itself, and nobody waits."""

    rate: Rate = "shared"
    compensate: float = 0.0
    momentum: Momentum = "auto"

    def may_proceed(self, clock: int, slowest: int) -> bool:  # noqa: ARG002
        return True
