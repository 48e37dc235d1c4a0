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
from pmm3d.nn.exchange import export_torch, import_torch, load_weights
from pmm3d.nn.transformer.names import architecture_of

pytestmark = [pytest.mark.parallel([2], thorough=[1, 4, 8]), pytest.mark.deadline(240)]

GRIDS = {
    1: [((1, 1, 1), 1, {})],
    2: [((2, 1, 1), 1, {}), ((1, 1, 2), 1, {}), ((1, 1, 1), 1, {"pipe": 2})],
    4: [
        ((4, 1, 1), 1, {}),
        ((2, 1, 2), 1, {}),
        ((1, 2, 1), 2, {}),
        ((1, 1, 1), 1, {"seq": 4}),
        ((2, 1, 1), 1, {"pipe": 2}),
    ],
    8: [((2, 2, 2), 1, {}), ((1, 1, 2), 2, {"pipe": 2})],
}
GPT = {"vocabulary": 11, "positions": 7, "layers": 2, "hidden": 12, "heads": 3, "mlp": 10, "dtype": "float64"}
LLAMA = {
    "vocabulary": 11,
    "positions": 7,
    "layers": 2,
    "hidden": 16,
    "heads": 4,
    "kv_heads": 2,
    "mlp": 130,
    "eps": 1e-6,
    "dtype": "float64",
}
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
    found = {
        "transformer.wte.weight": weights["0.table"].T,
        "transformer.wpe.weight": weights["0.positions"].T,
        "transformer.ln_f.weight": weights["3.norm.gain"][0],
        "transformer.ln_f.bias": weights["3.norm.bias"][0],
    }
    for there, here in (("transformer.h.0.", "1."), ("transformer.h.1.", "2.")):
        for name, own in (
            ("ln_1.weight", "norm1.gain"),
            ("ln_1.bias", "norm1.bias"),
            ("ln_2.weight", "norm2.gain"),
            ("ln_2.bias", "norm2.bias"),
            ("attn.c_proj.bias", "attention.out.bias"),
            ("mlp.c_fc.bias", "mlp.up.bias"),
            ("mlp.c_proj.bias", "mlp.down.bias"),
        ):
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
            source, target = (
                shared_path / (f"{names}{each}" + ".safetensors" * (each % 2)) for each in (number - 1, number)
            )
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
    fails(
        CheckpointError,
        "'transformer.h.2",
        lambda: load_weights(nn.GPT(some_grid, **{**GPT, "layers": 3}), shared_path / "gpt"),
    )
    fails(CheckpointError, "model_type.*gpt2.*nn.GPT.load", lambda: nn.Llama.load(some_grid, shared_path / "gpt"))
    fails(CheckpointError, "no names 'llama'", lambda: net.export(shared_path / "no", names="llama"))
    grouped = nn.GPT(some_grid, **GPT, kv_heads=1)
    fails(
        CheckpointError,
        "folder .*'torch'.*This GPT has the names torch. Give a file that ends in .safetensors",
        lambda: grouped.export(shared_path / "no"),
    )
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


one, two = pytest.mark.parallel([1]), pytest.mark.parallel([2])
OPENAI = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "n_special": 0,
    "predict_special_tokens": True,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "vocab_size": 50257,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
}
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5632,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 22,
    "num_key_value_heads": 4,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.35.0",
    "use_cache": True,
    "vocab_size": 32000,
}
NEWER = {
    "_name_or_path": "x",
    "attention_dropout": 0.0,
    "dtype": "float32",
    "head_dim": 64,
    "is_llama_config": True,
    "max_sequence_length": 2048,
    "mlp_bias": False,
    "pad_token_id": 0,
    "rope_interleaved": False,
    "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"},
    "sliding_window": 7,
    "transformers.js_config": {"kv_cache_dtype": {}},
    "id2label": {"0": "LABEL_0"},
}


@one
def test_settings_that_change_no_logit_are_accepted():
    """Files of published networks, and keys of newer versions of the transformers package."""
    of = architecture_of(OPENAI, "config.json")
    assert (of.vocabulary, of.positions, of.hidden, of.kv_heads, of.mlp, of.tied) == (50257, 1024, 768, 12, 3072, True)
    of = architecture_of(TINY, "config.json")
    assert (of.kv_heads, of.mlp, of.eps, of.window, of.tied) == (4, 5632, 1e-5, None, False)
    of = architecture_of({**TINY, **NEWER, "max_position_embeddings": None}, "config.json")
    assert (of.rotary_base, of.window, of.positions) == (5e5, None, None)
    mistral = {**TINY, "model_type": "mistral"}
    windows = [
        architecture_of({**mistral, **some}, "config.json").window
        for some in ({"sliding_window": 7}, {"sliding_window": None}, {})
    ]
    assert windows == [7, None, 4096]


REFUSED = [
    (TINY, "rope_scaling.type", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    (TINY, "rope_scaling.type", {"rope_scaling": {"factor": 4.0, "type": "dynamic"}}),
    (TINY, "rope_scaling.rope_type", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}),
    (TINY, "rope_parameters.rope_type", {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3"}}),
    (TINY, "rope_parameters.long_factor", {"rope_parameters": {"rope_theta": 5e5, "long_factor": [1.0]}}),
    (TINY, "rope_scaling", {"rope_scaling": "linear"}),
    (TINY, "partial_rotary_factor", {"partial_rotary_factor": 0.5}),
    (TINY, "quantization_config", {"quantization_config": {"bits": 4}}),
    (TINY, "logits_scaling", {"logits_scaling": 8.0}),
    (TINY, "attention_bias", {"attention_bias": True}),
    (TINY, "head_dim", {"head_dim": 128}),
    (TINY, "hidden_size", {"hidden_size": "2048"}),
    (TINY, "vocab_size", {"vocab_size": 32000.0}),
    (TINY, "num_hidden_layers", {"num_hidden_layers": None}),
    (TINY, "rms_norm_eps", {"rms_norm_eps": "1e-5"}),
    (TINY, "rope_theta", {"rope_theta": "1e6"}),
    (TINY, "rope_theta", {"rope_theta": float("inf")}),
    (TINY, "tie_word_embeddings", {"tie_word_embeddings": "no"}),
    (OPENAI, "scale_attn_weights", {"scale_attn_weights": False}),
    (OPENAI, "n_inner", {"n_inner": []}),
    (OPENAI, "pruned_heads", {"pruned_heads": {"0": [1]}}),
    (OPENAI, "position_embedding_type", {"position_embedding_type": "alibi"}),
]


@one
def test_settings_that_change_the_logits_or_are_unknown_are_refused_by_name():
    for config, key, change in REFUSED:
        with given(change=change), pytest.raises(CheckpointError, match=rf"config.json: .*\b{key}\b"):
            architecture_of({**config, **change}, "config.json")


@two
def test_files_of_json_with_another_content_are_refused(comm, shared_path, some_grid, fails):
    nn.Llama(some_grid, **LLAMA).export(shared_path)
    for name in ("config.json", "model.safetensors.index.json"):
        for text in ("[]", "{", "\udcff", '{"weight_map": ["model.safetensors"]}', '{"weight_map": {"a": 1}}'):
            with given(name=name, text=text):
                before = (shared_path / name).read_text() if name == "config.json" else ""
                comm.barrier()
                if comm.rank == 0:
                    (shared_path / name).write_bytes(text.encode(errors="surrogateescape"))
                comm.barrier()
                fails(
                    CheckpointError,
                    name if name != "config.json" or "weight" not in text else "model_type",
                    lambda: nn.Llama.load(some_grid, shared_path),
                )
                if comm.rank == 0:
                    (shared_path / name).write_text(before) if before else (shared_path / name).unlink()
                comm.barrier()


@two
def test_an_export_replaces_the_weight_files_of_the_folder(comm, shared_path, some_grid, fails):
    """Several files and their index are removed. Links are replaced, and their targets stay. Files of other kinds
    stay. A folder with both kinds of weight files, or with parts and no index, is refused."""
    folder, cache = shared_path / "net", shared_path / "cache"
    old, new = (filled(nn.Llama(some_grid, **{**LLAMA, "layers": layers})) for layers in (1, 2))
    old.export(folder)
    if comm.rank == 0:
        cache.mkdir()
        in_parts(folder, 2)
        for file in [*folder.glob("*.safetensors"), folder / "config.json"]:  # as in the cache of a hub
            file.rename(cache / file.name)
            file.symlink_to(cache / file.name)
        (folder / "tokenizer.json").write_text("{}")
    comm.barrier()
    kept = {file.name: file.read_bytes() for file in cache.iterdir()}
    assert same_weights(nn.Llama.load(some_grid, folder, dtype="float64"), old)
    new.export(folder)
    assert {file.name for file in folder.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    assert {file.name: file.read_bytes() for file in cache.iterdir()} == kept
    assert same_weights(nn.Llama.load(some_grid, folder, dtype="float64"), new)
    if comm.rank == 0:
        for name in kept:
            (folder / name).write_bytes(kept[name]) if "-of-" in name else None
    assert same_weights(nn.Llama.load(some_grid, folder, dtype="float64"), new)
    if comm.rank == 0:
        index = {"weight_map": {"a": "model-0-of-2.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    comm.barrier()
    fails(CheckpointError, "Remove those", lambda: nn.Llama.load(some_grid, folder))
    comm.barrier()
    if comm.rank == 0:
        for name in ("model.safetensors", "model.safetensors.index.json"):
            (folder / name).unlink()
    comm.barrier()
    for load in (lambda: nn.Llama.load(some_grid, folder), lambda: load_weights(new, folder)):
        fails(CheckpointError, "Copy the table", load)


def in_parts(folder, count):
    """Cut the weights of a folder into several files with an index. Return the paths of the files."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, files = sorted(tensors), [f"model-{number}-of-{count}.safetensors" for number in range(count)]
    table = {name: files[number * count // len(names)] for number, name in enumerate(names)}
    for file in files:
        save_file({name: tensors[name] for name in names if table[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    return [folder / file for file in files]


def same_weights(net, other):
    found = other.matrices()
    return net.matrices().keys() == found.keys() and all(
        np.array_equal(matrix.gather(), found[name].gather()) for name, matrix in net.matrices().items()
    )


@two
def test_weights_that_fail_to_load_change_nothing(comm, shared_path, some_grid, fails):
    """The last of two files is missing, cut off, or has other tensors."""
    net = filled(nn.Llama(some_grid, **LLAMA))
    net.export(shared_path)
    files = in_parts(shared_path, 2) if comm.rank == 0 else None
    last = comm.bcast(files)[-1]
    tensors, whole = load_file(last), last.read_bytes()
    name = next(iter(tensors))
    other, before = nn.Llama(some_grid, seed=9, **LLAMA), nn.Llama(some_grid, seed=9, **LLAMA)

    def change(file, contents):
        comm.barrier()
        if comm.rank == 0:
            file.unlink()
            if isinstance(contents, bytes):
                file.write_bytes(contents)
            elif contents is not None:
                save_file(contents, file)
        comm.barrier()

    for title, contents in {
        "missing": None,
        "cut off": whole[:-8],
        "longer": whole + bytes(8),
        "no header": whole[:4],
        "a tensor less": {each: tensors[each] for each in tensors if each != name},
        "another shape": {**tensors, name: tensors[name][:-1].copy()},
        "another type": {**tensors, name: tensors[name].astype("int8")},
    }.items():
        with given(title=title):
            change(last, contents)
            fails(
                CheckpointError,
                name if isinstance(contents, dict) else last.name,
                lambda: load_weights(other, shared_path),
            )
            assert same_weights(other, before)
            if comm.rank == 0:
                last.touch()
    change(last, {**tensors, "of.no.index": np.ones(3)})
    load_weights(other, shared_path)
    assert same_weights(other, net)


@two
def test_the_names_are_the_same_on_every_grid_and_by_every_function(comm, shared_path, fails):
    """Published names by default, also on stages. A config.json is written beside no other names."""
    sizes, found = {**GPT, "seed": 3}, []
    for axes in ({}, {"pipe": 2}):
        with given(axes=axes), Grid(comm, (1, 1, 1) if axes else (1, 1, 2), **axes) as grid:
            make = lambda stage: nn.GPT(stage, **sizes)
            net = nn.Pipeline(grid, make) if axes else make(grid)
            for export in (net.export, lambda path: export_torch(net, path)):
                path = shared_path / f"{len(found)}"
                export(path)
                export(path.with_suffix(".safetensors"))
                assert json.loads((path / "config.json").read_text())["model_type"] == "gpt2"
                for file in (path / "model.safetensors", path.with_suffix(".safetensors")):
                    found.append(set(load_file(file)))
            fails(
                CheckpointError,
                "folder .*'torch'.*torch, gpt2.*.safetensors",
                lambda: net.export(shared_path / "no", names="torch"),
            )
            net.export(shared_path / "torch.safetensors", names="torch")
            assert "0.table" in load_file(shared_path / "torch.safetensors")
            import_torch(net, shared_path / "torch.safetensors")
    assert len(found) == 8 and all(names == found[0] for names in found) and "transformer.wte.weight" in found[0]
    with Grid(comm, "ddp") as grid:
        net = nn.Encoder(grid, **GPT)
        net.export(shared_path / "encoder.safetensors")
        assert "0.table" in load_file(shared_path / "encoder.safetensors")
        fails(CheckpointError, "folder .*'torch'", lambda: net.export(shared_path / "no"))
    assert not (shared_path / "no").exists()


@two
def test_sizes_that_are_numbers_of_numpy_are_exported(comm, shared_path, some_grid):
    sizes = {
        "vocabulary": np.array([3, 10]).max() + 1,
        "layers": np.int64(1),
        "hidden": np.int32(8),
        "heads": np.int64(2),
        "kv_heads": np.int8(1),
        "mlp": np.int64(6),
        "positions": np.int64(4),
    }
    others = {
        "eps": np.float32(0.5),
        "dropout": np.float32(0.25),
        "tied": np.bool_(True),
        "window": np.int64(3),
        "rotary_base": np.float32(500),
        "recompute": np.int64(1),
    }
    net = nn.Llama(some_grid, **sizes, **others)
    net.export(shared_path)
    expected = {
        "vocab_size": 11,
        "num_hidden_layers": 1,
        "hidden_size": 8,
        "num_key_value_heads": 1,
        "max_position_embeddings": 4,
        "rms_norm_eps": 0.5,
        "tie_word_embeddings": True,
        "sliding_window": 3,
        "rope_theta": 500.0,
    }
    config = json.loads((shared_path / "config.json").read_text())
    assert {key: config[key] for key in expected} == expected
    assert nn.Llama.load(some_grid, shared_path).architecture == net.architecture
    free = nn.Llama(some_grid, **{**sizes, "positions": None})
    free.export(shared_path)
    assert "max_position_embeddings" not in json.loads((shared_path / "config.json").read_text())
    assert nn.Llama.load(some_grid, shared_path).architecture == free.architecture
