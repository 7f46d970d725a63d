"""Numbers for readers: three significant digits and a unit; a dash for a missing measurement.

Formats times, sizes, rates and shares for tables, charts and pages, so that they agree everywhere. Sizes are binary
(KiB = 1024 bytes), times SI.
"""

from __future__ import annotations

import math

MISSING = "-"

_LEAST, _MOST = 1e-9, 1e15
"""Numbers in this range are written out: measurements lie inside it, faulty values may not."""


def significant(value: float | None, digits: int = 3) -> str:
    """``value`` with that many significant digits, thousands separated; scientific outside the usual range."""
    if value is None:
        return MISSING
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    if not _LEAST <= abs(value) < _MOST:
        return f"{value:.{digits - 1}e}"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    # Rounding may carry into one more digit (9.996 to 10.0): take the decimals of the rounded value.
    rounded = round(value, decimals)
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    return f"{rounded:,.{decimals}f}"


def seconds(value: float | None) -> str:
    """A duration: ``850 us``, ``4.12 ms``, ``1.30 s``."""
    if value is None:
        return MISSING
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if abs(value) >= scale:
            return f"{significant(value / scale)} {unit}"
    return "0 s" if value == 0 else f"{significant(value / 1e-6)} us"


def milliseconds(value: float | None) -> str:
    """A duration as a bare number of milliseconds, for columns with the unit in their title."""
    return MISSING if value is None else significant(value * 1e3)


def size(value: float | None) -> str:
    """A number of bytes: ``0 B``, ``310 KiB``, ``1.20 MiB``."""
    if value is None:
        return MISSING
    scale, unit = size_unit(value)
    return f"{value:.0f} B" if scale == 1 else f"{significant(value / scale)} {unit}"


def decimal_size(value: int) -> str:
    """A number of bytes in powers of 1000, like the sizes of a bench: ``60.97 MB``."""
    for scale, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "KB")):
        if value >= scale:
            return f"{value / scale:.5g} {unit}"
    return f"{value} B"


def size_unit(value: float) -> tuple[int, str]:
    """The unit of a number of bytes: its size in bytes, and its name."""
    for scale, unit in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(value) >= scale:
            return scale, unit
    return 1, "B"


def link_rate(bit_per_s: float) -> str:
    """The speed of a link: ``1 Gbit/s``, ``44.6 Gbit/s``, ``100 Mbit/s``."""
    scale, unit = (1e9, "Gbit/s") if bit_per_s >= 1e9 else (1e6, "Mbit/s")
    return f"{float(f'{bit_per_s / scale:.3g}'):g} {unit}"


def percent(value: float | None, decimals: int = 0, sign: str = " %") -> str:
    """A share of 1 as per cent: ``98.06 %``."""
    return MISSING if value is None else f"{_fixed(value * 100, decimals)}{sign}"


def share(value: float | None) -> str:
    """A share of 1 as a bare number of whole per cents, for columns with the unit in their title."""
    return percent(value, 0, "")


def hundredths(value: float | None) -> str:
    """The same with two decimals, for accuracies."""
    return percent(value, 2, "")


def count(value: int) -> str:
    """A whole number, thousands separated."""
    return f"{value:,}"


def number(value: float | None) -> str:
    """A plain number with four decimals, such as a loss."""
    return MISSING if value is None else _fixed(value, 4)


def verdict(value: bool | None) -> str:
    """Whether a check has passed: ``yes``, ``NO``, or a dash if it was not made."""
    return {True: "yes", False: "NO", None: MISSING}[value]


def _fixed(value: float, decimals: int) -> str:
    return f"{value:.{decimals}f}" if abs(value) < _MOST or not math.isfinite(value) else significant(value)
