"""Numbers of rounds of messages of the collectives, with checks."""

import numpy as np
import pytest
from loops import given

from pmm3d import DistMatrix, Grid

SMALL, LARGE = 2, 500
"""Numbers of rows of 8 bytes on each rank."""


@pytest.fixture
def rounds(comm):
    """(Grid, a function that returns the number of rounds of a call)."""
    with Grid(comm, "ddp") as grid:
        found = []

        def counted(pending, collective):
            try:
                while True:
                    requests = next(collective)
                    found.append(bool(requests))
                    yield requests
            except StopIteration as end:
                return end.value

        def of(call):
            found.clear()
            pending = call()
            getattr(pending, "wait", lambda: None)()
            return sum(found)

        grid.engine.wrap = counted
        yield grid, of


@pytest.mark.parallel([2, 8], thorough=[3, 4])
def test_the_checks_of_collectives_ride_on_the_first_round(rounds):
    (grid, of), expected = rounds, {}
    axis = grid.everyone
    for rows, data in ((SMALL, 0), (LARGE, 1)):
        part, whole = np.ones(rows), np.ones(rows * axis.size)
        uneven, even = np.ones(rows + axis.index), [rows] * axis.size
        expected = {
            "all_gather": (lambda: axis.all_gather(part), 1 + data),
            "all_gather with counts": (lambda: axis.all_gather(part, counts=even), 1 + data),
            "all_gather of uneven parts": (lambda: axis.all_gather(uneven), 2 + data),
            "reduce_scatter": (lambda: axis.reduce_scatter(whole), 1 + data),
            "all_reduce": (lambda: axis.all_reduce(part), 1 + data),
            "all_reduce of a large array": (lambda: axis.all_reduce(np.ones(30000)), 3),
            "all_to_all": (lambda: axis.all_to_all(whole), 1 + data),
            "all_to_all of uneven arrays": (lambda: axis.all_to_all(uneven), 2 + data),
            "all_to_all with received": (lambda: axis.all_to_all(whole, received=even), 1 + data),
            "shift": (lambda: axis.shift(part), 1 + data),
            "agreed all_reduce": (lambda: axis.all_reduce(part, agreed=True), 1),
        }
        for name, (call, number) in expected.items():
            with given(name=name, rows=rows):
                assert of(call) == number


@pytest.mark.parallel([2, 4])
def test_a_number_of_a_matrix_takes_one_round(rounds):
    grid, of = rounds
    a, b = (DistMatrix.random(grid, (6, 6), seed=seed) for seed in (1, 2))
    for name, call in {"norm": a.norm, "trace": a.trace, "inner": lambda: a.inner(b)}.items():
        with given(name=name):
            assert of(call) == 1
