"""An all-reduce of a few numbers that is repeated in each step, on memory and requests that are prepared once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..arrays import NumpyLibrary, Slab
from ..model.schedule import sum_schedule
from .axis import Axis
from .engine import PlanResources
from .executor import Buffers, Persistent, work_bytes


class RepeatedSum:
    """The sums of some float64 numbers over all ranks of an axis, for repeated calls. Construction sends nothing.

    All members must make it at the same place among their collectives on the axis, for the same number of numbers.
    With debug, and in a dry run, each call is an ordinary all-reduce, in which debug compares the members' calls.

    axis      axis of the sums
    numbers   memory of the numbers, (count,)

        >>> from pmm3d import Grid
        >>> with Grid() as grid:
        ...     sums = RepeatedSum(grid.everyone, 2, "agreement")
        ...     [sums([1, grid.rank])[0] == grid.size for _ in range(3)]
        [True, True, True]
    """

    def __init__(self, axis: Axis, count: int, phase: str):
        self.axis, self.numbers, self._phase, engine = axis, np.empty(count), phase, axis._engine
        self._bound: Persistent | None = None
        if engine.debug or not axis.sends:
            return
        flat, library = self.numbers.reshape(-1, 1), NumpyLibrary()
        schedule = sum_schedule(count, "float64", axis.size, axis.index, axis.node_map)
        work = Slab(np.empty(work_bytes(schedule, library, flat, flat), np.uint8), library)
        buffers = Buffers(schedule, library, (flat, flat), (0, 0), work)
        with PlanResources() as resources:
            self._bound = axis._persistent("all_reduce", phase, schedule, buffers, self.numbers.itemsize, axis._number)
            resources.callback(self._bound.free)
            engine.hold(self, resources.pop_all())

    def __call__(self, numbers: Sequence[float]) -> list[float]:
        """Return the sums of these numbers. Collective."""
        engine = self.axis._engine
        with engine.guard:
            self.numbers[:] = numbers
            if self._bound is not None:
                self._bound.begin().wait()
            else:
                with engine.ledger.phase(self._phase):
                    self.axis.all_reduce(self.numbers, out=self.numbers, agreed=True).wait()
            total: list[float] = self.numbers.tolist()
        return total
