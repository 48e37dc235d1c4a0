"""Combinations of types, and refused ones; single rounding; TF32."""

import warnings

import numpy as np
import pytest
from loops import looped
from networks import INPUT, over_grids, spread
from samples import bits_of, integers, to_library, to_numpy

from pmm3d import DisagreementError, DistMatrix, DTypeError, Grid, Pmm3dError, nn
from pmm3d.layout import Layout, batch_layout
from pmm3d.nn import Precision
from pmm3d.nn.dry import dry_grid

pytestmark = pytest.mark.deadline(240)

REFUSED = [
    ({"compute": "float8"}, "types of a precision are"),
    ({"compute": "float32", "tf32": True, "gradient": "complex64"}, "complex numbers"),
    ({"compute": "bfloat16", "master": "bfloat16"}, "would lose small changes"),
    ({"compute": "float16", "tf32": True}, "tf32 rounds operands"),
    ({"compute": "float64", "gradient": "float32"}, "GEMMs of float64 write float64, in which"),
    ({"compute": "float32", "gradient": "float16"}, "communication = float32, gradient = float16"),
    ({"compute": "float32", "communication": "float64"}, "GEMMs of float32 write float32"),
    ({"compute": "float16", "communication": "bfloat16"}, "GEMMs of float16 write float16 or float32"),
    ({"compute": "bfloat16", "gradient": "float64", "master": "float64"}, "GEMMs of bfloat16 write"),
]


@looped("options, text", REFUSED)
def test_types_that_do_not_go_together_are_refused(options, text):
    with pytest.raises(DTypeError, match=text):
        Precision(**options)


def test_what_is_left_out_follows_compute():
    for name in ("float64", "complex128"):
        assert Precision(name) == Precision(name, name, name, name) == Precision.named(name)
    assert Precision("float16") == Precision("float16", "float16", "float32", "float32")
    assert Precision("float16", master="float64").gradient == "float32"


@pytest.mark.numpy_only("what numpy has not, torch has")
@pytest.mark.parallel([1])
def test_a_layer_that_cannot_be_had_is_refused(comm, fails):
    with Grid(comm) as grid:
        for options, text in [
            ({"precision": "half"}, "precision is float32, tf32"),
            ({"precision": "bfloat16"}, 'library = "torch"'),
            ({"precision": "tf32", "library": "torch"}, "tf32 needs a GPU"),
            ({"precision": "float16", "dtype": "float64"}, "give one of them"),
        ]:
            fails(DTypeError, text, lambda: nn.Linear(grid, 2, 2, **options))
        nn.Linear(grid, 2, 2, precision="float64", dtype="float64")
        half = nn.Linear(grid, 2, 2, precision="float16")
        fails(DTypeError, "of float16", lambda: nn.Parameter(half.weight.value, Precision("float64")))


@pytest.mark.parallel([2])
def test_the_grid_names_the_library_once(comm, fails):
    """For layers and matrices, also on a dry copy. `settle` uses the type and the library of the
    parameters."""
    with Grid(comm, "ddp", library="torch") as grid:
        low = {"precision": "bfloat16"}
        first, norm = nn.Linear(grid, 6, 4, **low), nn.LayerNorm(grid, 4, **low)
        net = nn.Sequential(grid, first, norm, nn.Dropout(grid, 0.5), nn.Linear(grid, 4, 3, **low))
        assert net.settle(6).dtype == "bfloat16" and nn.Linear(grid, 6, 4, dtype="float64").settle(6).dtype == "float64"
        made = [
            net(DistMatrix.random(grid, (8, 6), dtype="float32")),
            DistMatrix.random(grid, (3, 3)),
            DistMatrix.empty(grid, (3, 3)),
            DistMatrix.identity(grid, 3),
            DistMatrix.from_function(grid, (3, 3), lambda i, j: i + j),
        ]
        assert {each.library.kind for each in made} == {"torch"}
        with dry_grid(grid) as dry:
            assert nn.Linear(dry, 6, 4, **low).weight.library.kind == "torch"
    fails(DisagreementError, "Grid", lambda: Grid(comm, library=("numpy", "torch")[comm.rank]))
    fails(Pmm3dError, "unknown array library 'torsch'", lambda: Grid(comm, library="torsch"))


@pytest.mark.parallel([2], thorough=[1])
@over_grids({1: [("1x1x1", 1)], 2: [("1x2x1", 1)]})
def test_a_layer_norm_takes_its_own_type(grid, fails):
    """With gains of another type, gradients were arbitrary numbers from memory. With low precision, gains may be
    float32."""
    values, wanted = integers((6, 4), seed=1, low=-4, high=4), {}
    for dtype, gains in (("float64", "float64"), ("float16", "float32")):
        layer = nn.LayerNorm(grid, 4, dtype=gains)
        x = spread(grid, values, INPUT, dtype=dtype)
        layer(x).backward(spread(grid, values, layer(x).layout, dtype=dtype))
        wanted[dtype] = [to_numpy(each.grad.gather()) for each in layer.parameters()]
        assert [each.dtype for each in wanted[dtype]] == [gains] * 2
    assert (wanted["float16"][1] == wanted["float64"][1]).all()
    assert np.abs(wanted["float16"][0] - wanted["float64"][0]).max() < 2.0**-9 * np.abs(values).sum(0).max()
    double, other = (nn.LayerNorm(grid, 4, dtype=dtype) for dtype in ("float64", "float32"))
    half = nn.LayerNorm(grid, 4, precision="float16")
    for dtype, gain, bias in (
        ("float64", other.gain, other.bias),
        ("float64", double.gain, other.bias),
        ("float32", half.gain, half.bias),
    ):
        x = nn.Tensor(spread(grid, values, INPUT, dtype=dtype))
        fails(DTypeError, "layer_norm: .*one library and type", lambda: nn.layer_norm(x, gain, bias))


@pytest.mark.parallel([1])
def test_a_factor_is_not_rounded_before_it_multiplies(comm):
    """In float16 a third is 0.33325, 1e-7 is 1.2e-7, and 1e6 is infinite."""
    values = np.array([[3.0, 5.0, 7.0, 0.03]])

    def rounded(factor, part=values):
        return (part.astype("float16").astype("float32") * np.float32(factor)).astype("float16")

    with Grid(comm) as grid:
        x = nn.Tensor(spread(grid, values, Layout(), dtype="float16"), requires_grad=True)
        for out, factor in ((x * (1 / 3), 1 / 3), (x / 3, 1 / 3), (nn.scale(x, 1e-7), 1e-7), (0.02 * x * 1e6, None)):
            assert bits_of(out.gather()) == rounded(factor or 1e6, values if factor else rounded(0.02)).tobytes()
        (x / 3).backward(spread(grid, values, Layout(), dtype="float16"))
        assert bits_of(x.grad.gather()) == rounded(1 / 3).tobytes()
        kept = to_numpy(nn.dropout(nn.Tensor(x.value), 0.3, seed=1).gather())
        assert kept.any() and (kept[kept != 0] == rounded(1 / 0.7)[kept != 0]).all()
        column = nn.Tensor(spread(grid, np.full((7, 1), 5.0), Layout(), dtype="float16"), requires_grad=True)
        nn.mean(column, 0).backward(spread(grid, np.full((1, 1), 5.0), Layout(), dtype="float16"))
        assert (to_numpy(column.grad.gather()) == rounded(1 / 7, np.full((7, 1), 5.0))).all()
        assert rounded(1 / 7, np.full((1, 1), 5.0)) != np.float16(5) * np.float16(1 / 7)


@pytest.mark.parallel([1])
def test_a_quotient_by_a_large_number_has_a_gradient(comm):
    """float16 cannot represent the square of 300."""
    with Grid(comm) as grid:
        x, y = (
            nn.Tensor(spread(grid, np.full((1, 1), each), Layout(), dtype="float16"), requires_grad=True)
            for each in (600.0, 300.0)
        )
        (x / y).backward(spread(grid, np.ones((1, 1)), Layout(), dtype="float16"))
        assert abs(y.grad.gather().item() * -150 - 1) < 2.0**-9


@pytest.mark.numpy_only("warnings are numpy's")
@pytest.mark.parallel([2])
def test_what_overflows_warns_nobody(comm):
    """In a backward pass of float16, also with a scale of 1, and in a collective whose sum runs in this thread or in
    the helper thread."""
    with Grid(comm, "ddp") as grid, warnings.catch_warnings():
        warnings.simplefilter("error")
        layer = nn.Linear(grid, 2, 2, precision="float16")
        out = layer(spread(grid, np.full((4, 2), 300.0), INPUT, dtype="float32"))
        out.backward(spread(grid, np.full((4, 2), 300.0), batch_layout("x"), dtype="float16"))
        assert not np.isfinite(layer.weight.grad.gather()).any()
        assert (grid.everyone.all_reduce(np.full((1, 2), 6e4, "float16")).wait() == np.inf).all()
        pending = grid.everyone.all_reduce(np.full((1, 2), 6e4, "float16"))
        with grid.engine.background():
            while not pending.done:
                pass
        assert (pending.wait() == np.inf).all()


@pytest.mark.parallel([1])
def test_tf32_is_of_the_weights_precision_or_asked_for(comm):
    """1 + 2^-12 cannot be represented in TF32. A result computed from a parameter is not a weight."""
    with Grid(comm, (1, 1, 1), device_transport="direct") as grid:

        def matrix(value):
            return DistMatrix.from_global(
                grid, to_library(np.full((1, 1), value, "float32"), "standin"), layout=Layout()
            )

        x, one = nn.Tensor(matrix(1 + 2.0**-12)), nn.Tensor(matrix(1.0))
        fine, coarse = (nn.Parameter(one.value, Precision(tf32=tf32)) for tf32 in (False, True))
        for weight, tf32, rounded in (
            (fine, None, False),
            (coarse, None, True),
            (one * 1.0, None, False),
            (one * 1.0, True, True),
            (coarse, False, False),
        ):
            found = to_numpy(nn.linear(x, weight, tf32=tf32).gather(), "standin").item()
            assert found == (1 if rounded else 1 + 2.0**-12)
        host = nn.Linear(grid, 2, 2)
        with pytest.raises(DTypeError, match="linear: tf32 rounds float32 and complex64 on a GPU"):
            nn.linear(nn.Tensor(DistMatrix.random(grid, (2, 2), dtype="float32")), host.weight, tf32=True)
