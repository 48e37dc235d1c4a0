"""Logits, scores, gates and losses of a router, and their gradients."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ...arrays import Array
from ...layout.layout import layout_of
from ..compute import TensorSpec, array_namespace, computing, gemm
from ..contract import LazyMatrix
from ..overlapped_gemm import gemm_then_relayout
from ..parameter import Parameter
from ..tensor import Tensor, results_of
from .choice import Choice

LEAST = 1e-20
"""Added to the sum of the chosen scores before a division. Scores of a sigmoid may all be 0."""


def logits_of(x: Tensor, weight: Parameter) -> Tensor:
    """X W, with all columns on each rank. The rows are those of X, whose columns are split like the rows of W."""
    spec, axes, columns = x.spec, x.layout.rows, x.layout.cols
    units = (x.layout.units[0], 1)
    out = spec.like((x.shape[0], weight.shape[1]), layout_of(axes, (), (), units))
    product = LazyMatrix(
        layout_of(axes, (), columns, units),
        out.local_shape,
        lambda target, beta, rows: gemm(out, x.shard[rows], weight.shard, target, beta),
        "router",
    )
    logits = gemm_then_relayout(out, product, out.layout).wait()
    wanted, learns, home = x.requires_grad, weight.requires_grad, weight.layout

    def rule(gradient: Array, *saved: Array) -> list[LazyMatrix | None]:
        of_input, of_weight = None, None
        if wanted:
            block = saved[-1]
            of_input = LazyMatrix(
                spec.layout,
                spec.local_shape,
                lambda target, beta, rows: gemm(spec, gradient[rows], block.T, target, beta),
                "router",
            )
        if learns:
            inputs = saved[0]
            of_weight = LazyMatrix(
                layout_of(home.rows, (), axes, home.units),
                (inputs.shape[1], gradient.shape[1]),
                lambda target, beta, rows: gemm(spec, inputs.T[rows], gradient, target, beta),
                "reduce dW",
            )
        return [of_input, of_weight]

    saved = {"router.input": x} if learns else {}
    if wanted:
        saved["router.weight"] = weight
    return x.from_op(logits, (x, weight), rule, keep=saved, shape=out.shape, layout=out.layout)


class Gates(NamedTuple):
    """Functions of the logits, and their gradients.

    spec         of the logits
    of_balance   factor of sum_i n_i sum_t p_ti in the penalty
    of_z         factor of the sum of (log sum_i exp(logit_i))^2
    """

    spec: TensorSpec
    scores: str
    normalize: bool
    scale: float
    of_balance: float
    of_z: float

    def scores_of(self, logits: Array) -> Array:
        """Score of each expert, by which a token chooses, and from which its gates are computed."""
        with computing(self.spec.grid, "elementwise", name="router"):
            return self._scores(logits)

    def numbers(self, logits: Array, scores: Array) -> np.ndarray:
        """Sums over this rank's rows that the penalty needs: of the probability of each expert, and of the squares of
        the z-loss."""
        xp, library, sums = array_namespace(logits), self.spec.library, list[np.ndarray]()
        with computing(self.spec.grid, "elementwise", name="router"):
            if self.of_balance:
                sums.append(library.to_numpy(xp.sum(self._probabilities(scores)[0], axis=0)))
            if self.of_z:
                sums.append(library.to_numpy(xp.sum(_log_sum_exp(logits) ** 2, axis=0)))
        return np.concatenate([np.empty(0), *(each.reshape(-1) for each in sums)])

    def penalty(self, choice: Choice) -> float:
        """Value of the penalty; 0 without losses."""
        counts, sums = choice.counts, choice.sums
        of_balance = self.of_balance * float(counts @ sums[: len(counts)]) if self.of_balance else 0.0
        return of_balance + (self.of_z * float(sums[-1]) if self.of_z else 0.0)

    def results(self, logits: Tensor, scores: Array, choice: Choice, penalty: float) -> tuple[Tensor, Tensor | None]:
        """Gates, and the penalty of this value as a tensor, if there are losses."""
        spec, library = self.spec, self.spec.library
        masks = [library.from_numpy(mask, spec.dtype) for mask in (choice.chosen, choice.accepted)]
        gates = spec.new()
        with computing(spec.grid, "elementwise", name="router"):
            gates[...] = self.scale * scores * masks[1] / self._divisor(scores, masks[0])
        saved: dict[str, Any] = {"router.logits": logits, "router.chosen": masks[0], "router.accepted": masks[1]}
        if self.of_balance:
            saved["router.counts"] = library.from_numpy(choice.counts[None], spec.dtype)
        values = [spec.matrix(gates), *([spec.filled(penalty)] if self.of_balance or self.of_z else [])]
        made = results_of(values, (logits,), self.gradient, keep=saved)
        return made[0], made[1] if len(made) > 1 else None

    def gradient(self, of_gates: Array | None, *others: Array | None) -> tuple[Array]:
        """Gradient by the logits. others: gradient by the penalty, if there is one; and the arrays that are kept."""
        of_penalty = others[0] if self.of_balance or self.of_z else None
        logits, chosen, accepted, *counts = others[-4 if self.of_balance else -3 :]
        spec, xp, out = self.spec, array_namespace(logits), self.spec.new()
        along = partial(xp.sum, axis=1, keepdims=True)
        with computing(spec.grid, "elementwise", name="router backward"):
            scores = self._scores(logits)
            slope = xp.zeros_like(scores)
            if of_gates is not None:
                divisor = self._divisor(scores, chosen)
                slope = self.scale * of_gates * accepted / divisor
                if self.normalize:
                    slope = slope - chosen * along(slope * scores) / divisor
            if of_penalty is not None and self.of_balance:
                probabilities, total = self._probabilities(scores)
                weights = of_penalty * self.of_balance * counts[0]
                if self.scores == "sigmoid":
                    weights = (weights - along(weights * probabilities)) / total
                slope = slope + weights
            if self.scores == "sigmoid":
                slope = slope * scores * (1 - scores)
            else:
                slope = scores * (slope - along(slope * scores))
            if of_penalty is not None and self.of_z:
                normalizer = _log_sum_exp(logits)[:, None]
                slope = slope + of_penalty * (2 * self.of_z) * normalizer * xp.exp(logits - normalizer)
            out[...] = slope
        return (out,)

    def _scores(self, logits: Array) -> Array:
        if self.scores == "sigmoid":
            return self.spec.library.special("expit")(logits)
        xp = array_namespace(logits)
        return xp.exp(logits - _log_sum_exp(logits)[:, None])

    def _divisor(self, scores: Array, chosen: Array) -> Any:
        xp = array_namespace(scores)
        return xp.sum(scores * chosen, axis=1, keepdims=True) + LEAST if self.normalize else 1.0

    def _probabilities(self, scores: Array) -> tuple[Array, Any]:
        """Scores divided by their sum over the experts, and the sum."""
        if self.scores == "softmax":
            return scores, 1.0
        total = array_namespace(scores).sum(scores, axis=1, keepdims=True) + LEAST
        return scores / total, total


def _log_sum_exp(logits: Array) -> Array:
    """log sum_i exp(logit_i) of each row."""
    xp = array_namespace(logits)
    largest = xp.max(logits, axis=1)
    return largest + xp.log(xp.sum(xp.exp(logits - largest[:, None]), axis=1))
