"""PyTorch's tests that pass with the backend gloo and not with syncline, each with the reason."""

from __future__ import annotations

EXCEPTIONS: dict[str, str] = {}
