"""Sums on memory and requests that are prepared once."""

import gc

import numpy as np
import pytest

from pmm3d import Grid
from pmm3d.comm import RepeatedSum


@pytest.mark.parallel([1, 2, 4])
def test_repeated_sums_have_the_bits_of_all_reduces(comm):
    """Also with other sums between them, with debug, and with numbers that are not finite. They count as calls."""
    for debug in (False, True):
        with Grid(comm, debug=debug) as grid:
            sums, others = (RepeatedSum(grid.everyone, count, "agreement") for count in (5, 3))
            for turn in range(6):
                numbers = np.random.default_rng([grid.rank, turn]).standard_normal(5)
                numbers[4] = np.nan if turn == 3 else 0
                expected = grid.everyone.all_reduce(numbers).wait()
                assert np.array(sums(numbers.tolist())).tobytes() == expected.tobytes()
                assert others([1, grid.rank, turn]) == [grid.size, sum(range(grid.size)), turn * grid.size]
            assert grid.ledger.total(phase="agreement").calls == 12
            del sums, others
            gc.collect()
            assert grid.everyone.all_reduce(np.ones(2)).wait().tolist() == 2 * [grid.size]
            assert not grid.engine.plans and not grid.engine.persistent


def test_sums_in_a_dry_run_are_those_of_equal_ranks():
    with Grid.dry((2, 1, 1)) as grid:
        assert RepeatedSum(grid.everyone, 2, "agreement")([1, 3]) == [2, 6]
