"""Files of Mixtral, Qwen2-MoE, Qwen3-MoE and OLMoE: written and read on every grid. The reference computes logits from
the tensors and the config.json of a folder, token by token, by the published formulas."""

import json

import numpy as np
import pytest
from loops import given
from networks import alone, bits, spread, weights_of
from safetensors.numpy import load_file
from samples import to_numpy
from transformer_reference import values

from pmm3d import CheckpointError, Grid, nn
from pmm3d.layout import Layout
from pmm3d.nn.transformer.names import architecture_of

pytestmark = [pytest.mark.parallel([2], thorough=[1, 4]), pytest.mark.deadline(240)]

SIZES = {
    "vocabulary": 11, "positions": 7, "layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "mlp": 66, "experts": 4,
    "eps": 1e-6, "dtype": "float64",
}  # fmt: skip
KINDS = {
    "mixtral": {"window": 3, "top_k": 2},
    "qwen2_moe": {
        "qkv_bias": True, "shared": 10, "shared_gate": True, "expert_mlp": 6, "top_k": 3, "normalize": False,
        "every": 2, "tied": True,
    },
    "qwen3_moe": {"qk_norm": True, "head_dim": 6, "expert_mlp": 130, "normalize": True, "top_k": 2},
    "olmoe": {"qk_norm": "all", "top_k": 3, "normalize": False},
}  # fmt: skip
GRIDS = {
    1: [((1, 1, 1), 1, {})],
    2: [((1, 1, 1), 2, {"expert": 2}), ((2, 1, 1), 1, {}), ((1, 1, 2), 1, {"expert": 2})],
    4: [
        ((1, 1, 1), 4, {"expert": 4}), ((2, 1, 2), 1, {"expert": 2}), ((1, 2, 1), 2, {"expert": 2}),
        ((1, 1, 1), 2, {"pipe": 2, "expert": 2}),
    ],
}  # fmt: skip


def make(grid, name, filled=True):
    of = lambda stage: nn.Llama(stage, **SIZES, **KINDS[name], seed=1)
    net = nn.Pipeline(grid, of) if grid.shape.stages > 1 else of(grid)
    for path, parameter in net.named_parameters().items() if filled else ():
        parameter.assign(spread(net.grid, values(path, parameter.shape), parameter.layout))
    return net


def logits_of(net, grid):
    tokens = np.random.default_rng(0).integers(0, 11, (20, 1))
    with net.evaluating():
        return to_numpy(net(spread(net.grid, tokens, Layout(("data", "z"), units=(5, 1)))).gather())


def published_logits(folder):
    """The logits of 4 sequences of 5 tokens, by the tensors and the configuration in a folder."""
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    tokens = np.random.default_rng(0).integers(0, 11, (4, 5))
    model = config["model_type"]
    heads, shared = config["num_attention_heads"], config["num_key_value_heads"]
    experts, top_k = config["num_local_experts" if model == "mixtral" else "num_experts"], config["num_experts_per_tok"]
    window = config.get("sliding_window") if model == "mixtral" else None
    silu = lambda x: x / (1 + np.exp(-x))

    def linear(x, name):
        bias = tensors.get(f"{name}.bias")
        return x @ tensors[f"{name}.weight"].T + (0 if bias is None else bias)

    def norm(x, name):
        gain = tensors[f"{name}.weight"]
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config["rms_norm_eps"]) * gain

    def mlp(x, name, names=("gate_proj", "up_proj", "down_proj")):
        gate, up, down = (f"{name}.{each}" for each in names)
        return linear(silu(linear(x, gate)) * linear(x, up), down)

    def mixture(x, name):
        room = f"{name}.block_sparse_moe" if model == "mixtral" else f"{name}.mlp"
        scores = linear(x, f"{room}.gate")
        scores = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
        chosen = np.argsort(-scores)[:top_k]
        weights = scores[chosen] / (scores[chosen].sum() if config.get("norm_topk_prob", model == "mixtral") else 1)
        names = ("w1", "w3", "w2") if model == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        assert len([key for key in tensors if key.startswith(f"{room}.experts.")]) == 3 * experts
        out = sum(weight * mlp(x, f"{room}.experts.{each}", names) for weight, each in zip(weights, chosen))
        if model == "qwen2_moe":
            gate = 1 / (1 + np.exp(-linear(x, f"{room}.shared_expert_gate")))
            out = out + gate * mlp(x, f"{room}.shared_expert")
        return out

    def rotated(x):
        length, size = x.shape[-2:]
        angle = np.arange(length)[:, None] * config["rope_theta"] ** (-2 * np.arange(size // 2) / size)
        one, other = x[..., : size // 2], x[..., size // 2 :]
        return np.concatenate(
            [one * np.cos(angle) - other * np.sin(angle), other * np.cos(angle) + one * np.sin(angle)], -1
        )

    def attention(x, name):
        q, k, v = (linear(x, f"{name}.{each}_proj") for each in "qkv")
        if model == "olmoe":
            q, k = norm(q, f"{name}.q_norm"), norm(k, f"{name}.k_norm")
        q, k, v = (each.reshape(len(x), number, -1) for each, number in ((q, heads), (k, shared), (v, shared)))
        if model == "qwen3_moe":
            q, k = norm(q, f"{name}.q_norm"), norm(k, f"{name}.k_norm")
        q, k, v = (each.transpose(1, 0, 2) for each in (q, k, v))
        q, k = rotated(q), rotated(k)
        k, v = (np.repeat(each, heads // shared, 0) for each in (k, v))
        weights = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
        away = np.arange(len(x))[:, None] - np.arange(len(x))
        weights = np.where((away >= 0) & (away < (window or len(x))), weights, -np.inf)
        weights = np.exp(weights - weights.max(-1, keepdims=True))
        out = weights / weights.sum(-1, keepdims=True) @ v
        return linear(out.transpose(1, 0, 2).reshape(len(x), -1), f"{name}.o_proj")

    found = []
    for sequence in tokens:
        x = tensors["model.embed_tokens.weight"][sequence]
        for layer in range(config["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            x = x + attention(norm(x, f"{name}.input_layernorm"), f"{name}.self_attn")
            rows = norm(x, f"{name}.post_attention_layernorm")
            of_experts = (layer + 1) % config.get("decoder_sparse_step", 1) == 0
            x = x + (np.array([mixture(row, name) for row in rows]) if of_experts else mlp(rows, f"{name}.mlp"))
        head = "model.embed_tokens" if config["tie_word_embeddings"] else "lm_head"
        found.append(linear(norm(x, "model.norm"), head))
    return np.concatenate(found)


def test_files_have_the_published_names_and_meaning(comm, shared_path):
    """A folder that a grid writes has the same logits by the reference, and on the next grid that reads it."""
    for name in KINDS:
        for number, (shape, data, axes) in enumerate(GRIDS[comm.size]):
            folder, before = shared_path / f"{name}{number}", shared_path / f"{name}{number - 1}"
            with given(name=name, grid=shape, data=data, axes=axes), Grid(comm, shape, data, **axes) as grid:
                net = make(grid, name) if number == 0 else nn.Llama.load(grid, before, dtype="float64")
                assert nn.exchange.published_names(net)["llama"].config["model_type"] == name
                found = logits_of(net, grid)
                net.export(folder)
                wanted = published_logits(folder)
                assert np.abs(found - wanted).max() < 1e-12 * np.abs(wanted).max()
                assert {*load_file(folder / "model.safetensors")} == {
                    *load_file(shared_path / f"{name}0/model.safetensors")
                }
        with alone() as grid:
            assert bits(weights_of(nn.Llama.load(grid, folder, dtype="float64"))) == bits(weights_of(make(grid, name)))


MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False,
    "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.36.0.dev0", "use_cache": True,
    "vocab_size": 32000,
}  # fmt: skip
QWEN2_MOE = {
    "architectures": ["Qwen2MoeForCausalLM"], "attention_dropout": 0.0, "decoder_sparse_step": 1, "hidden_act": "silu",
    "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5632, "max_position_embeddings": 8192,
    "max_window_layers": 21, "mlp_only_layers": [], "model_type": "qwen2_moe", "moe_intermediate_size": 1408,
    "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
    "num_hidden_layers": 24, "num_key_value_heads": 16, "output_router_logits": False, "qkv_bias": True,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 5632, "sliding_window": 32768, "tie_word_embeddings": False,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960,
    "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
    "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
OLMOE = {
    "architectures": ["OlmoeForCausalLM"], "attention_bias": False, "clip_qkv": None, "eos_token_id": 50279,
    "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 1024, "max_position_embeddings": 4096,
    "model_type": "olmoe", "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 64,
    "num_experts_per_tok": 8, "num_hidden_layers": 16, "num_key_value_heads": 16, "pad_token_id": 1,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0, "router_aux_loss_coef": 0.01,
    "tie_word_embeddings": False, "vocab_size": 50304,
}  # fmt: skip
PARAMETERS = {
    "mixtral": 46_702_792_704,
    "qwen2_moe": 14_315_784_192,
    "qwen3_moe": 30_532_122_624,
    "olmoe": 6_919_161_856,
}
"""Number of parameters of each published network, by its authors."""


@pytest.mark.parallel([1])
def test_published_configurations(comm):
    """Each network has the published number of parameters, and its configuration is written as it was read."""
    for config in (MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE):
        model = config["model_type"]
        with given(model=model):
            of = architecture_of(config, "config.json")
            assert (of.model_type, of.experts) == (model, config.get("num_experts", config.get("num_local_experts")))
            with Grid.dry((1, 1, 1)) as grid:
                net = nn.Llama(grid, **{**of.options, "layers": 1})
                a_layer = sum(each.shape[0] * each.shape[1] for each in net.layers[1].parameters())
            assert net.size + (of.layers - 1) * a_layer == PARAMETERS[model]
            again = nn.exchange.published_names(net)["llama"].config
            others = "bos_token_id", "eos_token_id", "sliding_window", "num_hidden_layers"
            same = [key for key in again if key in config and key not in others]
            assert {key: again[key] for key in same} == {key: config[key] for key in same}


@pytest.mark.parallel([1])
def test_other_settings_are_refused(comm):
    for config, change, text in (
        (QWEN2_MOE, {"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\]"),
        (QWEN2_MOE, {"qkv_bias": False}, "qkv_bias is False"),
        (QWEN3_MOE, {"use_sliding_window": True}, "use_sliding_window is True"),
        (OLMOE, {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        (OLMOE, {"attention_bias": True}, "attention_bias is True"),
        (MIXTRAL, {"num_local_experts": 0}, "no experts"),
        (MIXTRAL, {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, more than num_local_experts = 8"),
        (QWEN3_MOE, {"decoder_sparse_step": 49}, "decoder_sparse_step is 49, but the network has 48 blocks"),
        (OLMOE, {"num_local_experts": 8}, "num_experts is 64, but num_local_experts is 8"),
        (QWEN2_MOE, {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0.*only with a shared"),
        (MIXTRAL, {"model_type": "deepseek_v3"}, "deepseek_v3.*not supported"),
    ):
        with given(change=change), pytest.raises(CheckpointError, match=text):
            architecture_of({**config, **change}, "config.json")
    assert architecture_of({**QWEN3_MOE, "num_experts": None, "num_local_experts": 16}, "config.json").experts == 16


@pytest.mark.parallel([1])
def test_networks_without_published_names(comm):
    """These are written with the names "torch". The first setting that does not fit is named."""
    with Grid.dry((1, 1, 1)) as grid:
        for change, reason in (
            ({"shared": 8}, "qkv_bias is False, and the nearest published network, qwen2_moe, has True"),
            ({"qkv_bias": True, "shared": 8}, "shared_gate is False, .* qwen2_moe, has True"),
            ({"qkv_bias": True}, "shared is 0, .* qwen2_moe, has a number of columns"),
            ({"scores": "sigmoid"}, "scores is 'sigmoid', .* mixtral, has softmax"),
            ({"bias_rate": 0.1}, "bias_rate is 0.1, .* mixtral, has 0.0"),
            ({"every": 2}, "every is 2, .* mixtral, has 1"),
            ({"normalize": False}, "normalize is False, .* mixtral, has True"),
            ({"qk_norm": True, "window": 3}, "window is 3, .* qwen3_moe, has no limit"),
            ({"qk_norm": "all", "head_dim": 8}, "head_dim is 8, .* olmoe, has 4"),
            ({"experts": 0, "qk_norm": "all"}, "qk_norm is 'all', .* qwen3, has True"),
        ):
            with given(change=change):
                net = nn.Llama(grid, **{**SIZES, **change})
                assert not net.names
                with pytest.raises(CheckpointError, match=f"This Llama has the names torch: {reason}"):
                    net.export("folder")
        gpt = nn.GPT(grid, **{**SIZES, "kv_heads": 4})
        assert not gpt.names and gpt.misfit.startswith("experts is 4, and the nearest published network, gpt2, has 0")


@pytest.mark.parallel([1])
def test_capacity_and_the_size_of_experts_in_files(comm, shared_path):
    """Files contain no capacity, so that of the caller counts. Without a dense block, `mlp` is not used."""
    sizes = {**SIZES, "expert_mlp": 10, "capacity": 1.0}
    with Grid(comm) as grid:
        for name in ("mixtral", "olmoe"):
            folder = shared_path / name
            nn.Llama(grid, **{**sizes, **KINDS[name]}, seed=1).export(folder)
            assert json.loads((folder / "config.json").read_text())["intermediate_size"] == 10
            for given_, capacity in (({}, None), ({"capacity": 2.0, "top_k": KINDS[name]["top_k"]}, 2.0)):
                net = nn.Llama.load(grid, folder, dtype="float64", **given_)
                assert net.layers[1].mlp.router.capacity == capacity
                assert np.abs(logits_of(net, grid) - published_logits(folder)).max() < 1e-12
            with pytest.raises(CheckpointError, match="a network with top_k = .*, not 1. Leave top_k out"):
                nn.Llama.load(grid, folder, top_k=1)


def test_other_routing_is_refused(comm, shared_path, fails):
    """By files and by their configuration: no shape shows it."""
    with Grid(comm, data=comm.size, expert=comm.size) as grid:
        make(grid, "olmoe").export(shared_path / "one")
        other = nn.Llama(grid, **{**SIZES, **KINDS["olmoe"], "top_k": 2})
        fails(CheckpointError, "top_k was 3, is 2", lambda: nn.exchange.load_weights(other, shared_path / "one"))
