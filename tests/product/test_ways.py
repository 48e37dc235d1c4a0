"""The ways to compute a product: by plans, decomposed, and with operands in shared memory. All have the values of
matmul for all forms of operands, results and options."""

import pytest
from loops import given, looped
from products import each_shape
from samples import operands, shared

from pmm3d import DistMatrix, Layout, MatmulPlan, matmul

WAYS = {
    "plan": {},
    "decomposed": {"overlap": "decomposed"},
    "plan, decomposed": {"overlap": "decomposed"},
    "shared": {},
    "one shared": {},
}
FORMS = {"transposed": lambda x: x.T, "conjugated": lambda x: x.H}
OPTIONS = {"panels": {"panels": 3}, "beta": {"beta": 3}, "max_workspace": {"max_workspace": 30_000}}
CASES = "as they are", *FORMS, "out transposed", "redistributed", *OPTIONS


def assert_is_matmul(grid, way, case, dtype="complex128", library="numpy"):
    of = {"dtype": dtype, "library": library, "distribution": "integers"}
    layouts = (Layout.B, Layout.C) if case == "redistributed" else (Layout.A, Layout.B)
    a, b = operands(grid, (23, 17, 40), layouts=layouts, **of)
    one, other = shared(a) if "shared" in way else a, shared(b) if way == "shared" else b
    if form := FORMS.get(case):
        a, b, one, other = form(b), form(a), form(other), form(one)
    turned, options = case == "out transposed", OPTIONS.get(case, {})
    shape = (a.shape[0], b.shape[1])[:: -1 if turned else 1]
    wanted, found = (DistMatrix.random(grid, shape, seed=5, layout=Layout.C, **of) for _ in range(2))
    wanted, found = (wanted.T, found.T) if turned else (wanted, found)
    matmul(a, b, out=wanted, **(options or {"panels": 1}))
    if "plan" in way:
        with MatmulPlan(one, other, out=found, **options, **WAYS[way]) as plan:
            for _ in range(1 if case == "beta" else 2):
                plan()
    else:
        matmul(one, other, out=found, **options, **WAYS[way])
    assert (found.gather() == wanted.gather()).all()


@pytest.mark.parallel([2], thorough=[1, 4, 8])
@looped("way", WAYS)
@each_shape
def test_each_way_takes_what_matmul_takes(grid, way):
    for case in CASES:
        if case not in ("panels", "max_workspace") or "decomposed" not in way:
            with given(case=case):
                assert_is_matmul(grid, way, case)


@pytest.mark.parallel([2], thorough=[1, 4, 8])
@looped("way", WAYS)
@looped("dtype", ["float64", "bfloat16"])
@each_shape
def test_each_way_takes_matrices_of_torch(grid, way, dtype):
    assert_is_matmul(grid, way, "as they are", dtype, "torch")
