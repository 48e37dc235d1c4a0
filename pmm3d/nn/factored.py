"""Optimizers that keep a number for each row and for each column of a matrix: Adafactor and SM3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, prod
from typing import Any

import numpy as np

from ..arrays import Array, by_rows
from .compute import override
from .optimizer import Batch, Optimizer, Options, Parameters
from .optimizer_options import BELOW_1, Option, is_share
from .optimizer_state import LIKE_WEIGHT, Shard, StateForm
from .parameter import Parameter


class _Factored(Optimizer):
    """Base class of optimizers with a state of rows and one of columns for matrices, and a state of elements for
    vectors. They are the first three of `state_names`."""

    needs_real = True

    def state_forms(self, parameter: Parameter, options: Options) -> Mapping[str, StateForm]:
        rows, cols, elements = self.state_names[:3]
        if parameter.is_vector:
            return {elements: LIKE_WEIGHT}
        return {rows: StateForm(cols=1), cols: StateForm(rows=1)}

    def _change(self, batch: Batch, factor: float, keep_gradients: bool) -> None:
        with override(self.grid, _check=False):  # sums of a shard are right, so ranks need not compare their arguments
            super()._change(batch, factor, keep_gradients)

    def _subtract(self, shard: Shard, change: Array, rate: Any) -> None:
        """Decay the weight, and subtract a change times a rate, which is a number or a 1 x 1 array."""
        keep = 1 - shard.options["lr"] * shard.options["weight_decay"]
        self._map(shard, lambda weight, change, rate: keep * weight - rate * change, shard.weight, change, rate)

    def _map(self, shard: Shard, function: Any, out: Array, *operands: Any) -> None:
        """out = function(out, *operands), by slices."""
        by_rows(shard.parameter.library, function, out, out, *operands, name=self._pass_name)


class Adafactor(_Factored):
    """Adafactor (N. Shazeer, M. Stern 2018): Adam without momentum, with factors of the mean squares of matrices.

    Parameters
    ----------
    parameters, lr
        As in `Optimizer`. `lr` is the largest relative change of a weight. Default of `lr`: 0.01.
    beta2_decay : float
        In step t, means of squares keep the share 1 - t^beta2_decay. Default: -0.8.
    eps : tuple
        The smallest root of a mean square (None or 0: the eps of the type), and the smallest scale of a weight.
        Default: (None, 0.001).
    d : float
        Largest root mean square of a change, before it is multiplied by the rate. Default: 1.
    weight_decay : float
        Decoupled, as in `AdamW`. Default: 0.
    **options
        Further options of `Optimizer`, such as `shard_over_data`.

    Raises
    ------
    Pmm3dError
        On every rank, for options out of range.
    DTypeError
        For complex parameters.

    Notes
    -----
    Names, defaults and steps are those of torch.optim.Adafactor. The rate of a step is min(lr, 1 / sqrt(t)) times the
    root mean square of the weight. A matrix of k x n has k + n numbers of state, a vector one for each element.

    A step all-reduces the sums of the rows and columns of a matrix and three numbers, and needs work memory of two
    gradients. Factors are those of a whole weight, also if it joins several
    matrices, such as queries, keys and values.

    Examples
    --------
    >>> from pmm3d import Grid, nn
    >>> from pmm3d.nn import optim
    >>> with Grid(shape="ddp") as grid:
    ...     states = optim.Adafactor(nn.Linear(grid, 3, 2).parameters(), shard_over_data=True).matrices()
    ...     {name: each.shape for name, each in states.items()}
    {'optimizer/weight/row_var': (3, 1), 'optimizer/weight/col_var': (1, 2), 'optimizer/bias/variance': (1, 2)}
    """

    state_names = ("row_var", "col_var", "variance")
    defaults = {
        "beta2_decay": Option(
            -0.8,
            "a number of at most 0",
            lambda exponent: -inf < exponent <= 0,
            "in step t, means of squares keep the share 1 - t^beta2_decay",
        ),
        "eps": Option(
            (None, 1e-3),
            "a list of 2 numbers of at least 0",
            lambda eps: len(eps) == 2 and 0 <= eps[1] < inf and (eps[0] is None or 0 <= eps[0] < inf),
            "the smallest root of a mean square (0: the eps of the type), and the smallest scale of a weight",
            (0.0, 1e-3),
        ),
        "d": Option(
            1.0,
            "a number of at least 1",
            lambda most: 1 <= most < inf,
            "largest root mean square of a change, before it is multiplied by the rate",
        ),
    }

    def __init__(
        self,
        parameters: Parameters,
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        **options: Any,
    ):
        super().__init__(parameters, lr, beta2_decay=beta2_decay, eps=eps, d=d, **options)

    def update_shard(self, shard: Shard) -> None:
        gradient, state, options = shard.gradient, shard.state, shard.options
        (rows, cols), step, (eps, smallest) = shard.shape, options["step"], options["eps"]
        xp, new = shard.parameter.library.xp, step ** options["beta2_decay"]
        eps = eps or float(np.finfo(shard.parameter.precision.master).eps)

        def root_mean_square(array: Array) -> Array:
            return xp.sqrt(shard.sum(array * array) / (rows * cols))

        rate = min(options["lr"], step**-0.5) * xp.clip(root_mean_square(shard.weight), smallest, None)
        squares = gradient * gradient
        if "variance" in state:
            means = {"variance": squares}
        else:
            means = {"row_var": shard.sum(squares, 1) / cols, "col_var": shard.sum(squares, 0) / rows}
        for name, mean in means.items():
            state[name] *= 1 - new
            state[name] += new * mean
        factors = [*state.values()]
        if "row_var" in state:
            factors[1] = factors[1] / xp.clip(shard.sum(factors[0], 0) / rows, eps, None)
        self._map(shard, lambda g, *each: g / xp.sqrt(xp.clip(prod(each), eps * eps, None)), gradient, *factors)
        self._subtract(shard, gradient, rate / xp.clip(root_mean_square(gradient) / options["d"], 1, None))


class SM3(_Factored):
    """SM3 (R. Anil and others 2019): Adagrad, with the largest sums of squares of rows and of columns of a matrix.

    Parameters
    ----------
    parameters, lr
        As in `Optimizer`. Default of `lr`: 0.1.
    momentum : float
        At least 0 and below 1. Above 0, a state has the size of the weight. Default: 0.
    weight_decay : float
        Decoupled, as in `AdamW`. Default: 0.
    **options
        Further options of `Optimizer`, such as `shard_over_data`.

    Raises
    ------
    Pmm3dError
        On every rank, for options out of range.
    DTypeError
        For complex parameters.

    Notes
    -----
    s_ij = min(r_i, c_j) + g_ij^2;  r_i = max_j s_ij;  c_j = max_i s_ij;  W = (1 - lr weight_decay) W - lr m, with
    m = momentum m + (1 - momentum) g / sqrt(s). This is SM3-II of the paper. The squares of a vector are summed for
    each element, as in Adagrad.

    For a matrix of k x n, along each axis of G ranks that splits rows or columns, a rank receives (G-1) times the n or
    k numbers of a rank. A step needs work memory of one gradient.

    Examples
    --------
    >>> from pmm3d import Grid, nn
    >>> from pmm3d.nn import optim
    >>> with Grid(shape="ddp") as grid:
    ...     list(optim.SM3(nn.Linear(grid, 3, 2, bias=False).parameters(), momentum=0.9).matrices())
    ['optimizer/weight/row_max', 'optimizer/weight/col_max', 'optimizer/weight/momentum']
    """

    defaults = {
        "momentum": Option(0.0, BELOW_1, is_share, "share of the running mean of scaled gradients that a step keeps")
    }

    def __init__(self, parameters: Parameters, lr: float = 0.1, momentum: float = 0.0, **options: Any):
        super().__init__(parameters, lr, momentum=momentum, **options)

    @property
    def state_names(self) -> Sequence[str]:  # type: ignore[override]
        momentum = ("momentum",) if any(group["momentum"] for group in self.groups) else ()
        return "row_max", "col_max", "sum", *momentum

    def state_forms(self, parameter: Parameter, options: Options) -> Mapping[str, StateForm]:
        forms = super().state_forms(parameter, options)
        return {**forms, "momentum": LIKE_WEIGHT} if options["momentum"] else forms

    def update_shard(self, shard: Shard) -> None:
        gradient, state, keep = shard.gradient, shard.state, shard.options["momentum"]
        xp, squares = shard.parameter.library.xp, gradient * gradient
        if "sum" in state:
            squares += state["sum"]
            state["sum"][...] = squares
        else:
            row_max, col_max = state["row_max"], state["col_max"]
            self._map(shard, lambda square, row, col: square + xp.minimum(row, col), squares, row_max, col_max)
            row_max[...], col_max[...] = shard.max(squares, 1), shard.max(squares, 0)
        # If a sum is 0, so is the gradient.
        self._map(shard, lambda g, total: g / xp.sqrt(xp.where(total > 0, total, 1)), gradient, squares)
        if keep:
            self._map(shard, lambda mean, g: keep * mean + (1 - keep) * g, state["momentum"], gradient)
        self._subtract(shard, state["momentum"] if keep else gradient, shard.options["lr"])
