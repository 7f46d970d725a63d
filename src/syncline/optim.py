"""PyTorch optimizers for large batches. ``import syncline`` does not import this module, because it imports torch."""

from __future__ import annotations

from .frameworks.torch.large_batch import LAMB, LARS

__all__ = ["LAMB", "LARS"]
