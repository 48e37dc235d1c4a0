"""A step as a program: the kernels, and the starts and waits of collectives, that a rank carries out in a step.

A `Recorder` notes them while the step runs as usual. The `Program` carries them out again on the same arrays, without
the Python code that decided on them.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Any, NamedTuple

from ..arrays import Arena, Array, library_of
from . import compressed_sum, point_to_point, strided_collectives
from .engine import Engine, Pending

if TYPE_CHECKING:
    from ..arrays import Workspace
    from .axis import Axis

LEAST_WORK = 2**21
"""Smallest number of operations of a kernel for which a helper thread is useful: about 100 us on a core."""
COLLECTIVES = {
    strided_collectives.all_gather_into: ("part", "out"),
    strided_collectives.reduce_scatter_into: ("array", "out"),
    strided_collectives.all_reduce_into: ("array", "out"),
    strided_collectives.sum_coalesced: ("arrays", "outs"),
    compressed_sum.sum_compressed: ("arrays", "outs"),
    strided_collectives.all_to_all_into: ("array", "out"),
    point_to_point.send: ("array", ""),
    point_to_point.receive: ("", "out"),
}
"""Collectives and messages whose arguments are arrays with fixed addresses -> names of the arguments that they read and
write. Without `outs`, `arrays` are summed in place."""


Action = Callable[..., Any]
Counted = dict[tuple[str, str, str], list[float]]
"""Key of the ledger -> calls, seconds, and seconds on a core."""


class Argument:
    """A number that may differ between the runs of a program. Instructions read its `value` when they run.

    >>> scale = Argument(2.0)
    >>> scale.value = 4.0
    >>> float(scale)
    4.0
    """

    __slots__ = ("value",)

    def __init__(self, value: float):
        self.value = value

    def __float__(self) -> float:
        return float(self.value)


class Kernel:
    """A function that reads and writes arrays.

    action   the function, bound to its arguments, or a function of the arrays of each call (`LinearProgram`)
    reads    arrays that it reads;   writes   arrays that it writes
    declared False: it is unknown which of its arrays it reads and which it writes, so all are in both lists
    what     operation in the ledger; "": the time is not counted, and the program calls the action itself
    work     approximate number of operations
    phase    phase of the ledger
    layer    name of the layer whose forward or backward pass computes it, or ""
    """

    __slots__ = ("_key", "action", "declared", "layer", "name", "phase", "reads", "what", "work", "writes")

    def __init__(
        self,
        action: Action,
        reads: Sequence[Array],
        writes: Sequence[Array],
        declared: bool,
        what: str,
        work: int,
        phase: str,
        name: str,
        layer: str = "",
    ):
        self.action, self.reads, self.writes, self.declared = action, reads, writes, declared
        self.what, self.work, self.phase, self.name, self.layer = what, work, phase, name, layer
        self._key = "", phase, what

    def run(self, engine: Engine, counted: Counted, *operands: Array) -> None:
        ledger = engine.ledger
        ledger._phase = self.phase
        begun, ran = perf_counter(), thread_time()
        helped = self.work >= LEAST_WORK and engine.computes()
        try:
            self.action(*operands)
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
        return self.name + f" of layer {self.layer}" * bool(self.layer) + f" ({self.phase})" * bool(self.phase)


class Start:
    """The start of a collective or message by begin().

    after     the starts of collectives that must be done first
    reads     arrays that are read until the wait;   writes   arrays that are written until the wait
    channel   (source, target, tag) of a message, as positions along the axis; None for a collective
    """

    __slots__ = ("after", "axis", "begin", "channel", "name", "pending", "phase", "reads", "writes")

    def __init__(
        self,
        axis: Axis,
        name: str,
        phase: str,
        begin: Callable[..., Pending],
        after: Sequence[Start],
        reads: Sequence[Array],
        writes: Sequence[Array],
        channel: tuple[int, int, int] | None = None,
    ):
        self.axis, self.name, self.phase, self.begin, self.after = axis, name, phase, begin, after
        self.reads, self.writes, self.channel = reads, writes, channel
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
        phase = self.start.phase
        return f"wait {self.start.name} along {self.start.axis.name}" + f" ({phase})" * bool(phase)


Instruction = Kernel | Start | Wait
Look = Callable[[Instruction], None]
"""Function that is called after each kernel and each wait, with its results in its arrays."""


class Section(NamedTuple):
    """Consecutive instructions, and the context in which they run, which is entered anew in each step, or None."""

    context: AbstractContextManager[Any] | None
    instructions: list[Instruction]


class Program:
    """The instructions of a step on fixed arrays. `run` carries them out. `check_program` checks them.

    arena   holds the work arrays
    taken   number of an instruction -> (address, bytes) of memory of the arena that new arrays got before it
    """

    def __init__(
        self, engine: Engine, sections: Sequence[Section], arena: Arena, taken: Mapping[int, Sequence[tuple[int, int]]]
    ):
        self.sections, self.runs = [each for each in sections if each.instructions], 0
        self._engine, self.arena, self.taken = engine, arena, taken

    @property
    def instructions(self) -> list[Instruction]:
        return [each for section in self.sections for each in section.instructions]

    def run(self, look: Look | None = None) -> None:
        """Carry out the step."""
        ledger, counted = self._engine.ledger, Counted()
        phase = ledger._phase
        try:
            for context, instructions in self.sections:
                if context is None:
                    self._carry_out(instructions, counted, look)
                else:
                    with context:
                        self._carry_out(instructions, counted, look)
        finally:
            ledger._phase = phase
        self.runs += 1

    def _carry_out(self, instructions: Sequence[Instruction], counted: Counted, look: Look | None) -> None:
        engine, ledger = self._engine, self._engine.ledger
        for each in instructions:
            if type(each) is Kernel and not each.what:
                ledger._phase = each.phase
                each.action()
            else:
                each.run(engine, counted)
            if look is not None and type(each) is not Start:
                look(each)
        if counted:
            ledger.add_computed(counted)
            counted.clear()

    def __str__(self) -> str:
        return "\n".join(f"{number:4} {each}" for number, each in enumerate(self.instructions))


class Recorder:
    """Notes the instructions of a step while it runs.

    problem   the first reason why the step cannot be replayed, or ""
    layer     name of the layer whose pass runs, or ""
    names     names of layers, by the objects of which `in_layer` is called
    look      is called with each kernel and wait that was noted, or None
    """

    def __init__(
        self,
        engine: Engine,
        workspace: Workspace,
        arena: Arena,
        names: Mapping[Any, str] = {},
        look: Look | None = None,
    ):
        self.problem, self.layer, self.names, self.look = "", "", names, look
        self._engine, self._workspace, self._arena = engine, workspace, arena
        self._sections = [Section(None, [])]
        self._starts: weakref.WeakKeyDictionary[Pending, Start] = weakref.WeakKeyDictionary()
        self._open: dict[Start, Sequence[Any]] = {}
        """Collectives that nobody has awaited, and their arrays. A replay may still send from these, so later arrays of
        the recorded step must not use their memory."""
        self._buffers, self._addresses = list[Array](), list[int]()
        self._fresh = list[tuple[int, int]]()
        """Memory of the arena that arrays got after the last instruction."""
        self._count, self._taken = 0, dict[int, list[tuple[int, int]]]()

    def refuse(self, problem: str) -> None:
        """Note that the step does something that is not recorded."""
        self.problem = self.problem or problem

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context in which the engine reports to this recorder, and work arrays come from memory of their own."""
        self._workspace.clear()
        self._engine.recorder = self
        try:
            with self._workspace.apart(self._arena), self._arena.noting() as self._fresh:
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

    @contextmanager
    def in_layer(self, layer: Any) -> Iterator[None]:
        """Context of the forward pass of a layer. Kernels of an inner layer have its name. A layer that has no name in
        `names` belongs to the outer one."""
        before, self.layer = self.layer, self.names.get(layer, self.layer)
        try:
            yield
        finally:
            self.layer = before

    def kernel(
        self,
        what: str,
        work: int,
        bind: Callable[..., Action],
        arrays: Sequence[Any],
        name: str = "",
        writes: Sequence[Any] | None = None,
        updates: Sequence[Any] = (),
    ) -> None:
        """Note a call that ran. bind(*arrays) returns the function that repeats it on these arrays.

        writes    of the arrays, those that it writes and does not read; None: unknown
        updates   of the arrays, those that it reads and writes. It reads the others
        """
        own, phase = [self._alias(each) for each in arrays], self._engine.ledger._phase
        declared = writes is not None or bool(updates)
        of = [(each, _among(given, writes or ()), _among(given, updates)) for given, each in zip(arrays, own)]
        of = [(each, *roles) for each, *roles in of if _is_array(each)]
        reads = [each for each, writes_only, _ in of if not writes_only]
        written = [each for each, *roles in of if any(roles) or not declared]
        self._add(Kernel(bind(*own), reads, written, declared, what, work, phase, name or what, self.layer))
        if self.look is not None:
            self.look(self._sections[-1].instructions[-1])

    def started(
        self,
        axis: Axis,
        pending: Pending,
        steps: Callable[..., Any],
        bind: Callable[..., Callable[..., Pending]],
        after: Sequence[Any] = (),
        channel: tuple[int, int, int] | None = None,
    ) -> None:
        """Note the start of a collective or message. bind(steps) returns the function that starts it. channel: (source,
        target, tag) of a message."""
        name = pending.record.key.operation
        if not isinstance(steps, partial) or steps.func not in COLLECTIVES or steps.keywords.get("work"):
            self.refuse(f"{name} along {axis.name} is not recorded")
            return
        keywords = {key: self._aliases(value) for key, value in steps.keywords.items()}
        earlier = [start for each in after for start in self._earlier(each)]
        begin = bind(partial(steps.func, **keywords))
        start = Start(axis, name, pending.record.key.phase, begin, earlier, *_used(steps.func, keywords), channel)
        self._starts[pending], self._open[start] = start, list(steps.keywords.values())
        self._add(start)

    def waited(self, pending: Pending) -> None:
        """Note a wait for a collective, which has ended."""
        start = self._starts.get(pending)
        if start is not None and self._open.pop(start, None) is not None:
            self._add(Wait(start))
            if self.look is not None:
                self.look(self._sections[-1].instructions[-1])

    def program(self) -> Program:
        """The recorded program."""
        return Program(self._engine, self._sections, self._arena, self._taken)

    def _add(self, instruction: Instruction) -> None:
        self._sections[-1].instructions.append(instruction)
        if self._fresh:
            self._taken[self._count] = [*self._fresh]
            self._fresh.clear()
        self._count += 1

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
        if not _is_array(array):
            return array
        library = library_of(array)
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


def call(
    engine: Engine,
    function: Callable[..., Any],
    *arrays: Any,
    writes: Sequence[Any] | None = None,
    updates: Sequence[Any] = (),
) -> None:
    """Call function(*arrays) as one instruction. It writes its results to these arrays. It may send messages: they are
    a part of the instruction.

    writes, updates   for the check of a program: as in `Recorder.kernel`
    """
    recorder = engine.recorder
    if recorder is None:
        function(*arrays)
        return
    with recorder.paused():
        function(*arrays)
    name = getattr(getattr(function, "func", function), "__name__", "call")
    recorder.kernel("", 0, partial(partial, function), arrays, name, writes, updates)


def assign(engine: Engine, out: Array, value: Any) -> None:
    """Set the elements of an array to those of another array, to a number, or to an argument of the program."""
    out[...] = value.value if isinstance(value, Argument) else value
    if engine.recorder is not None:
        engine.recorder.kernel("", 0, _assigning, (out, value), "assign", [out])


def _assigning(out: Array, value: Any) -> Action:
    if isinstance(value, Argument):
        return partial(_assign_argument, out, value)
    return partial(out.__setitem__, Ellipsis, value)


def _assign_argument(out: Array, value: Argument) -> None:
    out[...] = value.value


def _address(flat: Array) -> int:
    return library_of(flat).address(flat)


def _elements(array: Array) -> int:
    count = 1
    for extent in array.shape:
        count *= int(extent)
    return count


def _is_array(value: Any) -> bool:
    """Whether a value is an array with elements."""
    return hasattr(value, "dtype") and hasattr(value, "shape") and 0 not in value.shape


def _among(value: Any, others: Sequence[Any]) -> bool:
    return any(value is each for each in others)


def _used(function: Callable[..., Any], keywords: Mapping[str, Any]) -> tuple[list[Array], list[Array]]:
    """Return the arrays that a collective or message reads, and those that it writes."""
    given, out = ([*_arrays(keywords.get(name))] for name in COLLECTIVES[function])
    if COLLECTIVES[function] == ("arrays", "outs") and keywords.get("outs") is None:
        return given, given
    reads, writes = [*given], [*out]
    if keywords.get("beta"):
        reads += out
    adds = function is strided_collectives.all_reduce_into and out
    if adds and (keywords.get("beta") or not keywords["library"].is_contiguous(out[0])):
        writes += given  # the sum is first written there
    return reads, writes


def _arrays(value: Any) -> Iterator[Array]:
    for each in value if isinstance(value, (list, tuple)) else [value]:
        if _is_array(each):
            yield each
