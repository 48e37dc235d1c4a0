"""Collectives as linear maps: the adjoint of each is the collective that gradients need. Sums have reproducible
bits."""

import numpy as np
import pytest
from each_grid import each_grid
from loops import looped
from samples import RANKS, TESTED, bits_of, integers, to_library, to_numpy

from pmm3d.layout import part_sizes

AXES = ("x", "y", "z", "everyone")


def axes(grid):
    return [grid.axis(name) for name in AXES if grid.axis(name).size > 1]


def inner(axis, first, second):
    """<first, second> summed over the ranks of the axis, with the first conjugated; exact for integers."""
    total = np.array([np.vdot(first, second)])
    return axis.all_reduce(total).wait()[0]


def vector(axis, rows, seed):
    return integers((rows, 2), "complex128", seed=1000 * seed + axis.ranks[axis.index])


def assert_adjoint(axis, forward, backward, domain, image):
    """Assert <A x, y> = <x, A* y>. x has `domain` rows and y has `image` rows on this rank."""
    x, y = vector(axis, domain, 1), vector(axis, image, 2)
    moved, back = forward(x).wait(), backward(y).wait()
    assert moved.shape == y.shape and back.shape == x.shape
    assert inner(axis, moved, y) == inner(axis, x, back) != 0


@pytest.mark.parallel([2, 4, 6, 8])
@each_grid
def test_gather_and_reduce_scatter_are_adjoint(grid):
    for axis in axes(grid):
        counts = [(3, 0, 1, 4, 2, 0, 5, 1)[index] for index in range(axis.size)]
        assert_adjoint(
            axis,
            lambda x: axis.all_gather(x),
            lambda y: axis.reduce_scatter(y, counts=counts),
            counts[axis.index],
            sum(counts),
        )
        even = part_sizes(9, axis.size)
        assert_adjoint(axis, lambda x: axis.reduce_scatter(x), lambda y: axis.all_gather(y), 9, even[axis.index])


@pytest.mark.parallel([2, 4], thorough=RANKS[1:])
@each_grid
def test_all_to_all_is_undone_by_the_way_back(grid):
    for axis in axes(grid):
        sent = [(axis.index + 2 * reader) % 4 for reader in range(axis.size)]
        recv_blocks = [(sender + 2 * axis.index) % 4 for sender in range(axis.size)]
        there = lambda x: axis.all_to_all(x, counts=sent)
        back = lambda y: axis.all_to_all(y, counts=recv_blocks)
        assert_adjoint(axis, there, back, sum(sent), sum(recv_blocks))
        x = vector(axis, sum(sent), 3)
        assert np.array_equal(back(there(x).wait()).wait(), x)


@pytest.mark.parallel([4], thorough=[2, 6, 8])
@each_grid
def test_sums_are_bitwise_the_same_on_all_ranks_and_in_every_run(grid):
    """For float32 whose sums are rounded, in small and large arrays."""
    for axis in axes(grid):
        for rows in (3, 20000):
            drawn = np.random.default_rng(axis.ranks[axis.index]).standard_normal((rows, 2)).astype("float32")
            found = [axis.all_reduce(drawn).wait() for _ in range(2)]
            whole = axis.all_gather(axis.reduce_scatter(drawn).wait()).wait()
            arrays = axis.all_gather(drawn[None]).wait()
            in_rank_order = arrays[0].copy()
            for array in arrays[1:]:
                in_rank_order += array
            assert bits_of(found[0]) == bits_of(found[1]) == bits_of(whole) == bits_of(in_rank_order)
            assert len(set(grid.comm.allgather((axis.name, axis.ranks, bits_of(found[0]))))) <= grid.size // axis.size


@pytest.mark.parallel([2], thorough=[3, 4])
def test_sums_do_not_depend_on_the_array_library(some_grid):
    for axis in axes(some_grid):
        drawn = np.random.default_rng(axis.index).standard_normal((40, 3))
        for dtype in ("float16", "float32"):
            found = {
                bits_of(axis.all_reduce(to_library(drawn.astype(dtype), library)).wait())
                for library in ("numpy", "torch", "standin")
            }
            assert len(found) == 1


def assert_rounded_once(grid, library, dtype, large):
    """In float16, 2048 + 1 is 2048; in bfloat16, 256 + 1 is 256. A sum of several ranks is larger."""
    rounded = to_numpy(to_library(np.full((1,), large + grid.size - 1, "float32"), library, dtype), library)
    assert rounded > large
    for rows in (grid.size, 40000):
        mine = to_library(np.full((rows,), large if grid.rank == 0 else 1, "float32"), library, dtype)
        for total in (grid.everyone.all_reduce(mine), grid.everyone.reduce_scatter(mine)):
            assert np.all(to_numpy(total.wait(), library) == rounded)


@pytest.mark.parallel([3, 4], thorough=[6, 8])
@looped("library", [TESTED, "standin"])
def test_float16_is_added_up_in_float32(some_grid, library):
    assert_rounded_once(some_grid, library, "float16", 2048)


@pytest.mark.parallel([3], thorough=[4])
@looped("dtype, large", [("bfloat16", 256), ("float16", 2048)])
def test_low_precision_of_torch_is_added_up_in_float32(some_grid, dtype, large):
    assert_rounded_once(some_grid, "torch", dtype, large)
