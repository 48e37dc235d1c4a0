"""Baselines for the network: predictions of held-out fields without a network.

Errors are relative, |prediction - u| / |u| in the Euclidean norm over the points of each sample.
"""

from collections.abc import Callable
from itertools import combinations_with_replacement
from pathlib import Path

import h5py
import numpy as np
from scipy.spatial import cKDTree


def mean_field(x: np.ndarray, y: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The mean of all fields."""
    return np.broadcast_to(y.mean(axis=0), (len(wanted), y.shape[1]))


def nearest(x: np.ndarray, y: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The field of the nearest parameters."""
    return y[cKDTree(x).query(wanted)[1]]


def polynomial(degree: int) -> Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]:
    """Least squares in all monomials of the parameters up to a degree."""

    def monomials(x: np.ndarray) -> np.ndarray:
        powers = [c for d in range(degree + 1) for c in combinations_with_replacement(range(x.shape[1]), d)]
        return np.stack([np.prod(x[:, list(c)], axis=1, dtype=float) for c in powers], axis=1)

    def predict(x: np.ndarray, y: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        terms = monomials(x)
        factors = np.linalg.lstsq(terms.T @ terms, terms.astype("float32").T @ y, rcond=None)[0]
        return (monomials(wanted) @ factors).astype(y.dtype)

    return predict


BASELINES = {
    "mean field": mean_field,
    "nearest neighbour": nearest,
    "linear regression": polynomial(1),
    "cubic regression": polynomial(3),
}


def relative_errors(prediction: np.ndarray, y: np.ndarray, mean: float, std: float) -> np.ndarray:
    """The relative error of each sample. prediction and y are as stored: u = mean + std y."""
    return std * np.linalg.norm(prediction - y, axis=1) / np.linalg.norm(mean + std * y, axis=1)


def baseline_errors(path: str | Path, held_out: int) -> dict[str, np.ndarray]:
    """Name -> relative errors of the last `held_out` samples, predicted from the samples before them."""
    with h5py.File(path) as file:
        x, y, mean, std = file["x"][:], file["y"][:], file.attrs["mean"], file.attrs["std"]
    known = len(x) - held_out
    return {
        name: relative_errors(predict(x[:known], y[:known], x[known:]), y[known:], mean, std)
        for name, predict in BASELINES.items()
    }


def table(errors: dict[str, np.ndarray]) -> str:
    """A line for each prediction: mean, median and 95% quantile of its errors."""
    lines = [f"{'relative error of held-out fields':<36}{'mean':>9}{'median':>9}{'95 %':>9}"]
    for name, each in errors.items():
        mean, (median, high) = each.mean(), np.quantile(each, (0.5, 0.95))
        lines.append(f"  {name:<34}{mean:9.4f}{median:9.4f}{high:9.4f}")
    return "\n".join(lines)
