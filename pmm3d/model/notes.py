"""Notes to the user on stderr, by the loggers pmm3d.comm, pmm3d.io and pmm3d.nn. Imports no numpy and no MPI."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from ..errors import printable


class StderrHandler(logging.StreamHandler):
    """Prints to the current sys.stderr, which commands replace on all ranks but the first."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(logging.Formatter("%(name)s: %(message)s"))

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))

    @property
    def stream(self) -> TextIO:
        return sys.stderr


def show_notes(name: str = "pmm3d") -> None:
    """Show the notes of a logger on stderr, unless the program has configured logging."""
    logger = logging.getLogger(name)
    if not logger.hasHandlers():
        logging.getLogger("pmm3d").addHandler(StderrHandler())
    if not logger.isEnabledFor(logging.INFO):
        logger.setLevel(logging.INFO)
