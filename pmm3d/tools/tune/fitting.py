"""Fits to measured times: least squares of relative errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from scipy.optimize import nnls

from ...model.machines import Group, load
from ...model.machines.figures import Measured
from ...model.machines.laws import DEFAULT, Law, terms

LEAST_RATE = 1.0
"""Smallest rate, in bytes per second."""
AT_LEAST = 100.0
"""If more bytes take no longer, the fitted rate is this many times the largest measured rate."""
PLACES = (1, 3), (2, 4)
"""Terms of a law, (messages, bytes), inside a node and across nodes."""


def fitted(rows: Sequence[Measured], groups: Mapping[tuple[int, int], Group]) -> dict[str, Law]:
    """Return a law of each operation, and "default" for all operations. Misfits are medians of relative errors.

    groups   (inside, nodes) -> the group that was measured; on uneven nodes it has fewer than inside * nodes ranks

    If no row is across nodes, the figures across nodes are those of the nominal machine; likewise inside a node.
    """
    by_operation: dict[str, list[tuple[str, Group, int, float]]] = {DEFAULT: []}
    for row in rows:
        points = [
            (row.operation, groups[row.inside, row.nodes], nbytes, seconds)
            for nbytes, seconds in zip(row.nbytes, row.seconds)
        ]
        for name in (row.operation, DEFAULT):
            by_operation.setdefault(name, []).extend(points)
    return {name: _fit(points) for name, points in by_operation.items() if points} or {
        DEFAULT: load("nominal").laws[DEFAULT]
    }


def _fit(points: Sequence[tuple[str, Group, int, float]]) -> Law:
    matrix = np.array([terms(operation, group, nbytes) for operation, group, nbytes, _ in points], float)
    seconds = np.array([point[-1] for point in points])
    figures = relative_fit(matrix, seconds)
    misfit = np.median(np.abs(matrix @ figures / seconds - 1))
    nominal = load("nominal").laws[DEFAULT]
    for messages, nbytes in PLACES:
        if not matrix[:, nbytes].any():
            figures[messages], figures[nbytes] = nominal[messages], nominal[nbytes]
    return Law(*map(float, [*figures, round(float(misfit), 4)]))


def relative_fit(matrix: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return the non-negative x that minimizes the relative errors of `matrix @ x` from `seconds`.

    >>> relative_fit(np.array([[1.0, 10], [1, 1000]]), np.array([3.0, 201.0])).round(6).tolist()
    [1.0, 0.2]
    """
    weighted = matrix / seconds[:, None]
    scale = np.maximum(weighted.max(axis=0), np.finfo(float).tiny)
    solution, _ = nnls(weighted / scale, np.ones(len(seconds)))
    return solution / scale


def line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return (overhead, rate) of the line seconds = overhead + bytes / rate, fitted to points (bytes, seconds).

    >>> overhead, rate = line([(100, 1.5), (200, 2.5)])
    >>> round(overhead, 6), round(rate, 6)
    (0.5, 100.0)
    """
    nbytes, seconds = np.array(points, float).T
    if len(points) == 1:
        return 0.0, max(LEAST_RATE, float(nbytes[0] / seconds[0]))
    overhead, each = relative_fit(np.stack([np.ones(len(points)), nbytes], axis=1), seconds)
    fastest = max(LEAST_RATE, AT_LEAST * float((nbytes / seconds).max()))
    return float(overhead), max(LEAST_RATE, float(1 / max(each, 1 / fastest)))
