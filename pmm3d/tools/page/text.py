"""Numbers and settings as people read them."""

from __future__ import annotations

import json
import statistics
from math import isfinite


def seconds(value: float) -> str:
    if value >= 3600:
        return f"{value // 3600:.0f} h {value % 3600 // 60:.0f} min"
    if value >= 60:
        return f"{value // 60:.0f} min {value % 60:.0f} s"
    if value >= 1:
        return f"{value:.3g} s"
    return f"{1e3 * value:.3g} ms" if value >= 1e-3 or value == 0 else f"{1e6 * value:.3g} µs"


def number(value) -> str:
    """Four digits; whole numbers whole."""
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    if not isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def share(value: float) -> str:
    return f"{value:.1%}" if value < 0.1 else f"{value:.0%}"


def median(values) -> float:
    """Of numbers that are not empty; 0 of none."""
    listed = list(values)
    return statistics.median(listed) if listed else 0.0


def spans(pairs) -> str:
    """[[0, 3], [5, 5]] as "0–3, 5"."""
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in pairs)


def toml(settings: dict) -> str:
    """Sections of plain values as TOML; what is None is left out, as it is the default."""
    lines = []
    for section, values in settings.items():
        lines += ["" if lines else None, f"[{section}]"]
        lines += [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()
                  if value is not None]
    return "\n".join(line for line in lines if line is not None)
