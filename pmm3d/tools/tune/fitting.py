"""Laws fitted to what was measured: nonnegative least squares of relative errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from ...model.machines import Group, load
from ...model.machines.figures import Measured
from ...model.machines.laws import DEFAULT, Law, terms_of

LEAST_RATE = 1.0
"""Bytes a second, where no rate can be seen."""
AT_LEAST = 100.0
"""Times the largest rate seen: the rate of what takes no longer for more bytes."""
PLACES = (1, 3), (2, 4)
"""Terms of a law, (messages, bytes) inside a node and across: ranks on one node tell nothing of the latter, ranks
each on a node of its own nothing of the former."""


class Misfit(NamedTuple):
    """How far a law is from the rows that it was fitted to: relative errors, and how many points."""

    median: float
    largest: float
    points: int


class Fitted(NamedTuple):
    """Laws by operation, "default" for all together, and how well each fits."""

    laws: dict[str, Law]
    misfits: dict[str, Misfit]


def fitted(rows: Sequence[Measured], groups: Mapping[tuple[int, int], Group]) -> Fitted:
    """Laws of rows that were measured.

    groups   of each (inside, nodes), the group that was measured: on uneven nodes of fewer than inside * nodes ranks

    Where no row went across nodes, the figures across are those of the nominal machine, and so are those inside where
    none went inside: nothing is known of them.
    """
    by_operation: dict[str, list[tuple[Group, int, float]]] = {DEFAULT: []}
    for row in rows:
        group = groups[row.inside, row.nodes]
        points = [(group, nbytes, seconds) for nbytes, seconds in zip(row.nbytes, row.seconds)]
        by_operation.setdefault(row.operation, []).extend(points)
    laws, misfits = dict[str, Law](), dict[str, Misfit]()
    everything = [(operation, *point) for operation, points in by_operation.items() for point in points]
    for operation, points in by_operation.items():
        own = everything if operation == DEFAULT else [(operation, *point) for point in points]
        if own:
            laws[operation], misfits[operation] = _fit(own)
    if not laws:
        laws[DEFAULT] = load("nominal").laws[DEFAULT]
    return Fitted(laws, misfits)


def _fit(points: Sequence[tuple[str, Group, int, float]]) -> tuple[Law, Misfit]:
    matrix = np.array([terms_of(operation, group, nbytes) for operation, group, nbytes, _ in points], float)
    seconds = np.array([point[-1] for point in points])
    figures = relative_fit(matrix, seconds)
    errors = np.abs(matrix @ figures / seconds - 1)
    misfit = Misfit(float(np.median(errors)), float(errors.max()), len(points))
    nominal = load("nominal").laws[DEFAULT]
    for messages, nbytes in PLACES:
        if not matrix[:, nbytes].any():
            figures[messages], figures[nbytes] = nominal[messages], nominal[nbytes]
    return Law(*map(float, [*figures, round(misfit.median, 4)])), misfit


def relative_fit(matrix: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Figures of at least 0 whose products with the rows of a matrix are nearest to these seconds, relative to them.

        >>> relative_fit(np.array([[1.0, 10], [1, 1000]]), np.array([3.0, 201.0])).round(6).tolist()
        [1.0, 0.2]
    """
    weighted = matrix / seconds[:, None]
    scale = np.maximum(weighted.max(axis=0), np.finfo(float).tiny)
    found, _ = nnls(weighted / scale, np.ones(len(seconds)))
    return found / scale


def line(points: Sequence[tuple[int, int, float]]) -> tuple[float, float]:
    """(overhead, rate) of seconds = count * overhead + bytes / rate through points (count, bytes, seconds).

        >>> overhead, rate = line([(2, 100, 2.0), (2, 200, 3.0)])
        >>> round(overhead, 6), round(rate, 6)
        (0.5, 100.0)
    """
    seconds = np.array([point[2] for point in points])
    if len(points) == 1:
        return 0.0, max(LEAST_RATE, points[0][1] / points[0][2])
    overhead, each = relative_fit(np.array([point[:2] for point in points], float), seconds)
    fastest = AT_LEAST * max(nbytes / taken for _, nbytes, taken in points)
    return float(overhead), max(LEAST_RATE, float(1 / max(each, 1 / max(fastest, LEAST_RATE))))
