"""Codecs: bytes, errors, numbers that are not finite, and equal bits in every library."""

import importlib.util

import numpy as np
import pytest

from pmm3d import Grid, nn
from pmm3d.arrays import library_named
from pmm3d.arrays.codecs import codec_named
from pmm3d.errors import Pmm3dError

CODECS = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "int8": 1 / 254, "int8:7": 1 / 254}
"""Name -> largest error, relative to the number, or to the largest magnitude for int8."""


def decoded(name, numbers, library="numpy"):
    codec, library = codec_named(name), library_named(library)
    flat, data = library.from_numpy(numbers.copy(), "float32"), library.empty((codec.nbytes(len(numbers)),), "uint8")
    data[...] = 0
    codec.encode(library, flat, data)
    codec.decode(library, data, flat)
    return library.to_numpy(flat).copy(), library.to_numpy(data).copy()


@pytest.mark.parametrize("size", [0, 1, 6, 255, 257, 70_000])
@pytest.mark.parametrize("name", CODECS)
def test_codecs_keep_their_error(name, size):
    """Any size (DeepSpeed 4386). A second time, nothing changes."""
    numbers = np.random.default_rng(size).normal(size=size).astype("float32")
    found, data = decoded(name, numbers)
    scale = np.abs(numbers) if name in ("bfloat16", "float16") else np.full(size, np.abs(numbers).max(initial=0))
    assert (np.abs(found - numbers) <= CODECS[name] * scale + 1e-7).all()
    again, same = decoded(name, found)
    assert np.array_equal(again, found) and np.array_equal(same, data)
    block = codec_named(name).block
    assert len(data) == -(-(size + 4 * -(-size // block) if block else 2 * size) // 4) * 4


@pytest.mark.parametrize("name", CODECS)
def test_codecs_of_torch_give_the_same_bits(name):
    pytest.importorskip("torch")
    numbers = np.random.default_rng(1).normal(size=1001).astype("float32") * np.float32(1e-3)
    for one, other in zip(decoded(name, numbers), decoded(name, numbers, "torch")):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("name", CODECS)
def test_numbers_that_are_not_finite_stay_so(name, bad):
    """An overflow is seen after the codec (DeepSpeed 4886, 6926)."""
    numbers = np.ones(600, "float32")
    numbers[300] = bad
    found, _ = decoded(name, numbers)
    assert not np.isfinite(found[300]) and np.isfinite(found[:250]).all()
    assert name == "int8" or np.isfinite(found[-200:]).all()


def test_zeros_and_the_largest_number_are_exact():
    numbers = np.zeros(512, "float32")
    numbers[300:] = np.linspace(-3, 2.5, 212)
    found, _ = decoded("int8", numbers)
    assert not found[:256].any() and found.min() == np.float32(-3)


def test_a_tiny_number_is_0_or_has_its_sign():
    """Scales below 2^-126 are 0: codes of less exact scales would not fit 8 bits. In every library."""
    for library in ("numpy", *(["torch"] if importlib.util.find_spec("torch") else [])):
        for size in (1e-45, 2e-43, 1e-41, 1e-38, 1.4e-36, 1.5e-36, 1e-35):
            numbers = np.array([size, -size, size / 3], "float32")
            found, _ = decoded("int8", numbers, library)
            assert np.abs(found - numbers).max() <= (numbers[0] / 254 * 1.001 if size >= 1.5e-36 else numbers[0])
            assert (found * np.sign(numbers) >= 0).all()


def test_numbers_are_encoded_if_they_take_fewer_bytes():
    codecs = "bfloat16", "float16", "int8", "int8:2", "int8:1"
    for dtype, number in (("float64", 5), ("float32", 4), ("float16", 1), ("bfloat16", 1)):
        kept = [nn.Compression(stages=name).codec_of("stages", dtype) for name in codecs]
        assert sum(each is not None for each in kept) == number


@pytest.mark.parametrize("name", ["", "int4", "int8:0", "int8:x", "float16:2"])
def test_unknown_codecs_are_refused(name):
    with pytest.raises(Pmm3dError, match="int8"):
        codec_named(name)


def test_dry_arrays_are_encoded_in_one_pass():
    with Grid.dry((1, 1, 1)) as grid:
        library, codec = grid.library("numpy"), codec_named("int8")
        numbers, data = library.empty((10_000,), "float32"), library.empty((codec.nbytes(10_000),), "uint8")
        grid.dry_run.actions.clear()
        codec.encode(library, numbers, data)
        codec.decode(library, data, numbers)
        assert [(each.operation, each.nbytes) for each in grid.dry_run.actions] == [
            (name, numbers.nbytes + data.nbytes) for name in ("encode", "decode")
        ]
