"""The grid of ranks and its axes: collectives, the engine that drives them, agreement, the ledger, the watchdog."""

from .axis import Axis
from .engine import Pending
from .grid import Grid
from .ledger import Ledger

__all__ = ["Axis", "Grid", "Ledger", "Pending"]
