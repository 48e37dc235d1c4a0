"""Names of tensors, and configurations, in files of GPT-2, Llama, Mistral and Qwen of the transformers package."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

from ...errors import CheckpointError, LayoutError
from ...layout import natural, offsets, real
from ...text import names_in_words
from ..exchange import Columns, Names, Stored
from ..facts import LAYERS, fact
from .blocks import POSITIVE, gate_unit, head_size, qkv_turns
from .scaling import ORIGINAL, RotaryScaling

KINDS = {"gpt2": "GPT", "llama": "Llama", "mistral": "Llama", "qwen2": "Llama", "qwen3": "Llama"}
"""model_type in a config.json -> class in pmm3d.nn. Files of Mistral and Qwen use the names of Llama."""
MODELS = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
"""model_type -> beginning of the name of the package's class."""
IGNORED = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""Name endings of masks and frequencies in older files. They are computed here."""
HEAD = "lm_head.weight"
ROTARY = "rope_scaling", "rope_parameters"
"""Keys of config.json with settings of rotary positions, of which the second is that of newer files."""
LAYERS_OF_FILE = "layer_types"
"""Key of config.json with a list of the kind of attention of each layer."""
EPS, ROTARY_BASE = 1e-5, 10000.0
"""Defaults of norms and of rotary positions."""

OPTIONAL = "positions", "mlp", "window"
"""Fields of `Architecture` that can be None: no limit, or the default."""
SWITCHES = "tied", "qkv_bias", "qk_norm"
OF_LLAMA = "rotary_base", "rotary_scaling", "qkv_bias", "qk_norm"
"""Fields of `Architecture` that are arguments of `nn.Llama` only."""


class Architecture(NamedTuple):
    """Sizes and options of a GPT ("gpt2") or a Llama ("llama")."""

    kind: str
    vocabulary: int
    positions: int | None
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    tied: bool
    eps: float
    rotary_base: float = ROTARY_BASE
    rotary_scaling: RotaryScaling | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    window: int | None = None

    @classmethod
    def checked(
        cls, what: str, names: Mapping[str, str] = {}, error: type[Exception] = LayoutError, **given: Any
    ) -> Architecture:
        """Architecture with these fields, in types of Python. None for kv_heads, head_dim or mlp is replaced by the
        default.

        Raises `error` for values of other types and out of range. what: the network, or the file; names: field -> its
        name there.
        """
        made = dict(given)
        for field in ("kv_heads", "head_dim"):
            if made.get(field) is None:
                made.pop(field, None)
        for field, value in [*made.items()]:
            name = f"{what}: {names.get(field, field)}"
            if field == "eps":
                made[field] = real(value, f"{name} is a number of at least 0", 0, error)
            elif field == "rotary_base":
                made[field] = real(value, f"{name} is a positive number", POSITIVE, error)
            elif field == "rotary_scaling":
                made[field] = RotaryScaling.of(value, name, made["positions"], error)
            elif field in SWITCHES:
                if value not in (True, False):
                    raise error(f"{name} is true or false; got {value!r}")
                made[field] = bool(value)
            elif field != "kind" and (value is not None or field not in OPTIONAL):
                made[field] = natural(value, f"{name} is a whole number, at least 1", 1, error)
        hidden = made["hidden"]
        made.setdefault("kv_heads", made["heads"])
        made["head_dim"] = head_size(what, hidden, made["heads"], made["kv_heads"], made.get("head_dim"), error)
        if (scaling := made.get("rotary_scaling")) is not None:
            name = f"{what}: {names.get('rotary_scaling', 'rotary_scaling')}"
            scaling.check(made["head_dim"], made["rotary_base"], name, error)
        made["mlp"] = made["mlp"] or (64 * -(-hidden // 24) if made["kind"] == "llama" else 4 * hidden)
        return cls(**made)

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `nn.GPT` or `nn.Llama`."""
        others = {"kind"} if self.kind == "llama" else {"kind", *OF_LLAMA}
        return {name: value for name, value in self._asdict().items() if name not in others}

    @property
    def model_type(self) -> str:
        """model_type of a config.json, or "" if no network of the transformers package is like this one."""
        if self.kind != "llama":
            sizes = self.kv_heads, self.head_dim * self.heads, self.window
            return self.kind if sizes == (self.heads, self.hidden, None) else ""
        kinds = {
            (False, False, False): "" if self.hidden % self.heads else "llama",  # which the package refuses
            (True, False, False): "mistral",
            (False, True, False): "qwen2",
            (False, False, True): "qwen3",
        }
        return kinds.get((self.window is not None, self.qkv_bias, self.qk_norm), "")

    @property
    def facts(self) -> dict[str, Any]:
        """Facts of the network that `facts_of` returns too."""
        return {f"network.{name}": fact(value) for name, value in self.options.items() if name in LAYERS}


def names_of(of: Architecture) -> dict[str, Names]:
    """Published names of a network's tensors, or no names for a network without a `model_type`.

    Weights in files of GPT-2 are (inputs, outputs), as in pmm3d. Weights in files of Llama, and all tables, are
    (outputs, inputs). In pmm3d, queries, keys and values are stored head by head in one tensor (`qkv_turns`). A file of
    GPT-2 has one tensor with all queries, then all keys, then all values. A file of Llama has three tensors. In pmm3d,
    the columns of a gated MLP alternate between gate and factor.

        >>> found = names_of(Architecture("gpt2", 9, 8, 1, 4, 2, 2, 2, 16, True, 1e-5))["gpt2"]
        >>> found.tensors["transformer.h.0.attn.c_attn.bias"].parts[0]
        Columns(parameter='1.attention.qkv.bias', start=0, stop=2, unit=6)
    """
    ours = of.kind == "gpt2"
    if not of.model_type:
        return {}
    parts, ignored = (_gpt2 if ours else _llama)(of), (*IGNORED, *[HEAD] * of.tied)
    if not of.tied:
        parts[HEAD] = _stored(f"{of.layers + 1}.linear.weight", True)
    return {of.kind: Names(parts, ignored, "transformer." if ours else "model.", config_of(of))}


def _qkv(of: Architecture, layer: str) -> tuple[Columns, ...]:
    """Columns of queries, keys and values in a block's projection."""
    return _in_turns(layer, *qkv_turns(of.heads, of.kv_heads, of.head_dim))


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
        for name, part in zip("qkv", _qkv(of, f"{here}.attention.qkv.bias") if of.qkv_bias else ()):
            tensors[f"{there}.self_attn.{name}_proj.bias"] = Stored((part,))
        for name in ("q_norm", "k_norm") if of.qk_norm else ():
            tensors[f"{there}.self_attn.{name}.weight"] = _stored(f"{here}.attention.{name}.gain")
        tensors[f"{there}.self_attn.o_proj.weight"] = _stored(f"{here}.attention.out.weight", True)
        tensors[f"{there}.mlp.down_proj.weight"] = _stored(f"{here}.mlp.down.weight", True)
    return tensors | {"model.norm.weight": _stored(f"{of.layers + 1}.norm.gain")}


def config_of(of: Architecture) -> dict[str, Any]:
    """Contents of config.json for the transformers package. What the network does not limit is left out."""
    common = {"bos_token_id": None, "eos_token_id": None}
    sizes = {key: value for field, key in KEYS[of.kind].items() if (value := getattr(of, field)) is not None}
    if of.rotary_scaling is not None:
        sizes[ROTARY[0]] = of.rotary_scaling.keys
        if of.rotary_scaling.rope_type == "dynamic":  # the package has no other key for the length in the formula
            sizes["max_position_embeddings"] = of.rotary_scaling.original_max_position_embeddings
    if of.kind == "gpt2":
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            **common,
            **sizes,
            "activation_function": "gelu_new",
        }
    return {
        "architectures": [f"{MODELS[of.model_type]}ForCausalLM"],
        "model_type": of.model_type,
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
        "head_dim": "head_dim",
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
        "head_dim": None,
        "tied": False,
        "eps": 1e-6,
        "rotary_base": ROTARY_BASE,
        "window": None,
    },
}
"""Kind -> values of keys that a config.json may leave out, or set to null."""
LEFT_OUT: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4096, "num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
}
"""model_type -> values of keys that a config.json leaves out, if they differ from those for null."""
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
    "use_sliding_window": (False,),
    LAYERS_OF_FILE: ("full_attention",),
    **{f"{name}.partial_rotary_factor": (1,) for name in ROTARY},
}
"""Further keys of config.json -> values that pmm3d supports."""
HARMLESS = frozenset(
    """
    architectures attn_implementation auto_map bad_words_ids begin_suppress_tokens chunk_size_feed_forward do_sample
    dtype early_stopping finetuning_task gradient_checkpointing id2label initializer_range is_decoder
    is_llama_config label2id max_length max_new_tokens max_sequence_length max_window_layers min_length
    model_max_length model_type
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
    given, rotary, scaling = _without_rotary(config, path) if kind == "llama" else (config, "", {})
    given = {**LEFT_OUT.get(model, {}), **given}
    keys = {field: key for field, key in KEYS[kind].items() if field != "window" or model == "mistral"}
    for key, value in sorted(given.items(), key=lambda item: item[0] not in SAME):
        harmless = key in HARMLESS or key.startswith(HARMLESS_STARTS) or key.endswith(HARMLESS_ENDS)
        if value is None or harmless or key in KEYS[kind].values():
            continue
        if key not in SAME:
            raise CheckpointError(
                f"{path}: {key} is {value!r}, and pmm3d does not know whether this setting changes "
                f"the results of {network}. If it does not, remove the key from config.json"
            )
        of_layers = key == LAYERS_OF_FILE and isinstance(value, list)
        if any(each not in SAME[key] for each in (value if of_layers else [value])):
            raise CheckpointError(
                f"{path}: {key} is {value!r}, but {network} supports only {SAME[key][0]!r}. Choose a "
                "network that was trained with this setting"
            )
    fields = DEFAULTS[kind] | {field: given[key] for field, key in keys.items() if given.get(key) is not None}
    if kind == "llama":
        fields |= {"qkv_bias": model == "qwen2", "qk_norm": model == "qwen3"}
        found = RotaryScaling.of(scaling, f"{path}: {rotary}", fields["positions"], CheckpointError)
        if found is not None and found.rope_type == "dynamic":
            if found.original_max_position_embeddings != fields["positions"]:
                raise CheckpointError(
                    f"{path}: {rotary}.{ORIGINAL} is {found.original_max_position_embeddings}, but with rope_type "
                    f"dynamic the transformers package uses max_position_embeddings, {fields['positions']}. Remove "
                    f"{ORIGINAL} from {rotary}"
                )
            fields["positions"] = None  # the network has no limit
        fields["rotary_scaling"] = found
    if lacking := [key for field, key in keys.items() if field not in fields]:
        raise CheckpointError(
            f"{path}: the configuration lacks {names_in_words(lacking)}. Copy the file again from "
            "where the network was published"
        )
    return Architecture.checked(path, {**KEYS[kind], "rotary_scaling": rotary}, CheckpointError, kind=kind, **fields)


def _without_rotary(config: Mapping[str, Any], path: str) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """Return a config.json without the tables of rotary positions; and the key and the contents of the table with the
    scaling, in its newer form. Raises CheckpointError for two different tables."""
    given, found = {**config}, dict[str, dict[str, Any]]()
    for name in ROTARY:
        if not isinstance(given.get(name), Mapping):
            continue
        table = {key: value for key, value in given.pop(name).items() if value is not None}
        if "type" in table and table["type"] == table.setdefault("rope_type", table["type"]):
            del table["type"]
        given |= {"rope_theta": table.pop("rope_theta")} if "rope_theta" in table else {}
        given[f"{name}.partial_rotary_factor"] = table.pop("partial_rotary_factor", None)
        found[name] = {"rope_type": "default", **table}
    if len(found) == 2 and found[ROTARY[0]] != found[ROTARY[1]]:
        raise CheckpointError(f"{path}: {ROTARY[0]} and {ROTARY[1]} differ. Remove one of them")
    name, scaling = next(iter(found.items()), (ROTARY[1], {}))
    return given, name, scaling
