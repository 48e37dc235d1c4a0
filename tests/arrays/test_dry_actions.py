"""Actions of arithmetic in a dry run: the form of each GEMM, and passes over memory with their bytes."""

import numpy as np
import pytest
from loops import looped

from pmm3d.arrays import DryLibrary, DryRun, Workspace
from pmm3d.arrays.dry_run import LEAST_PASS
from pmm3d.arrays.sums import add_up

ROWS, COLS = 64, 128
NBYTES = 4 * ROWS * COLS


@pytest.fixture
def library():
    return DryLibrary(DryRun())


def passes(library):
    """(operation, bytes) of each pass."""
    assert all(action.what == "pass" for action in library.run.actions)
    return [(action.operation, action.nbytes) for action in library.run.actions]


def array_of(library, rows=ROWS, cols=COLS, dtype="float32"):
    return library.temporary((rows, cols), dtype)


@looped("form", ["nn", "nt", "tn", "tt"])
def test_the_form_of_a_gemm_says_how_its_factors_lie(form):
    """A part of an array has the form of the array from which it is cut."""
    library = DryLibrary(DryRun())
    whole = array_of(library)
    assert all(part.transposed == "n" for part in (whole[:, 1:3], whole[:1], whole[:, ::2]))
    assert all(part.transposed == "t" for part in (whole[1:, :3].T, whole[:, :1].T))
    a = array_of(library, 5, 3) if form[0] == "n" else array_of(library, 3, 5).T
    b = array_of(library, 3, 4) if form[1] == "n" else array_of(library, 4, 3).T
    library.gemm(a, b, array_of(library, 5, 4), 1, 0, Workspace())
    assert (a @ b).shape == (5, 4)
    assert [(each.m, each.n, each.k, each.form) for each in library.run.actions] == [(5, 4, 3, form)] * 2
    assert str(library.run.actions[0]) == "gemm 5 x 4 x 3 float32" + (f" {form}" if form != "nn" else "")


EXPRESSIONS = {
    "a + 1": ("add", 2), "1 - a": ("subtract", 2), "a * b": ("multiply", 3), "a * a": ("multiply", 2),
    "a / b": ("divide", 3), "-a": ("negative", 2),
    "xp.exp(a)": ("exp", 2), "np.maximum(a, b)": ("maximum", 3), "xp.multiply(a, 2, out=b)": ("multiply", 2),
    "a.copy()": ("copy", 2), "library.copy(a)": ("copy", 2), "a.T.reshape(-1)": ("copy", 2),
    "xp.stack([a, b])": ("copy", 4), "a.sum(axis=0)": ("sum", 1 + 1 / ROWS),
    "a.astype('float64')": ("cast", 3), "library.astype(a, 'bfloat16')": ("cast", 1.5), "a[rows]": ("take", 2),
    "a.__setitem__(..., b)": ("copy", 2), "a.__setitem__(..., 0)": ("fill", 1), "a.__setitem__((rows, rows), 0)": None,
    "a.__setitem__(rows, b)": ("put", 2), "a.__iadd__(b)": ("add", 3), "a.__imul__(2)": ("multiply", 2),
    "library.square_sum(a)": ("norm", 1), "library.conjugate_in_place(a)": ("conj", 2), "a[1:].T": None,
    "a.__setitem__(slice(None), a)": None, "xp.empty((64, 128))": None,
}  # fmt: skip


@looped("expression", EXPRESSIONS)
def test_arithmetic_is_a_pass_over_what_it_reads_and_writes(expression):
    library = DryLibrary(DryRun())
    a, b, rows = array_of(library), array_of(library), np.arange(ROWS)
    eval(expression, {"a": a, "b": b, "xp": library.xp, "np": np, "library": library, "rows": rows})
    name, times = EXPRESSIONS[expression] or ("", 0)
    assert passes(library) == [(name, NBYTES * times)] * bool(times)


def test_what_is_changed_in_place_is_not_copied_to_itself(library):
    array = array_of(library)
    array[...] *= 2
    array[3:] += 1
    assert passes(library) == [("multiply", 2 * NBYTES), ("add", 2 * (NBYTES - 3 * 4 * COLS))]


def test_passes_in_a_context_are_one_of_its_name(library):
    a, small = array_of(library), array_of(library, 1, 2)
    with library.run.passing("norm of rows"):
        sums = (a * a).sum(axis=1)
        with library.run.passing("inner"):
            a[...] = 0
        a[...] = sums[:, None]
    with library.run.passing("norm of rows"):
        small + small
    with library.run.passing("nothing"):
        pass
    assert passes(library) == [("norm of rows", 4 * NBYTES + 8 * ROWS), ("inner", NBYTES), ("norm of rows", 16)]
    assert str(library.run.actions[1]) == f"inner: reads and writes {NBYTES:,} bytes"


def test_small_ones_without_a_name_are_left_out_and_equal_ones_are_one(library):
    large, small = array_of(library), library.temporary((LEAST_PASS // 4 - 1,), "uint8")
    small + small
    large + large
    large[...] = 0
    large[...] = 1
    small[...] = 1
    assert passes(library) == [("add", 2 * NBYTES), ("fill", 2 * NBYTES)]


def test_sums_beside_a_collective_and_widened_factors_are_passes(library):
    a, b, c = (array_of(library, 64, 64, "float16") for _ in range(3))
    add_up(library, [a, b], c, beta=2)
    library.gemm(a, b, c, 1, 0, Workspace())
    half = 2 * 64 * 64
    assert [(each.operation, each.nbytes) for each in library.run.actions] == [
        ("add", 4 * half),
        ("cast", 6 * half),
        ("", 0),
        ("cast", 3 * half),
    ]
    assert library.run.actions[2].dtype == "float32"
