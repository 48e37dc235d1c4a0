"""Gathers of weights over z in fewer bytes: bytes by formula, equal bits on all ranks, and no outdated block."""

import contextlib
import io
import re
from pathlib import Path

import h5py
import numpy as np
import pytest
from loops import looped
from networks import (
    CLASSES,
    INPUT,
    adamw,
    batch_of,
    bits,
    loss_of,
    network_of,
    ordinary,
    over_grids,
    spread,
    weights_of,
)
from samples import TESTED, to_library, to_numpy

from pmm3d import DTypeError, Grid, Pmm3dError, nn
from pmm3d.arrays import library_named
from pmm3d.arrays.codecs import codec_named
from pmm3d.comm import communicator
from pmm3d.layout import batch_layout, part_sizes
from pmm3d.nn.dry import Facts, dry_grid
from pmm3d.nn.recorded_steps import Replays
from pmm3d.nn.training.config import checked
from pmm3d.nn.training.job import train_job
from pmm3d.nn.training.step import train_step

pytestmark = [pytest.mark.parallel([2]), pytest.mark.deadline(240)]
GRIDS = {2: [("fsdp", 1)], 4: [("1x2x2", 1), ("hsdp", 2)]}
CODECS = ("bfloat16", "float16", "int8", "int8:64")


def encoding(grid, weights, **overlap):
    """Choose the codec of the weights of this grid."""
    parallel = nn.Tape.of(grid).parallel
    parallel.compression, parallel.overlap = nn.Compression(weights=weights), nn.Overlap(**overlap)


def rounded(name, whole, parts):
    """A weight whose shards, of these numbers of rows, were encoded and decoded."""
    codec, library, out = codec_named(name), library_named(TESTED), []
    for shard in np.split(whole, np.cumsum(parts)[:-1]):
        data = library.empty((codec.nbytes(shard.size),), "uint8")
        codec.encode(library, to_library(shard.reshape(-1)), data)
        decoded = to_library(np.empty(shard.size, shard.dtype))
        codec.decode(library, data, decoded)
        out.append(to_numpy(decoded).reshape(shard.shape))
    return np.concatenate(out)


@pytest.mark.parallel([4], thorough=[2])
@looped("name", CODECS)
@over_grids(GRIDS)
def test_bytes_are_those_of_the_formula_and_all_ranks_have_the_same_block(grid, name):
    """A rank gets the encoded shards of the others, of any size (DeepSpeed 4386), also empty ones. It decodes its own
    shard too. The bytes of a dry run are equal."""
    codec, z = codec_named(name), grid.shape.z
    for inputs, outputs in ((13, 7), (1, 5), (64, 48)):
        layer = nn.Linear(grid, inputs, outputs, bias=False, dtype="float32", seed=3)
        x, whole = spread(grid, np.ones((6, inputs), "float32")), to_numpy(layer.weight.gather())
        with dry_grid(grid) as dry:
            received = []
            for where in (grid, dry):
                own = layer if where is grid else nn.Linear(where, inputs, outputs, bias=False, dtype="float32")
                encoding(where, name)
                where.ledger.reset()
                own(x if where is grid else Facts.of(x).on(where))
                received.append(where.ledger.total(phase="gather W").received)
        r0, r1, c0, c1 = layer.weight._stored.layout.summed.box((inputs, outputs), grid.shape, grid.coords)
        rows = layer.weight.spec.counts("z")
        expected = sum(codec.nbytes(count * (c1 - c0)) for rank, count in enumerate(rows) if rank != grid.z.index)
        assert received == [expected, expected]
        block = to_numpy(nn.Tape.of(grid).parallel.weights.gathered(layer.weight, "backward"))
        first = r0 - sum(rows[: grid.z.index])
        assert np.array_equal(block, rounded(name, whole[first : first + sum(rows), c0:c1], rows))
        assert inputs == 1 or not np.array_equal(block, whole[first : first + sum(rows), c0:c1])
        assert z == 1 or r1 - r0 < sum(rows) or inputs == 1
    encoding(grid, "")


def trained(grid, weights, steps=8, **overlap):
    """(losses and norms, bits of the weights) of some steps, and the number of replayed ones."""
    encoding(grid, weights, **overlap)
    net = network_of(grid, CLASSES, dropout=0.2)
    optimizer, told = adamw(net.parameters()), []
    for step in range(steps):
        x, y = batch_of(CLASSES, step)
        batch = spread(grid, x), spread(grid, y, batch_layout(None))
        told.append(train_step(net, optimizer, nn.cross_entropy, [batch], 1.0))
    return told, bits(weights_of(net)), Replays.of(net).replayed


@over_grids(GRIDS)
def test_replayed_steps_have_the_bits_of_ordinary_ones(grid):
    """Also if gathers do not overlap, and if blocks are kept or gathered again. Switched off, bits are as before."""
    plain = trained(grid, "")
    told, weights, replayed = trained(grid, "int8")
    assert replayed > 0 and told != plain[0] and np.allclose(told, plain[0], rtol=0.2)
    with ordinary():
        for overlap in ({"oag": False}, {"reshard_after_forward": True}, {"reshard_after_forward": False}):
            assert trained(grid, "int8", **overlap) == (told, weights, 0)
    assert trained(grid, "") == plain


@over_grids(GRIDS)
@looped("overlap", [{}, {"reshard_after_forward": True}, {"keep_bytes": 0}, {"shared_weights": True}])
def test_a_changed_weight_is_gathered_anew(grid, overlap):
    """No block of an earlier step is used, in any choice of blocks that are kept (DeepSpeed 4851: hpZ with an outdated
    secondary copy does not converge)."""
    encoding(grid, "int8", **overlap)
    layer = nn.Linear(grid, 12, 8, bias=False, dtype="float64")
    for turn in range(1, 6):
        with nn.unchanged(grid):
            layer.weight.local[...] = turn
            layer.weight._loaded()
            out = layer(spread(grid, np.ones((4, 12))))
            assert np.allclose(to_numpy(out.local), 12 * turn, rtol=1e-2)
            nn.mean(out).backward()


@over_grids(GRIDS)
@looped("name", CODECS)
def test_a_weight_that_is_not_finite_is_seen_on_every_rank(grid, name):
    """Rounding never hides it (DeepSpeed 5059, 6926: a loss of 0; 4886: inf)."""
    encoding(grid, name)
    layer = nn.Linear(grid, 12, 8, bias=False, dtype="float32")
    layer.weight.local[...] = 1
    if grid.z.index == 0:
        layer.weight.local[0, 0] = float("inf")
    out = to_numpy(layer(spread(grid, np.ones((4, 12), "float32"))).local)
    assert not np.isfinite(out[:, 0]).any()


@over_grids(GRIDS)
def test_what_has_no_codec_is_refused(grid):
    encoding(grid, "int8")
    layer = nn.Linear(grid, 4, 4, dtype="complex128")
    with pytest.raises(DTypeError, match=r"Compression\(weights='int8'\): codecs are for real numbers"):
        layer(spread(grid, np.ones((2, 4), complex), INPUT))
    with pytest.raises(Pmm3dError, match='codecs are "bfloat16"'):
        nn.Compression(weights="int4")


@pytest.mark.parallel([4])
def test_between_nodes_only_with_one_copy_for_a_node(comm, monkeypatch):
    """Two levels, as ZeRO++ (hpZ): one decoded copy on each of two nodes, which the backward pass reads. Encoded shards
    travel between nodes, in the forward pass, and no bytes within a node. All nodes have the same bits."""
    monkeypatch.setattr(communicator.MPI, "Get_processor_name", lambda: f"node{2 * comm.rank // comm.size}")
    codec = codec_named("int8")
    with Grid(comm, "fsdp") as grid:
        encoding(grid, "int8", shared_weights=True)
        layer = nn.Linear(grid, 13, 7, bias=False, dtype="float64", seed=3)
        whole, parts = to_numpy(layer.weight.gather()), part_sizes(13, 4)
        for _ in range(2):
            grid.ledger.reset()
            out = layer(spread(grid, np.ones((8, 13))))
            forward = grid.ledger.total(phase="gather W")
            nn.mean(out).backward()
            assert grid.ledger.total(phase="gather W").received == forward.received == forward.across
            assert forward.received == codec.nbytes(parts[(grid.z.index + 2) % 4] * 7)
            block = nn.Tape.of(grid).parallel.weights.gathered(layer.weight, "backward")
            assert np.array_equal(to_numpy(block), rounded("int8", whole, parts))
            grid.comm.Barrier()
    monkeypatch.setattr(communicator.MPI, "Get_processor_name", lambda: "node")
    with Grid(comm, "fsdp") as grid:  # on one node nothing is sent, so nothing is rounded
        encoding(grid, "int8", shared_weights=True)
        layer = nn.Linear(grid, 13, 7, bias=False, dtype="float64", seed=3)
        layer(spread(grid, np.ones((8, 13))))
        block = nn.Tape.of(grid).parallel.weights.gathered(layer.weight, "backward")
        assert np.array_equal(to_numpy(block), whole)
        grid.comm.Barrier()


def test_losses_of_passes_alike(comm):
    """One loss with two libraries of a grid: the block of a torch network is that of a numpy network."""
    pytest.importorskip("torch")
    with Grid(comm, "fsdp") as grid:
        encoding(grid, "int8")
        blocks = []
        for library in ("numpy", "torch"):
            net = network_of(grid, CLASSES, library=library)
            loss_of(net, CLASSES, *batch_of(CLASSES, 0), library)
            blocks.append([to_numpy(nn.Tape.of(grid).parallel.weights.gathered(net.parameters()[0], "backward"))])
        assert np.array_equal(*blocks)


def test_the_programs_of_the_page_run(comm):
    """Those of kept arrays, of gathers and of stages, on the ranks of the test. The bytes are those of the formulas."""
    page = (Path(__file__).parents[2] / "docs" / "memory.md").read_text()
    texts = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    own = [text for text in texts if "keep_as" in text or "Compression(weights" in text or "stages=" in text]
    said = []
    for text in own:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            text = text.replace("MPI.COMM_WORLD", "comm").replace("Grid(shape=", "Grid(comm, shape=")
            exec(text, {"comm": comm})
        said.append(out.getvalue())
    kept, gathered, staged = said
    without, with_forms = (int(line.split()[-1]) for line in kept.splitlines())
    codec, rows = codec_named("int8"), 128
    others = without - 4 * rows * (64 + 256)
    assert with_forms == others + sum(codec.nbytes(rows * columns) for columns in (64, 256)) + rows * 256 // 8
    assert int(staged) == 4 * codec.nbytes(32 * 64)
    assert int(gathered) == codec.nbytes(part_sizes(64, comm.size)[1 - comm.rank] * 256)


@pytest.mark.parallel([1])
@pytest.mark.numpy_only("a configuration that sends nothing")
def test_a_job_names_the_codecs_without_effect_on_its_grid(comm, shared_path, capsys):
    with h5py.File(shared_path / "data.h5", "w") as file:
        file["x"], file["y"] = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")
    tables = {
        "data": {"file": str(shared_path / "data.h5"), "batch_size": 4, "validation": 0.0},
        "network": {"hidden": [4]},
        "training": {"folder": str(shared_path / "run"), "steps": 1},
        "memory": {"gradients": "int8", "weights": "int8", "stages": "int8"},
    }
    assert train_job(checked(tables), comm, "never", None)
    said = capsys.readouterr().err
    for key, reason in (("gradients", "data is 1"), ("weights", "z is 1"), ("stages", "it has no pipeline")):
        assert f"memory.{key} has no effect on this grid: {reason}\n" in said
