"""RecordedStep programs by the facts on which they depend: those of training steps, and those of forward passes."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import MethodType
from typing import Any, Generic, TypeVar
from weakref import ref

from ..arrays import Arena, Array
from ..comm import Axis, Grid, Look, Program, Recorder, check_program
from ..layout import Layout
from ..product import DistMatrix
from .compression import Compression
from .gathered import Gathered
from .module import Module
from .parallel import BackwardSync

logger = logging.getLogger("pmm3d.nn")
LARGEST = 4
"""Largest number of kinds with programs. The one that was not used for longest is dropped."""
MANY = 12
"""Number of kinds after which the log says what differs."""
VALUES = {int, float, str, bool, tuple, Compression, Layout, MethodType}
"""Types of facts that are compared. Other facts must be the same objects."""


class Recording:
    """Steps, or passes, with equal facts.

    facts     objects on which the program depends
    seen      number of ordinary steps
    program   None: it is not recorded
    trusted   whether the program gave the bits of ordinary steps on all ranks
    problem   reason why the steps are not replayed, or ""
    """

    def __init__(self, facts: list[Any]):
        self.facts, self.seen, self.problem, self.trusted = facts, 0, "", False
        self.program: Program | None = None
        self._arguments, self._gathers = list[tuple[DistMatrix, Array]](), list[Gathered]()

    def arguments(self, matrices: Sequence[DistMatrix]) -> list[DistMatrix]:
        """Copies of the matrices of a step, which is recorded. `fill` writes those of other steps to them."""
        self._arguments = [(copy, copy.local) for copy in map(copy_of, matrices)]
        return [copy for copy, _ in self._arguments]

    def fill(self, matrices: Sequence[DistMatrix]) -> None:
        """Copy the matrices of a step into the arguments of the program."""
        for (copy, local), given in zip(self._arguments, matrices):
            local[...] = given.local
            copy.labels_below = given.labels_below

    def keep(self, recorder: Recorder, grid: Grid, pauses: int, problem: str = "") -> None:
        """Keep the recorded program, unless there is a problem. With debug, it is checked. pauses: `Weights.pauses`
        before the recording."""
        self.problem, program = recorder.problem or problem, recorder.program()
        if not self.problem and grid.debug and (faults := check_program(program)):
            self.problem = f"the recorded program is wrong: {faults[0]}"
        if not self.problem:
            self.program, self._gathers = program, BackwardSync.of(grid).weights.used_since(pauses)

    def run(self, grid: Grid, look: Look | None = None) -> None:
        """Carry out the program. After an error, it is forgotten."""
        assert self.program is not None
        try:
            self.program.run(look)
        except BaseException:  # collectives that are under way may still write to the arrays
            self.forget()
            grid.attached.pop(Arena, None)  # no other program may use its memory
            raise
        BackwardSync.of(grid).weights.use_again(self._gathers)

    def forget(self, seen: int = 0) -> None:
        """Forget the program. A new one is compared before it is trusted."""
        self.program, self.trusted, self.seen = None, False, seen


Some = TypeVar("Some", bound=Recording)
Own = TypeVar("Own", bound="Recordings[Any]")


class Recordings(ABC, Generic[Some]):
    """The kinds of steps of a network, the last one first. Subclasses decide when to record and to compare.

    what       the steps, for the log
    replayed   number of replayed steps
    problem    reason why the last step was not replayed, or ""
    """

    what = ""

    def __init__(self, grid: Grid, everyone: Axis):
        self._grid, self._everyone, self._all = grid, everyone, list[Some]()
        self.replayed = self._steps = self._kinds = 0
        self.problem = ""

    @classmethod
    def of(cls: type[Own], network: Module) -> Own:
        """Those of a network. The first call makes them."""
        known: dict[type, Any] = vars(network).setdefault("_replays", {})
        if cls not in known:
            known[cls] = cls(network.grid, network.parent_grid.everyone)
        made: Own = known[cls]
        return made

    def __deepcopy__(self: Own, memo: object) -> Own:
        """A copy of the network has recorded nothing."""
        return type(self)(self._grid, self._everyone)

    def _arena(self, make: bool = False) -> Any:
        """The arena of all programs of the grid, or None. Only programs keep it. make: a new one."""
        if not make:
            found = self._grid.attached.get(Arena)
            return None if found is None else found()
        arena = Arena(self._grid.workspace)
        self._grid.attached[Arena] = ref(arena)
        return arena

    def _totals(self, *numbers: float) -> list[float]:
        """Sums of numbers over all ranks. Collective."""
        return BackwardSync.of(self._grid).summed(self._everyone, numbers)

    def _every(self, mine: bool) -> bool:
        """Whether `mine` is true on all ranks. Collective."""
        return self._totals(mine)[0] == self._everyone.size

    def _tell(self, problem: str) -> None:
        """Log why steps are not replayed, once for each reason in turn."""
        if problem != self.problem and self._everyone.index == 0 and self._grid.dry_run is None:
            logger.info("%s are not replayed: %s", self.what, problem)
        self.problem = problem

    def _trust(self, kind: Some) -> None:
        """Trust a program that was compared on all ranks."""
        kind.trusted = True
        self._grid.workspace.clear()
        if kind.program is not None and self._everyone.index == 0:
            logger.info("%s are replayed: %d instructions", self.what, len(kind.program.instructions))

    @abstractmethod
    def _new(self, facts: list[Any]) -> Some:
        """A new recording."""

    def _with(self, facts: list[Any]) -> Some:
        """The kind with these facts. Its program is forgotten if its memory was given up after an error."""
        for place, each in enumerate(self._all):
            if _change(each.facts, facts) is None:
                if place:
                    self._all.insert(0, self._all.pop(place))
                if each.program is not None and each.program.arena is not self._arena():
                    each.forget()
                return each
        if self._all:
            self._kinds += 1
            self.problem = f"{_difference(self._all[0].facts, facts)} since an earlier step"
        if self._kinds == MANY:
            logger.log(
                logging.INFO if self._everyone.index == 0 else logging.DEBUG, "%s differ: %s", self.what, self.problem
            )
        self._all = [each for each in self._all if not _stale(each.facts, facts)][: LARGEST - 1]
        self._all.insert(0, self._new(facts))
        return self._all[0]


def copy_of(matrix: DistMatrix) -> DistMatrix:
    """Copy of a matrix in memory of its own."""
    copy = DistMatrix(matrix.grid, matrix.library.copy(matrix.local), matrix.shape, matrix.layout)
    copy.labels_below = matrix.labels_below
    return copy


def _difference(before: Sequence[Any], now: Sequence[Any]) -> str:
    """Describe the first fact that differs."""
    place = _change(before, now)
    if place is None or len(before) != len(now):
        return "an attribute of a module was added or removed, or the number of micro-batches changed"
    return f"{before[place]!r:.60} became {now[place]!r:.60}"


def _change(before: Sequence[Any], now: Sequence[Any]) -> int | None:
    """Place of the first fact that differs, or None if all facts are unchanged."""
    for place, (one, other) in enumerate(zip(before, now)):
        if one is not other and not (type(one) in VALUES and type(one) is type(other) and one == other):
            return place
    return None if len(before) == len(now) else min(len(before), len(now))


def _stale(before: Sequence[Any], now: Sequence[Any]) -> bool:
    """Whether an array in the facts was replaced, so that a step with these facts does not come again."""
    arrays = ((a, b) for a, b in zip(before, now) if hasattr(a, "dtype") and hasattr(a, "shape"))
    return len(before) == len(now) and any(a is not b for a, b in arrays)
