"""Figures and settings as people read them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from typing import Any


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


def toml(settings: Mapping[str, Mapping[str, Any]]) -> str:
    """Sections of plain values as TOML; what is None is left out, as it is the default."""
    lines = {section: [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()
                       if value is not None] for section, values in settings.items()}
    return "\n\n".join("\n".join([f"[{section}]", *values]) for section, values in lines.items())
