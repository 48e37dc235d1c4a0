"""pmm3d.arrays.random: an element depends only on the seed and its global place."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loops import looped
from samples import to_library, to_numpy

from pmm3d import Pmm3dError
from pmm3d.arrays import NumpyLibrary, library_named, random
from pmm3d.layout import EMPTY, Box

SHAPE = 40, 33


def filled(box=Box(0, *SHAPE[:1], 0, SHAPE[1]), dtype="float64", seed=0, distribution="uniform", columns=SHAPE[1]):
    out = np.full(box.shape, 99, dtype)
    random.fill(out, box, columns, seed, distribution)
    return out


@given(*[st.integers(0, 40)] * 2, *[st.integers(0, 33)] * 2, st.sampled_from(["float16", "float64", "complex64"]))
def test_a_block_is_cut_out_of_the_whole(r0, r1, c0, c1, dtype):
    box = Box(min(r0, r1), max(r0, r1), min(c0, c1), max(c0, c1))
    for distribution in random.DISTRIBUTIONS:
        whole = filled(dtype=dtype, distribution=distribution)
        assert np.array_equal(filled(box, dtype, distribution=distribution), whole[box.within(EMPTY)])


def test_large_blocks_are_filled_in_pieces():
    columns = 3 * library_named("numpy").slice_elements + 1
    whole = filled(Box(0, 10, 0, columns), columns=columns)
    assert np.array_equal(filled(Box(5, 9, 0, columns), columns=columns), whole[5:9])


def test_elements_far_out_are_drawn_too():
    far = filled(Box(2**40, 2**40 + 50, 2**33, 2**33 + 50), columns=2**34)
    assert len(np.unique(far)) == far.size and np.all(np.abs(far) < 1)


@looped("seed", [0, 1, -1, 2**64 - 2, 2**70, np.int64(7), np.uint8(7)])
def test_any_integer_is_a_seed(seed):
    assert np.array_equal(filled(seed=seed), filled(seed=seed))
    assert not np.any(filled(seed=seed) == filled(seed=12345))


def test_streams_and_seeds_do_not_repeat_each_other():
    index = np.arange(10000, dtype=np.uint64)
    drawn = np.concatenate([random.bits(index, seed, stream) for seed in range(4) for stream in range(4)])
    assert len(np.unique(drawn)) == drawn.size
    ones = np.unpackbits(drawn.view(np.uint8)).mean()
    assert abs(ones - 0.5) < 0.001


def test_rows_are_not_shifted_copies_of_each_other():
    whole = filled(Box(0, 100, 0, 100), columns=100)
    for shift in range(1, 5):
        assert abs(np.corrcoef(whole[:-1, shift:].ravel(), whole[1:, :-shift].ravel())[0, 1]) < 0.05


def test_unknown_distributions_are_named():
    with pytest.raises(Pmm3dError, match="unknown distribution 'gauss'; there are uniform, normal, integers"):
        filled(distribution="gauss")


@pytest.mark.parametrize("library", ["torch", "standin"])
def test_bits_are_the_same_in_every_library(library):
    """torch has no unsigned arithmetic, so half of the indices, bits and limits are negative there."""
    face = library_named(library)
    for start in (0, 2**40, 2**63 - 51):
        index = np.arange(start, start + 100, dtype=np.uint64)
        words = face.words(start, start + 50)
        found = random.bits(words, seed=2**64 - 3, stream=5)
        assert np.array_equal(to_numpy(found, library).view(np.uint64), random.bits(index[:50], 2**64 - 3, 5))


@pytest.mark.parametrize("library", ["torch", "standin"])
def test_a_device_draws_what_the_host_draws(library, monkeypatch):
    monkeypatch.setattr(NumpyLibrary, "slice_elements", 100)
    monkeypatch.setattr(random, "DEVICE_ELEMENTS", 100)
    box, columns = Box(2**33, 2**33 + 40, 5, 38), 2**20
    for dtype in ("float16", "float32", "float64", "complex64"):
        for distribution in random.DISTRIBUTIONS:
            host, there = np.empty(box.shape, dtype), to_library(np.empty(box.shape, dtype), library)
            random.fill(host, box, columns, 3, distribution)
            random.fill(there, box, columns, 3, distribution)
            close = 1e-3 if dtype == "float16" else 1e-6
            assert np.allclose(to_numpy(there, library), host, 0, close if distribution == "normal" else 0)


def test_random_matrices_of_a_device_are_made_there(monkeypatch):
    monkeypatch.setattr(random, "NumpyLibrary", None)
    made = random.drawn(library_named("standin"), Box(0, 4, 0, 5), "float32", 5, 1, "uniform")
    assert np.array_equal(to_numpy(made, "standin"), filled(Box(0, 4, 0, 5), "float32", 1, columns=5))
