"""Calls of the library as Python gets them: device pointers, on the stand-in for a GPU, and requests. No compiler."""

import ctypes

import numpy as np
import pytest
from samples import to_library, to_numpy

from pmm3d.embedding.host import AT_ONCE, Host

N = 6
OUT = ctypes.addressof(ctypes.c_int())


class Calls:
    """Calls of a Host, with texts, numbers and descriptors in memory of the host."""

    def __init__(self, comm, library):
        self.host, self.library, self.kept = Host(), library, []
        self.comm, self.ranks = comm.py2f(), comm.size

    def __call__(self, name, *arguments):
        answer = self.host.call(name, [self.number(each) for each in arguments])
        assert answer.code == 0, answer.text
        return answer.results[0] if answer.results else None

    def number(self, argument):
        if isinstance(argument, int):
            return argument
        if isinstance(argument, str) and len(argument) == 1:
            return ord(argument)
        if isinstance(argument, str):
            made = ctypes.create_string_buffer(argument.encode())
        elif isinstance(argument, float):
            made = ctypes.c_double(argument)
        elif isinstance(argument, list):
            made = (ctypes.c_int64 * len(argument))(*argument)
        else:
            self.kept.append(argument)
            return argument.data.ptr if hasattr(argument, "__cuda_array_interface__") else argument.ctypes.data
        self.kept.append(made)
        return ctypes.addressof(made)

    def made(self, values):
        """An array by columns in the library's memory. It is shown transposed, by rows."""
        return to_library(np.ascontiguousarray(np.asarray(values, float).T), self.library)

    def shown(self, array):
        return to_numpy(array, self.library).T


@pytest.mark.parallel([2])
@pytest.mark.parametrize("library", ["numpy", "standin"])
def test_routines_and_plans_on_pointers_of_a_library(comm, library):
    """Whole numbers, so results are exact. The process grid is 2 x 1 ranks, with blocks of all columns."""
    calls = Calls(comm, library)
    context = calls("context", calls.comm, comm.size, 1, "R", OUT, 0)
    calls("library", context, library)
    rows = np.array_split(np.arange(N), comm.size)[comm.rank]
    values = np.add.outer(np.arange(N), 3 * np.arange(N)) % 7 - 3.0
    symmetric = values + values.T + 20 * np.eye(N)
    desc = [1, 0, N, N, N // comm.size, N, 0, 0, len(rows)]
    a, b, c = (calls.made(each[rows]) for each in (values, symmetric, np.full((N, N), np.nan)))

    def part(array):
        return array, 1, 1, desc, 0

    def call(name, *arguments, plan=AT_ONCE):
        return calls(name, 8, plan, context, "d", *arguments)

    call("pgemm", "N", "T", N, N, N, 2.0, 0, *part(a), *part(b), 0.0, 0, *part(c))
    assert np.array_equal(calls.shown(c), (2 * values @ symmetric.T)[rows])
    call("ptran", N, N, 1.0, 0, *part(a), 0.0, 0, *part(c))
    assert np.array_equal(calls.shown(c), values.T[rows])
    call("psyrk", "L", "N", N, N, 1.0, 0, *part(a), 1.0, 0, *part(c))
    expected = np.where(np.tri(N), values @ values.T, 0) + values.T
    assert np.array_equal(calls.shown(c), expected[rows])
    assert call("ppotrf", "L", N, *part(b), OUT) == 0
    factor = np.where(np.tri(N), np.linalg.cholesky(symmetric), symmetric)
    assert np.allclose(calls.shown(b), factor[rows], rtol=1e-13)

    product = call("plan_pgemm", "N", "N", N, N, N, 1.0, 0, *part(a), *part(a), 0.0, 0, *part(c), plan=OUT)
    request = calls("begin", product, OUT)
    calls("wait", request)
    assert np.array_equal(calls.shown(c), (values @ values)[rows])
    other = calls.made(np.zeros((len(rows), N)))
    calls("run_pgemm", product, 3.0, c, a, 0.0, other, 0, 0, 0, 0, 0)
    assert np.array_equal(calls.shown(other), (3 * values @ values @ values)[rows])
    calls("finalize", 1)


@pytest.mark.parallel([2])
@pytest.mark.parametrize("library", ["numpy", "standin"])
def test_matrices_of_a_grid_on_pointers_of_a_library(comm, library):
    calls = Calls(comm, library)
    grid = calls("grid", calls.comm, 1, 1, comm.size, OUT)
    calls("library", grid, library)
    values = np.add.outer(np.arange(N), 3 * np.arange(N)) % 7 - 3.0
    slabs = np.array_split(np.arange(N), comm.size)[comm.rank]
    mine = [values[slabs], values + 1, np.full((len(slabs), N), np.nan)]
    arrays = [calls.made(each) for each in mine]
    layouts = "z/", "/ ", "z/"
    a, b, c = (
        calls("matrix", grid, "d", N, N, layout, "F", array, 0, -1, -1, OUT) for layout, array in zip(layouts, arrays)
    )
    plan = calls("plan_matmul", "N", "N", 1.0, a, b, 0.0, c, 0, 0, OUT)
    calls("wait", calls("begin", plan, OUT))
    product = values @ (values + 1)
    assert np.array_equal(calls.shown(arrays[2]), product[slabs])
    bounds = [int(slabs[0]), int(slabs[-1]) + 1, 0, N]
    block = calls.made(values[slabs] * 2)
    calls("from_blocks", block, bounds, "F", a, 0, 0, AT_ONCE)
    calls("run", plan)
    assert np.array_equal(calls.shown(arrays[2]), 2 * product[slabs])
    move = calls("plan_redistribute", c, b, OUT)
    requests = [calls("begin", each, OUT) for each in (move,)]
    for name, number in (("run", [move]), ("free", [grid, OUT])):
        refused = calls.host.call(name, number)
        assert (refused.code, refused.everywhere) == (1, name == "free") and "has a request" in refused.text
    calls("wait", *requests)
    assert np.array_equal(calls.shown(arrays[1]), 2 * product)
    if library != "numpy":
        wrong = calls.host.call("library", [grid, calls.number("no library")])
        assert wrong.code == 1 and "there are numpy, torch, torch:DEVICE and cupy" in wrong.text
    calls("finalize", 1)
