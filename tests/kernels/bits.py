"""Comparing numbers by their bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def same(mine: NDArray[Any], theirs: NDArray[Any]) -> None:
    """Bit for bit; a NaN may be any NaN."""
    nan = np.isnan(theirs)
    np.testing.assert_array_equal(np.isnan(mine), nan)
    bits = np.dtype(f"u{mine.itemsize}")
    np.testing.assert_array_equal(mine.view(bits)[~nan], theirs.view(bits)[~nan])
