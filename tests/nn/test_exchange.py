"""Networks to torch and back: the same outputs there, the same weights here, on another grid."""

import numpy as np
import pytest

from pmm3d import DistMatrix, Grid, nn
from pmm3d.errors import CheckpointError
from pmm3d.layout import batch_layout
from pmm3d.nn.exchange import export_torch, import_torch

SIZES = [7, 13, 11, 5]


def made(grid, seed):
    return nn.MLP(grid, SIZES, nn.gelu, norm=True, seed=seed, dtype="float64")


def in_torch(path, x):
    import torch
    from safetensors.torch import load_file

    layers = []
    for inputs, outputs in zip(SIZES[:-1], SIZES[1:-1]):
        layers += [torch.nn.Linear(inputs, outputs), torch.nn.LayerNorm(outputs), torch.nn.GELU()]
    network = torch.nn.Sequential(*layers, torch.nn.Linear(*SIZES[-2:])).double()
    network.load_state_dict(load_file(path))
    return network(torch.from_numpy(x)).detach().numpy()


@pytest.mark.parallel([1, 4])
def test_torch_computes_the_same_and_the_weights_come_back(comm, nranks, shared_path):
    x = np.random.default_rng(0).standard_normal((9, 7))
    path = shared_path / "network.safetensors"
    with Grid(comm, (1, 1, 1) if nranks == 1 else (2, 1, 2)) as grid:
        network = made(grid, seed=3)
        export_torch(network, path)
        here = network(DistMatrix.from_global(grid, x, layout=batch_layout("y"))).gather()
        before = {name: matrix.gather() for name, matrix in network.matrices().items()}
    there = comm.bcast(in_torch(path, x) if comm.rank == 0 else None)
    assert np.allclose(here, there, rtol=1e-12, atol=1e-12)
    with Grid(comm, (1, 1, 1), data=nranks) as grid:
        other = made(grid, seed=4)
        import_torch(other, path)
        for name, matrix in other.matrices().items():
            assert np.array_equal(matrix.gather(), before[name])
        smaller = nn.MLP(grid, SIZES[1:], nn.gelu, norm=True, dtype="float64")
        with pytest.raises(CheckpointError, match="0.weight"):
            import_torch(smaller, path)
