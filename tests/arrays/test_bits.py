"""Masks as bits: one bit for each number, in every array library."""

import numpy as np
from loops import looped
from samples import LIBRARIES, to_library, to_numpy

from pmm3d.arrays import DryLibrary, DryRun, library_named
from pmm3d.arrays.bits import Bits


@looped("dtype", ["float32", "float64", "uint8", "float16"])
@looped("library", LIBRARIES)
def test_bits_say_which_numbers_are_positive(library, dtype):
    """Bit i of byte k is number 8 k + i. For sizes that 8 does not divide, and for several slices of a loop."""
    arrays, codec = library_named(library), Bits()
    for size in (0, 1, 7, 8, 9, 1000, 8 * 2**16 + 3):
        numbers = np.random.default_rng(size).integers(-1, 2, size).astype("float32")
        numbers = (numbers > 0 if dtype == "uint8" else numbers).astype(dtype)
        data = arrays.empty((codec.nbytes(size),), "uint8")
        codec.encode(arrays, to_library(numbers, library), data)
        assert np.array_equal(to_numpy(data, arrays), np.packbits(numbers > 0, bitorder="little"))
        out = to_library(np.full(size, 3, dtype), library)
        codec.decode(arrays, data, out)
        assert np.array_equal(to_numpy(out, arrays), (numbers > 0).astype(dtype))


def test_numbers_that_are_not_finite():
    arrays, codec, data = library_named("numpy"), Bits(), np.empty(1, "uint8")
    codec.encode(arrays, np.array([np.nan, np.inf, -np.inf, -0.0]), data)
    assert data.tolist() == [2]


def test_a_dry_run_records_the_passes():
    run = DryRun()
    arrays, codec = DryLibrary(run), Bits()
    numbers, data = arrays.empty((2**16,), "float32"), arrays.empty((2**13,), "uint8")
    codec.encode(arrays, numbers, data)
    codec.decode(arrays, data, numbers)
    assert [(each.operation, each.nbytes) for each in run.actions] == [("encode", 270336), ("decode", 270336)]
