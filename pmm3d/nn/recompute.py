"""Recomputation of parts of a network in the backward pass, and its policies for networks of blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array
from ..comm import call
from ..errors import Pmm3dError
from ..layout import Layout
from ..text import bytes_in
from .compute import override
from .module import Module
from .parameter import Parameter
from .tape import Edge, Tape, outside, propagate
from .tensor import Tensor, results_of

POLICIES = ("none", "selective", "full")
"""Names for an argument `recompute`."""
Mode = tuple[dict[str, int], dict[Module, bool]]
"""`Module.random_state` of a network, and whether each module trains."""


class Recomputed(NamedTuple):
    """Parts of a network of blocks that are recomputed: every k-th block (0: none), the attention of each block, or the
    parts that a `Budget` of bytes chooses.

    >>> [index for index in range(6) if Recomputed.named(2).includes(index)]
    [1, 3, 5]
    """

    every: int
    attention: bool
    budget: int | None = None

    @classmethod
    def named(cls, recompute: str | int) -> Recomputed:
        """Policy of an argument `recompute`.

        "none" or False; "full" or True: each block keeps only its input (Chen et al. 2016); k: every k-th block;
        "selective": attention keeps only queries, keys and values (Korthikanti et al. 2022); "2 GiB": a budget. Raises
        Pmm3dError.
        """
        recompute = recompute.item() if isinstance(recompute, np.generic) else recompute
        if isinstance(recompute, bool) or (isinstance(recompute, int) and recompute > 0):
            return cls(int(recompute), False)
        if isinstance(recompute, str) and (budget := bytes_in(recompute)) is not None:
            return cls(0, False, budget)
        if recompute not in POLICIES:
            raise Pmm3dError(
                'recompute is "none", "selective" (attention alone), "full", a number k for every k-th '
                f'block, or bytes with a unit, such as "2 GiB"; got {recompute!r}'
            )
        return cls(int(recompute == "full"), recompute == "selective")

    def includes(self, index: int) -> bool:
        """Whether the block with this index is recomputed."""
        return self.every > 0 and (index + 1) % self.every == 0

    def block(self, index: int, block: Module) -> Module:
        """Return the block with this index, in a `Recompute` if it is recomputed."""
        return Recompute(block) if self.includes(index) else block


class Recompute(Module):
    """Part of a network that keeps its inputs only, and is recomputed in the backward pass.

    Parameters
    ----------
    module : Module
        The part. Names of its parameters do not change.

    Raises
    ------
    Pmm3dError
        On every rank, in a forward pass: if the part contains a network with a number of bytes as `recompute`.

    Notes
    -----
    This is activation checkpointing (Chen et al. 2016). Dropout uses the same masks in both passes.
    `memory["recompute saves"]` of the ledger is the number of bytes that were not kept.

    Examples
    --------
    >>> from pmm3d import Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     list(nn.Recompute(nn.Linear(grid, 3, 4)).named_parameters())
    ['weight', 'bias']
    """

    replays = True

    def __init__(self, module: Module):
        self.grid, self.module = module.grid, module

    def _attributes(self) -> Iterator[tuple[str, Any]]:
        """Yield the part, without a name."""
        yield "", self.module

    def _assign_layout(self, columns: Layout | None, placed: set[Module]) -> Layout | None:
        return self.module._assign_layout(columns, placed)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        tape = Tape.of(self.grid)
        if not tape.recording:
            return self.module(*inputs, **options)
        mode, first = self._mode(), next(tape.numbers)
        frozen = [parameter for parameter in self.module.parameters() if not parameter.requires_grad]
        held = {} if tape.first_pass is None else tape.first_pass
        with tape.set(keeping=False, first_pass=held):
            made = self.module(*inputs, **options)
        outs = made if isinstance(made, tuple) else (made,)
        came, count = [(x.spec, x._edge) for x in inputs], len(outs)
        outer, noted = outside([out._edge for out in outs], first)

        def rule(*passed: Array) -> list[Array]:
            values = [Tensor(spec.matrix(value), edge=edge) for (spec, edge), value in zip(came, passed[count:])]
            again = self._again(self.module, values, options, mode, held, frozen, passed[:count])
            return [again.get(edge) for edge in outer]

        saved = {f"recompute.input {number}": x for number, x in enumerate(inputs)}
        results = results_of([out.value for out in outs], outer, rule, keep=saved)
        if results[0].node is not None:
            results[0].node.leaves = noted
        return tuple(results) if isinstance(made, tuple) else results[0]

    def _mode(self) -> Mode:
        """Return the state on which a forward pass depends, besides its inputs and parameters."""
        state = self.module.random_state()
        if state:
            call(self.grid.engine, lambda: state.update(self.module.random_state()))
        return state, {module: module.training for _, module in self.module.named_modules()}

    def _set_mode(self, mode: Mode) -> None:
        if mode[0]:
            call(self.grid.engine, self.module.set_random_state, mode[0])
        for module, training in mode[1].items():
            module.training = training

    def _again(
        self,
        part: Callable[..., Any],
        inputs: Sequence[Tensor],
        options: dict[str, Any],
        mode: Mode,
        results: dict[Any, Any],
        frozen: Sequence[Parameter],
        gradients: Sequence[Array | None],
    ) -> dict[Edge, Array]:
        """Repeat the forward pass, then run the backward pass. Return the gradients of the inputs.

        part: the module, or a tile of it; mode, results, frozen: state, `Tape.first_pass` and frozen parameters of the
        first forward pass; gradients: of the outputs.
        """
        tape, workspace, memory = Tape.of(self.grid), self.grid.workspace, self.grid.ledger.memory
        held, now, first = workspace.in_use(), self._mode(), next(tape.numbers)
        self._set_mode(mode)
        try:
            with tape.set(recording=True, phase="recompute", first_pass=results), ExitStack() as stack:
                for parameter in frozen:
                    stack.enter_context(override(parameter, node=None))
                made = part(*inputs, **options)
        finally:
            self._set_mode(now)
        outs = made if isinstance(made, tuple) else (made,)
        starts = [
            (out._edge, gradient)
            for out, gradient in zip(outs, gradients)
            if out._edge is not None and gradient is not None
        ]
        output = sum(workspace.counted(out.spec.local_shape, out.dtype, out.library) for out in outs)
        memory["recompute saves"] = memory.get("recompute saves", 0) + workspace.in_use() - held - output
        del made, outs, inputs
        return {edge: coming.wait() for edge, coming in propagate(starts, first).items()}
