"""What a training can do without: it is tried, and what went wrong is a warning."""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger("pmm3d.nn")


def attempt(what: str, body: Callable[[], object]) -> bool:
    """Whether it went well. what: "curves.png could not be drawn", for the warning.

    Nothing that all ranks must do belongs here.

        >>> attempt("it could not be done", lambda: None)
        True
    """
    try:
        body()
    except Exception as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        logger.warning(f"{what}: {reason}. The training is not concerned")
        return False
    return True
