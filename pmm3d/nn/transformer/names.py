"""Names of tensors, and configurations, in files of GPT-2 and Llama of the transformers package."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

from ...errors import CheckpointError, LayoutError
from ...layout import natural, offsets, real
from ...text import names_in_words
from ..exchange import Columns, Names, Stored
from ..facts import LAYERS
from .blocks import POSITIVE, gate_unit, qkv_turns

KINDS = {"gpt2": "GPT", "llama": "Llama", "mistral": "Llama"}
"""model_type in a config.json -> class in pmm3d.nn. Files of Mistral use the names of Llama."""
IGNORED = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""Name endings of masks and frequencies in older files. They are computed here."""
HEAD = "lm_head.weight"
ROTARY = "rope_scaling", "rope_parameters"
"""Keys of config.json with settings of rotary positions, of which the second is that of newer files."""
EPS, ROTARY_BASE = 1e-5, 10000.0
"""Defaults of norms and of rotary positions."""

OPTIONAL = "positions", "kv_heads", "mlp", "window"
"""Fields of `Architecture` that can be None: no limit, or the default."""


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

    @classmethod
    def checked(
        cls, what: str, names: Mapping[str, str] = {}, error: type[Exception] = LayoutError, **given: Any
    ) -> Architecture:
        """Architecture with these fields, in types of Python. None for kv_heads or mlp is replaced by the default.

        Raises `error` for values of other types and out of range. what: the network, or the file; names: field -> its
        name there.
        """
        made = dict(given)
        for field, value in given.items():
            name = f"{what}: {names.get(field, field)}"
            if field == "eps":
                made[field] = real(value, f"{name} is a number of at least 0", 0, error)
            elif field == "rotary_base":
                made[field] = real(value, f"{name} is a positive number", POSITIVE, error)
            elif field == "tied":
                if value not in (True, False):
                    raise error(f"{name} is true or false; got {value!r}")
                made[field] = bool(value)
            elif field != "kind" and (value is not None or field not in OPTIONAL):
                made[field] = natural(value, f"{name} is a whole number, at least 1", 1, error)
        hidden = made["hidden"]
        made["kv_heads"] = made["kv_heads"] or made["heads"]
        made["mlp"] = made["mlp"] or (64 * -(-hidden // 24) if made["kind"] == "llama" else 4 * hidden)
        return cls(**made)

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `nn.GPT` or `nn.Llama`."""
        others = {"kind"} if self.kind == "llama" else {"kind", "rotary_base"}
        return {name: value for name, value in self._asdict().items() if name not in others}

    @property
    def facts(self) -> dict[str, Any]:
        """Facts of the network that `facts_of` returns too."""
        return {f"network.{name}": value for name, value in self.options.items() if name in LAYERS}


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
    parts, ignored = (_gpt2 if ours else _llama)(of), (*IGNORED, *[HEAD] * of.tied)
    if not of.tied:
        parts[HEAD] = _stored(f"{of.layers + 1}.linear.weight", True)
    return {of.kind: Names(parts, ignored, "transformer." if ours else "model.", config_of(of))}


def _qkv(of: Architecture, layer: str) -> tuple[Columns, ...]:
    """Columns of queries, keys and values in a block's projection."""
    return _in_turns(layer, *qkv_turns(of.heads, of.kv_heads, of.hidden // of.heads))


def _in_turns(parameter: str, *sizes: int) -> tuple[Columns, ...]:
    """Parts of a parameter whose columns alternate, with these numbers of adjacent columns."""
    ends = offsets(sizes)
    return tuple(Columns(parameter, start, stop, ends[-1]) for start, stop in itertools.pairwise(ends))


def _stored(name: str, transpose: bool = False) -> Stored:
    """Tensor of a file that contains a whole parameter."""
    return Stored((Columns(name),), transpose)


def _gpt2(of: Architecture) -> dict[str, Stored]:
    tensors = {
        "transformer.wte.weight": _stored("0.table", True),
        "transformer.wpe.weight": _stored("0.positions", True),
    }
    for index in range(of.layers):
        there, here = f"transformer.h.{index}", f"{index + 1}"
        for name, own in (("ln_1", "norm1"), ("ln_2", "norm2")):
            tensors[f"{there}.{name}.weight"] = _stored(f"{here}.{own}.gain")
            tensors[f"{there}.{name}.bias"] = _stored(f"{here}.{own}.bias")
        for part in ("weight", "bias"):
            tensors[f"{there}.attn.c_attn.{part}"] = Stored(_qkv(of, f"{here}.attention.qkv.{part}"))
            for name, own in (("attn.c_proj", "attention.out"), ("mlp.c_fc", "mlp.up"), ("mlp.c_proj", "mlp.down")):
                tensors[f"{there}.{name}.{part}"] = _stored(f"{here}.{own}.{part}")
    last = f"{of.layers + 1}.norm"
    return tensors | {
        "transformer.ln_f.weight": _stored(f"{last}.gain"),
        "transformer.ln_f.bias": _stored(f"{last}.bias"),
    }


def _llama(of: Architecture) -> dict[str, Stored]:
    tensors = {"model.embed_tokens.weight": _stored("0.table", True)}
    for index in range(of.layers):
        there, here = f"model.layers.{index}", f"{index + 1}"
        for name, own in (("input_layernorm", "norm1"), ("post_attention_layernorm", "norm2")):
            tensors[f"{there}.{name}.weight"] = _stored(f"{here}.{own}.gain")
        unit = gate_unit(of.mlp)
        for names, parts in (
            (("q", "k", "v"), _qkv(of, f"{here}.attention.qkv.weight")),
            (("gate", "up"), _in_turns(f"{here}.mlp.up.weight", unit, unit)),
        ):
            for name, part in zip(names, parts):
                room = "self_attn" if len(parts) == 3 else "mlp"
                tensors[f"{there}.{room}.{name}_proj.weight"] = Stored((part,), True)
        tensors[f"{there}.self_attn.o_proj.weight"] = _stored(f"{here}.attention.out.weight", True)
        tensors[f"{there}.mlp.down_proj.weight"] = _stored(f"{here}.mlp.down.weight", True)
    return tensors | {"model.norm.weight": _stored(f"{of.layers + 1}.norm.gain")}


def config_of(of: Architecture) -> dict[str, Any]:
    """Contents of config.json for the transformers package. What the network does not limit is left out."""
    common = {"bos_token_id": None, "eos_token_id": None}
    sizes = {key: value for field, key in KEYS[of.kind].items() if (value := getattr(of, field)) is not None}
    if of.kind == "gpt2":
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            **common,
            **sizes,
            "activation_function": "gelu_new",
        }
    model = "Mistral" if of.window else "Llama"
    return {
        "architectures": [f"{model}ForCausalLM"],
        "model_type": model.lower(),
        **common,
        **sizes,
        "hidden_act": "silu",
    }


KEYS = {
    "gpt2": {
        "vocabulary": "vocab_size",
        "positions": "n_positions",
        "layers": "n_layer",
        "hidden": "n_embd",
        "heads": "n_head",
        "mlp": "n_inner",
        "tied": "tie_word_embeddings",
        "eps": "layer_norm_epsilon",
    },
    "llama": {
        "vocabulary": "vocab_size",
        "positions": "max_position_embeddings",
        "layers": "num_hidden_layers",
        "hidden": "hidden_size",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "mlp": "intermediate_size",
        "tied": "tie_word_embeddings",
        "eps": "rms_norm_eps",
        "rotary_base": "rope_theta",
        "window": "sliding_window",
    },
}
"""Kind -> field of `Architecture` -> key of config.json."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt2": {"kv_heads": None, "mlp": None, "tied": True, "eps": EPS},
    "llama": {
        "positions": None,
        "kv_heads": None,
        "tied": False,
        "eps": 1e-6,
        "rotary_base": ROTARY_BASE,
        "window": None,
    },
}
"""Kind -> values of keys that a config.json may leave out, or set to null."""
SAME: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "hidden_act": ("silu", "swish"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "is_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "partial_rotary_factor": (1,),
    "rope_interleaved": (False,),
    **{
        f"{name}.{key}": values
        for name in ROTARY
        for key, values in (("rope_type", ("default",)), ("type", ("default",)), ("partial_rotary_factor", (1,)))
    },
}
"""Further keys of config.json -> values that pmm3d supports."""
HARMLESS = frozenset(
    """
    architectures attn_implementation auto_map bad_words_ids begin_suppress_tokens chunk_size_feed_forward do_sample
    dtype early_stopping finetuning_task gradient_checkpointing id2label initializer_range is_decoder
    is_llama_config label2id max_length max_new_tokens max_sequence_length min_length model_max_length model_type
    n_ctx n_special name_or_path neftune_noise_alpha num_beam_groups num_beams num_labels num_return_sequences
    predict_special_tokens prefix pretraining_tp problem_type remove_invalid_values reorder_and_upcast_attn
    return_dict return_dict_in_generate suppress_tokens task_specific_params temperature tf_legacy_loss
    tie_encoder_decoder top_k top_p torch_dtype torchscript typical_p use_bfloat16 use_cache use_return_dict
    """.split()
)
HARMLESS_STARTS = ("_", "summary_", "output_", "tokenizer_", "transformers", "unsloth_")
HARMLESS_ENDS = ("_token_id", "dropout", "_pdrop", "_penalty", "_ngram_size")
"""Keys of config.json that change no logit: names, tokens of a tokenizer, types in memory, options of training and of
generation. They are listed, or have such a start or end."""


def architecture_of(config: Mapping[str, Any], path: str) -> Architecture:
    """Architecture in a config.json. Raises CheckpointError for an unsupported network, and for each setting that is
    not known, because it may change the results of the network."""
    model = config.get("model_type", "")
    if model not in KINDS:
        raise CheckpointError(f"{path}: the model_type {model!r} is not supported. Supported are {', '.join(KINDS)}")
    kind, network = "gpt2" if model == "gpt2" else "llama", f"nn.{KINDS[model]}"
    given = {key: value for key, value in config.items() if key not in ROTARY or not isinstance(value, Mapping)}
    for name in (name for name in ROTARY if name in config and name not in given):
        given |= {key if key == "rope_theta" else f"{name}.{key}": value for key, value in config[name].items()}
    if model == "mistral":
        given.setdefault("sliding_window", 4096)
    keys = {field: key for field, key in KEYS[kind].items() if field != "window" or model == "mistral"}
    for key, value in sorted(given.items(), key=lambda item: item[0] not in SAME):
        harmless = key in HARMLESS or key.startswith(HARMLESS_STARTS) or key.endswith(HARMLESS_ENDS)
        if value is None or harmless or key in (*KEYS[kind].values(), "head_dim"):
            continue
        if key not in SAME:
            raise CheckpointError(
                f"{path}: {key} is {value!r}, and pmm3d does not know whether this setting changes "
                f"the results of {network}. If it does not, remove the key from config.json"
            )
        if value not in SAME[key]:
            raise CheckpointError(
                f"{path}: {key} is {value!r}, but {network} supports only {SAME[key][0]!r}. Choose a "
                "network that was trained with this setting"
            )
    fields = DEFAULTS[kind] | {field: given[key] for field, key in keys.items() if given.get(key) is not None}
    if lacking := [key for field, key in keys.items() if field not in fields]:
        raise CheckpointError(
            f"{path}: the configuration lacks {names_in_words(lacking)}. Copy the file again from "
            "where the network was published"
        )
    of = Architecture.checked(path, KEYS[kind], CheckpointError, kind=kind, **fields)
    if given.get("head_dim") not in (None, of.hidden // of.heads):
        raise CheckpointError(
            f"{path}: head_dim is {given['head_dim']!r}, but {network} supports only "
            f"{of.hidden // of.heads}, hidden_size / num_attention_heads"
        )
    return of
