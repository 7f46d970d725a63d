"""PyTorch: ``prepare`` puts hooks into a model and, under a parameter server, takes over its optimizer."""

from __future__ import annotations

from .options import Options
from .prepare import Prepared, prepare

__all__ = ["Options", "Prepared", "prepare"]
