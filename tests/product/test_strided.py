"""Copies of evenly repeated pieces, compared with numpy's fancy indexing, for all orders, types and libraries."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loops import looped
from samples import integers, to_library, to_numpy

from pmm3d.arrays import library_named
from pmm3d.arrays.threads import ALIASED, WRITTEN
from pmm3d.comm import Buffers, compute
from pmm3d.layout.distribution import Strided
from pmm3d.model.rounds import IN, OUT, Indices, Round, Schedule, Span, Strides, Sum

groups = st.builds(
    lambda here, there, length, times, gap, other: Strided(here, there, length, times, length + gap, length + other),
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(0, 2),
)
SIZE = 3 + 3 * 7


def copy_strided(library, source, target, rows, cols, beta=0):
    """target = beta target + source for these rows and columns: `here` in the source, `there` in the target."""
    copies = tuple(Sum((span(IN, row, col),), span(OUT, turned(row), turned(col))) for row in rows for col in cols)
    each = Round(copies=copies)
    compute(library, Buffers(Schedule((each,)), library, (source, target), (0, 0), None, beta).arithmetic(copies))


def span(buffer, rows, cols):
    across = Indices(cols.here, cols.here + cols.length, cols.times, cols.step_here)
    return Span(buffer, rows.here, rows.here + rows.length, Strides(rows.times, rows.step_here, across))


def turned(runs):
    return Strided(runs.there, runs.here, runs.length, runs.times, runs.step_there, runs.step_here)


def at(group, there):
    start, step = (group.there, group.step_there) if there else (group.here, group.step_here)
    return [start + turn * step + index for turn in range(group.times) for index in range(group.length)]


def lying(array, order):
    return np.asarray(array, order=order)


@given(
    groups,
    groups,
    st.sampled_from(["float32", "float64", "complex64", "complex128", "float16", "int64"]),
    st.sampled_from("CF"),
    st.sampled_from("CF"),
    st.sampled_from([0, 1, 2]),
)
def test_what_is_copied_and_what_stays(rows, cols, dtype, order, other, beta):
    source, target = lying(integers((SIZE, SIZE), dtype, seed=1), order), lying(integers((SIZE, SIZE), dtype), other)
    wanted = target.copy()
    place = np.ix_(at(rows, True), at(cols, True))
    wanted[place] = source[np.ix_(at(rows, False), at(cols, False))] + (beta * wanted[place] if beta else 0)
    copy_strided(library_named("numpy"), source, target, [rows], [cols], beta)
    assert (target == wanted).all()


@looped("orders", ["CF", "FC", "CC"])
@looped("length", [3, 64])
def test_transposed_blocks(orders, length):
    """Blocks that repeat in both dims, in arrays of different orders: copied, and added."""
    blocks, size = Strided(1, 2, length, 5, 2 * length, length + 1), ALIASED // 8 + 11 * length
    for beta, rows in ((0, size), (2, ALIASED // 8)):
        source, target = lying(integers((size, rows)), orders[0]), lying(integers((size, rows), seed=1), orders[1])
        of_rows = blocks if rows == size else Strided(0, 3, 7)
        wanted, place = target.copy(), np.ix_(at(blocks, True), at(of_rows, True))
        wanted[place] = source[np.ix_(at(blocks, False), at(of_rows, False))] + beta * wanted[place]
        copy_strided(library_named("numpy"), source, target, [blocks], [of_rows], beta)
        assert (target == wanted).all()


@looped(
    "shape",
    [(WRITTEN + 3, WRITTEN + 70), (2 * WRITTEN, 2 * WRITTEN), (2 * WRITTEN, ALIASED // 8 - 8), (33, 40), (1, 500)],
)
@looped("orders", ["CF", "FC"])
def test_transposed_pieces(shape, orders):
    source, target = lying(integers(shape), orders[0]), lying(np.zeros(shape), orders[1])
    everything = [Strided(0, 0, shape[0])], [Strided(0, 0, shape[1])]
    copy_strided(library_named("numpy"), source, target, *everything)
    assert (target == source).all()
    copy_strided(library_named("numpy"), source, target, *everything, 2)
    assert (target == 3 * source).all()


@looped("library, dtype", [("numpy", "float16"), ("torch", "float16"), ("torch", "bfloat16")])
def test_low_precision_with_beta_is_rounded_once(library, dtype):
    random = np.random.default_rng(1)
    source, target = (to_library(random.standard_normal((64, 64)).astype("float32"), library, dtype) for _ in range(2))
    wide = [to_numpy(array, library).astype("float32") for array in (source, target)]
    wanted = to_library(np.float32(0.1) * wide[1] + wide[0], library, dtype)
    everything = [Strided(0, 0, 64)]
    copy_strided(library_named(library), source, target, everything, everything, 0.1)
    assert (to_numpy(target, library) == to_numpy(wanted, library)).all()


@pytest.mark.parametrize("blocks", [[Strided(0, 0, 1024)], [Strided(0, 0, 32, 32, 32, 32)]])
def test_low_precision_with_beta_takes_little_memory(blocks):
    source, target = (np.ones((1024, 1024), "float16") for _ in range(2))
    tracemalloc.start()
    copy_strided(library_named("numpy"), source, target, blocks, blocks, 2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (target == 3).all() and peak < 2 * target.nbytes  # which a float32 copy of the whole array would exceed
