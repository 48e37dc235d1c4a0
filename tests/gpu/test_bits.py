"""Results that must be equal on a device and on the host, and the error if device memory is exhausted."""

from __future__ import annotations

import numpy as np
import pytest

from gpu.cases import cases, gpu, on_device, ranks, wide
from pmm3d import DistMatrix, Grid, Layout, OutOfMemoryError, nn
from pmm3d.io import Checkpoints
from pmm3d.nn import functional, optim, recorded_steps
from pmm3d.nn.training.step import train_step

pytestmark = gpu
DISTRIBUTIONS = ("uniform", "normal", "integers")
ROUNDING = {"float64": 1e-12, "float32": 1e-6, "complex64": 1e-6}
"""Allowed difference of normal numbers: each library has its own inverse of the distribution function."""
HUGE, TERABYTE = 2**58, 2**40
"""Bytes that no machine has; bytes that no GPU has."""


@cases("library")
@ranks(1)
def test_random_matrices(comm, library, result):
    """Normal numbers may differ by rounding."""
    different = []
    with Grid(comm) as grid:
        for distribution in DISTRIBUTIONS:
            for dtype, rounding in ROUNDING.items():
                device, host = (
                    wide(
                        DistMatrix.random(
                            grid, (257, 129), seed=7, dtype=dtype, library=name, distribution=distribution
                        ).gather()
                    )
                    for name in (library, "numpy")
                )
                most = rounding if distribution == "normal" else 0.0
                different += [] if np.allclose(device, host, most, most) else [f"{distribution} {dtype}"]
    assert different == []
    result(f"{', '.join(DISTRIBUTIONS)} in {', '.join(ROUNDING)}: as on the host")


@cases("library")
@ranks(1, 2)
def test_replayed_steps(comm, library, result):
    """Losses, norms and weights of replayed training steps are those of ordinary ones."""
    found = []
    for ordinary in (10**9, recorded_steps.ORDINARY):
        with pytest.MonkeyPatch.context() as patch, Grid(comm, "fsdp") as grid:
            patch.setattr(recorded_steps, "ORDINARY", ordinary)
            net = nn.MLP(grid, (37, 64, 51, 12), nn.gelu, norm=True, dropout=0.2, seed=3, library=library)
            optimizer, told = optim.AdamW(net.parameters(), lr=1e-2), []
            for step in range(8):
                x, y = (
                    DistMatrix.random(grid, (96, columns), seed=seed, dtype="float32", layout=layout, library=library)
                    for columns, seed, layout in (
                        (37, 2 * step, Layout(("data", "z"), "y")),
                        (12, 2 * step + 1, net.output_layout),
                    )
                )
                told.append(train_step(net, optimizer, nn.mse, [(x, y)], 1.0))
            found.append((told, [wide(each.value.gather()).tobytes() for each in net.parameters()]))
            replays = recorded_steps.Replays.of(net)
    assert found[0] == found[1] and replays.replayed == 3, replays.problem
    result(f"{replays.replayed} replayed steps: the bits of ordinary ones")


@cases("library")
@ranks(1)
def test_dropout(comm, library, result):
    """Dropout keeps the same elements."""
    with Grid(comm, "ddp") as grid:
        for p in (0.1, 0.5, 0.9):
            device, host = (
                wide(functional.dropout(nn.Tensor(_ones(grid, name)), p, seed=11, stream=3).gather())
                for name in (library, "numpy")
            )
            assert np.array_equal(device != 0, host != 0), f"p = {p}"
    result("masks of p = 0.1, 0.5, 0.9: as on the host")


def _ones(grid, library):
    return DistMatrix.from_function(
        grid, (300, 131), lambda i, j: 1.0, dtype="float32", layout=Layout(("data", "z")), library=library
    )


@cases("library")
@ranks(1)
def test_checkpoint(comm, library, shared_path, result):
    """Weights and optimizer states are saved from the device and loaded to the host."""
    with Grid(comm, "fsdp") as grid:
        saved, loaded = (
            {**net.state_dict(), **opt.matrices()} for net, opt in (_stepped(grid, name) for name in (library, "numpy"))
        )
        for matrix in loaded.values():
            matrix.local[...] = -1
        checkpoints = Checkpoints(grid, shared_path)
        checkpoints.save(1, saved)
        checkpoints.load_latest(loaded)
        different = [
            name for name in saved if wide(saved[name].gather()).tobytes() != wide(loaded[name].gather()).tobytes()
        ]
    assert different == []
    result("weights and optimizer states: the same bits on the host")


def _stepped(grid, library):
    """A network and its optimizer after one step."""
    net = nn.MLP(grid, (12, 20, 6), nn.relu, seed=1, library=library)
    opt = optim.AdamW(net.parameters(), lr=1e-3)
    x = DistMatrix.random(grid, (16, 12), seed=2, dtype="float32", layout=Layout(("data", "z"), "y"), library=library)
    y = DistMatrix.random(grid, (16, 6), seed=3, dtype="float32", layout=net.output_layout, library=library)
    nn.mse(net(x), y).backward()
    opt.step()
    return net, opt


@cases("library")
@ranks(1)
def test_out_of_memory(comm, library, result):
    """The error names what was requested, and the next product is right."""
    columns = (TERABYTE if on_device(library) else HUGE) // 2**20
    with Grid(comm) as grid:
        with pytest.raises(OutOfMemoryError) as caught:
            DistMatrix.empty(grid, (2**18, columns), dtype="float32", library=library)
        small = DistMatrix.random(grid, (64, 64), seed=1, distribution="integers", dtype="float32", library=library)
        whole = wide(small.gather())
        assert np.array_equal(wide((small @ small).gather()), whole @ whole)
    result(f"refused ({str(caught.value)[:300]}); the next product is right")
