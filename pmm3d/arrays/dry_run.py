"""What a dry run writes down: what is done, in order, and how many bytes of what kind are held. No array has data.

Passes over memory have the names of operations, by which a machine's rates are kept; "NAME backward" is that of the
operation's rule. All passes of a named operation between two messages are one action: its rate holds for all of them,
and for what goes through the cache on the way, which is not counted.

    name                                        of                                  time on a grid with data (Ledger)
    relu gelu silu tanh sigmoid, backward       nn.functional                       elementwise
    dropout, dropout backward                   nn.functional, with the mask        elementwise
    dropout mask                                nn.functional: what is drawn        -
    layer_norm softmax log_softmax              nn.functional, .operations,         statistics + elementwise
                                                .statistics
    layer_norm softmax log_softmax backward     the same                            elementwise
    sum mean; sum backward, mean backward       nn.operations                       statistics; -
    columns, columns backward                   nn.operations                       -
    add subtract multiply divide; the last      nn.arithmetic                       elementwise
        three backward
    scale cast, backward                        nn.arithmetic                       -
    mse mae; backward                           nn.loss                             loss; -
    cross_entropy, cross_entropy backward       nn.loss, nn.statistics              statistics; loss
    accuracy r2                                 nn.loss                             -
    sgd adam adamw muon, and the name of others   nn.optimizer: weight, gradient,     update
        Optimizer, in lower case                state and remainder
    norm, clip                                  nn.optimizer: of all gradients      -
    bias                                        nn.dense: where O begins from it    -
    add, copy                                   gradients that meet, or are laid    -
                                                down (nn.gradients, nn.forming)
    copy                                        panels, packed messages, results    -
    elementwise                                 nn.in_chunks without a name         -
    add multiply exp sum fill cast take ...     arithmetic of arrays elsewhere, by  -
                                                the function's name

Sums and copies within a collective are a part of it. Those of rows, for biases and gains, are GEMMs of one row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import numpy as np

from ..layout import aligned, itemsize
from .action import Action

LEAST_PASS = 2**12
"""Bytes below which a pass that is none of a named operation takes no longer than Python beside it: it is left out."""
SPACE = 2**62
"""Bytes of addresses that the arrays of a dry run are given, none of them twice."""
FIRST_ADDRESS = 2**21
"""No array is at 0."""


class _Addresses:
    """All addresses there are, for numpy, which does not look at what is there."""

    __array_interface__ = {"version": 3, "shape": (SPACE,), "typestr": "|u1", "data": (FIRST_ADDRESS, False)}


class DryRun:
    """Of one rank of a grid without data.

    actions   in their order
    held      kind -> bytes of the arrays that somebody refers to. Kinds: "weights", "gradients", "state" (of an
              optimizer), "activations" (tensors, what rules keep, gradients that flow), "workspace" (of products and
              messages), "other"
    peak      the same, at the moment when most was held in all
    most      kind -> bytes, the most that this kind alone held at once

    Arrays that arithmetic makes on its way are not counted: elementwise operations work through small slices.

        >>> run = DryRun()
        >>> with run.holding("weights"):
        ...     weight = run.hold(100)
        >>> del weight
        >>> run.held, run.peak
        ({'weights': 0}, {'weights': 100})
    """

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._pass: Action | None
        self.held: dict[str, int] = {}
        self.peak: dict[str, int] = {}
        self.most: dict[str, int] = {}
        self.kind, self._named, self._pass = "other", "", None
        self._total = self._largest = self._used = 0
        self._addresses = np.asarray(_Addresses())

    def hold(self, nbytes: int, kind: str | None = None) -> Held:
        """Bytes that are held for as long as somebody refers to the result; of the present kind if left out."""
        return Held(self, kind or self.kind, nbytes)

    @contextmanager
    def holding(self, kind: str) -> Iterator[None]:
        """In this context new arrays are of that kind, unless whoever makes them says another."""
        outer, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = outer

    def elements(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """An array of new addresses, which must not be read: shape, strides, slices and overlaps are numpy's own."""
        size = itemsize(dtype)
        start, nbytes = self._used, prod(shape) * size
        self._used += aligned(nbytes)
        return self._addresses[start : start + nbytes].view(f"V{size}").reshape(shape)

    def multiplied(self, m: int, n: int, k: int, dtype: str, form: str = "nn") -> None:
        """Write a GEMM down, if there is anything to multiply."""
        if m * n * k:
            self.actions.append(Action("gemm", m, n, k, dtype, form=form))

    @contextmanager
    def passing(self, name: str) -> Iterator[None]:
        """All passes in this context are one action of that name."""
        outer = self.name_passes(name)
        try:
            yield
        finally:
            self.name_passes(*outer)

    def name_passes(self, name: str, action: Action | None = None) -> tuple[str, Action | None]:
        """From now on passes are of that name, and belong to that action, or to a new one; what was so before."""
        before = self._named, self._pass
        self._named, self._pass = name, action
        return before

    def passed(self, name: str, nbytes: int) -> None:
        """Write down that arrays of so many bytes were read and written, under the name in force, or under this one;
        passes under no name in force, one after the other of the same function, are one action."""
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

    def taken(self, kind: str, nbytes: int) -> None:
        now = self.held[kind] = self.held.get(kind, 0) + nbytes
        self._total += nbytes
        if now > self.most.get(kind, 0):
            self.most[kind] = now
        if self._total > self._largest:
            self._largest, self.peak = self._total, dict(self.held)

    def given_back(self, kind: str, nbytes: int) -> None:
        self.held[kind] -= nbytes
        self._total -= nbytes


class Held:
    """Bytes of a kind, counted while this lives."""

    __slots__ = ("_kind", "_nbytes", "_run")

    def __init__(self, run: DryRun, kind: str, nbytes: int) -> None:
        self._run, self._kind, self._nbytes = run, kind, nbytes
        run.taken(kind, nbytes)

    def end(self) -> None:
        """Count them no longer."""
        self._run.given_back(self._kind, self._nbytes)
        self._nbytes = 0

    __del__ = end
