"""Tensor files: written on one grid, read on every other, loaded by torch, refused if anything is wrong."""

import os

import numpy as np
import pytest
from grids import process_grids
from loops import given
from on_disk import OTHER, every_size, full_disk, on_rank_0, two_ranks
from samples import TESTED, integers, to_library, to_numpy

from pmm3d import DistMatrix, Grid, Layout
from pmm3d.io import export_safetensors, import_safetensors

pytestmark = pytest.mark.parallel([4])

TENSORS = {
    "layers.0.weight": (7, 5),
    "layers.0.bias": (1, 5),
    "layers.1.weight": (6, 4),
    "column": (9, 1),
    "none": (0, 3),
}
FORMS = {"transpose": {"layers.0.weight", "column"}, "vectors": {"layers.0.bias", "column"}}


def tensors(grid, dtype="float32", layout=Layout.A, library=TESTED):
    return {
        name: DistMatrix.from_global(grid, to_library(integers(shape, dtype), library, dtype), layout=layout)
        for name, shape in TENSORS.items()
    }


@every_size
def test_tensor_files_come_back_on_every_grid(comm, storing_grid, shared_path):
    path = shared_path / "new" / "model.safetensors"
    export_safetensors(storing_grid, path, tensors(storing_grid), **FORMS)
    assert os.listdir(path.parent) == [path.name]
    for number, shape in enumerate(process_grids(storing_grid.size)):
        with Grid(comm, shape) as other:
            back = {
                name: DistMatrix.from_global(other, to_library(np.zeros(shape)), layout=OTHER[number % 4])
                for name, shape in TENSORS.items()
            }
            import_safetensors(other, path, back, **FORMS)
            for name, shape in TENSORS.items():
                assert np.array_equal(back[name].gather(), integers(shape, "float32")), name


@every_size
def test_partial_sums_are_written_as_their_sum_and_read_into_the_first(storing_grid, shared_path):
    layout, path = Layout("z", sums=("data", "y")), shared_path / "sums.safetensors"
    box, coords = layout.box((6, 5), storing_grid.shape, storing_grid.coords), storing_grid.coords
    part = np.full(box.shape, 0.0 if coords is None else 1.0 + coords.y + 10 * coords.data)
    export_safetensors(
        storing_grid, path, {"sums": DistMatrix.from_local(storing_grid, to_library(part), (6, 5), layout=layout)}
    )
    total = sum(1.0 + y + 10 * data for y in range(storing_grid.shape.y) for data in range(storing_grid.shape.data))
    for kind in (Layout.A, layout):
        matrix = DistMatrix.from_global(storing_grid, to_library(np.ones((6, 5))), layout=kind)
        import_safetensors(storing_grid, path, {"sums": matrix})
        assert np.all(to_numpy(matrix.gather()) == total)


@two_ranks
def test_torch_loads_what_was_exported(storing_grid, shared_path):
    import torch
    from safetensors.torch import load_file

    layer = torch.nn.Linear(7, 5)
    for dtype in ("float32", "bfloat16"):
        path = shared_path / f"{dtype}.safetensors"
        some = {
            name: matrix for name, matrix in tensors(storing_grid, dtype, library="torch").items() if "layers.0" in name
        }
        forms = {"transpose": {"layers.0.weight"}, "vectors": {"layers.0.bias"}}
        export_safetensors(storing_grid, path, some, **forms)
        loaded = load_file(path)
        assert loaded["layers.0.weight"].dtype == getattr(torch, dtype)
        layer.load_state_dict({name.removeprefix("layers.0."): tensor for name, tensor in loaded.items()})
        weight, bias = integers((7, 5), "float32"), integers((1, 5), "float32")
        assert np.array_equal(layer.weight.detach().numpy(), weight.T)
        assert np.array_equal(layer.bias.detach().numpy(), bias[0])
        for library, to in (("numpy", "float64"), ("torch", "bfloat16")):
            back = {
                "layers.0.weight": DistMatrix.empty(
                    storing_grid, (7, 5), dtype=to, layout=Layout.C, library=library
                ).T.T,
                "layers.0.bias": DistMatrix.empty(storing_grid, (1, 5), dtype=to, layout=Layout.B, library=library),
            }
            import_safetensors(storing_grid, path, back, **forms)
            assert np.array_equal(to_numpy(back["layers.0.weight"].gather(), library), weight)
            assert np.array_equal(to_numpy(back["layers.0.bias"].gather(), library), bias)


def test_tensor_files_that_do_not_fit(storing_grid, shared_path, checkpoint_fails):
    path, odd = shared_path / "model.safetensors", shared_path / "complex.safetensors"
    export_safetensors(storing_grid, path, tensors(storing_grid), **FORMS)
    real = tensors(storing_grid) | {"none": DistMatrix.empty(storing_grid, (0, 3), dtype="complex64")}
    export_safetensors(storing_grid, odd, real, **FORMS)
    fewer = {name: matrix for name, matrix in tensors(storing_grid).items() if name != "none"} | {
        "more": tensors(storing_grid)["none"]
    }
    for text, source, matrices, forms in (
        (
            r"It differs in 'layers.0.weight' \(\(5, 7\) F32 there, \(7, 5\) F32 here\)",
            path,
            tensors(storing_grid),
            {"vectors": FORMS["vectors"]},
        ),
        ("It lacks 'more'. It also has 'none'", path, fewer, FORMS),
        ("not names of matrices: 'weight'", path, tensors(storing_grid), {"transpose": {"weight"}}),
        ("a vector has one row or one column", path, tensors(storing_grid), {"vectors": {"layers.1.weight"}}),
        (r"It differs in 'none' \(\(0, 3\) C64 there, \(0, 3\) float32 here\)", odd, tensors(storing_grid), FORMS),
        ("none.safetensors is missing", shared_path / "none.safetensors", tensors(storing_grid), FORMS),
    ):
        with given(text=text):
            checkpoint_fails(
                text, lambda some=(source, matrices), forms=forms: import_safetensors(storing_grid, *some, **forms)
            )
    wide = {"w": DistMatrix.empty(storing_grid, (2, 2), dtype="complex128")}
    checkpoint_fails("'w' is complex128; safetensors files have", lambda: export_safetensors(storing_grid, path, wide))
    on_rank_0(storing_grid, lambda: os.truncate(path, 200))
    checkpoint_fails(
        "model.safetensors cannot be read",
        lambda: import_safetensors(storing_grid, path, tensors(storing_grid), **FORMS),
    )
    below = path / "model.safetensors"
    checkpoint_fails(
        "cannot be written", lambda: export_safetensors(storing_grid, below, tensors(storing_grid), **FORMS)
    )


def test_a_full_disk_leaves_the_tensor_file_as_it_was(storing_grid, shared_path, checkpoint_fails):
    path = shared_path / "model.safetensors"
    export_safetensors(storing_grid, path, tensors(storing_grid), **FORMS)
    large = {"large": DistMatrix.empty(storing_grid, (600, 300))}
    with full_disk(storing_grid.rank == storing_grid.size - 1):
        checkpoint_fails("cannot be written: File too large", lambda: export_safetensors(storing_grid, path, large))
    assert os.listdir(shared_path) == [path.name]
    import_safetensors(storing_grid, path, tensors(storing_grid), **FORMS)
