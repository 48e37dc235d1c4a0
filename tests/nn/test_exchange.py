"""Networks to torch and back: the same outputs there, the same weights here, on another grid."""

import json

import numpy as np
import pytest
from loops import given
from networks import CLASSES, bits, network_of, on_grid, spread, weights_of
from on_disk import on_rank_0
from safetensors.numpy import load_file, save_file
from test_nn_torch import torch_network
from torch_reference import by_rank_0

from pmm3d import CheckpointError, Grid, nn
from pmm3d.io import Checkpoints
from pmm3d.nn import optim
from pmm3d.nn.exchange import export_torch, import_torch, load_weights
from pmm3d.nn.training import TrainState


def in_torch(path, weights, x):
    import torch
    from safetensors.torch import load_file

    network = torch_network(torch, CLASSES, weights)
    network.load_state_dict(load_file(path))
    return network(torch.from_numpy(x)).detach().numpy()


@pytest.mark.parallel([4], thorough=[1])
def test_torch_computes_the_same_and_the_weights_come_back(comm, nranks, shared_path):
    x = np.random.default_rng(0).standard_normal((9, 7))
    path = shared_path / "network.safetensors"
    with Grid(comm, (1, 1, 1) if nranks == 1 else (2, 1, 2)) as grid:
        network, others = network_of(grid, CLASSES, seed=3), weights_of(network_of(grid, CLASSES, seed=4))
        export_torch(network, path)
        here, weights = network(spread(grid, x)).gather(), weights_of(network)
    there = by_rank_0(comm, lambda: in_torch(path, others, x))
    assert np.allclose(here, there, rtol=1e-12, atol=1e-12)
    with Grid(comm, (1, 1, 1), data=nranks) as grid:
        other = network_of(grid, CLASSES, seed=4)
        import_torch(other, path)
        assert bits(weights_of(other)) == bits(weights)
        smaller = network_of(grid, CLASSES._replace(sizes=CLASSES.sizes[1:]))
        with pytest.raises(CheckpointError, match="0.weight"):
            import_torch(smaller, path)


@pytest.mark.parallel([4], thorough=[1, 2])
def test_a_warm_start_takes_the_weights_and_nothing_else(comm, nranks, shared_path, fails):
    """From a checkpoint, a run's folder, a folder of checkpoints and a file for torch, on another grid."""
    file = shared_path / "net.safetensors"
    with Grid(comm, "fsdp") as grid:
        network = network_of(grid, CLASSES, seed=3)
        optimizer = optim.AdamW(network.parameters(), lr=0.1)
        keeper = Checkpoints(grid, shared_path / "run" / "checkpoints")
        path = keeper.save(4, {**network.matrices(), **optimizer.matrices()})
        export_torch(network, file)
        before = bits(weights_of(network))
    with Grid(comm, (1, nranks, 1)) as grid:
        x = spread(grid, np.ones((2, 7)))
        for start in (path, shared_path / "run", path.parent, str(file)):
            other = network_of(grid, CLASSES, seed=4)
            other(x)
            assert str(load_weights(other, start)) == str(file if start == str(file) else path)
            assert bits(weights_of(other)) == before
        for sizes, start, text in (
            ([*CLASSES.sizes, 3], path, "is the checkpoint of another network. It lacks '7.bias'"),
            ([7, 13, 12, 5], path, "It differs in '3.bias'"),
            (CLASSES.sizes[:2], path, "It also has '1.bias', '1.gain'"),
            (CLASSES.sizes, shared_path / "none", "there is no checkpoint in .*none"),
            (CLASSES.sizes, shared_path / "none.safetensors", "none.safetensors is missing"),
            (CLASSES.sizes, "n" * 300, "too long"),  # only rank 0 looks at the path
        ):
            with given(sizes=sizes, start=start):
                other = nn.MLP(grid, sizes, nn.gelu, norm=len(sizes) > 2, dtype="float64")
                values = bits(weights_of(other))
                fails(CheckpointError, text, lambda: load_weights(other, start))
                assert bits(weights_of(other)) == values


LLAMA = {
    "vocabulary": 13,
    "layers": 1,
    "hidden": 16,
    "mlp": 16,
    "positions": 8,
    "heads": 4,
    "kv_heads": 2,
    "rotary_base": 5e5,
}
OTHERS = [
    ({"heads": 2, "kv_heads": 1}, "network.heads was 4, is 2"),
    ({"rotary_base": 1e4}, "network.rotary_base was 500000.0, is 10000.0"),
    ({"window": 2}, "network.window was None, is 2"),
    ({"eps": 0.1}, "network.eps was 1e-05, is 0.1"),
    (
        {"rotary_scaling": {"rope_type": "linear", "factor": 2}},
        "network.rotary_scaling was None, is 'linear, factor=2.0'",
    ),
]


def state_of(net):
    return TrainState(net, optim.SGD(net.parameters(), lr=0.1))


def foreign(net, folder):
    """Write a folder as another program does: without metadata of pmm3d in the file."""
    net.export(folder)
    on_rank_0(net.grid, lambda: save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors"))


@pytest.mark.parallel([2])
@on_grid("fsdp")
def test_weights_of_a_network_with_other_settings_are_refused_by_name(grid, comm, shared_path, fails, caplog):
    """From each kind of file, before a weight changes, unless the network may differ. All shapes fit."""
    net = nn.Llama(grid, seed=1, **LLAMA)
    doors = {
        "folder": foreign,
        "file": lambda net, path: net.export(path.with_suffix(".safetensors"), names="torch"),
        "checkpoint": lambda net, path: state_of(net).save(Checkpoints(grid, path)),
    }
    for door, write in doors.items():
        write(net, shared_path / door)
        path = next(shared_path.glob(f"{door}*"))
        for changes, text in OTHERS:
            with given(door=door, changes=changes):
                other = nn.Llama(grid, seed=2, **{**LLAMA, **changes})
                before = bits(weights_of(other))
                fails(CheckpointError, f"{text}.*--accept network", lambda: load_weights(other, path))
                assert bits(weights_of(other)) == before
        load_weights(other, path, accept=["network"])
        assert bits(weights_of(other)) == bits(weights_of(net))
        assert text in caplog.text or comm.rank
        caplog.clear()
    config = shared_path / "folder" / "config.json"
    on_rank_0(comm, lambda: config.write_text(json.dumps(json.loads(config.read_text()) | {"hidden_act": "gelu"})))
    fails(CheckpointError, "hidden_act is 'gelu'", lambda: load_weights(other, config.parent))
    assert load_weights(other, config.parent, accept=["network"]) == config.parent  # although no network has it


@pytest.mark.parallel([2])
def test_activations_and_masks_are_compared_too(comm, shared_path, fails):
    """Of any network, and by the resume of a loop of one's own, which has no settings."""
    gpt = {"vocabulary": 13, "layers": 1, "hidden": 16, "heads": 2, "positions": 8}
    with Grid(comm, "fsdp") as grid:
        for text, net, make in (
            (
                "activation was 'gelu', is 'relu'",
                nn.MLP(grid, [3, 4, 4, 2], nn.gelu),
                lambda: nn.MLP(grid, [3, 4, 4, 2], "relu"),
            ),
            (
                "causal was True, is False; network.activation was 'gelu_tanh', is 'gelu'",
                nn.GPT(grid, **gpt),
                lambda: nn.Encoder(grid, **gpt),
            ),
            (
                r"window was \[2, None\], is None",
                nn.Sequential(grid, nn.Attention(grid, 8, 2, window=2), nn.Attention(grid, 8, 2)),
                lambda: nn.Sequential(grid, nn.Attention(grid, 8, 2), nn.Attention(grid, 8, 2)),
            ),
        ):
            with given(text=text):
                keeper = Checkpoints(grid, shared_path / type(net).__name__)
                state_of(net).save(keeper)
                export_torch(net, shared_path / "net.safetensors")
                for path in (keeper.folder, shared_path / "net.safetensors"):
                    fails(CheckpointError, text, lambda: load_weights(make(), path))
                fails(CheckpointError, text, lambda: state_of(make()).resume(keeper))
                assert state_of(make()).resume(keeper, accept=["network"])


@pytest.mark.parallel([2])
@on_grid("fsdp")
def test_a_refused_file_makes_neither_master_weights_nor_states(grid, shared_path, fails):
    net = nn.MLP(grid, [3, 4, 2], "relu")
    state_of(net).save(Checkpoints(grid, shared_path / "run"))
    export_torch(net, shared_path / "net.safetensors")
    for path in shared_path / "run", shared_path / "net.safetensors":
        other = nn.MLP(grid, [3, 4, 2], "gelu", dtype="float16", precision="float16")
        optimizer = optim.Adam(other.parameters(), lr=0.1)
        fails(CheckpointError, "activation was 'relu'", lambda: load_weights(other, path, optimizer))
        assert all(each.master is None and not each.has_state for each in other.parameters())
