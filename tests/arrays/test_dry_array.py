"""Arrays of a dry run have the shapes, types and strides of numpy arrays."""

import numpy as np
import pytest
from array_api_compat import array_namespace
from loops import looped
from scipy import special

from pmm3d import Pmm3dError
from pmm3d.arrays import DryLibrary, DryRun, NumpyLibrary, library_of

EXPRESSIONS = [
    "a[2]",
    "a[1:3, ::2]",
    "a[-1, 2]",
    "a[None, :, 1]",
    "a[..., None]",
    "a.T[1:]",
    "a[1:1]",
    "a[np.int64(2), 1:]",
    "a[i]",
    "a[i, i]",
    "a[:, i]",
    "a[i, 1:3]",
    "a[1, i]",
    "a[None, i]",
    "a[[0, 3]]",
    "a.reshape(-1)",
    "a.reshape((5, 4))",
    "a.T.reshape(2, 10)",
    "a[:, 1:3].reshape(-1, 1)",
    "a + 1",
    "2.5 * a",
    "a - a[:1]",
    "a[:, :1] / a",
    "-a",
    "abs(a)",
    "a ** 2",
    "a > 0",
    "(a >= a).sum()",
    "a.sum(axis=1)",
    "a.sum(axis=(0, 1), keepdims=True)",
    "a.max(axis=-1)",
    "a.mean()",
    "a.any(axis=0)",
    "(a == 1).all()",
    "a.clip(0)",
    "a.clip(0, 1)",
    "a.astype('float16')",
    "a.astype(np.int64)",
    "np.float64(2) * a",
    "np.exp(a)",
    "np.add(a, a[0])",
    "special.erf(a)",
    "xp.sqrt(a)",
    "xp.maximum(a, 0 * a)",
    "xp.stack([a, a])",
    "xp.stack([a[0], a[1]], axis=1)",
    "xp.concat([a, a], axis=1)",
    "xp.sum(a, axis=0, keepdims=True)",
    "xp.max(a)",
    "xp.zeros((2, 3), dtype=xp.float32)",
    "xp.zeros_like(a)",
    "xp.isfinite(a)",
    "xp.where(a > 0, a, a[0])",
    "a.T @ a",
    "next(iter(a))",
    "a + a.astype('float64')",
    "a // 2",
    "~(a > 0)",
    "(a > 0) & (a < 2)",
    "np.matmul(a, a.T)",
    "np.zeros_like(a)",
    "np.where(a > 0, a, 0 * a)",
    "np.concatenate([a, a])",
    "np.sum(a, 0)",
    "np.round(a)",
]


def pair():
    library = DryLibrary(DryRun())
    return library.empty((4, 5), "float32"), np.ones((4, 5), "float32")


@looped("expression", EXPRESSIONS)
def test_shape_and_type_are_numpys(expression):
    dry, real = (
        eval(expression, {"a": a, "np": np, "special": special, "i": np.array([0, 2, 1]), "xp": array_namespace(a)})
        for a in pair()
    )
    assert (dry.shape, dry.dtype, dry.ndim, dry.size) == (real.shape, real.dtype.name, real.ndim, real.size)
    assert library_of(dry).dtype(dry) == real.dtype.name and dry.nbytes == real.nbytes


def test_what_dry_arrays_do_not_have_is_an_error():
    array, _ = pair()
    with pytest.raises(Pmm3dError, match="have no 'einsum'"):
        np.einsum("ij->i", array)
    with pytest.raises(AttributeError, match="have no 'arange'"):
        array_namespace(array).arange(3)


def test_places_in_memory_are_numpys():
    """Gaps determine what is packed, and therefore the work memory."""
    (dry, real), numpy = pair(), NumpyLibrary()
    library = dry.library
    for part in (lambda a: a, lambda a: a.T, lambda a: a[:, 1:], lambda a: a[1:], lambda a: a[:, 2:3], lambda a: a[:0]):
        assert library.strides(part(dry)) == numpy.strides(part(real))
        assert library.is_contiguous(part(dry)) == numpy.is_contiguous(part(real))
        for other in (lambda a: a[:1], lambda a: a[2:, 3:]):
            assert library.share_memory(part(dry), other(dry)) == numpy.share_memory(part(real), other(real))
    assert library.address(dry[1:]) - library.address(dry) == 20
    assert library.as_input(dry) is dry and library.is_contiguous(library.as_input(dry.T))
    assert not library.share_memory(dry, library.copy(dry))


def test_numbers_that_are_asked_for():
    array = whole = pair()[0]
    array += 1
    array *= array
    array[0, 1:] = 5
    assert array is whole
    library = array.library
    assert float(array.sum()) == array[0, 0].item() == 1 and int((array > 0).sum()) == 0
    host = library.to_numpy(array)
    assert host.tolist() == np.ones((4, 5)).tolist() and host.strides == (0, 0) and not host.flags.writeable
    assert library.to_numpy(library.from_numpy(np.ones(3), "bfloat16")).dtype == "float32"


def test_low_precision_widens():
    library = DryLibrary(DryRun(), "torch")
    low, high = library.empty((2,), "bfloat16"), library.empty((2,), "float32")
    assert (low * 2).dtype == "bfloat16" and (low * high).dtype == "float32" and low.nbytes == 4
    assert (low + (high > 0)).dtype == "bfloat16" and (low + high.astype("float16")).dtype == "float32"
