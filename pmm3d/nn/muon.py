"""Muon: momentum whose matrices are made orthogonal, on the whole grid."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod, sqrt
from numbers import Real
from typing import Any

from ..arrays import Array, by_rows
from ..errors import DTypeError, Pmm3dError
from ..layout import whole_number
from ..product import DistMatrix, newton_schulz
from ..product.orthogonal import MUON
from .adam import Adam, AdamW
from .compute import PER_ELEMENT, computing
from .optimizer import Group, Options, Parameters
from .parameter import Parameter

SCALES = ("original", "match_rms_adamw")
MATRIX, VECTOR = ("momentum",), ("mean", "square")
"""The state of what Muon changes, and of what AdamW does."""


class Muon(AdamW):
    """Muon (K. Jordan and others, 2024): m = momentum m + (1 - momentum) g;  d = (1 - momentum) g + momentum m, or m
    without nesterov;  W = (1 - lr weight_decay) W - lr s NS(d), with NS(d) of singular values near 1: `newton_schulz`.

    ns_steps, ns_coefficients   of NS
    adjust_lr_fn   s: "original", max(1, n / k)^(1/2) for a weight of k inputs and n outputs; or "match_rms_adamw",
                   0.2 max(k, n)^(1/2), with which lr and weight_decay of AdamW fit (J. Liu and others,
                   arXiv:2502.16982, 2025)
    use_muon       of a group, once and for all: False has AdamW change its matrices too, as is usual for the table of
                   an embedding and the last layer
    betas, eps     of AdamW, which changes all vectors (biases, gains), at their group's lr

    Names, defaults and values are those of torch.optim.Muon, whose weights are transposed; but NS is calculated in the
    type of the master weights, not in bfloat16. It takes 2 ns_steps s^2 (2 l + s) operations of a k x n weight, s and l
    the smaller and the larger of k and n, over x, y and z; the ranks along data do all the same, so that on nodes
    whose BLAS rounds differently their weights would drift apart. What it moves is in the phases of `matmul`, and a
    number from each rank ("norm"). With shard_over_data the momentum is split over data and gathered for it.

    Raises Pmm3dError, on every rank, for options that make no sense, DTypeError for complex matrices.

        >>> from pmm3d import Grid, nn
        >>> with Grid(shape="fsdp") as grid:
        ...     list(Muon(nn.Linear(grid, 3, 2).parameters(), lr=0.02).matrices())
        ['optimizer/weight/momentum', 'optimizer/bias/mean', 'optimizer/bias/square']
    """

    state_names = (*MATRIX, *VECTOR)
    defaults = {**Adam.defaults, "momentum": 0.95, "nesterov": True, "ns_steps": 5, "ns_coefficients": MUON,
                "adjust_lr_fn": "original", "use_muon": True}

    def __init__(self, parameters: Parameters, lr: float = 1e-3, momentum: float = 0.95, *, weight_decay: float = 0.1,
                 **options: Any):
        super().__init__(parameters, lr, weight_decay=weight_decay, momentum=momentum, **options)

    def check_options(self, options: Options) -> None:
        super().check_options(options)
        if not 0 <= options["momentum"] < 1:
            raise Pmm3dError(f"Muon: momentum is at least 0 and below 1; got {options['momentum']!r}")
        try:
            known = 1 <= whole_number(options["ns_steps"]) < 100
        except TypeError:
            known = False
        if not known:
            raise Pmm3dError(f"Muon: ns_steps is a number of steps, 1 to 99; got {options['ns_steps']!r}")
        numbers = options["ns_coefficients"]
        if len(numbers) != 3 or not all(isinstance(number, Real) for number in numbers):
            raise Pmm3dError(f"Muon: ns_coefficients are three numbers; got {numbers!r}")
        if options["adjust_lr_fn"] not in SCALES:
            raise Pmm3dError(f"Muon: adjust_lr_fn is one of {', '.join(SCALES)}; got {options['adjust_lr_fn']!r}")

    def _check_parameters(self) -> None:
        super()._check_parameters()
        self._chosen = [bool(group["use_muon"]) for group in self.groups]
        for parameter in (each for group in self.groups if group["use_muon"] for each in group["params"]):
            if not parameter.is_vector and parameter.dtype.startswith("complex"):
                raise DTypeError(f"Muon: {parameter.name or 'a parameter'} is {parameter.dtype}, and Muon is of real "
                                 "matrices: put it in a group of its own with use_muon=False")

    def step(self, *, check: bool = False, factor: float = 1.0) -> None:
        """See `Optimizer.step`. Raises Pmm3dError where use_muon of a group is another than at the beginning."""
        if [bool(group["use_muon"]) for group in self.groups] != self._chosen:
            raise Pmm3dError("Muon: use_muon of a group is another than when the optimizer was made, and the state of "
                             "its parameters is of what it was: make another optimizer")
        super().step(check=check, factor=factor)

    def options_of(self, parameter: Parameter, group: Group) -> Options:
        """As the base class; "use_muon" is False for vectors."""
        use_muon = bool(group["use_muon"]) and not parameter.is_vector
        return {**super().options_of(parameter, group), "use_muon": use_muon}

    def states(self, options: Options) -> tuple[str, ...]:
        return MATRIX if options["use_muon"] else VECTOR

    def _change(self, parameter: Parameter, options: Options, factor: float) -> None:
        if not options["use_muon"]:
            super()._change(parameter, options, factor)
            return
        direction = self._direction(parameter, options, factor)
        split = direction.layout != parameter.layout
        whole = direction.redistribute(parameter.layout) if split else direction
        with self.grid.ledger.passing("muon"):
            newton_schulz(whole, [tuple(options["ns_coefficients"])] * options["ns_steps"], out=whole)
        if split:
            whole.redistribute(direction.layout, out=direction)
        with computing(self.grid, "update", PER_ELEMENT * prod(direction.local.shape)):
            scale = _scale(*parameter.shape, options["adjust_lr_fn"])
            self._move(parameter, direction.local.reshape(-1), [], options, scale)

    def _direction(self, parameter: Parameter, options: Options, factor: float) -> DistMatrix:
        """The momentum takes in the gradient; what is to be made orthogonal, in work memory."""
        library, types, keep = parameter.library, parameter.precision, options["momentum"]
        momentum = self._states(parameter, options)[0]
        shape = tuple(momentum.shape)
        gradient = self._gradient(parameter).reshape(shape)
        made = self.grid.workspace.array(shape, types.master, library)
        fresh = (1 - keep) * factor

        def taken(kept: Array, new: Array) -> Array:
            return keep * kept + fresh * (new if types.gradient == types.master else library.astype(new, types.master))

        with computing(self.grid, "update", PER_ELEMENT * prod(shape)):
            by_rows(library, taken, momentum, momentum, gradient, name="muon")
            if options["nesterov"]:
                by_rows(library, taken, made, momentum, gradient, name="muon")
            else:
                by_rows(library, lambda kept: kept, made, momentum, name="muon")
        return DistMatrix(self.grid, made, parameter.shape, self._layout(parameter))

    def update(self, weight: Array, gradient: Array, state: Sequence[Array], options: Options) -> None:
        if not options["use_muon"]:
            super().update(weight, gradient, state, options)
            return
        if options["weight_decay"]:
            weight *= 1 - options["lr"] * options["weight_decay"]
        weight -= options["lr"] * gradient


def _scale(inputs: int, outputs: int, adjust_lr_fn: str) -> float:
    """The factor s of a weight with so many inputs and outputs."""
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * sqrt(max(inputs, outputs))
    return sqrt(max(1.0, outputs / inputs))
