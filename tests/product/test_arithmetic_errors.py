"""Errors of arithmetic of matrices, on every rank. No matrix is changed by then."""

import numpy as np
import pytest
from samples import to_library
from test_arithmetic import assert_is, made

from pmm3d import (
    DisagreementError,
    DistMatrix,
    DTypeError,
    Grid,
    GridError,
    Layout,
    LayoutError,
    Pmm3dError,
    matmul,
    nn,
)

pytestmark = pytest.mark.parallel([2], thorough=[1, 4, 6])


@pytest.mark.numpy_only("its functions are numpy's")
def test_what_elementwise_refuses(some_grid, all_fail):
    a, _ = made(some_grid, (6, 5))
    single, last = DistMatrix.empty(some_grid, (6, 5), dtype="float32"), some_grid.rank == some_grid.size - 1
    other = DistMatrix.empty(some_grid, (6, 5), layout=Layout())
    refused = lambda kind, text, *given, **options: (kind, text, lambda: a.elementwise(*given, **options))
    all_fail(
        refused(LayoutError, r"the function makes the shape \(\) of", np.sum),
        refused(LayoutError, "the function makes the shape .* it must keep it", lambda x: x.T[:0]),
        refused(DTypeError, "bool", lambda x: x > 0),
        refused(DTypeError, "list is none of", lambda x: [1]),
        refused(DTypeError, "the function makes float64, and out is float32", np.exp, out=single),
        refused(LayoutError, "elementwise: out is", np.exp, out=DistMatrix.empty(some_grid, (5, 6))),
        refused(Pmm3dError, "out is a ndarray", np.exp, out=np.ones((6, 5))),
        refused(Pmm3dError, "is no function", "exp"),
        refused(Pmm3dError, "B is a int; it must be a DistMatrix", np.add, 1),
        refused(LayoutError, "B is 5 x 6; it must be 6 x 5", np.add, a.T),
        refused(Exception, "division by zero", lambda x: x.copy() if not last else 1 / 0),
    )
    if some_grid.size > 1:
        all_fail(
            refused(LayoutError, "elementwise: out is", np.exp, out=other),
            refused(DisagreementError, "different", lambda x: x.astype("float32" if last else "float64")),
        )


def test_what_sums_and_multiples_refuse(some_grid, all_fail):
    a, whole = made(some_grid, (6, 5))
    square, single = DistMatrix.identity(some_grid, 4), DistMatrix.empty(some_grid, (6, 5), dtype="float32")
    view = made(some_grid, (6, 5), dtype="complex64")[0].H
    all_fail(
        (LayoutError, "add: B is 4 x 4; it must be 6 x 5", lambda: a + square),
        (DTypeError, "subtract: the matrix is float64 of .*, B float32", lambda: a - single),
        (DTypeError, "inner: the matrix is float64", lambda: a.inner(single)),
        (Pmm3dError, r"add: 3 is no matrix.*add_identity.*elementwise", lambda: a + 3),
        (Pmm3dError, "add: 3.5 is no matrix", lambda: 3.5 + a),
        (Pmm3dError, "subtract: 1 is no matrix", lambda: 1 - a),
        (Pmm3dError, "add: B is a ndarray; it must be a DistMatrix", lambda: a + whole),
        (Pmm3dError, "add: B is a ndarray; it must be a DistMatrix", lambda: whole + a),
        (Pmm3dError, "add: B is a NoneType", lambda: a + None),
        (Pmm3dError, "multiply: of two matrices .*numpy.multiply.* a @ b", lambda: a * a),
        (Pmm3dError, "divide: of two matrices", lambda: a / a),
        (TypeError, "", lambda: 2 / a),
        (DTypeError, "multiply: the factor is 1j, which cannot scale a float64", lambda: 1j * a),
        (DTypeError, "scale: the factor is True", lambda: a.scale(True)),
        (DTypeError, "scale: the factor is 'x'", lambda: a.scale("x")),
        (DTypeError, "multiply: the factor is array", lambda: a * whole),
        (DTypeError, "add: alpha is 2j", lambda: a.add(a, alpha=2j)),
        (DTypeError, "add_identity: the factor is 1j", lambda: square.add_identity(1j)),
        (LayoutError, "add_identity: the matrix is 6 x 5; it must be square", lambda: a.add_identity(1)),
        (LayoutError, "trace: the matrix is 6 x 5", a.trace),
        (LayoutError, r"a conjugated view \(.H\), which is not written to", lambda: view.scale(2)),
        (LayoutError, r"a conjugated view \(.H\), which is not written to", lambda: view.add(view)),
        (LayoutError, r"a conjugated view \(.H\), which is not written to", lambda: view.__iadd__(view)),
    )
    assert_is(a, whole)


@pytest.mark.numpy_only("tensors are not frozen")
def test_frozen_arrays_are_not_written(some_grid, all_fail):
    a, whole = made(some_grid, (6, 5))
    a.local.flags.writeable = False
    assert_is(2 * a, 2 * whole)
    all_fail(*((LayoutError, "the matrix is read-only", call) for call in (lambda: a.scale(2), lambda: a.add(a))))


def test_labels_have_no_arithmetic(some_grid, all_fail):
    a = DistMatrix.from_global(some_grid, to_library(np.arange(12).reshape(4, 3), dtype="int64"))
    square = DistMatrix.from_global(some_grid, to_library(np.arange(9).reshape(3, 3), dtype="int64"))
    network = nn.MLP(some_grid, [3, 3])
    calls = {
        "add": lambda: a + a,
        "subtract": lambda: a - a,
        "scale": lambda: a.scale(2),
        "multiply": lambda: 2 * a,
        "norm": a.norm,
        "inner": lambda: a.inner(a),
        "diagonal": a.diagonal,
        "trace": square.trace,
        "elementwise": lambda: a.elementwise(np.square),
        "add_identity": lambda: square.add_identity(1),
    }
    all_fail(
        *((DTypeError, f"{name}: the matrix is int64, which holds labels", calls[name]) for name in calls),
        (DTypeError, "A and B are int64, which holds labels", lambda: matmul(square, square)),
        (DTypeError, "convert them to one type", lambda: square @ DistMatrix.random(some_grid, (3, 3))),
        (DTypeError, "int64", lambda: network(square)),
    )


def test_matrices_of_two_grids(comm, some_grid, all_fail):
    a, whole = made(some_grid, (6, 6))
    with Grid(comm, (1, some_grid.size, 1)) as other:
        b, _ = made(other, (6, 6))
        calls = lambda: a + b, lambda: a.inner(b), lambda: a.elementwise(np.add, b)
        all_fail(*((GridError, r"B.redistribute\(layout, grid\)", call) for call in calls))
        assert_is(a + b.redistribute(Layout.A, some_grid), 2 * whole)


@pytest.mark.parallel([2])
def test_what_ranks_do_not_agree_on_changes_nothing(some_grid, all_fail):
    (a, whole), rank = made(some_grid, (6, 6)), some_grid.rank
    all_fail(
        (DisagreementError, "scale: the ranks passed different", lambda: a.scale(rank)),
        (DisagreementError, "add: the ranks passed different", lambda: a.add(a, rank)),
        (DisagreementError, "add: the ranks passed different", lambda: a + (a if rank else 1)),
        (DisagreementError, "multiply: the ranks passed different", lambda: a * (a if rank else 2)),
    )
    assert_is(a, whole)
