"""Optimizers, and schedules of their learning rates."""

from __future__ import annotations

from collections.abc import Sequence
from math import cos, inf, pi, prod, sqrt
from numbers import Real
from typing import Any

from ..arrays import Array, by_rows, library_of
from ..errors import DTypeError, Pmm3dError
from ..layout import whole_number
from ..product import DistMatrix, newton_schulz
from ..product.orthogonal import MUON
from . import fused
from .compute import PER_ELEMENT, computing
from .gradient_norm import NonFiniteGradientError
from .loss_scale import LossScale
from .optimizer import Group, Optimizer, Options, Parameters
from .parameter import Parameter

__all__ = ["SGD", "Adam", "AdamW", "Cosine", "LossScale", "Muon", "NonFiniteGradientError", "Optimizer", "Schedule",
           "Step"]

SCALES = ("original", "match_rms_adamw")
MATRIX, VECTOR = ("momentum",), ("mean", "square")
"""The state of what Muon changes, and of what AdamW does."""


class SGD(Optimizer):
    """v = momentum v + g;  w = w - lr v, or w - lr (g + momentum v) with nesterov. g has weight_decay w added.

        >>> from pmm3d import Grid, nn
        >>> with Grid(shape="ddp") as grid:
        ...     SGD(nn.Linear(grid, 3, 2).parameters(), lr=0.1, momentum=0.9).state_names
        ('momentum',)
    """

    defaults = {"momentum": 0.0, "nesterov": False}

    def __init__(self, parameters: Parameters, lr: float, momentum: float = 0.0, **options: Any):
        super().__init__(parameters, lr, momentum=momentum, **options)
        self.state_names = ("momentum",) if any(group["momentum"] for group in self.groups) else ()

    def check_options(self, options: Options) -> None:
        super().check_options(options)
        momentum = options["momentum"]
        if not 0 <= momentum < 1 or (options["nesterov"] and not momentum):
            raise Pmm3dError(f"SGD: momentum is at least 0 and below 1, and above 0 for nesterov; got {momentum!r}")

    def update(self, weight: Array, gradient: Array, state: Sequence[Array], options: Options) -> None:
        if fused.sgd(weight, gradient, state, options):
            return
        momentum, decay = options["momentum"], options["weight_decay"]
        if decay:
            gradient = gradient + decay * weight
        if momentum:
            velocity = state[0]
            velocity *= momentum
            velocity += gradient
            gradient = gradient + momentum * velocity if options["nesterov"] else velocity
        weight -= options["lr"] * gradient


class Adam(Optimizer):
    """Adam (Kingma, Ba 2015), with weight_decay w added to the gradient. Its correction for the first steps counts,
    for each parameter, the steps in which it had a gradient.

        >>> from pmm3d import Grid, nn
        >>> with Grid(shape="ddp") as grid:
        ...     list(Adam(nn.Linear(grid, 3, 2, bias=False).parameters(), shard_over_data=True).matrices())
        ['optimizer/weight/mean', 'optimizer/weight/square']
    """

    state_names: tuple[str, ...] = ("mean", "square")
    defaults = {"betas": (0.9, 0.999), "eps": 1e-8}
    decoupled = False
    """Whether weight_decay shrinks the weight beside the step, or is a part of the gradient."""

    def __init__(self, parameters: Parameters, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, **options: Any):
        super().__init__(parameters, lr, betas=betas, eps=eps, **options)

    def check_options(self, options: Options) -> None:
        super().check_options(options)
        betas, eps = options["betas"], options["eps"]
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise Pmm3dError(f"{type(self).__name__}: betas are two numbers of at least 0 and below 1; got {betas!r}")
        if not 0 <= eps < inf:
            raise Pmm3dError(f"{type(self).__name__}: eps is a number of at least 0; got {eps!r}")

    def update(self, weight: Array, gradient: Array, state: Sequence[Array], options: Options) -> None:
        """With two arrays of the slice's size beside those that are given; three if the gradient is decayed."""
        if fused.adam(weight, gradient, state, options, self.decoupled):
            return
        (first, second), lr, decay, step = (options[name] for name in ("betas", "lr", "weight_decay", "step"))
        (mean, square), xp = state, library_of(weight).xp
        if self.decoupled and decay:
            weight *= 1 - lr * decay
        elif decay:
            gradient = gradient + decay * weight
        work = (1 - first) * gradient
        mean *= first
        mean += work
        xp.multiply(gradient, 1 - second, out=work)
        work *= gradient
        square *= second
        square += work
        xp.sqrt(square, out=work)
        work /= sqrt(1 - second**step)
        work += options["eps"]
        change = lr / (1 - first**step) * mean
        change /= work
        weight -= change


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov, Hutter 2019): w = (1 - lr weight_decay) w before each step.

        >>> from pmm3d import Grid, nn
        >>> with Grid(shape="ddp") as grid:
        ...     AdamW(nn.Linear(grid, 3, 2).parameters()).groups[0]["weight_decay"]
        0.01
    """

    decoupled = True

    def __init__(self, parameters: Parameters, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, *, weight_decay: float = 0.01, **options: Any):
        super().__init__(parameters, lr, betas, eps, weight_decay=weight_decay, **options)


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
    """Return the factor s of the learning rate of a weight."""
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * sqrt(max(inputs, outputs))
    return sqrt(max(1.0, outputs / inputs))


class Schedule:
    """Sets an optimizer's learning rate, of each group that group's own; call step() after each of its steps. This one
    keeps it constant.

    warm_up   steps in which the rate rises linearly from 1/warm_up of the optimizer's to the whole of it

        >>> from pmm3d import Grid, nn
        >>> with Grid(shape="ddp") as grid:
        ...     Schedule(SGD(nn.Linear(grid, 3, 2).parameters(), lr=1.0), warm_up=4).optimizer.lr
        0.25
    """

    def __init__(self, optimizer: Optimizer, warm_up: int = 0):
        self.optimizer, self.warm_up, self.count = optimizer, warm_up, 0
        self.bases = [group["lr"] for group in optimizer.groups]
        self._set()

    def factor(self, steps: int) -> float:
        """Of the optimizer's rate, `steps` steps after the warm-up."""
        return 1.0

    def step(self) -> None:
        self.count += 1
        self._set()

    def end_at(self, steps: int) -> None:
        """Have it come to its end, if it has one, so many steps after the start."""

    def _set(self) -> None:
        for group, base in zip(self.optimizer.groups, self.bases):
            if self.count < self.warm_up:
                group["lr"] = base * (self.count + 1) / self.warm_up
            else:
                group["lr"] = base * self.factor(self.count - self.warm_up)

    def state(self) -> dict[str, Any]:
        """For a checkpoint; JSON-able."""
        return {"count": self.count}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take what `state` gave: how many steps there were. The rates stay those of the optimizer as it was made."""
        self.count = state["count"]
        self._set()


class Cosine(Schedule):
    """Half a cosine from the whole rate to `floor` of it, `steps` steps after the start, warm-up included.

        >>> from pmm3d import Grid, nn
        >>> with Grid(shape="ddp") as grid:
        ...     round(Cosine(SGD(nn.Linear(grid, 3, 2).parameters(), lr=1.0), steps=10).factor(5), 12)
        0.5
    """

    def __init__(self, optimizer: Optimizer, steps: int, warm_up: int = 0, floor: float = 0.0):
        self.length, self.floor = max(1, steps - warm_up), floor
        super().__init__(optimizer, warm_up)

    def end_at(self, steps: int) -> None:
        self.length = max(1, steps - self.warm_up)
        self._set()

    def factor(self, steps: int) -> float:
        done = min(1.0, steps / self.length)
        return self.floor + (1 - self.floor) * 0.5 * (1 + cos(pi * done))


class Step(Schedule):
    """The rate times `factor` every `every` steps.

        >>> from pmm3d import Grid, nn
        >>> with Grid(shape="ddp") as grid:
        ...     Step(SGD(nn.Linear(grid, 3, 2).parameters(), lr=1.0), every=10, factor=0.5).factor(25)
        0.25
    """

    def __init__(self, optimizer: Optimizer, every: int, factor: float = 0.1, warm_up: int = 0):
        self.every, self.ratio = every, factor
        super().__init__(optimizer, warm_up)

    def factor(self, steps: int) -> float:
        return self.ratio ** (steps // self.every)
