"""Files with the names of GPT-2 and of Llama: written and read on every grid, with the weights in their order."""

import json

import numpy as np
import pytest
from loops import given
from networks import alone, spread, weights_of
from safetensors.numpy import load_file, save_file
from samples import to_numpy

from pmm3d import CheckpointError, Grid, nn
from pmm3d.layout import Layout
from pmm3d.nn.exchange import load_weights

pytestmark = [pytest.mark.parallel([4], thorough=[1, 2, 8]), pytest.mark.deadline(240)]

GRIDS = {
    1: [((1, 1, 1), 1, {})],
    2: [((2, 1, 1), 1, {}), ((1, 1, 2), 1, {}), ((1, 1, 1), 1, {"pipe": 2})],
    4: [((4, 1, 1), 1, {}), ((2, 1, 2), 1, {}), ((1, 2, 1), 2, {}), ((1, 1, 1), 1, {"seq": 4}),
        ((2, 1, 1), 1, {"pipe": 2})],
    8: [((2, 2, 2), 1, {}), ((1, 1, 2), 2, {"pipe": 2})],
}
GPT = {"vocabulary": 11, "positions": 7, "layers": 2, "hidden": 12, "heads": 3, "mlp": 10, "dtype": "float64"}
LLAMA = {"vocabulary": 11, "positions": 7, "layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "mlp": 130,
         "eps": 1e-6, "dtype": "float64"}
KINDS = {"gpt2": (nn.GPT, GPT), "llama": (nn.Llama, LLAMA)}


def filled(net):
    """Set different values for all weights, also of norms and biases. Return the network."""
    for number, parameter in enumerate(net.parameters()):
        values = np.random.default_rng(number).standard_normal(parameter.shape)
        parameter.assign(spread(net.grid, values, parameter.layout))
    return net


def gpt2_tensors(weights):
    """Tensors of a file of GPT-2, element by element, from weights of pmm3d."""
    h, heads = GPT["hidden"], GPT["heads"]
    size = h // heads
    order = [(3 * head + part) * size + column for part in range(3) for head in range(heads) for column in range(size)]
    found = {"transformer.wte.weight": weights["0.table"].T, "transformer.wpe.weight": weights["0.positions"].T,
             "transformer.ln_f.weight": weights["3.norm.gain"][0], "transformer.ln_f.bias": weights["3.norm.bias"][0]}
    for there, here in (("transformer.h.0.", "1."), ("transformer.h.1.", "2.")):
        for name, own in (("ln_1.weight", "norm1.gain"), ("ln_1.bias", "norm1.bias"), ("ln_2.weight", "norm2.gain"),
                          ("ln_2.bias", "norm2.bias"), ("attn.c_proj.bias", "attention.out.bias"),
                          ("mlp.c_fc.bias", "mlp.up.bias"), ("mlp.c_proj.bias", "mlp.down.bias")):
            found[there + name] = weights[here + own][0]
        for name, own in (("attn.c_proj", "attention.out"), ("mlp.c_fc", "mlp.up"), ("mlp.c_proj", "mlp.down")):
            found[f"{there}{name}.weight"] = weights[f"{here}{own}.weight"]
        found[there + "attn.c_attn.weight"] = weights[here + "attention.qkv.weight"][:, order]
        found[there + "attn.c_attn.bias"] = weights[here + "attention.qkv.bias"][0, order]
    return found


def test_a_file_of_gpt2_has_queries_then_keys_then_values(comm, shared_path):
    with alone() as grid:
        expected = gpt2_tensors(weights_of(filled(nn.GPT(grid, **GPT))))
    for shape, data, axes in GRIDS[comm.size]:
        with given(grid=shape, data=data, axes=axes), Grid(comm, shape, data, **axes) as grid:
            make = lambda stage: nn.GPT(stage, **GPT)
            net = nn.Pipeline(grid, make) if "pipe" in axes else make(grid)
            path = shared_path / "expected.safetensors"
            if comm.rank == 0:
                save_file({name: np.ascontiguousarray(tensor) for name, tensor in expected.items()}, path)
            comm.barrier()
            load_weights(net, path)
            net.export(shared_path / "gpt.safetensors", names="gpt2")
            found = load_file(shared_path / "gpt.safetensors")
            assert found.keys() == expected.keys()
            assert all(np.array_equal(found[name], tensor) for name, tensor in expected.items())
            comm.barrier()


def logits_of(net, grid):
    tokens = np.random.default_rng(0).integers(0, 11, (40, 1))
    with net.evaluating():
        layout = Layout(tuple(axis for axis in ("data", "z", "seq") if axis in grid.shape.names), units=(5, 1))
        return to_numpy(net(spread(net.grid, tokens, layout)).gather())


def test_what_one_grid_exports_every_other_loads(comm, shared_path):
    """Logits equal those of one rank, from a folder, and from a file whose configuration contains the sizes."""
    for names, (make, sizes) in KINDS.items():
        with alone() as grid:
            expected = logits_of(filled(make(grid, **sizes)), grid)
        for number, (shape, data, axes) in enumerate(GRIDS[comm.size]):
            source, target = (shared_path / (f"{names}{each}" + ".safetensors" * (each % 2))
                              for each in (number - 1, number))
            with given(names=names, grid=shape, data=data, axes=axes), Grid(comm, shape, data, **axes) as grid:
                if number == 0:
                    filled(make(grid, **sizes)).export(target)
                else:
                    net = make.load(grid, source, dtype="float64")
                    assert np.allclose(logits_of(net, grid), expected, rtol=1e-12, atol=1e-12)
                    net.export(target, names=names)


def test_several_files_and_other_names(comm, shared_path, some_grid):
    """A folder with an index of files; names without the prefix, and with masks, as in the first files of GPT-2."""
    folder = shared_path / "parts"
    net = filled(nn.GPT(some_grid, **GPT))
    net.export(folder)
    if comm.rank == 0:
        tensors = load_file(folder / "model.safetensors")
        short = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        short["h.0.attn.bias"] = np.ones((1, 1, 7, 7), np.float32)
        table = {name: f"part{number % 2}.safetensors" for number, name in enumerate(short)}
        for part in {*table.values()}:
            save_file({name: tensor for name, tensor in short.items() if table[name] == part}, folder / part)
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    comm.barrier()
    other = nn.GPT.load(some_grid, folder, dtype="float64")
    for name, matrix in net.matrices().items():
        assert np.array_equal(matrix.gather(), other.matrices()[name].gather())


def test_files_that_do_not_fit_are_refused(comm, shared_path, some_grid, fails):
    net = nn.GPT(some_grid, **GPT)
    net.export(shared_path / "gpt")
    fails(CheckpointError, "'transformer.h.2", lambda: load_weights(nn.GPT(some_grid, **{**GPT, "layers": 3}),
                                                                    shared_path / "gpt"))
    fails(CheckpointError, "model_type.*gpt2.*nn.GPT.load", lambda: nn.Llama.load(some_grid, shared_path / "gpt"))
    fails(CheckpointError, "no names 'llama'", lambda: net.export(shared_path / "no", names="llama"))
    grouped = nn.GPT(some_grid, **GPT, kv_heads=1)
    fails(CheckpointError, "no names 'gpt2'", lambda: grouped.export(shared_path / "no"))
    if comm.rank == 0:
        config = json.loads((shared_path / "gpt" / "config.json").read_text())
        for folder, change in (("relu", {"activation_function": "relu"}), ("bert", {"model_type": "bert"})):
            (shared_path / folder).mkdir()
            (shared_path / folder / "config.json").write_text(json.dumps({**config, **change}))
        save_file(load_file(shared_path / "gpt" / "model.safetensors"), shared_path / "bare.safetensors")
    comm.barrier()
    fails(CheckpointError, "activation_function is 'relu'", lambda: nn.GPT.load(some_grid, shared_path / "relu"))
    fails(CheckpointError, "'bert'", lambda: nn.GPT.load(some_grid, shared_path / "bert"))
    fails(CheckpointError, "not contain the sizes", lambda: nn.GPT.load(some_grid, shared_path / "bare.safetensors"))
    fails(CheckpointError, "missing|there is no", lambda: nn.GPT.load(some_grid, shared_path / "nowhere"))
