"""Figures of tables and pages. `pmm3d.text` has bytes, times, counts and ranks in words."""

from __future__ import annotations

from math import isfinite


def figure(value: float, decimals: int) -> str:
    """A figure of a column: this number of decimals, and none from 10,000 on.

        >>> figure(1727.4, 2), figure(171757.3, 2)
        ('1,727.40', '171,757')
    """
    return f"{value:,.{decimals if abs(value) < 1e4 else 0}f}"


def milliseconds(seconds: float) -> str:
    """A time of a column in milliseconds, with two decimals."""
    return figure(1e3 * seconds, 2)


def number(value: float | None) -> str:
    """A number by itself: four digits, and all digits of a whole number; "–" for None."""
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if isfinite(value) and abs(value) >= 1e4 else f"{value:.4g}"


def percent(share: float) -> str:
    """A share from 0 to 1 in percent: one decimal below 10%."""
    return f"{share:.1%}" if share < 0.1 else f"{share:.0%}"


def in_flops(rate: float) -> str:
    """A rate in flop/s: three digits or more, and a unit.

        >>> in_flops(48.21e9), in_flops(1.234e12), in_flops(1234e15)
        ('48.2 GFLOP/s', '1.23 TFLOP/s', '1,234 PFLOP/s')
    """
    scale, unit = next(((scale, unit) for scale, unit in ((1e15, "P"), (1e12, "T")) if rate >= scale), (1e9, "G"))
    return f"{rate / scale:,.0f} {unit}FLOP/s" if rate >= 100 * scale else f"{rate / scale:.3g} {unit}FLOP/s"
