"""Networks to torch and back: the same outputs there, the same weights here, on another grid."""

import numpy as np
import pytest
from samples import to_library

from pmm3d import CheckpointError, DistMatrix, Grid, nn
from pmm3d.io import Checkpoints
from pmm3d.layout import batch_layout
from pmm3d.nn import optim
from pmm3d.nn.exchange import export_torch, import_torch, load_weights

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


@pytest.mark.parallel([4], thorough=[1])
def test_torch_computes_the_same_and_the_weights_come_back(comm, nranks, shared_path):
    x = np.random.default_rng(0).standard_normal((9, 7))
    path = shared_path / "network.safetensors"
    with Grid(comm, (1, 1, 1) if nranks == 1 else (2, 1, 2)) as grid:
        network = made(grid, seed=3)
        export_torch(network, path)
        here = network(DistMatrix.from_global(grid, to_library(x), layout=batch_layout("y"))).gather()
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


@pytest.mark.parallel([4], thorough=[1, 2])
def test_a_warm_start_takes_the_weights_and_nothing_else(comm, nranks, shared_path, fails):
    """From a checkpoint, a run's folder, a folder of checkpoints and a file for torch, on another grid."""
    with Grid(comm, "fsdp") as grid:
        network = made(grid, seed=3)
        optimizer = optim.AdamW(network.parameters(), lr=0.1)
        keeper = Checkpoints(grid, shared_path / "run" / "checkpoints")
        path = keeper.save(4, {**network.matrices(), **optimizer.matrices()})
        export_torch(network, shared_path / "net.safetensors")
        before = {name: matrix.gather() for name, matrix in network.matrices().items()}
    with Grid(comm, (1, nranks, 1)) as grid:
        x = DistMatrix.from_global(grid, to_library(np.ones((2, 7))), layout=batch_layout("y"))
        for start in (path, shared_path / "run", path.parent, str(shared_path / "net.safetensors")):
            other = made(grid, seed=4)
            other(x)
            assert str(load_weights(other, start)) == str(start if str(start).endswith("rs") else path)
            for name, matrix in other.matrices().items():
                assert np.array_equal(matrix.gather(), before[name])
        other = made(grid, seed=4)
        values = {name: matrix.gather() for name, matrix in other.matrices().items()}
        deeper, narrow = (nn.MLP(grid, sizes, nn.gelu, norm=True, dtype="float64") for sizes in (
            [*SIZES, 3], [7, 13, 12, 5]))
        fails(CheckpointError, "is the checkpoint of another network. It lacks '7.bias'", lambda: load_weights(
            deeper, path))
        fails(CheckpointError, "It differs in '3.bias'", lambda: load_weights(narrow, path))
        smaller = nn.MLP(grid, [7, 13], nn.gelu, dtype="float64")
        fails(CheckpointError, "It also has '1.bias', '1.gain'", lambda: load_weights(smaller, path))
        fails(CheckpointError, "there is no checkpoint in .*none", lambda: load_weights(other, shared_path / "none"))
        fails(CheckpointError, "none.safetensors is missing", lambda: load_weights(
            other, shared_path / "none.safetensors"))
        for name, matrix in other.matrices().items():
            assert np.array_equal(matrix.gather(), values[name])
