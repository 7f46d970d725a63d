"""What several codecs check in the same way."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ..errors import UsageError
from . import Floats


def check_block(block: int, codes: int) -> None:
    """Raise UsageError unless a block has a whole number of words, and so few elements that they stay in the cache."""
    if not codes <= block <= 1 << 20 or block % codes:
        raise UsageError(f"block={block}: choose a multiple of {codes} from {codes} to {1 << 20}")


@lru_cache(maxsize=1)
def no_residual() -> Floats:
    """How kernels are told that there is no error feedback: an empty array."""
    return np.empty(0, np.float32)
