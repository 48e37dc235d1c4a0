"""Sums in fewer bytes: nothing is lost, bytes by formula, exact limits, numbers that are not finite."""

from functools import partial
from math import ceil, prod

import numpy as np
import pytest
from loops import looped
from samples import TESTED, to_library, to_numpy

from pmm3d import Pmm3dError
from pmm3d.arrays import library_named
from pmm3d.arrays.codecs import codec_named
from pmm3d.comm import Feedback, Grid, sum_compressed, sum_named
from pmm3d.comm.compressed_sum import _take_largest
from pmm3d.layout import part_sizes

NAMES = ("bfloat16", "int8:3", "powersgd:1", "topk:0.1", "topk:1")
pytestmark = pytest.mark.deadline(240)
SHAPES = [(9, 13), (1, 1), (1, 7), (40, 11), (3, 2), (257, 3)]
"""Sizes that no number of ranks, and no block, divides (DeepSpeed 4386)."""


def numbers(rank, call, dtype="float64", shapes=SHAPES):
    random = np.random.default_rng([rank, call])
    return [random.standard_normal(shape).astype(dtype) for shape in shapes]


def feedback_for(method, shapes, dtype, library):
    made = list[Feedback | None]()
    for shape in shapes:
        made.append(Feedback(library.empty((prod(shape),), dtype)) if method.compresses(shape) else None)
    return made


def summed(grid, name, arrays, feedback, kind="all", outs=None, beta=0, **options):
    """Sum arrays of numpy. Returns (this rank's results as numpy arrays, received bytes)."""
    library, axis = library_named(TESTED), grid.everyone
    given = [to_library(each, TESTED) for each in arrays]
    counts = None
    if kind != "all":
        counts = [[rows * each.shape[1] for rows in part_sizes(each.shape[0], axis.size)] for each in arrays]
    steps = partial(sum_compressed, library=library, method=sum_named(name), arrays=given, feedback=feedback)
    begun = axis.begin("sum", partial(steps, counts=counts, outs=outs, beta=beta, **options), library=library)
    begun.wait()
    if outs is not None:
        return [to_numpy(each, library) for each in outs], begun.record.received
    results = [to_numpy(each, library) for each in given]
    if counts is not None:
        rows = [part_sizes(each.shape[0], axis.size) for each in arrays]
        results = [
            each[sum(part[: axis.index]) : sum(part[: axis.index + 1])].copy() for each, part in zip(results, rows)
        ]
    return results, begun.record.received


def whole(parts, kind):
    """The results on all ranks: parts are put together, and whole arrays must be bitwise equal."""
    if kind != "all":
        return [np.concatenate(each) for each in zip(*parts)]
    assert all(one.tobytes() == other.tobytes() for own in parts for one, other in zip(own, parts[0]))
    return parts[0]


@pytest.mark.parallel([2, 4])
@looped("kind", ["all", "scatter", "accumulate"])
@looped("name", NAMES)
def test_what_was_summed_and_what_is_left_add_up(comm, name, kind):
    """To 1e-12 in float64: with reduce-scatters, with sums that are added to earlier ones (ZeRO-2), and if the scale of
    the loss changes."""
    with Grid(comm) as grid:
        library, method = library_named(TESTED), sum_named(name)
        feedback = feedback_for(method, SHAPES, "float64", library)
        parts = [(part_sizes(rows, grid.size)[grid.rank], cols) for rows, cols in SHAPES]
        outs = [to_library(np.zeros(part), TESTED) for part in parts] if kind == "accumulate" else None
        total, plain, seen = [0.0] * len(SHAPES), [0.0] * len(SHAPES), set()
        for call in range(3):
            arrays = numbers(grid.rank, call)
            scale = 4.0**-call if outs is None else 1.0
            scaled = [scale * each for each in arrays]
            results, _ = summed(
                grid, name, scaled, feedback, kind, outs, int(call > 0 and outs is not None), scale=scale
            )
            results = [each / scale for each in results]
            everyone = comm.allgather((results, arrays))
            now = whole([own for own, _ in everyone], kind)
            total = now if outs is not None else [one + other for one, other in zip(total, now)]
            plain = [one + sum(other) for one, other in zip(plain, zip(*(given for _, given in everyone)))]
            seen.add(b"".join(each.tobytes() for each in now))
        assert len(seen) == 3
        own = [0 if each is None else to_numpy(each.error, library) / each.scale for each in feedback]
        left = [np.sum(each, 0) for each in zip(*comm.allgather(own))]
        for index, (each, shape) in enumerate(zip(left, SHAPES)):
            assert (
                np.abs(total[index] + np.reshape(np.broadcast_to(each, prod(shape)), shape) - plain[index]).max()
                < 1e-12
            )
        largest = max(np.abs(each).max() for each in left)
        assert (largest > 1e-4) == (name != "topk:1"), "some numbers were rounded, or left out"


@pytest.mark.parallel([2, 4])
def test_bytes_are_those_of_the_formulas(comm):
    """Also for reduce-scatters, and in sizes that do not divide."""
    with Grid(comm) as grid:
        library, size, own = library_named(TESTED), grid.size, grid.rank
        for name in ("bfloat16", "int8", "int8:5"):
            codec, arrays = codec_named(name), numbers(own, 0, "float32")
            parts = [part_sizes(each.size, size) for each in arrays]
            coded = [sum(codec.nbytes(each[rank]) for each in parts) for rank in range(size)]
            _, received = summed(grid, name, arrays, feedback_for(sum_named(name), SHAPES, "float32", library))
            assert received == (size - 1) * coded[own] + sum(coded) - coded[own]
            rows = [part_sizes(shape[0], size)[own] * shape[1] for shape in SHAPES]
            feedback = feedback_for(sum_named(name), SHAPES, "float32", library)
            _, received = summed(grid, name, arrays, feedback, "scatter")
            assert received == (size - 1) * sum(map(codec.nbytes, rows))
        big, itemsize = [(512, 256)], 4
        for name, formula in (
            ("int8", 2 * (size - 1) * 512 * 256 * (1 + 4 / 256) / size),
            ("bfloat16", 2 * (size - 1) * 512 * 256 * 2 / size),
            ("topk:0.01", (size - 1) * 8 * ceil(0.01 * 512 * 256)),
            ("powersgd:32", 2 * (size - 1) * itemsize * 32 * (512 + 256) / size),
        ):
            feedback = feedback_for(sum_named(name), big, "float32", library)
            _, received = summed(grid, name, numbers(own, 0, "float32", big), feedback)
            assert received == formula, name


@pytest.mark.parallel([4])
def test_the_limits_are_plain_sums(comm):
    """All numbers, or as many columns as the matrix has rank: the errors of the ranks add up to 0. A rank that saves no
    bytes: bitwise."""
    with Grid(comm) as grid:
        library, plain = library_named(TESTED), lambda arrays: [sum(each) for each in zip(*comm.allgather(arrays))]
        arrays = numbers(grid.rank, 5)
        results, _ = summed(grid, "topk:1", arrays, feedback_for(sum_named("topk:1"), SHAPES, "float64", library))
        assert all(np.abs(one - other).max() < 1e-12 for one, other in zip(results, plain(arrays)))
        random, method = np.random.default_rng(grid.rank), sum_named("powersgd:4")
        right = np.random.default_rng(9).standard_normal((4, 30))
        feedback = feedback_for(method, [(50, 30)], "float64", library)
        for rank in (4, 1, 3):  # with a matrix of a lower rank in between
            matrix = random.standard_normal((50, rank)) @ right[:rank]
            results, _ = summed(grid, "powersgd:4", [matrix], feedback)
            assert np.abs(results[0] - plain([matrix])[0]).max() < 1e-10
            left = sum(comm.allgather(to_numpy(feedback[0].error, library)))
            assert np.abs(left).max() < 1e-10
        square = random.standard_normal((12, 12))
        assert not sum_named("powersgd:6").compresses((12, 12)) and sum_named("powersgd:5").compresses((12, 12))
        results, _ = summed(grid, "powersgd:12", [square], [None])
        usual = grid.everyone.all_reduce(to_library(square, TESTED)).wait()
        assert results[0].tobytes() == to_numpy(usual, library).tobytes()


@pytest.mark.parallel([2])
@looped("value", [np.inf, np.nan])
@looped("name", ["bfloat16", "int8", "powersgd:1", "topk:0.1"])
def test_a_number_that_is_not_finite_is_seen_by_all_and_forgotten(comm, name, value):
    """DeepSpeed 4886, 6926: the step is skipped on all ranks, and later sums are finite."""
    with Grid(comm) as grid:
        library = library_named(TESTED)
        feedback = feedback_for(sum_named(name), [(40, 11)], "float32", library)
        for call in range(4):
            arrays = numbers(grid.rank, call, "float32", [(40, 11)])
            if call == 1 and grid.rank == 1:
                arrays[0][3, 4] = value
            results, _ = summed(grid, name, arrays, feedback)
            assert np.isfinite(results[0]).all() == (call != 1)
        assert np.isfinite(to_numpy(feedback[0].error, library)).all()


def test_the_largest_numbers_are_a_contraction():
    """|x - C(x)|^2 <= (1 - k/n) |x|^2, also for equal numbers."""
    library = library_named(TESTED)
    for size, share in ((1, 0.5), (7, 0.01), (1000, 0.01), (1000, 0.37), (5, 1.0)):
        for x in (np.random.default_rng(size).standard_normal(size), np.ones(size)):
            number = ceil(share * size)
            error = to_library(x.copy(), TESTED)
            values, positions = library.empty((number,), "float64"), library.empty((number,), "int32")
            _take_largest(library, error, values, positions)
            left = to_numpy(error, library)
            assert (left**2).sum() <= (1 - number / size) * (x**2).sum() + 1e-12
            sent = np.zeros(size)
            sent[to_numpy(positions, library)] = to_numpy(values, library)
            assert (sent + left == x).all()


@pytest.mark.parametrize("name", ["", "int4", "int8:0", "powersgd", "powersgd:0", "topk:0", "topk:1.5", "bfloat16:2"])
def test_unknown_methods_are_refused(name):
    with pytest.raises(Pmm3dError, match='gradients are compressed by "bfloat16"'):
        sum_named(name)
