"""Figures and settings as people read them."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from ...errors import needs


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


def short(value: float) -> str:
    """Of a round number, a few signs: 20k, 3M, 2e-05.

        >>> short(20000), short(0.25)
        ('20k', '0.25')
    """
    for sign, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if max(size, 1e4) <= abs(value) < 1e15:
            return f"{value / size:.4g}{sign}"
    return f"{value:.4g}"


def percent(share: float) -> str:
    return f"{share:.1%}" if share < 0.1 else f"{share:.0%}"


def toml(settings: Mapping[str, Any]) -> str:
    """As TOML, which has no null: what is None is left out, as it is the default."""
    with needs("report", "the page of a run"):
        import tomlkit
    return tomlkit.dumps(_without_none(settings)).strip()


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _without_none(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_none(each) for each in value if each is not None]
    return value
