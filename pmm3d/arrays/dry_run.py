"""The record of a dry run: the actions of a rank in order, and the bytes that the rank holds by kind. Arrays have no
data. docs/dry-runs.md lists the passes over memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..action import Action
from ..layout import aligned, itemsize

LEAST_PASS = 2**12
"""Bytes. A smaller unnamed pass is not recorded, because it takes less time than the Python code around it."""
SPACE = 2**62
"""Size in bytes of the address space for the arrays of a dry run. No address is used twice."""
FIRST_ADDRESS = 2**21
"""No array is at address 0."""


class _Addresses:
    """The whole address space as a numpy array. numpy does not read it."""

    __array_interface__ = {"version": 3, "shape": (SPACE,), "typestr": "|u1", "data": (FIRST_ADDRESS, False)}


class Passed(NamedTuple):
    """A pass in the table of a pipeline, such as "2F0".

    first, stop   its actions are DryRun.actions[first:stop]
    held          bytes of activations after it
    """

    name: str
    first: int
    stop: int
    held: int


class DryRun:
    """The record of one rank of a grid without data.

    Temporary arrays of arithmetic are not counted, because with data, elementwise operations process small slices.

    Attributes
    ----------
    actions
        Actions of the rank, in order.
    passes
        Passes of a pipeline's table, in order. Clear this list together with `actions`.
    held
        Bytes of the arrays that are alive, by kind: "weights", "gradients", "state" (of an optimizer), "activations"
        (tensors, arrays saved for backward, gradients that flow), "workspace" (of products and messages), "other".
    peak
        `held` at the time of the largest total.
    most
        Largest number of bytes of each kind at a time.
    trace
        Object whose method taken(kind, bytes) is called for each array, and given_back(its result, kind, bytes) when
        the array is freed, or None.

    Examples
    --------
    >>> run = DryRun()
    >>> with run.holding("weights"):
    ...     weight = run.hold(100)
    >>> del weight
    >>> run.held, run.peak
    ({'weights': 0}, {'weights': 100})
    """

    def __init__(self) -> None:
        self.actions, self.passes = list[Action](), list[Passed]()
        self.held, self.peak, self.most = dict[str, int](), dict[str, int](), dict[str, int]()
        self.kind, self._named = "other", ""
        self._pass: Action | None = None
        self.trace: Any = None
        self._total = self._largest = self._used = 0
        self._addresses = np.asarray(_Addresses())

    def hold(self, nbytes: int, kind: str | None = None) -> Held:
        """Count bytes until the returned object is deleted. Default: the kind of the innermost `holding`."""
        return Held(self, kind or self.kind, nbytes)

    @contextmanager
    def holding(self, kind: str) -> Iterator[None]:
        """As a context: new arrays are of this kind, unless the call of `hold` names another."""
        outer, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = outer

    def elements(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """Return an array of new addresses, which must not be read. numpy computes its strides, slices and overlaps."""
        size = itemsize(dtype)
        start, nbytes = self._used, prod(shape) * size
        self._used += aligned(nbytes)
        return self._addresses[start : start + nbytes].view(f"V{size}").reshape(shape)

    def multiplied(self, m: int, n: int, k: int, dtype: str, form: str = "nn") -> None:
        """Record a GEMM, unless a size is 0."""
        if m * n * k:
            self.actions.append(Action("gemm", m, n, k, dtype, form=form))

    @contextmanager
    def passing(self, name: str) -> Iterator[None]:
        """As a context: record all passes in it as one action of this name."""
        outer = self.name_passes(name)
        try:
            yield
        finally:
            self.name_passes(*outer)

    @contextmanager
    def acting(self, name: str) -> Iterator[None]:
        """As a context: record a pass in the table of a pipeline."""
        first = len(self.actions)
        yield
        self.passes.append(Passed(name, first, len(self.actions), self.held.get("activations", 0)))

    def name_passes(self, name: str, action: Action | None = None) -> tuple[str, Action | None]:
        """Set the name of later passes, and the action to which they are added (None: a new one). Return the previous
        two."""
        before = self._named, self._pass
        self._named, self._pass = name, action
        return before

    def passed(self, name: str, nbytes: int) -> None:
        """Record that `nbytes` bytes were read and written: in the open named pass, or else in a pass of this name.
        Consecutive passes of the same name are one action."""
        if self._named:
            if self._pass is not None:
                self._pass.nbytes += nbytes
            elif nbytes:
                self._pass = Action("pass", operation=self._named, nbytes=nbytes)
                self.actions.append(self._pass)
        elif nbytes >= LEAST_PASS:
            last = self.actions[-1] if self.actions else None
            if last is not None and last.what == "pass" and last.operation == name:
                last.nbytes += nbytes
            else:
                self.actions.append(Action("pass", operation=name, nbytes=nbytes))

    def taken(self, kind: str, nbytes: int) -> Any:
        """Count an array, and return what `trace` returns for it."""
        now = self.held[kind] = self.held.get(kind, 0) + nbytes
        self._total += nbytes
        if now > self.most.get(kind, 0):
            self.most[kind] = now
        if self._total > self._largest:
            self._largest, self.peak = self._total, dict(self.held)
        return None if self.trace is None else self.trace.taken(kind, nbytes)

    def given_back(self, kind: str, nbytes: int, traced: Any = None) -> None:
        self.held[kind] -= nbytes
        self._total -= nbytes
        if self.trace is not None:
            self.trace.given_back(traced, kind, nbytes)


class Held:
    """Bytes of a kind, which are counted until this object is deleted or `end` is called. traced: see
    `DryRun.trace`."""

    __slots__ = ("_nbytes", "_run", "kind", "traced")

    def __init__(self, run: DryRun, kind: str, nbytes: int) -> None:
        self._run, self.kind, self._nbytes = run, kind, nbytes
        self.traced = run.taken(kind, nbytes)

    def end(self) -> None:
        """Stop counting the bytes."""
        self._run.given_back(self.kind, self._nbytes, self.traced)
        self._nbytes = 0

    __del__ = end
