"""A step as a program: the kernels, and the starts and waits of collectives, that a rank carries out in a step.

A `Recorder` notes them while the step runs as usual. The `Program` carries them out again on the same arrays, without
the Python code that decided on them.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Any, NamedTuple

from ..arrays import Arena, Array, library_of
from . import point_to_point, strided_collectives
from .engine import Engine, Pending

if TYPE_CHECKING:
    from ..arrays import Workspace
    from .axis import Axis

LEAST_WORK = 2**21
"""Smallest number of operations of a kernel for which a helper thread is useful: about 100 us on a core."""
COLLECTIVES = {
    strided_collectives.all_gather_into,
    strided_collectives.reduce_scatter_into,
    strided_collectives.all_reduce_into,
    strided_collectives.sum_coalesced,
    strided_collectives.all_to_all_into,
    point_to_point.send,
    point_to_point.receive,
}
"""Collectives and messages whose arguments are arrays with fixed addresses."""


Action = Callable[[], Any]
Counted = dict[tuple[str, str, str], list[float]]
"""Key of the ledger -> calls, seconds, and seconds on a core."""


class Kernel:
    """A function that reads and writes arrays.

    action   the function, bound to its arguments
    arrays   those that it reads and writes
    what     operation in the ledger; "": the time is not counted, and the program calls the action itself
    work     approximate number of operations
    phase    phase of the ledger
    """

    __slots__ = ("_key", "action", "arrays", "name", "phase", "what", "work")

    def __init__(self, action: Action, arrays: Sequence[Any], what: str, work: int, phase: str, name: str):
        self.action, self.arrays, self.what, self.work, self.phase, self.name = action, arrays, what, work, phase, name
        self._key = "", phase, what

    def run(self, engine: Engine, counted: Counted) -> None:
        ledger = engine.ledger
        ledger._phase = self.phase
        begun, ran = perf_counter(), thread_time()
        helped = self.work >= LEAST_WORK and engine.computes()
        try:
            self.action()
        finally:
            if helped:
                engine.computed()
        if ledger.trace:
            ledger.computed(self.what, (begun, ran))
            return
        if (entry := counted.get(self._key)) is None:
            entry = counted[self._key] = [0, 0.0, 0.0]
        entry[0] += 1
        entry[1] += perf_counter() - begun
        entry[2] += thread_time() - ran

    def __str__(self) -> str:
        return self.name + f" ({self.phase})" * bool(self.phase)


class Start:
    """The start of a collective or message by begin(). after: the starts of collectives that must be done first."""

    __slots__ = ("after", "axis", "begin", "name", "pending", "phase")

    def __init__(self, axis: Axis, name: str, phase: str, begin: Callable[..., Pending], after: Sequence[Start]):
        self.axis, self.name, self.phase, self.begin, self.after = axis, name, phase, begin, after
        self.pending: Pending | None = None

    def run(self, engine: Engine, counted: Counted) -> None:
        engine.ledger._phase = self.phase
        if self.after:
            after = [each.pending for each in self.after if each.pending is not None]
            self.pending = self.begin(after=after)
        else:
            self.pending = self.begin()

    def __str__(self) -> str:
        return f"start {self.name} along {self.axis.name}" + f" ({self.phase})" * bool(self.phase)


class Wait:
    """The wait for a collective."""

    __slots__ = ("start",)

    def __init__(self, start: Start):
        self.start = start

    def run(self, engine: Engine, counted: Counted) -> None:
        pending, self.start.pending = self.start.pending, None
        if pending is not None:
            pending.wait()

    def __str__(self) -> str:
        return f"wait {self.start.name} along {self.start.axis.name}"


Instruction = Kernel | Start | Wait


class Section(NamedTuple):
    """Consecutive instructions, and the context in which they run, which is entered anew in each step, or None."""

    context: AbstractContextManager[Any] | None
    instructions: list[Instruction]


class Program:
    """The instructions of a step on fixed arrays. `run` carries them out.

    arena   holds the work arrays
    """

    def __init__(self, engine: Engine, sections: Sequence[Section], arena: Arena):
        self.sections, self.runs = [each for each in sections if each.instructions], 0
        self._engine, self.arena = engine, arena

    @property
    def instructions(self) -> list[Instruction]:
        return [each for section in self.sections for each in section.instructions]

    def run(self) -> None:
        """Carry out the step."""
        ledger, counted = self._engine.ledger, Counted()
        phase = ledger._phase
        try:
            for context, instructions in self.sections:
                if context is None:
                    self._carry_out(instructions, counted)
                else:
                    with context:
                        self._carry_out(instructions, counted)
        finally:
            ledger._phase = phase
        self.runs += 1

    def _carry_out(self, instructions: Sequence[Instruction], counted: Counted) -> None:
        engine, ledger = self._engine, self._engine.ledger
        for each in instructions:
            if type(each) is Kernel and not each.what:
                ledger._phase = each.phase
                each.action()
            else:
                each.run(engine, counted)
        if counted:
            ledger.add_computed(counted)
            counted.clear()

    def __str__(self) -> str:
        return "\n".join(f"{number:4} {each}" for number, each in enumerate(self.instructions))


class Recorder:
    """Notes the instructions of a step while it runs.

    problem   the first reason why the step cannot be replayed, or ""
    """

    def __init__(self, engine: Engine, workspace: Workspace, arena: Arena):
        self.problem = ""
        self._engine, self._workspace, self._arena = engine, workspace, arena
        self._sections = [Section(None, [])]
        self._starts: weakref.WeakKeyDictionary[Pending, Start] = weakref.WeakKeyDictionary()
        self._open: dict[Start, Sequence[Any]] = {}
        """Collectives that nobody has awaited, and their arrays. A replay may still send from these, so later arrays of
        the recorded step must not use their memory."""
        self._buffers, self._addresses = list[Array](), list[int]()

    def refuse(self, problem: str) -> None:
        """Note that the step does something that is not recorded."""
        self.problem = self.problem or problem

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context in which the engine reports to this recorder, and work arrays come from memory of their own."""
        self._workspace.clear()
        self._engine.recorder = self
        try:
            with self._workspace.apart(self._arena):
                yield
                for start in [*self._open]:
                    self._add(Wait(start))
        finally:
            self._engine.recorder = None
            self._open.clear()

    @contextmanager
    def section(self, context: AbstractContextManager[Any]) -> Iterator[None]:
        """Context whose instructions run in another context, which can be entered again."""
        self._sections.append(Section(context, []))
        try:
            yield
        finally:
            self._sections.append(Section(None, []))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which nothing is recorded, because one instruction contains all of it."""
        self._engine.recorder = None
        try:
            yield
        finally:
            self._engine.recorder = self

    def kernel(self, what: str, work: int, bind: Callable[..., Action], arrays: Sequence[Any], name: str = "") -> None:
        """Note a call that ran. bind(*arrays) returns the function that repeats it on these arrays."""
        own = [self._alias(each) for each in arrays]
        self._add(Kernel(bind(*own), own, what, work, self._engine.ledger._phase, name or what))

    def started(
        self,
        axis: Axis,
        pending: Pending,
        steps: Callable[..., Any],
        bind: Callable[..., Callable[..., Pending]],
        after: Sequence[Any] = (),
    ) -> None:
        """Note the start of a collective or message. bind(steps) returns the function that starts it."""
        name = pending.record.key.operation
        if not isinstance(steps, partial) or steps.func not in COLLECTIVES or steps.keywords.get("work"):
            self.refuse(f"{name} along {axis.name} is not recorded")
            return
        keywords = {key: self._aliases(value) for key, value in steps.keywords.items()}
        earlier = [start for each in after for start in self._earlier(each)]
        start = Start(axis, name, pending.record.key.phase, bind(partial(steps.func, **keywords)), earlier)
        self._starts[pending], self._open[start] = start, list(steps.keywords.values())
        self._add(start)

    def waited(self, pending: Pending) -> None:
        """Note a wait for a collective."""
        start = self._starts.get(pending)
        if start is not None and self._open.pop(start, None) is not None:
            self._add(Wait(start))

    def program(self) -> Program:
        """The recorded program."""
        return Program(self._engine, self._sections, self._arena)

    def _add(self, instruction: Instruction) -> None:
        self._sections[-1].instructions.append(instruction)

    def _earlier(self, awaited: Any) -> list[Start]:
        """Starts of this step that a collective waits for. Collectives of earlier steps are done."""
        if isinstance(awaited, Pending):
            start = self._starts.get(awaited)
            return [] if start is None else [start]
        inner = getattr(awaited, "awaited", None)
        if inner is None:
            self.refuse(f"a {type(awaited).__name__} is not recorded")
        return [start for each in inner or () for start in self._earlier(each)]

    def _aliases(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)) and value and hasattr(value[0], "dtype"):
            return [self._alias(each) for each in value]
        return self._alias(value)

    def _alias(self, array: Any) -> Any:
        """Return the same elements without the claim on their memory, which later arrays of the step may use."""
        if not hasattr(array, "dtype") or not hasattr(array, "shape") or 0 in array.shape:
            return array
        library = library_of(array)
        if not library.on_host:
            return array
        if len(self._addresses) != len(self._arena.buffers):
            self._buffers = sorted(self._arena.buffers, key=_address)
            self._addresses = [_address(each) for each in self._buffers]
        address = library.address(array)
        place = bisect_right(self._addresses, address) - 1
        if place < 0 or address >= self._addresses[place] + self._buffers[place].nbytes:
            return array
        flat, dtype = self._buffers[place], library.dtype(array)
        size = array.nbytes // max(1, _elements(array))
        whole = library.view(flat[: flat.shape[0] // size * size], (flat.shape[0] // size,), dtype)
        return library.as_strided(
            whole, tuple(array.shape), library.strides(array), (address - self._addresses[place]) // size
        )


def call(engine: Engine, function: Callable[..., Any], *arrays: Any) -> None:
    """Call function(*arrays) as one instruction. It writes its results to these arrays. It may send messages: they are
    a part of the instruction."""
    recorder = engine.recorder
    if recorder is None:
        function(*arrays)
        return
    with recorder.paused():
        function(*arrays)
    name = getattr(getattr(function, "func", function), "__name__", "call")
    recorder.kernel("", 0, partial(partial, function), arrays, name)


def assign(engine: Engine, out: Array, value: Any) -> None:
    """Set the elements of an array to those of another array, or to a number."""
    out[...] = value
    if engine.recorder is not None:
        engine.recorder.kernel("", 0, _assigning, (out, value), "assign")


def _assigning(out: Array, value: Any) -> Action:
    return partial(out.__setitem__, Ellipsis, value)


def _address(flat: Array) -> int:
    return int(flat.__array_interface__["data"][0])


def _elements(array: Array) -> int:
    count = 1
    for extent in array.shape:
        count *= int(extent)
    return count
