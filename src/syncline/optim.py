"""Optimizers of PyTorch for large batches; not loaded with the package, since they load torch."""

from __future__ import annotations

from .frameworks.torch.large_batch import LAMB, LARS

__all__ = ["LAMB", "LARS"]
