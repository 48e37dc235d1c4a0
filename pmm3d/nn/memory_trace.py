"""The memory of a step over time: each array with its kind, its bytes, its operation and its layer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from ..arrays import library_of
from ..arrays.workspace import SMALL_BYTES
from ..layout import is_folded, itemsize
from ..text import in_bytes
from .module import Module
from .optimizer_state import note_memory
from .recorded_steps import names_of
from .tape import Tape, propagate

if TYPE_CHECKING:
    from ..comm import Grid

GATHERED = "gathered weights"
KINDS = "weights", "experts", "gradients", "state", GATHERED, "activations", "work", "messages"
"""Kinds of arrays, in the order of a picture from below. Other kinds follow."""
FIXED = "weights", "gradients", "state"
"""Kinds of arrays that are not in the workspace."""
HERE = str(Path(__file__).resolve().parents[1])
HELPERS = tuple(f"{HERE}/{name}" for name in ("arrays/", "comm/", "nn/compute.py", "nn/elementwise.py", "nn/tape.py"))
"""Files whose functions ask for arrays on behalf of an operation."""
OUTSIDE = tuple(f"{HERE}/nn/{name}" for name in ("training/", "pipeline/executor.py", "recorded_"))
"""Files whose functions call operations and layers."""
EARLIER, STAGES = "before the step", "between stages"
POINTS = 75
"""Largest number of times in a picture. Of several changes at about the same time, that with the largest total is
drawn."""
LARGEST = 8
"""Number of arrays in the text of a trace."""


class TracedArray:
    """An array of a step.

    what    operation that asked for it, or the name by which it is saved for the backward pass, such as "linear.input"
    layer   name of the layer, or ""
    """

    __slots__ = ("kind", "layer", "nbytes", "what")

    def __init__(self, kind: str, nbytes: int, what: str, layer: str = ""):
        self.kind, self.nbytes, self.what, self.layer = kind, nbytes, what, layer


class Change(NamedTuple):
    """An array that was made (nbytes > 0) or freed (nbytes < 0). at: the time."""

    at: float
    kind: str
    nbytes: int
    array: TracedArray


class Peak(NamedTuple):
    """The moment of the largest total.

    held      bytes by kind
    made      the array that was made last
    arrays    all arrays that are alive, the largest first
    """

    held: dict[str, int]
    made: TracedArray
    arrays: list[TracedArray]


class MemoryTrace:
    """The memory of this rank in a step, by kind. `trace_memory` makes it.

    Attributes
    ----------
    changes : list of Change
        In their order. In a dry run, `at` is the number of earlier actions in `DryRun.actions`; otherwise it is in
        seconds from the start of the trace. The first changes are the arrays from before the trace.
    """

    def __init__(self, changes: Sequence[Change] = ()):
        self.changes = list(changes)

    @property
    def kinds(self) -> list[str]:
        """Kinds of the arrays, in the order of `KINDS`."""
        found = dict.fromkeys(each.kind for each in self.changes if each.nbytes)
        return [kind for kind in KINDS if kind in found] + [kind for kind in found if kind not in KINDS]

    def series(self) -> Iterator[tuple[float, dict[str, int]]]:
        """Yield (time, bytes by kind) after the changes of each time, and at the largest total in between."""
        held = dict.fromkeys(self.kinds, 0)
        for at, changes in groupby(self.changes, lambda each: each.at):
            most = dict(held)
            for each in changes:
                held[each.kind] += each.nbytes
                if sum(held.values()) >= sum(most.values()):
                    most = dict(held)
            if sum(most.values()) > sum(held.values()):
                yield at, most
            yield at, dict(held)

    def document(self, unit: str, time_of: Callable[[float], float] = float) -> dict[str, Any]:
        """Return the series for JSON and for a picture: times, bytes by kind, and the peak in words.

        Parameters
        ----------
        unit : str
            Label of the times.
        time_of : callable
            `Change.at` -> time in the result. Default: the same number.
        """
        rows = [(time_of(at), held) for at, held in self.series()]
        part = -(-len(rows) // POINTS) or 1
        rows = [
            max(rows[start : start + part], key=lambda row: sum(row[1].values())) for start in range(0, len(rows), part)
        ]
        return {
            "at": [at for at, _ in rows],
            "held": {kind: [held[kind] for _, held in rows] for kind in self.kinds},
            "peak": self.most,
            "text": str(self),
            "unit": unit,
        }

    @property
    def peak(self) -> Peak:
        """The moment of the largest total, the first one if there are several."""
        held, most, total, best, made = dict.fromkeys((each.kind for each in self.changes), 0), -1, 0, 0, -1
        for number, each in enumerate(self.changes):
            total += each.nbytes
            if total > most:
                most, best = total, number
        alive = dict[TracedArray, int]()
        for number, each in enumerate(self.changes[: best + 1]):
            held[each.kind] += each.nbytes
            alive[each.array] = alive.get(each.array, 0) + each.nbytes
            made = number if each.nbytes > 0 else made
        held_now = [TracedArray(each.kind, nbytes, each.what, each.layer) for each, nbytes in alive.items() if nbytes]
        arrays = sorted(held_now, key=lambda each: -each.nbytes)
        array = self.changes[made].array if made >= 0 else TracedArray("", 0, "")
        return Peak({kind: held[kind] for kind in self.kinds}, array, arrays)

    @property
    def most(self) -> int:
        """Bytes of all arrays at the peak."""
        return sum(self.peak.held.values())

    def __str__(self) -> str:
        """The peak in words: bytes by kind, operation, and the largest arrays."""
        peak = self.peak
        lines = [f"Peak {in_bytes(sum(peak.held.values()))}, when {_where(peak.made)} got {in_bytes(peak.made.nbytes)}"]
        lines += [f"  {in_bytes(nbytes):>10}  {kind}" for kind, nbytes in peak.held.items() if nbytes]
        passing = [each for each in peak.arrays if each.kind not in (*FIXED, "experts")][:LARGEST]
        lines += ["Largest arrays at the peak, without weights, gradients and states:"] if passing else []
        return "\n".join(lines + [f"  {in_bytes(each.nbytes):>10}  {each.kind}: {_where(each)}" for each in passing])


def _where(array: TracedArray) -> str:
    return array.what + f" of layer {array.layer}" * bool(array.layer)


@contextmanager
def trace_memory(network: Module) -> Iterator[MemoryTrace]:
    """Record the memory of this rank as a context, with data or in a dry run.

    Kinds are "weights" ("experts" for those of experts), "gradients", "state" of optimizers, averages and master
    weights, "gathered weights", "activations" (tensors, saved arrays and gradients that flow), "work" of products and
    kernels, and "messages". Bytes are those of the arrays, not of the buffers, which the workspace reuses. Arrays of
    less than 4 KiB, batches, and arrays of your own are not counted. With data, neither are arrays of the step in
    device memory, which the array library manages: see a dry run of them.

    A step in the context is an ordinary one: it is not replayed. Its results have the same bits. Trace a step after the
    first one, which makes gradients and states. A replayed step keeps the arrays of its program, which are in
    `grid.workspace.allocated`.

    Parameters
    ----------
    network : Module
        The network that is trained. Its layers give the names.

    Yields
    ------
    MemoryTrace
        The record, which is complete after the context.

    Examples
    --------
    >>> from pmm3d import Grid, nn
    >>> from pmm3d.layout import batch_layout
    >>> from pmm3d.nn.dry import Facts
    >>> with Grid.dry((1, 1, 1)) as grid:
    ...     net, x = nn.MLP(grid, [64, 256, 64]), Facts((512, 64), batch_layout("y"), "float32", "numpy").on(grid)
    ...     with nn.trace_memory(net) as trace:
    ...         nn.mse(net(x), x).backward()
    >>> trace.peak.held["weights"], trace.peak.made.kind
    (132352, 'activations')
    """
    grid, tape, names = network.grid, Tape.of(network.grid), names_of(network)
    run, pack = grid.dry_run, tape.pack
    trace = MemoryTrace()
    watch = _DryWatch(trace, grid, names) if run is not None else _Watch(trace, grid, names)
    arrays = run if run is not None else grid.workspace
    earlier = {"activations": grid.workspace.in_use()} if run is None else _held_by(run, grid)
    kept = sum(watch.knows(each.block) for each in tape.parallel.weights.used_since(0) if each.block is not None)
    earlier |= {GATHERED: kept, "activations": earlier["activations"] - kept}
    outer, arrays.trace = arrays.trace, watch

    def named(name: str, array: Any) -> Any:
        watch.saved(name, array)
        return pack(name, array)

    try:
        with tape.set(pack=named):
            yield trace
    finally:
        grid.workspace.in_use()  # notes the arrays that were deleted
        arrays.trace = outer
        if run is None:
            earlier |= _fixed(network)
        experts = sum(
            each.box.size * itemsize(each.dtype)
            for each in network.parameters()
            if any(map(is_folded, each.layout.rows))
        )
        if experts:
            earlier |= {"weights": earlier["weights"] - experts, "experts": experts}
        for kind, nbytes in earlier.items():
            watch.earlier(kind).nbytes = nbytes
        before = [Change(0.0, each.kind, each.nbytes, each) for each in watch.before.values() if each.nbytes]
        trace.changes[:0] = before


def _held_by(run: Any, grid: Grid) -> dict[str, int]:
    """Bytes in a dry run before a trace. Arrays of the host in the workspace are counted as with data."""
    held = {kind: nbytes for kind, nbytes in run.held.items() if kind not in ("other", "workspace")}
    return {**held, "activations": grid.workspace.in_use() or held.get("activations", 0)}


def _fixed(network: Module) -> dict[str, int]:
    """Bytes of weights, gradients and states with data."""
    grid = network.grid
    if note_memory in grid.attached:
        note_memory(grid)
        return {kind: grid.ledger.memory[kind] for kind in FIXED}
    weights = network.parameters()
    gradients = [each.grad_buffer.array for each in weights if each.grad_buffer.array is not None]
    return {"weights": sum(each.shard.nbytes for each in weights), "gradients": sum(each.nbytes for each in gradients)}


class _Watch:
    """Notes the arrays of a workspace, by their addresses."""

    def __init__(self, trace: MemoryTrace, grid: Grid, names: Mapping[Any, str]):
        self._trace, self._grid, self._names = trace, grid, names
        self._alive, self._began = dict[int, TracedArray](), perf_counter()
        self.before = dict[str, TracedArray]()
        """Kind -> all arrays from before the trace."""

    def earlier(self, kind: str) -> TracedArray:
        return self.before.setdefault(kind, TracedArray(kind, 0, EARLIER))

    def knows(self, block: Any) -> int:
        """Note a gathered weight from before the trace. Return its bytes, 0 if it is too small to be counted."""
        if block.nbytes < SMALL_BYTES:
            return 0
        self._alive[library_of(block).address(block)] = self.earlier(GATHERED)
        return int(block.nbytes)

    def lent(self, address: int, nbytes: int, lends: bool) -> None:
        """Note an array of `Workspace.array` (lends), or of `take`."""
        self._alive[address] = self._made("activations" if lends else "work", nbytes)

    def returned(self, address: int, lent: int) -> None:
        """Note that a buffer is free. lent: bytes of the array, 0 if it is of `take`."""
        array = self._alive.pop(address, None)
        if array is None and lent:
            array = self.earlier("activations")
        if array is not None:
            self._freed(array, lent or array.nbytes)

    def saved(self, name: str, array: Any) -> None:
        """Name the array that an operation saves."""
        address = library_of(array).address(array)
        for start, each in self._alive.items():
            if start <= address < start + each.nbytes:
                each.what = name

    def _now(self) -> float:
        return perf_counter() - self._began

    def _made(self, kind: str, nbytes: int) -> TracedArray:
        array = _named(kind, nbytes, sys._getframe(2), self._names, self._grid.ledger._phase)
        self._trace.changes.append(Change(self._now(), array.kind, nbytes, array))
        return array

    def _freed(self, array: TracedArray, nbytes: int) -> None:
        self._trace.changes.append(Change(self._now(), array.kind, -nbytes, array))


class _DryWatch(_Watch):
    """Notes the arrays of a dry run."""

    def _now(self) -> float:
        return float(len(self._grid.dry_run.actions))  # type: ignore[union-attr]

    def taken(self, kind: str, nbytes: int) -> TracedArray | None:
        if kind == "other" or (kind == "activations" and nbytes < SMALL_BYTES):
            return None
        return self._made("work" if kind == "workspace" else kind, nbytes)

    def given_back(self, array: TracedArray | None, kind: str, nbytes: int) -> None:
        if array is None and kind != "other" and nbytes >= (SMALL_BYTES if kind == "activations" else 1):
            array = self.earlier("work" if kind == "workspace" else kind)
        if array is not None and nbytes:
            self._freed(array, nbytes)

    def knows(self, block: Any) -> int:
        if block.nbytes < SMALL_BYTES or self._held(block) is None:
            return 0
        self._held(block).traced = self.earlier(GATHERED)
        return int(block.nbytes)

    def saved(self, name: str, array: Any) -> None:
        entry = getattr(self._held(array), "traced", None)
        if entry is not None:
            entry.what = name

    @staticmethod
    def _held(array: Any) -> Any:
        """The Held of a dry array."""
        held = getattr(array, "held", None)
        return held[1] if isinstance(held, tuple) else held


def _named(kind: str, nbytes: int, frame: FrameType | None, names: Mapping[Any, str], phase: str) -> TracedArray:
    """Return the array with the operation and the layer that asked for it: functions on the stack."""
    what, layer, backward, first, public, gathers = "", "", False, "", False, False
    while frame is not None:
        code, path = frame.f_code, frame.f_code.co_filename
        if code is propagate.__code__:
            backward = True
            break
        if code is Module.__call__.__code__:
            layer = names.get(frame.f_locals["self"], "")
            if layer:
                break
        elif path.startswith(HERE) and not path.startswith(HELPERS[0]):
            first, gathers = first or path, gathers or path.endswith("nn/gathered.py")
            if path.startswith(OUTSIDE):
                what = what or STAGES * path.endswith("pipeline/executor.py")
                break
            own = code.co_qualname.partition(".<locals>")[0]
            if not path.startswith(HELPERS) and code.co_name not in ("forward", "<lambda>"):
                what, public = (
                    (own, True) if not own.startswith("_") and "." not in own else (what if public else own, public)
                )
        frame = frame.f_back
    if kind == "work" and first.startswith(HELPERS[1]):
        kind = "messages"
    if gathers and kind in ("activations", "work"):
        kind = GATHERED
    what = (what.replace("._", ".").lstrip("_") + " backward" * backward) if what else phase
    return TracedArray(kind, nbytes, phase or what if kind in ("messages", GATHERED) else what, layer)
