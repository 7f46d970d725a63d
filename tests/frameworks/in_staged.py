"""The toy problem in PyTorch on a device, for which the CPU stands in."""

from __future__ import annotations

from functools import partial

import in_torch

begin = partial(in_torch.begin, staged=True)
