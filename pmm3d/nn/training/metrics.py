"""metrics.jsonl as it is read."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from ...errors import check_regular

METRICS = "metrics.jsonl"
logger = logging.getLogger("pmm3d.nn")


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a metrics file; none if it is not there. Lines that are none of a step are left out, with a warning
    unless it is the last one, which a crash cut short."""
    lines: list[dict[str, Any]] = []
    try:
        check_regular(path)
        texts = Path(path).read_bytes().splitlines()
    except FileNotFoundError:
        return lines
    wrong = []
    for number, text in enumerate(texts, 1):
        line = _parsed(text)
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
        elif number < len(texts):
            wrong.append(number)
    if wrong:
        logger.warning(f"{path}: {len(wrong)} lines are left out, which are not JSON of a step (the first is line "
                       f"{wrong[0]})")
    return lines


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # ValueError: also of what is not UTF-8
        return None
