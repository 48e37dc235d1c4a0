"""Figures as people read them."""

from __future__ import annotations

from math import isfinite


def in_seconds(value: float) -> str:
    """Three digits and a unit; hours and minutes of what takes long."""
    if value >= 3600:
        return f"{value // 3600:.0f} h {value % 3600 // 60:.0f} min"
    if value >= 60:
        return f"{value // 60:.0f} min {value % 60:.0f} s"
    if value >= 1:
        return f"{value:.3g} s"
    return f"{1e3 * value:.3g} ms" if value >= 1e-3 or value == 0 else f"{1e6 * value:.3g} µs"


def number(value: float | None) -> str:
    """Four digits; whole numbers whole."""
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if isfinite(value) and abs(value) >= 1e4 else f"{value:.4g}"


def percent(share: float) -> str:
    return f"{share:.1%}" if share < 0.1 else f"{share:.0%}"
