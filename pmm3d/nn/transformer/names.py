"""Names of tensors, and configurations, in files of GPT-2 and of Llama as the transformers package writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ...errors import CheckpointError
from ..exchange import Columns, Names, Stored

KINDS = {"gpt2": "GPT", "llama": "Llama"}
"""Names of the files -> the network that has them."""
IGNORED = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""Ends of the names of masks and frequencies, which older files have and which are computed here."""
HEAD = "lm_head.weight"


class Architecture(NamedTuple):
    """What the shapes of a GPT's or a Llama's tensors, and its function, follow from.

    positions   of a GPT: rows of the table of positions. Of a Llama: the length that its configuration promises
    kv_heads    heads of keys and values;   mlp: columns between the two layers of an MLP block
    tied        whether the head is the table of the embedding
    """

    kind: str
    vocabulary: int
    positions: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    mlp: int
    tied: bool
    eps: float
    rotary_base: float = 10000.0


def names_of(of: Architecture) -> dict[str, Names]:
    """Return the names of the tensors of a network's files.

    Weights of GPT-2 are (inputs, outputs) as ours, those of Llama, and all tables, are (outputs, inputs). Our projection to queries,
    keys and values has its columns head by head: for each head of keys its heads of queries, then the key, then the
    value. A file of GPT-2 has the queries of all heads, then the keys, then the values, in one tensor; one of Llama has
    a tensor for each.

        >>> found = names_of(Architecture("gpt2", 9, 8, 1, 4, 2, 2, 16, True, 1e-5))["gpt2"]
        >>> found.tensors["transformer.h.0.attn.c_attn.bias"].parts[0]
        Columns(parameter='1.attention.qkv.bias', start=0, stop=2, unit=6)
    """
    found, ignored = (_gpt2 if of.kind == "gpt2" else _llama)(of), IGNORED
    if of.tied:
        ignored += (HEAD,)
    else:
        found[HEAD] = Stored((Columns(f"{of.layers + 2}.weight"),), True)
    return {of.kind: Names(found, ignored, "transformer." if of.kind == "gpt2" else "model.")}


def _qkv(of: Architecture, layer: str) -> tuple[Columns, ...]:
    """Queries, keys and values of a block's projection."""
    size, group = of.hidden // of.heads, of.heads // of.kv_heads
    cuts = (0, group, group + 1, group + 2)
    return tuple(Columns(layer, start * size, stop * size, cuts[-1] * size) for start, stop in zip(cuts, cuts[1:]))


def _gpt2(of: Architecture) -> dict[str, Stored]:
    whole = lambda name: Stored((Columns(name),))
    found = {"transformer.wte.weight": Stored((Columns("0.weight"),), True),
             "transformer.wpe.weight": Stored((Columns("0.positions"),), True)}
    for index in range(of.layers):
        there, here = f"transformer.h.{index}", f"{index + 1}"
        for name, own in (("ln_1", "norm_1"), ("ln_2", "norm_2")):
            found[f"{there}.{name}.weight"] = whole(f"{here}.{own}.gain")
            found[f"{there}.{name}.bias"] = whole(f"{here}.{own}.bias")
        for part in ("weight", "bias"):
            found[f"{there}.attn.c_attn.{part}"] = Stored(_qkv(of, f"{here}.attention.qkv.{part}"))
            for name, own in (("attn.c_proj", "attention.out"), ("mlp.c_fc", "mlp.up"), ("mlp.c_proj", "mlp.down")):
                found[f"{there}.{name}.{part}"] = whole(f"{here}.{own}.{part}")
    last = of.layers + 1
    return found | {"transformer.ln_f.weight": whole(f"{last}.gain"), "transformer.ln_f.bias": whole(f"{last}.bias")}


def _llama(of: Architecture) -> dict[str, Stored]:
    found = {"model.embed_tokens.weight": Stored((Columns("0.weight"),), True)}
    for index in range(of.layers):
        there, here = f"model.layers.{index}", f"{index + 1}"
        for name, own in (("input_layernorm", "norm_1"), ("post_attention_layernorm", "norm_2")):
            found[f"{there}.{name}.weight"] = Stored((Columns(f"{here}.{own}.gain"),))
        for letter, part in zip("qkv", _qkv(of, f"{here}.attention.qkv.weight")):
            found[f"{there}.self_attn.{letter}_proj.weight"] = Stored((part,), True)
        for name, own in (("self_attn.o_proj", "attention.out"), ("mlp.gate_proj", "mlp.gate"),
                          ("mlp.up_proj", "mlp.up"), ("mlp.down_proj", "mlp.down")):
            found[f"{there}.{name}.weight"] = Stored((Columns(f"{here}.{own}.weight"),), True)
    return found | {"model.norm.weight": Stored((Columns(f"{of.layers + 1}.gain"),))}


def config_of(of: Architecture) -> dict[str, Any]:
    """Return the config.json of a network, as the transformers package reads it."""
    common = {"model_type": of.kind, "vocab_size": of.vocabulary, "tie_word_embeddings": of.tied}
    if of.kind == "gpt2":
        return {"architectures": ["GPT2LMHeadModel"], **common, "n_positions": of.positions, "n_embd": of.hidden,
                "n_layer": of.layers, "n_head": of.heads, "n_inner": of.mlp, "layer_norm_epsilon": of.eps,
                "activation_function": "gelu_new", "bos_token_id": None, "eos_token_id": None}
    return {"architectures": ["LlamaForCausalLM"], **common, "max_position_embeddings": of.positions,
            "hidden_size": of.hidden, "intermediate_size": of.mlp, "num_hidden_layers": of.layers,
            "num_attention_heads": of.heads, "num_key_value_heads": of.kv_heads, "rms_norm_eps": of.eps,
            "hidden_act": "silu", "rope_theta": of.rotary_base, "bos_token_id": None, "eos_token_id": None}


SAME = {
    "gpt2": {"activation_function": ("gelu_new", "gelu_pytorch_tanh"), "scale_attn_weights": (True,),
             "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,)},
    "llama": {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)},
}
"""Settings by which a network of the kind may differ from ours -> values for which it does not."""


def architecture_of(config: Mapping[str, Any], path: str) -> Architecture:
    """Return what a config.json says. Raises CheckpointError for a network that ours is not."""
    kind = config.get("model_type")
    if kind not in KINDS:
        raise CheckpointError(f"{path}: model_type is {kind!r}; known are {', '.join(KINDS)}")
    for key, values in SAME[kind].items():
        if config.get(key, values[0]) not in values:
            raise CheckpointError(f"{path}: {key} is {config[key]!r}; nn.{KINDS[kind]} has {values[0]!r}. Export a "
                                  "network that was trained with that")
    try:
        found = _architecture(kind, config, path)
    except KeyError as error:
        raise CheckpointError(f"{path}: {error.args[0]} is missing, without which the network's shapes are not known"
                              ) from None
    if config.get("head_dim") not in (None, found.hidden // found.heads):
        raise CheckpointError(f"{path}: head_dim is {config['head_dim']}; nn.Llama has hidden_size / "
                              f"num_attention_heads, {found.hidden // found.heads}")
    return found


def _architecture(kind: str, config: Mapping[str, Any], path: str) -> Architecture:
    if kind == "gpt2":
        hidden, heads = config["n_embd"], config["n_head"]
        return Architecture(kind, config["vocab_size"], config["n_positions"], config["n_layer"], hidden, heads, heads,
                            config.get("n_inner") or 4 * hidden, config.get("tie_word_embeddings", True),
                            config.get("layer_norm_epsilon", 1e-5))
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rotary.get("rope_type", "default") != "default":
        raise CheckpointError(f"{path}: rope_type is {rotary['rope_type']!r}; nn.Llama turns by the angles of "
                              '"default"')
    heads = config["num_attention_heads"]
    return Architecture(
        kind, config["vocab_size"], config["max_position_embeddings"], config["num_hidden_layers"],
        config["hidden_size"], heads, config.get("num_key_value_heads") or heads, config["intermediate_size"],
        config.get("tie_word_embeddings", False), config.get("rms_norm_eps", 1e-6),
        rotary.get("rope_theta", config.get("rope_theta", 10000.0)))
