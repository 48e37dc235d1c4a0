"""Names of tensors, and configurations, in files of GPT-2 and Llama of the transformers package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ...errors import CheckpointError
from ...layout import offsets
from ..exchange import Columns, Names, Stored
from .blocks import gate_unit, qkv_turns

KINDS = {"gpt2": "GPT", "llama": "Llama", "mistral": "Llama"}
"""model_type in a config.json -> class in pmm3d.nn. Files of Mistral use the names of Llama."""
IGNORED = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""Name endings of masks and frequencies in older files. They are computed here."""
HEAD = "lm_head.weight"
EPS, ROTARY_BASE = 1e-5, 10000.0
"""Defaults of norms and of rotary positions."""


class Architecture(NamedTuple):
    """Sizes and options of a GPT ("gpt2") or a Llama ("llama")."""

    kind: str
    vocabulary: int
    positions: int | None
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    mlp: int
    tied: bool
    eps: float
    rotary_base: float = ROTARY_BASE
    window: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `nn.GPT` or `nn.Llama`."""
        others = {"kind"} if self.kind == "llama" else {"kind", "rotary_base"}
        return {name: value for name, value in self._asdict().items() if name not in others}

    @property
    def facts(self) -> dict[str, Any]:
        """Facts of the network, as `facts_of` returns them."""
        gpt = self.kind == "gpt2"
        found = {"heads": self.heads, "causal": True, "window": self.window, "eps": self.eps,
                 "rotary_base": None if gpt else self.rotary_base, "activation": "gelu_tanh" if gpt else "silu"}
        return {f"network.{name}": value for name, value in found.items()}


def names_of(of: Architecture) -> dict[str, Names]:
    """Published names of a network's tensors, or no names for a GPT with grouped heads or a window.

    Weights in files of GPT-2 are (inputs, outputs), as in pmm3d. Weights in files of Llama, and all tables, are
    (outputs, inputs). In pmm3d, queries, keys and values are stored head by head in one tensor (`qkv_turns`). A file of
    GPT-2 has one tensor with all queries, then all keys, then all values. A file of Llama has three tensors. In pmm3d,
    the columns of a gated MLP alternate between gate and factor.

        >>> found = names_of(Architecture("gpt2", 9, 8, 1, 4, 2, 2, 16, True, 1e-5))["gpt2"]
        >>> found.tensors["transformer.h.0.attn.c_attn.bias"].parts[0]
        Columns(parameter='1.attention.qkv.bias', start=0, stop=2, unit=6)
    """
    ours = of.kind == "gpt2"
    if ours and (of.kv_heads != of.heads or of.window is not None):
        return {}
    found, ignored = (_gpt2 if ours else _llama)(of), (*IGNORED, *[HEAD] * of.tied)
    if not of.tied:
        found[HEAD] = _whole(f"{of.layers + 1}.linear.weight", True)
    return {of.kind: Names(found, ignored, "transformer." if ours else "model.", config_of(of))}


def _qkv(of: Architecture, layer: str) -> tuple[Columns, ...]:
    """Columns of queries, keys and values in a block's projection."""
    return _in_turns(layer, *qkv_turns(of.heads, of.kv_heads, of.hidden // of.heads))


def _in_turns(parameter: str, *sizes: int) -> tuple[Columns, ...]:
    """Parts of a parameter whose columns alternate, with these numbers of adjacent columns."""
    ends = offsets(sizes)
    return tuple(Columns(parameter, start, stop, ends[-1]) for start, stop in zip(ends, ends[1:]))


def _whole(name: str, transpose: bool = False) -> Stored:
    """Tensor of a file that contains a whole parameter."""
    return Stored((Columns(name),), transpose)


def _gpt2(of: Architecture) -> dict[str, Stored]:
    found = {"transformer.wte.weight": _whole("0.table", True), "transformer.wpe.weight": _whole("0.positions", True)}
    for index in range(of.layers):
        there, here = f"transformer.h.{index}", f"{index + 1}"
        for name, own in (("ln_1", "norm1"), ("ln_2", "norm2")):
            found[f"{there}.{name}.weight"] = _whole(f"{here}.{own}.gain")
            found[f"{there}.{name}.bias"] = _whole(f"{here}.{own}.bias")
        for part in ("weight", "bias"):
            found[f"{there}.attn.c_attn.{part}"] = Stored(_qkv(of, f"{here}.attention.qkv.{part}"))
            for name, own in (("attn.c_proj", "attention.out"), ("mlp.c_fc", "mlp.up"), ("mlp.c_proj", "mlp.down")):
                found[f"{there}.{name}.{part}"] = _whole(f"{here}.{own}.{part}")
    last = f"{of.layers + 1}.norm"
    return found | {"transformer.ln_f.weight": _whole(f"{last}.gain"), "transformer.ln_f.bias": _whole(f"{last}.bias")}


def _llama(of: Architecture) -> dict[str, Stored]:
    found = {"model.embed_tokens.weight": _whole("0.table", True)}
    for index in range(of.layers):
        there, here = f"model.layers.{index}", f"{index + 1}"
        for name, own in (("input_layernorm", "norm1"), ("post_attention_layernorm", "norm2")):
            found[f"{there}.{name}.weight"] = _whole(f"{here}.{own}.gain")
        unit = gate_unit(of.mlp)
        for names, parts in ((("q", "k", "v"), _qkv(of, f"{here}.attention.qkv.weight")),
                             (("gate", "up"), _in_turns(f"{here}.mlp.up.weight", unit, unit))):
            for name, part in zip(names, parts):
                room = "self_attn" if len(parts) == 3 else "mlp"
                found[f"{there}.{room}.{name}_proj.weight"] = Stored((part,), True)
        found[f"{there}.self_attn.o_proj.weight"] = _whole(f"{here}.attention.out.weight", True)
        found[f"{there}.mlp.down_proj.weight"] = _whole(f"{here}.mlp.down.weight", True)
    return found | {"model.norm.weight": _whole(f"{of.layers + 1}.norm.gain")}


def config_of(of: Architecture) -> dict[str, Any]:
    """Contents of config.json for the transformers package."""
    common = {"vocab_size": of.vocabulary, "tie_word_embeddings": of.tied, "bos_token_id": None, "eos_token_id": None}
    if of.kind == "gpt2":
        return {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **common, "n_positions": of.positions,
                "n_embd": of.hidden, "n_layer": of.layers, "n_head": of.heads, "n_inner": of.mlp,
                "layer_norm_epsilon": of.eps, "activation_function": "gelu_new"}
    model = "Mistral" if of.window else "Llama"
    return {"architectures": [f"{model}ForCausalLM"], "model_type": model.lower(), **common,
            "max_position_embeddings": of.positions or UNLIMITED, "hidden_size": of.hidden,
            "intermediate_size": of.mlp, "num_hidden_layers": of.layers, "num_attention_heads": of.heads,
            "num_key_value_heads": of.kv_heads, "rms_norm_eps": of.eps, "hidden_act": "silu",
            "rope_theta": of.rotary_base, **({"sliding_window": of.window} if of.window else {})}


UNLIMITED = 2**31 - 1
"""max_position_embeddings of a network without a limit of the length."""
SAME: dict[str, dict[str, tuple[Any, ...]]] = {
    "gpt2": {"activation_function": ("gelu_new", "gelu_pytorch_tanh"), "scale_attn_weights": (True,),
             "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,)},
    "llama": {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)},
    "mistral": {"hidden_act": ("silu",)},
}
"""model_type -> setting of a config.json -> values that pmm3d supports. The first value is the default."""


def architecture_of(config: Mapping[str, Any], path: str) -> Architecture:
    """Architecture in a config.json. Raises CheckpointError for an unsupported network."""
    kind = config.get("model_type", "")
    if kind not in KINDS:
        raise CheckpointError(f"{path}: the model_type {kind!r} is not supported. Supported are {', '.join(KINDS)}")
    for key, values in SAME[kind].items():
        if config.get(key, values[0]) not in values:
            raise CheckpointError(f"{path}: {key} is {config[key]!r}, but nn.{KINDS[kind]} supports only "
                                  f"{values[0]!r}. Choose a network that was trained with this setting")
    try:
        return _gpt2_of(config) if kind == "gpt2" else _llama_of(config, path)
    except KeyError as error:
        raise CheckpointError(f"{path}: the configuration lacks {error.args[0]}, which determines the sizes of the "
                              "network") from None


def _gpt2_of(config: Mapping[str, Any]) -> Architecture:
    hidden, heads = config["n_embd"], config["n_head"]
    return Architecture("gpt2", config["vocab_size"], config["n_positions"], config["n_layer"], hidden, heads, heads,
                        config.get("n_inner") or 4 * hidden, config.get("tie_word_embeddings", True),
                        config.get("layer_norm_epsilon", EPS))


def _llama_of(config: Mapping[str, Any], path: str) -> Architecture:
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    for key, value, ours in (("rope_type", rotary.get("rope_type", "default"), "default"),
                             ("head_dim", config.get("head_dim") or hidden // heads, hidden // heads)):
        if value != ours:
            raise CheckpointError(f"{path}: {key} is {value!r}, but nn.Llama supports only {ours!r}")
    return Architecture(
        "llama", config["vocab_size"], config["max_position_embeddings"], config["num_hidden_layers"], hidden, heads,
        config.get("num_key_value_heads") or heads, config["intermediate_size"],
        config.get("tie_word_embeddings", False), config.get("rms_norm_eps", 1e-6),
        rotary.get("rope_theta", config.get("rope_theta", ROTARY_BASE)), config.get("sliding_window"))
