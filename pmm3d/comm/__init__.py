"""The grid of ranks and its axes: collectives, the engine that drives them, agreement, the ledger, the watchdog."""

from ..model.launch import check_launcher

check_launcher()

from .axis import Axis  # noqa: E402
from .engine import Pending  # noqa: E402
from .grid import Grid  # noqa: E402
from .ledger import Ledger  # noqa: E402

__all__ = ["Axis", "Grid", "Ledger", "Pending"]
