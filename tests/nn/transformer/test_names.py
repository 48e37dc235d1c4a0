"""Files with the names of GPT-2 and of Llama: written and read on every grid, with the weights in their order."""

import json
from functools import partial
from itertools import product

import numpy as np
import pytest
from loops import given, looped
from networks import alone, bits, on_grid, spread, weights_of
from on_disk import on_rank_0
from safetensors.numpy import load_file, save_file
from samples import to_numpy

from pmm3d import CheckpointError, Grid, nn
from pmm3d.layout import Layout
from pmm3d.nn.exchange import export_torch, import_torch, load_weights
from pmm3d.nn.transformer.names import architecture_of
from pmm3d.nn.transformer.scaling import RotaryScaling

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
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8.0}
KINDS = {
    "gpt2": (nn.GPT, GPT),
    "llama": (nn.Llama, LLAMA),
    "llama3": (nn.Llama, {**LLAMA, "rotary_scaling": LLAMA3, "tied": True}),
    "qwen2": (nn.Llama, {**LLAMA, "qkv_bias": True, "rotary_scaling": YARN, "kv_heads": 1}),
    "qwen3": (nn.Llama, {**LLAMA, "qk_norm": True, "head_dim": 6}),
}


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
        "wte.weight": weights["0.table"].T,
        "wpe.weight": weights["0.positions"].T,
        "ln_f.weight": weights["3.norm.gain"][0],
        "ln_f.bias": weights["3.norm.bias"][0],
    }
    for there, here in (("h.0.", "1."), ("h.1.", "2.")):
        of = {name.removeprefix(here): value for name, value in weights.items() if name.startswith(here)}
        for name, own in (("ln_1", "norm1"), ("ln_2", "norm2")):
            found[f"{there}{name}.weight"], found[f"{there}{name}.bias"] = of[f"{own}.gain"][0], of[f"{own}.bias"][0]
        for name, own, columns in (
            ("attn.c_attn", "attention.qkv", order),
            ("attn.c_proj", "attention.out", slice(None)),
            ("mlp.c_fc", "mlp.up", slice(None)),
            ("mlp.c_proj", "mlp.down", slice(None)),
        ):
            found[f"{there}{name}.weight"] = of[f"{own}.weight"][:, columns]
            found[f"{there}{name}.bias"] = of[f"{own}.bias"][0, columns]
    return {f"transformer.{name}": np.ascontiguousarray(tensor) for name, tensor in found.items()}


def test_a_file_of_gpt2_has_queries_then_keys_then_values(comm, shared_path):
    with alone() as grid:
        expected = gpt2_tensors(weights_of(filled(nn.GPT(grid, **GPT))))
    path, make = shared_path / "expected.safetensors", partial(nn.GPT, **GPT)
    if comm.rank == 0:
        save_file(expected, path)
    comm.barrier()
    for shape, data, axes in GRIDS[comm.size]:
        with given(grid=shape, data=data, axes=axes), Grid(comm, shape, data, **axes) as grid:
            net = nn.Pipeline(grid, make) if "pipe" in axes else make(grid)
            load_weights(net, path)
            net.export(shared_path / "gpt.safetensors")
            assert bits(load_file(shared_path / "gpt.safetensors")) == bits(expected)
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
                    net.export(target, names=make.kind)


def test_several_files_and_other_names(comm, shared_path, some_grid):
    """A folder with an index of files; names without the prefix, and with masks, as in the first files of GPT-2."""
    net = filled(nn.GPT(some_grid, **GPT))
    net.export(shared_path)
    if comm.rank == 0:
        tensors = load_file(shared_path / "model.safetensors")
        short = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        short["h.0.attn.bias"] = np.ones((1, 1, 7, 7), np.float32)
        save_file(short, shared_path / "model.safetensors")
        in_parts(shared_path, 2)
    comm.barrier()
    assert same_weights(nn.GPT.load(some_grid, shared_path, dtype="float64"), net)


def test_files_that_do_not_fit_are_refused(comm, shared_path, some_grid, fails):
    net, folder = nn.GPT(some_grid, **GPT), shared_path / "gpt"
    net.export(folder)
    if comm.rank == 0:
        config = json.loads((folder / "config.json").read_text())
        for name, change in (("relu", {"activation_function": "relu"}), ("bert", {"model_type": "bert"})):
            (shared_path / name).mkdir()
            (shared_path / name / "config.json").write_text(json.dumps({**config, **change}))
        save_file(load_file(folder / "model.safetensors"), shared_path / "bare.safetensors")
    comm.barrier()
    grouped, deeper = (nn.GPT(some_grid, **{**GPT, **change}) for change in ({"kv_heads": 1}, {"layers": 3}))
    load = lambda name, kind=nn.GPT: kind.load(some_grid, shared_path / name)
    for text, call in (
        ("'transformer.h.2", lambda: load_weights(deeper, folder)),
        ("model_type.*gpt2.*nn.GPT.load", lambda: load("gpt", nn.Llama)),
        ("no names 'llama'", lambda: net.export(shared_path / "no", names="llama")),
        ("folder .*'torch'.*the names torch. .*.safetensors", lambda: grouped.export(shared_path / "no")),
        ("activation_function is 'relu'", lambda: load("relu")),
        ("'bert'", lambda: load("bert")),
        ("not contain the sizes", lambda: load("bare.safetensors")),
        ("missing|there is no", lambda: load("nowhere")),
    ):
        fails(CheckpointError, text, call)


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
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 131072,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA31 = {
    **TINY,
    "max_position_embeddings": 131072,
    "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8192},
    "rope_theta": 500000.0,
}
DYNAMIC = {**TINY, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
LINEAR = RotaryScaling("linear", 4.0)
NEWER = {
    "_name_or_path": "x",
    "attention_dropout": 0.0,
    "dtype": "float32",
    "head_dim": None,
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
    mistral = {**TINY, "model_type": "mistral"}
    for config, expected in (
        (OPENAI, {"vocabulary": 50257, "positions": 1024, "hidden": 768, "kv_heads": 12, "mlp": 3072, "tied": True}),
        (TINY, {"kv_heads": 4, "mlp": 5632, "eps": 1e-5, "window": None, "tied": False}),
        ({**TINY, **NEWER, "max_position_embeddings": None}, {"rotary_base": 5e5, "window": None, "positions": None}),
        (QWEN2, {"qkv_bias": True, "qk_norm": False, "window": None, "head_dim": 64, "tied": True}),
        (QWEN3, {"qkv_bias": False, "qk_norm": True, "window": None, "head_dim": 128, "rotary_scaling": None}),
        ({**QWEN3, "head_dim": 32}, {"head_dim": 32}),
        ({**QWEN2, "layer_types": 24 * ["full_attention"]}, {"kv_heads": 2}),
        ({**TINY, "head_dim": 128}, {"head_dim": 128}),
        ({**TINY, "rope_scaling": {"type": "linear", "factor": 4}}, {"rotary_scaling": LINEAR}),
        ({**TINY, "rope_parameters": {"rope_type": "linear", "factor": 4.0}}, {"rotary_scaling": LINEAR}),
        (DYNAMIC, {"positions": None, "rotary_scaling": RotaryScaling("dynamic", 2.0, 2048)}),
        (LLAMA31, {"rotary_scaling": RotaryScaling("llama3", 8.0, 8192, 1.0, 4.0), "positions": 131072}),
        ({**mistral, "sliding_window": 7}, {"window": 7}),
        ({**mistral, "sliding_window": None}, {"window": None}),
        (mistral, {"window": 4096}),
    ):
        found = architecture_of(config, "config.json")
        assert {name: getattr(found, name) for name in expected} == expected


REFUSED = [
    (TINY, "rope_scaling.rope_type", {"rope_scaling": {"type": "longrope", "factor": 4.0}}),
    (TINY, "rope_scaling.type", {"rope_scaling": {"rope_type": "linear", "type": "dynamic", "factor": 4.0}}),
    (TINY, "rope_parameters.factor", {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3"}}),
    (
        TINY,
        "rope_scaling.high_freq_factor",
        {"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0, "high_freq_factor": "4"}},
    ),
    (TINY, "rope_scaling.partial_rotary_factor", {"rope_scaling": {"type": "default", "partial_rotary_factor": 0.5}}),
    (TINY, "rope_parameters differ", {"rope_scaling": LLAMA3, "rope_parameters": {**LLAMA3, "factor": 4.0}}),
    (
        TINY,
        "rope_scaling and rope_parameters differ",
        {"rope_scaling": {"rope_type": "default"}, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    ),
    (QWEN2, "layer_types", {"layer_types": 4}),
    (
        DYNAMIC,
        "original_max_position_embeddings is 4, but with rope_type dynamic",
        {"rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 4}},
    ),
    (
        {**TINY, "max_position_embeddings": None},
        "original_max_position_embeddings is missing",
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    ),
    (QWEN2, "use_sliding_window", {"use_sliding_window": True}),
    (QWEN2, "layer_types", {"layer_types": ["full_attention", "sliding_attention"]}),
    (QWEN2, "num_experts", {"num_experts": 8}),
    (QWEN3, "attention_bias", {"attention_bias": True}),
    (QWEN3, "model_type", {"model_type": "qwen3_next"}),
    (TINY, "final_logit_softcapping", {"final_logit_softcapping": 30.0}),
    (TINY, "rope_parameters.long_factor", {"rope_parameters": {"rope_theta": 5e5, "long_factor": [1.0]}}),
    (TINY, "rope_scaling", {"rope_scaling": "linear"}),
    (TINY, "partial_rotary_factor", {"partial_rotary_factor": 0.5}),
    (TINY, "quantization_config", {"quantization_config": {"bits": 4}}),
    (TINY, "logits_scaling", {"logits_scaling": 8.0}),
    (TINY, "attention_bias", {"attention_bias": True}),
    (TINY, "head_dim", {"head_dim": 0}),
    (TINY, "hidden must be a multiple of heads", {"num_attention_heads": 28}),
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
@looped("config, key, change", REFUSED)
def test_settings_that_change_the_logits_or_are_unknown_are_refused_by_name(config, key, change):
    with pytest.raises(CheckpointError, match=rf"config.json: .*\b{key}\b"):
        architecture_of({**config, **change}, "config.json")


@two
def test_files_of_json_with_another_content_are_refused(shared_path, some_grid, fails):
    nn.Llama(some_grid, **LLAMA).export(shared_path)
    config = shared_path / "config.json"
    right = config.read_bytes()
    for file, text in product(
        (config, shared_path / "model.safetensors.index.json"),
        ("[]", "{", "\udcff", '{"weight_map": ["model.safetensors"]}', '{"weight_map": {"a": 1}}'),
    ):
        with given(name=file.name, text=text):
            on_rank_0(some_grid, lambda: file.write_bytes(text.encode(errors="surrogateescape")))
            wrong = "model_type" if file == config and "weight" in text else file.name
            fails(CheckpointError, wrong, lambda: nn.Llama.load(some_grid, shared_path))
            if file != config:
                net = nn.Llama(some_grid, **LLAMA)
                fails(CheckpointError, "Or remove it before the export", lambda: net.export(shared_path))
            on_rank_0(some_grid, lambda: (file.unlink(), config.write_bytes(right)))


@two
def test_an_export_removes_no_file_but_weight_files(shared_path, some_grid):
    """Whatever names an index lists."""
    listed = ("config.json", "notes.txt", "..", "", "a\0.safetensors", "../old.safetensors", "model.safetensors")
    table, net = {str(number): name for number, name in enumerate(listed)}, nn.Llama(some_grid, **LLAMA)
    index = json.dumps({"weight_map": table})
    for name, text in (("notes.txt", ""), ("old.safetensors", ""), ("model.safetensors.index.json", index)):
        on_rank_0(some_grid, lambda name=name, text=text: (shared_path / name).write_text(text))
    net.export(shared_path)
    names = {file.name for file in shared_path.iterdir()}
    assert names == {"config.json", "model.safetensors", "notes.txt", "old.safetensors"}


@two
def test_an_export_replaces_the_weight_files_of_the_folder(shared_path, some_grid, fails):
    """Several files and their index are removed. Links are replaced, and their targets stay. Files of other kinds
    stay. A folder with both kinds of weight files, or with parts and no index, is refused."""
    folder, cache, index = shared_path / "net", shared_path / "cache", "model.safetensors.index.json"
    old, new = (filled(nn.Llama(some_grid, **{**LLAMA, "layers": layers})) for layers in (1, 2))
    load = lambda: nn.Llama.load(some_grid, folder, dtype="float64")
    old.export(folder)

    def link():  # as in the cache of a hub
        cache.mkdir()
        in_parts(folder, 2)
        for file in [*folder.iterdir()]:
            file.rename(cache / file.name)
            (folder / file.name).symlink_to(cache / file.name)
        (folder / "tokenizer.json").write_text("{}")

    on_rank_0(some_grid, link)
    kept = {file.name: file.read_bytes() for file in cache.iterdir()}
    parts = [name for name in kept if "-of-" in name]
    assert same_weights(load(), old)
    new.export(folder)
    assert {file.name for file in folder.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    assert {file.name: file.read_bytes() for file in cache.iterdir()} == kept and same_weights(load(), new)
    on_rank_0(some_grid, lambda: [(folder / name).write_bytes(kept[name]) for name in parts])
    assert same_weights(load(), new)
    on_rank_0(some_grid, lambda: (folder / index).write_bytes(kept[index]))
    fails(CheckpointError, "Remove those", load)
    on_rank_0(some_grid, lambda: [(folder / name).unlink() for name in ("model.safetensors", index)])
    for refused in (load, lambda: load_weights(new, folder)):
        fails(CheckpointError, "Copy the table", refused)


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
    last = comm.bcast(in_parts(shared_path, 2) if comm.rank == 0 else None)[-1]
    tensors, whole = load_file(last), last.read_bytes()
    name = next(iter(tensors))
    other, before = nn.Llama(some_grid, seed=9, **LLAMA), nn.Llama(some_grid, seed=9, **LLAMA)

    def change(contents):
        last.unlink(missing_ok=True)
        if isinstance(contents, bytes):
            last.write_bytes(contents)
        elif contents is not None:
            save_file(contents, last)

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
            on_rank_0(some_grid, lambda: change(contents))
            fails(
                CheckpointError,
                name if isinstance(contents, dict) else last.name,
                lambda: load_weights(other, shared_path),
            )
            assert same_weights(other, before)
    on_rank_0(some_grid, lambda: change({**tensors, "of.no.index": np.ones(3)}))
    load_weights(other, shared_path)
    assert same_weights(other, net)


@two
@on_grid("fsdp")
def test_the_names_are_the_same_by_every_function(grid, shared_path, fails):
    """Published names by default. A config.json is written beside no other names."""
    net, found, no = nn.GPT(grid, **GPT), [], shared_path / "no"
    for export, suffix in product((net.export, partial(export_torch, net)), ("", ".safetensors")):
        export(path := shared_path / f"{len(found)}{suffix}")
        assert suffix or json.loads((path / "config.json").read_text())["model_type"] == "gpt2"
        found.append(load_file(path if suffix else path / "model.safetensors").keys())
    assert all(names == found[0] for names in found) and "transformer.wte.weight" in found[0]
    fails(CheckpointError, "folder .*'torch'.*gpt2.*.safetensors", lambda: net.export(no, names="torch"))
    encoder, file = nn.Encoder(grid, **GPT), shared_path / "torch.safetensors"
    fails(CheckpointError, "folder .*'torch'", lambda: encoder.export(no))
    for export in (partial(net.export, names="torch"), encoder.export):
        export(file)
        assert "0.table" in load_file(file)
        grid.comm.barrier()
    import_torch(encoder, file)
    assert not no.exists()


@two
def test_sizes_that_are_numbers_of_numpy_are_exported(comm, shared_path, some_grid):
    """A network without a number of positions is exported without them."""
    sizes = dict(zip(("vocabulary", "layers", "hidden", "heads", "kv_heads", "mlp"), np.array([11, 1, 8, 2, 1, 6])))
    others = {
        "eps": np.float32(0.5),
        "dropout": np.float32(0.25),
        "tied": np.bool_(True),
        "window": np.int8(3),
        "rotary_base": np.float32(500),
        "recompute": np.int64(1),
    }
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
    for positions in (np.int64(4), None):
        net = nn.Llama(some_grid, **sizes, **others, positions=positions)
        net.export(shared_path)
        config = json.loads((shared_path / "config.json").read_text())
        assert nn.Llama.load(some_grid, shared_path).architecture == net.architecture
        if positions is None:
            del expected["max_position_embeddings"]
            assert "max_position_embeddings" not in config
        assert {key: config[key] for key in expected} == expected
