"""Optimizers, schedules of the learning rate, the scale of a loss, and averages of weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from math import inf, isfinite, prod, sqrt
from numbers import Real
from operator import itemgetter
from typing import Any

from ..arrays import Array, by_rows, library_of
from ..comm import Compared
from ..errors import DTypeError, Pmm3dError
from ..layout import whole_number
from ..product import DistMatrix, newton_schulz
from ..product.orthogonal import MUON
from . import fused
from .compute import PER_ELEMENT, computing, override
from .ema import EMA
from .factored import SM3, Adafactor
from .gradient_norm import NonFiniteGradientError
from .layers import Linear
from .learning_rate import Cosine, InverseSquareRoot, LinearDecay, Schedule, Step, WarmUpStableDecay
from .loss_scale import LossScale
from .module import Module
from .optimizer import Batch, Group, Optimizer, Options, Parameters, Slice
from .optimizer_options import BELOW_1, FLAG, Option, is_share
from .optimizer_state import LIKE_WEIGHT, Part, Shard, StateForm
from .parameter import Parameter
from .parameter_groups import groups_by_name

__all__ = [
    "EMA",
    "SGD",
    "SM3",
    "Adafactor",
    "Adam",
    "AdamW",
    "Cosine",
    "InverseSquareRoot",
    "LinearDecay",
    "Lion",
    "LossScale",
    "Muon",
    "NonFiniteGradientError",
    "Option",
    "Optimizer",
    "Schedule",
    "Shard",
    "StateForm",
    "Step",
    "WarmUpStableDecay",
    "groups_by_name",
]

SCALES = ("original", "match_rms_adamw")
MATRIX, VECTOR = ("momentum",), ("mean", "square")
"""States of parameters that Muon changes, and of those that AdamW changes."""


def _is_sequence_of(number: int, fits: Any, value: Any) -> bool:
    return len(value) == number and all(map(fits, value))


class SGD(Optimizer):
    """Stochastic gradient descent: v = momentum v + g, w = w - lr v.

    Parameters
    ----------
    parameters, lr
        As in `Optimizer`.
    momentum : float
        At least 0 and below 1. Default: 0.
    nesterov : bool
        Use w = w - lr (g + momentum v). Default: False.
    weight_decay : float
        weight_decay w is added to the gradient g. Default: 0.
    **options
        Further options of `Optimizer`, such as `shard_over_data`.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> from pmm3d.nn import optim
    >>> with Grid(shape="ddp") as grid:
    ...     net = nn.Linear(grid, 3, 2)
    ...     x, y = (DistMatrix.random(grid, (8, n), dtype="float32", seed=n) for n in (3, 2))
    ...     opt, losses = optim.SGD(net.parameters(), lr=0.1, momentum=0.9), []
    ...     for _ in range(2):
    ...         loss = nn.mse(net(x), y)
    ...         loss.backward()
    ...         opt.step()
    ...         losses.append(loss.item())
    ...     losses[1] < losses[0]
    True
    """

    defaults = {
        "momentum": Option(0.0, BELOW_1, is_share, "share of the running sum of gradients that a step keeps", 0.9),
        "nesterov": FLAG,
    }

    def __init__(self, parameters: Parameters, lr: float, momentum: float = 0.0, **options: Any):
        super().__init__(parameters, lr, momentum=momentum, **options)

    @property
    def state_names(self) -> Sequence[str]:  # type: ignore[override]
        for group in self.groups:
            if group["momentum"]:
                return MATRIX
        return ()

    def check_options(self, options: Options) -> None:
        super().check_options(options)
        if options["nesterov"] and not options["momentum"]:
            raise Pmm3dError("SGD: nesterov needs a momentum above 0; got 0")

    def _update_slices(self, slices: Sequence[Slice]) -> None:
        if type(self).update is SGD.update:
            self._change_slices(slices)
        else:
            super()._update_slices(slices)

    def update(self, weight: Array, gradient: Array, state: Sequence[Array], options: Options) -> None:
        self._change_slices([(weight, gradient, state, options)])

    def _change_slices(self, slices: Sequence[Slice]) -> None:
        if fused.sgd(library_of(slices[0][0]), slices):
            return
        for weight, gradient, state, options in slices:
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
    """Adam (Kingma, Ba 2015).

    Parameters
    ----------
    parameters, lr
        As in `Optimizer`. Default of `lr`: 0.001.
    betas : tuple of float
        Shares of the running means of gradients and of their squares that a step keeps. Default: (0.9, 0.999).
    eps : float
        Added to the root of the mean square. Default: 1e-8.
    weight_decay : float
        weight_decay w is added to the gradient. Default: 0.
    **options
        Further options of `Optimizer`, such as `shard_over_data`.

    Notes
    -----
    The bias correction counts, for each parameter, the steps in which it had a gradient. `update` needs two work arrays
    of the size of its slice, and three with weight decay that is not decoupled.

    Examples
    --------
    >>> from pmm3d import Grid, nn
    >>> from pmm3d.nn import optim
    >>> with Grid(shape="ddp") as grid:
    ...     list(optim.Adam(nn.Linear(grid, 3, 2, bias=False).parameters(), shard_over_data=True).matrices())
    ['optimizer/weight/mean', 'optimizer/weight/square']
    """

    state_names: Sequence[str] = VECTOR
    defaults = {
        "betas": Option(
            (0.9, 0.999),
            "a list of 2, each a number of at least 0 and below 1",
            partial(_is_sequence_of, 2, is_share),
            "shares of the running means of gradients and of their squares that a step keeps",
        ),
        "eps": Option(
            1e-8,
            "a number of at least 0",
            lambda eps: 0 <= eps < inf,
            "added to the root of the mean square, to avoid a division by 0",
        ),
    }
    decoupled = False
    """Whether weight decay acts on the weight, or is added to the gradient."""

    def __init__(
        self,
        parameters: Parameters,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        **options: Any,
    ):
        super().__init__(parameters, lr, betas=betas, eps=eps, **options)

    def _update_slices(self, slices: Sequence[Slice]) -> None:
        if type(self).update is Adam.update:
            self._change_slices(slices)
        else:
            super()._update_slices(slices)

    def update(self, weight: Array, gradient: Array, state: Sequence[Array], options: Options) -> None:
        self._change_slices([(weight, gradient, state, options)])

    def _change_slices(self, slices: Sequence[Slice]) -> None:
        library = library_of(slices[0][0])
        if fused.adam(library, slices, self.decoupled):
            return
        xp, numbers = library.xp, itemgetter("betas", "lr", "weight_decay", "step")
        for weight, gradient, (mean, square), options in slices:
            (first, second), lr, decay, step = numbers(options)
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

    Parameters
    ----------
    parameters, lr, betas, eps
        As in `Adam`.
    weight_decay : float
        Default: 0.01.
    **options
        As in `Adam`.

    Examples
    --------
    >>> from pmm3d import Grid, nn
    >>> from pmm3d.nn import optim
    >>> with Grid(shape="ddp") as grid:
    ...     optim.AdamW(nn.Linear(grid, 3, 2).parameters()).groups[0]["weight_decay"]
    0.01
    """

    decoupled = True

    def __init__(
        self,
        parameters: Parameters,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        weight_decay: float = 0.01,
        **options: Any,
    ):
        super().__init__(parameters, lr, betas, eps, weight_decay=weight_decay, **options)


class Lion(Optimizer):
    """Lion (X. Chen and others, arXiv 2302.06675): each weight changes by lr, in the direction of a running mean.

    Parameters
    ----------
    parameters, lr
        As in `Optimizer`. Default of `lr`: 0.0001.
    betas : tuple of float
        Shares of the running mean in the direction, and in the running mean of the next step. Default: (0.9, 0.99).
    weight_decay : float
        Decoupled, as in `AdamW`. Default: 0.
    **options
        Further options of `Optimizer`, such as `shard_over_data`.

    Raises
    ------
    DTypeError
        On every rank, for complex parameters.

    Notes
    -----
    d = sign(b1 m + (1 - b1) g);  m = b2 m + (1 - b2) g;  w = (1 - lr weight_decay) w - lr d. The authors recommend a
    rate 3 to 10 times smaller than that of AdamW, and a weight decay larger by this factor.

    Examples
    --------
    >>> from pmm3d import Grid, nn
    >>> from pmm3d.nn import optim
    >>> with Grid(shape="ddp") as grid:
    ...     list(optim.Lion(nn.Linear(grid, 3, 2, bias=False).parameters()).matrices())
    ['optimizer/weight/momentum']
    """

    needs_real, state_names = True, MATRIX
    defaults = {
        "betas": Adam.defaults["betas"]._replace(
            default=(0.9, 0.99),
            meaning="shares of the running mean of gradients in the direction of a step, and in the next running mean",
        )
    }

    def __init__(
        self, parameters: Parameters, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), **options: Any
    ):
        super().__init__(parameters, lr, betas=betas, **options)

    def update(self, weight: Array, gradient: Array, state: Sequence[Array], options: Options) -> None:
        (momentum,), (first, second), lr = state, options["betas"], options["lr"]
        direction = first * momentum + (1 - first) * gradient
        momentum *= second
        momentum += (1 - second) * gradient
        weight *= 1 - lr * options["weight_decay"]
        weight -= lr * library_of(weight).xp.sign(direction)


class Muon(AdamW):
    """Muon (K. Jordan and others, 2024) for matrices, and AdamW for vectors.

    Parameters
    ----------
    parameters, lr
        As in `Optimizer`. Default of `lr`: 0.001.
    momentum : float
        At least 0 and below 1. Default: 0.95.
    weight_decay : float
        Decoupled, as in `AdamW`. Default: 0.1.
    nesterov : bool
        Whether the direction includes the gradient. Default: True.
    ns_steps, ns_coefficients
        Number of steps and coefficients of the Newton-Schulz iteration. Default: 5 steps.
    adjust_lr_fn : str
        Factor s of the learning rate for a weight of k inputs and n outputs: "original" (default), max(1, n / k)^(1/2);
        or "match_rms_adamw", 0.2 max(k, n)^(1/2), for values of `lr` and `weight_decay` of AdamW (J. Liu and others,
        arXiv 2502.16982).
    use_muon : bool
        For a group: if False, AdamW changes its matrices too, as is usual for embeddings and the last layer. It must
        not be changed later. Default: True.
    betas, eps
        Options of AdamW, which changes vectors (biases, gains).
    **options
        Further options of `Optimizer`.

    Raises
    ------
    Pmm3dError
        On every rank, for options out of range. By `step`, if `use_muon` of a group was changed, or if options or the
        parameters with a gradient differ between ranks.
    DTypeError
        For complex matrices.

    Notes
    -----
    m = momentum m + (1 - momentum) g;  d = (1 - momentum) g + momentum m, or m without nesterov;
    W = (1 - lr weight_decay) W - lr s NS(d). NS(d) is `newton_schulz`, whose singular values are near 1.

    Names and defaults are those of torch.optim.Muon, whose weights are transposed. NS is computed in the type of the
    master weights, not in bfloat16. With s the smaller and l the larger of k and n, it takes 2 ns_steps s^2 (2 l + s)
    operations over x, y and z. It sends the messages of `matmul`, and a number from each rank. Ranks along data compute
    the same step, so their weights diverge if their BLAS rounds differently.

    Examples
    --------
    >>> from pmm3d import Grid, nn
    >>> from pmm3d.nn import optim
    >>> with Grid(shape="fsdp") as grid:
    ...     list(optim.Muon(nn.Linear(grid, 3, 2).parameters(), lr=0.02).matrices())
    ['optimizer/weight/momentum', 'optimizer/bias/mean', 'optimizer/bias/square']
    """

    state_names = (*MATRIX, *VECTOR)
    defaults = {
        **Adam.defaults,
        "momentum": Option(0.95, BELOW_1, is_share, "share of the running mean of gradients that a step keeps"),
        "nesterov": FLAG._replace(default=True),
        "ns_steps": Option(
            5,
            "a whole number of at least 1 and below 100",
            lambda steps: 1 <= whole_number(steps) < 100,
            "steps of the Newton-Schulz iteration that orthogonalizes the update",
        ),
        "ns_coefficients": Option(
            MUON,
            "a list of 3 finite numbers",
            partial(_is_sequence_of, 3, lambda each: isinstance(each, Real) and isfinite(each)),
        ),
        "adjust_lr_fn": Option(
            "original",
            " or ".join(f'"{name}"' for name in SCALES),
            SCALES.__contains__,
            "factor of lr for a weight of k inputs and n outputs. original: sqrt(max(1, n / k)); match_rms_adamw: "
            "0.2 sqrt(max(k, n)), for the lr and weight_decay of adamw",
            "match_rms_adamw",
        ),
        "use_muon": FLAG._replace(default=True),
    }

    def __init__(
        self,
        parameters: Parameters,
        lr: float = 1e-3,
        momentum: float = 0.95,
        *,
        weight_decay: float = 0.1,
        **options: Any,
    ):
        super().__init__(parameters, lr, weight_decay=weight_decay, momentum=momentum, **options)

    @classmethod
    def groups_of(cls, network: Module) -> Parameters:
        """Groups of a configuration. AdamW changes tables of embeddings and positions, and the last layer."""
        from .transformer import Embedding

        every: Any = getattr(network, "dry", network)  # all stages of a pipeline
        modules = [module for _, module in every.named_modules()]
        layers = [
            *(each for each in modules if isinstance(each, Embedding)),
            *[each for each in modules if isinstance(each, Linear)][-1:],
        ]
        spared = {parameter for layer in layers for parameter in layer.parameters()}
        names = {name for name, parameter in every.named_parameters().items() if parameter in spared}
        own = network.named_parameters()
        return [
            {"params": [each for name, each in own.items() if (name in names) == outer], "use_muon": not outer}
            for outer in (False, True)
        ]

    def _take_groups(self) -> None:
        super()._take_groups()
        self._chosen, self._before = {**self._choices(), **getattr(self, "_chosen", {})}, ""

    def _choices(self) -> dict[Parameter, bool]:
        return {each: bool(group["use_muon"]) for group in self.groups for each in group["params"]}

    def _check_parameters(self, parameters: Sequence[Parameter]) -> None:
        super()._check_parameters(parameters)
        for parameter, use_muon in self._choices().items():
            if use_muon and not parameter.is_vector and parameter.dtype.startswith("complex"):
                raise DTypeError(
                    f"Muon: {parameter.name or 'a parameter'} is {parameter.dtype}, and Muon needs real "
                    "matrices: put it in a group of its own with use_muon=False"
                )

    def step(self, *, check: bool = False, factor: float = 1.0, keep_gradients: bool = False) -> None:
        # After a step with the same options and gradients, work memory is allocated, and `newton_schulz` need not
        # compare its arguments again. The learning rate may change.
        before, self._before = self._before, ""
        lrs, plan, filled = list[float](), list[tuple[str, Any]](), list[str]()
        with self.grid.collective_call("Muon.step", check, factor, keep_gradients, lrs, plan, filled):
            numbers = {parameter: number for number, parameter in enumerate(self.parameters)}
            if self._choices() != self._chosen:
                raise Pmm3dError(
                    "Muon: use_muon of a group has changed since the optimizer was made, and the state of "
                    "its parameters does not fit the new value: make another optimizer"
                )
            for group in self.groups:
                lrs.append(float(group["lr"]))
                plan += [(name, value) for name, value in group.items() if name not in ("params", "lr")]
            filled += [f"{parameter.name} (parameter {numbers[parameter]})" for parameter in self._with_gradient()]
        now = Compared((plan, filled)).form
        with override(self.grid, _check=False) if now == before else nullcontext():
            super().step(check=check, factor=factor, keep_gradients=keep_gradients)
        self._before = now

    def _options_of(self, part: Part, group: Group) -> Options:
        """Options as in the base class, with "use_muon" False for vectors."""
        return {**super()._options_of(part, group), "use_muon": bool(group["use_muon"]) and not part.is_vector}

    def state_forms(self, parameter: Parameter, options: Options) -> Mapping[str, StateForm]:
        return dict.fromkeys(MATRIX if options["use_muon"] else VECTOR, LIKE_WEIGHT)

    def _change(self, batch: Batch, factor: float, keep_gradients: bool) -> None:
        if vectors := [each for each in batch if not each[1]["use_muon"]]:
            super()._change(vectors, factor, keep_gradients)
        for part, options in batch:
            if options["use_muon"]:
                self._change_matrix(part, options, factor)

    def _change_matrix(self, part: Part, options: Options, factor: float) -> None:
        """Update a matrix with its gradient times a factor."""
        direction, parameter = self._direction(part, options, factor), part.parameter
        split = direction.layout != parameter.layout
        matrix = direction.redistribute(parameter.layout) if split else direction
        with self.grid.ledger.passing(self._pass_name):
            newton_schulz(matrix, [tuple(options["ns_coefficients"])] * options["ns_steps"], out=matrix)
        if split:
            matrix.redistribute(direction.layout, out=direction)
        with computing(self.grid, "update", PER_ELEMENT * part.size):
            scale = _scale(*parameter.shape, options["adjust_lr_fn"])
            self._apply([(part, options, direction.local.reshape(-1), ())], scale)

    def _direction(self, part: Part, options: Options, factor: float) -> DistMatrix:
        """Add the gradient to the momentum. Return the direction, in work memory."""
        library, types, decay = part.library, part.types, options["momentum"]
        momentum = self._states(part, options)["momentum"]
        shape = tuple(momentum.shape)
        gradient = part.gradient().reshape(shape)
        made = self.grid.workspace.array(shape, types.master, library)
        fresh = (1 - decay) * factor

        def taken(before: Array, new: Array) -> Array:
            return decay * before + fresh * (
                new if types.gradient == types.master else library.astype(new, types.master)
            )

        with computing(self.grid, "update", PER_ELEMENT * prod(shape)):
            by_rows(library, taken, momentum, momentum, gradient, name=self._pass_name)
            if options["nesterov"]:
                by_rows(library, taken, made, momentum, gradient, name=self._pass_name)
            else:
                by_rows(library, lambda same: same, made, momentum, name=self._pass_name)
        return DistMatrix(self.grid, made, part.parameter.shape, part.layout)

    def update(self, weight: Array, gradient: Array, state: Sequence[Array], options: Options) -> None:
        if not options["use_muon"]:
            super().update(weight, gradient, state, options)
            return
        if options["weight_decay"]:
            weight *= 1 - options["lr"] * options["weight_decay"]
        weight -= options["lr"] * gradient


def _scale(inputs: int, outputs: int, adjust_lr_fn: str) -> float:
    """Factor s of the learning rate of a weight."""
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * sqrt(max(inputs, outputs))
    return sqrt(max(1.0, outputs / inputs))


KINDS: dict[str, type[Optimizer]] = {
    each.__name__.lower(): each for each in (SGD, Adam, AdamW, Muon, Lion, Adafactor, SM3)
}
"""Optimizers by their names in a configuration (`optimizer.kind`), with their options, defaults and checks."""
