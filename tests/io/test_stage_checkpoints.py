"""Checkpoints and safetensors files of matrices on the stages of a grid: one for all stages, loaded with any number of
stages."""

import os
from contextlib import contextmanager
from threading import Event

import h5py
import numpy as np
import pytest
from loops import given, looped
from on_disk import OTHER, full_disk, stored_elements
from safetensors.numpy import load_file
from samples import integers, to_library

from pmm3d import CheckpointError, DisagreementError, DistMatrix, Grid, Layout
from pmm3d.io import Checkpoints, checkpoint, export_safetensors, import_safetensors
from pmm3d.layout import part_range

pytestmark = [pytest.mark.parallel([4], thorough=[8]), pytest.mark.deadline(240)]
NAMES = ("table", "0.weight", "0.bias", "1.weight", "optimizer/1.weight/m", "2.weight", "none")
SHAPES = dict(zip(NAMES, [(9, 4), (7, 11), (1, 11), (11, 5), (11, 5), (5, 4), (0, 3)]))
VECTORS, TRANSPOSED = {"0.bias"}, {"0.weight", "2.weight"}


@contextmanager
def cut(comm, stages, **options):
    """A grid of 4 or 8 ranks with this number of stages. 0: without an axis "pipe"."""
    x, data = (2, comm.size // 2) if stages < 2 else (1, comm.size // stages)
    with Grid(comm, (x, 1, 1), data, pipe=stages or None, **options) as grid:
        yield grid


def values(name, seed=0):
    return integers(SHAPES[name], "float32", seed + NAMES.index(name))


def of_stage(grid):
    """Names of the matrices of this stage. The last stage also has the table of the first."""
    stages, index = grid.shape.stages, grid.coords.pipe if grid._has_stages else 0
    own = NAMES[slice(*part_range(len(NAMES), stages, index))]
    return [*own, *["table"] * (index == stages - 1 and index > 0)]


def matrices_of(grid, seed=0, shift=0, blank=False):
    """Matrices on this rank's stage, in layouts that depend on the shift."""
    return {
        name: DistMatrix.from_global(
            grid.stage, to_library(values(name, seed) * (not blank)), layout=OTHER[(number + shift) % len(OTHER)]
        )
        for number, name in enumerate(of_stage(grid))
    }


def hold(matrices, seed=0):
    return all(np.array_equal(matrix.gather(), values(name, seed)) for name, matrix in matrices.items())


@pytest.mark.parametrize("background", [False, True], ids=["at once", "background"])
@looped("stages", (4, 2, 1, 0))
def test_saved_in_stages_and_loaded_in_any_number_of_them(comm, shared_path, background, stages):
    with cut(comm, stages) as grid:
        keeper = Checkpoints(grid, shared_path / str(stages), background=background)
        matrices = matrices_of(grid, seed=stages)
        path = keeper.save(3, matrices, {"stages": stages})
        assert len(set(grid.comm.allgather(path))) == 1
        for matrix in matrices.values():
            matrix.local[...] = -1  # a checkpoint in the background has the values at the call
        keeper.finish()
        assert keeper.contents(path) == {name: (SHAPES[name], "float32") for name in NAMES}
    for others in (4, 2, 1, 0):
        with given(stages=stages, others=others), cut(comm, others) as other:
            into = matrices_of(other, shift=1, blank=True)
            assert Checkpoints(other, shared_path / str(stages)).load_latest(into) == (path, {"stages": stages})
            assert hold(into, stages)


def test_each_element_is_stored_once(comm, shared_path):
    """Also of the table, which two stages have."""
    with cut(comm, 4) as grid:
        path = Checkpoints(grid, shared_path).save(1, matrices_of(grid))
    assert stored_elements(path) == {name: np.prod(shape) for name, shape in SHAPES.items() if np.prod(shape)}
    with h5py.File(path / "checkpoint.h5") as file:
        assert all(np.array_equal(file[name][...], values(name)) for name in NAMES)


def test_matrices_on_the_whole_grid_and_on_stages_together(comm, shared_path):
    with cut(comm, 2) as grid:
        keeper, everywhere = Checkpoints(grid, shared_path), values("0.weight", 5)
        whole = DistMatrix.from_global(grid, to_library(everywhere), layout=Layout(("pipe", "x"), "data"))
        partial = DistMatrix.from_local(
            grid.stage, to_library(np.ones((3, 2), "float32")), (3, 2), layout=Layout(sums=("data",))
        )
        name = f"sum {grid.coords.pipe}"
        keeper.save(1, {"everywhere": whole, name: partial})
        whole.local[...], partial.local[...] = 0, 0
        keeper.load_latest({"everywhere": whole, name: partial})
        assert np.array_equal(whole.gather(), everywhere)
        assert np.array_equal(partial.gather(), np.full((3, 2), grid.data.size))


def test_names_are_compared_with_those_of_all_stages(comm, shared_path, fails):
    with cut(comm, 2) as grid:
        keeper, last = Checkpoints(grid, shared_path), grid.coords.pipe == 1
        path = keeper.save(1, matrices_of(grid))
        blank = matrices_of(grid, blank=True)
        keeper.load(path, blank if last else {}, partial=True)
        assert hold(blank) == last

        blank = matrices_of(grid, blank=True)
        small = {name: matrix for name, matrix in blank.items() if name != "2.weight"}
        other = {"3.weight" if name == "0.bias" else name: matrix for name, matrix in blank.items()}
        wide = {**blank, "table": DistMatrix.empty(grid.stage, (9, 4 + last), dtype="float32")}
        sizes = "'table' is 9 x 4 float32 in one stage and 9 x 5 float32 in another"
        keeper.load(path, small, partial=lambda name: name == "2.weight")
        begin = f"^{path} is the checkpoint of another network. It "
        for text, matrices, partial in (
            (rf"{begin}also has '2.weight'\.", small, False),
            (rf"{begin}lacks '3.*It also has '0.bias'\.", other, False),
            ("It also has '2.weight'", small, lambda name: name == "0.bias"),
            (sizes, wide, False),
        ):
            fails(
                CheckpointError, text, lambda some=matrices, partial=partial: keeper.load(path, some, partial=partial)
            )
        cases = [(sizes, wide)]
        for row in (0, 3, 8):
            table = values("table")
            table[[row, -2]] = table[[-2, row]] if last else table[[row, -2]]
            tied = DistMatrix.from_global(grid.stage, to_library(table), layout=Layout.A)
            cases.append(("save: two stages have other values under one name: 'table'", {"table": tied}))
        cases.append(("'a' and 'a/b' cannot both name a matrix", {"a" if last else "a/b": blank["table"]}))
        for text, matrices in cases:
            fails(CheckpointError, text, lambda some=matrices: keeper.save(2, some))
        assert keeper.candidates() == [path] and os.listdir(shared_path) == [path.name]


def test_what_is_wrong_in_one_stage_is_told_to_all(comm, shared_path, fails, monkeypatch):
    monkeypatch.setattr("pmm3d.io.matrices.SLICE", 2**17)
    with cut(comm, 2) as grid:
        keeper, last = Checkpoints(grid, shared_path), grid.rank == grid.size - 1
        path, matrices = keeper.save(1, matrices_of(grid)), matrices_of(grid, blank=True)
        own = {name: matrix for name, matrix in matrices.items() if not last or name != "table"}
        layout = Layout(cols="data") if last else Layout()
        local = np.zeros(layout.box((9, 4), grid.stage.shape, grid.stage.coords).shape)
        turned = {"table": DistMatrix(grid.stage, to_library(local), (9, 4), layout)}
        whole = DistMatrix.empty(grid, (2, 2))
        told = f"passed different arguments. rank.*'table'.*rank {grid.size - 1}: "
        fails(DisagreementError, told, lambda: keeper.load(path, own))
        for kind, text, of, some in (
            (DisagreementError, told, keeper, own),
            (DisagreementError, "the ranks passed different arguments", keeper, turned),
            (
                DisagreementError,
                "the ranks passed different arguments",
                keeper,
                {"whole": whole} if grid.coords.pipe else {},
            ),
            (CheckpointError, "got a str", keeper, {"a": "text"} if last else {}),
            (CheckpointError, "on a grid over other processes", Checkpoints(grid.stage, shared_path), {"w": whole}),
        ):
            fails(kind, text, lambda of=of, some=some: of.save(2, some))
        large = {f"{grid.coords.pipe}": DistMatrix.empty(grid.stage, (1200, 300), layout=Layout("data"))}
        with full_disk(last):
            fails(CheckpointError, "rank-0000.*h5 cannot be written: File too large", lambda: keeper.save(2, large))
            fails(
                CheckpointError,
                "cannot be written: File too large",
                lambda: export_safetensors(grid, shared_path / "large.safetensors", large),
            )
        assert os.listdir(shared_path) == [path.name]
        assert keeper.load_latest(matrices) == (path, None) and hold(matrices)


def test_nobody_waits_for_a_slow_stage(comm, shared_path, monkeypatch):
    """In the background, a checkpoint is complete when each stage has written its shards."""
    opened, write = Event(), checkpoint.on_disk.write_shards
    monkeypatch.setattr(checkpoint.on_disk, "write_shards", lambda *args: (opened.wait(60), write(*args))[1])
    with cut(comm, 2) as grid:
        keeper = Checkpoints(grid, shared_path, background=True)
        if grid.coords.pipe == 0:
            opened.set()
        path = keeper.save(1, matrices_of(grid, 1))
        assert [keeper.poll() for _ in range(20)] == [None] * 20
        opened.set()
        assert keeper.finish() == path
        matrices = matrices_of(grid, blank=True)
        keeper.load(path, matrices)
        assert hold(matrices, 1)


def test_a_safetensors_file_is_the_same_from_any_number_of_stages(comm, shared_path, fails):
    forms = lambda own: {"transpose": TRANSPOSED & own.keys(), "vectors": VECTORS & own.keys()}
    written = []
    for stages in (4, 2, 0):
        with cut(comm, stages) as grid:
            path = shared_path / f"{stages}.safetensors"
            own = matrices_of(grid)
            export_safetensors(grid, path, own, **forms(own), metadata={"a": "b"})
            written.append(path.read_bytes())
            blank = matrices_of(grid, shift=2, blank=True)
            import_safetensors(grid, shared_path / "4.safetensors", blank, **forms(blank))
            assert hold(blank)
            blank.pop("2.weight", None)
            fails(
                CheckpointError,
                "holds other tensors than these matrices. It also has '2.weight'",
                lambda grid=grid, blank=blank: import_safetensors(grid, path, blank, **forms(blank)),
            )
    found = load_file(shared_path / "0.safetensors")
    assert written[0] == written[1] == written[2] and found.keys() == {*NAMES}
    assert np.array_equal(found["0.weight"], values("0.weight").T) and found["0.bias"].shape == (11,)
    with cut(comm, 2) as grid:
        tied = {"table": DistMatrix.from_global(grid.stage, to_library(values("table", grid.coords.pipe)))}
        fails(
            CheckpointError,
            "export_safetensors: two stages have other values under one name: 'table'",
            lambda: export_safetensors(grid, path, tied, transpose={"table"}),
        )
