"""Names of tensors, and configurations, in files of the transformers package, of GPT-2 and of networks like Llama."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...errors import CheckpointError, LayoutError
from ...layout import natural, offsets, real
from ...text import names_in_words
from ..exchange import Columns, Names, Stored
from ..facts import LAYERS, fact
from ..feed_forward import gate_unit
from ..layers import check_switches
from .blocks import ALL_HEADS, POSITIVE, check_qk_norm, head_size, qkv_turns
from .scaling import ORIGINAL, RotaryScaling

MODELS = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "mixtral": "Mixtral",
    "qwen2_moe": "Qwen2Moe",
    "qwen3_moe": "Qwen3Moe",
    "olmoe": "Olmoe",
}
"""model_type of files that use the names of Llama -> beginning of the name of the package's class."""
KINDS = {"gpt2": "GPT", **dict.fromkeys(MODELS, "Llama")}
"""model_type in a config.json -> class in pmm3d.nn."""
IGNORED = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""Name endings of masks and frequencies in older files. They are computed here."""
HEAD = "lm_head.weight"
ROTARY = "rope_scaling", "rope_parameters"
"""Keys of config.json with settings of rotary positions, of which the second is that of newer files."""
OTHER_EXPERTS = "num_local_experts"
"""Key of config.json with the number of experts in files of some versions of the package."""
WINDOWED = "mistral", "mixtral"
"""model_type of files whose key sliding_window has an effect."""
LAYERS_OF_FILE = "layer_types"
"""Key of config.json with a list of the kind of attention of each layer."""
EPS, ROTARY_BASE = 1e-5, 10000.0
"""Defaults of norms and of rotary positions."""

OPTIONAL = "positions", "mlp", "window", "top_k", "expert_mlp"
"""Fields of `Architecture` that can be None: no limit, or the default."""
SWITCHES = "tied", "qkv_bias", "shared_gate"
NONE_OR_MORE = "experts", "shared"
"""Fields of `Architecture` that can be 0."""
MIXTURE = "top_k", "expert_mlp", "every", "shared", "shared_gate", "scores", "normalize", "bias_rate"
"""Fields of `Architecture` for a mixture of experts."""
OF_ROUTER = "capacity", "balance", "z_loss"
"""Arguments of a network for the routers of a mixture, besides these fields."""
TOP_K, BALANCE = 2, 0.01
"""Defaults of a mixture: experts of a token, and factor of the balance loss (that of Switch Transformers)."""
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
    qk_norm: bool | str = False
    window: int | None = None
    experts: int = 0
    top_k: int | None = None
    expert_mlp: int | None = None
    every: int = 1
    shared: int = 0
    shared_gate: bool = False
    scores: str = "softmax"
    normalize: bool | None = None
    bias_rate: float = 0.0

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
            if field in ("eps", "bias_rate"):
                made[field] = real(value, f"{name} is a number of at least 0", 0, error)
            elif field == "rotary_base":
                made[field] = real(value, f"{name} is a positive number", POSITIVE, error)
            elif field == "rotary_scaling":
                made[field] = RotaryScaling.of(value, name, made["positions"], error)
            elif field in SWITCHES or (field == "normalize" and value is not None):
                check_switches(what, error, **{names.get(field, field): value})
                made[field] = bool(value)
            elif field == "qk_norm":
                check_qk_norm(what, value, error)
                made[field] = value if value == ALL_HEADS else bool(value)
            elif field in NONE_OR_MORE:
                made[field] = natural(value, f"{name} is a whole number, at least 0", 0, error)
            elif field not in ("kind", "scores", "normalize") and (value is not None or field not in OPTIONAL):
                made[field] = natural(value, f"{name} is a whole number, at least 1", 1, error)
        hidden = made["hidden"]
        made.setdefault("kv_heads", made["heads"])
        made["head_dim"] = head_size(what, hidden, made["heads"], made["kv_heads"], made.get("head_dim"), error)
        if (scaling := made.get("rotary_scaling")) is not None:
            name = f"{what}: {names.get('rotary_scaling', 'rotary_scaling')}"
            scaling.check(made["head_dim"], made["rotary_base"], name, error)
        made["mlp"] = made["mlp"] or (64 * -(-hidden // 24) if made["kind"] == "llama" else 4 * hidden)
        return cls(**made)._with_mixture(what, names, error)

    def _with_mixture(self, what: str, names: Mapping[str, str], error: type[Exception]) -> Architecture:
        """The same with defaults of a mixture of experts. Raises `error` for settings of a mixture without experts."""
        if problem := mixture_problem(self._asdict(), names):
            raise error(f"{what}: {problem}")
        if not self.experts:
            return self
        top_k = TOP_K if self.top_k is None else self.top_k
        normalize = top_k > 1 if self.normalize is None else self.normalize
        return self._replace(top_k=top_k, expert_mlp=self.expert_mlp or self.mlp, normalize=normalize)

    def is_mixture(self, index: int) -> bool:
        """Whether the block with this index, counted from 0, has a mixture of experts."""
        return self.experts > 0 and (index + 1) % self.every == 0

    def mixture(self, what: str, *, balance: float | None, **router: Any) -> dict[str, Any]:
        """Arguments of `MoE` for the mixtures of a network. balance, router: arguments of its `Router`.

        Raises LayoutError for arguments of a router without experts. what: the network.
        """
        if problem := mixture_problem({"experts": self.experts, "balance": balance, **router}):
            raise LayoutError(f"{what}: {problem}")
        if balance is None:
            balance = 0.0 if self.bias_rate else BALANCE
        router |= {name: getattr(self, name) for name in ("bias_rate", "scores", "normalize")} | {"balance": balance}
        sizes = {name: getattr(self, name) for name in ("experts", "top_k", "shared", "shared_gate")}
        return {**sizes, "inner": self.expert_mlp, "router": router}

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `nn.GPT` or `nn.Llama`."""
        others = {"kind"} if self.kind == "llama" else {"kind", *OF_LLAMA}
        return {name: value for name, value in self._asdict().items() if name not in others}

    @property
    def model_type(self) -> str:
        """model_type of a config.json, or "" if no network of the transformers package is like this one."""
        return "" if self.misfit else self._nearest

    @property
    def _nearest(self) -> str:
        """model_type of the network of the transformers package that is the most like this one."""
        if self.kind != "llama":
            return self.kind
        if self.experts:
            if self.shared or self.qkv_bias:
                return "qwen2_moe"
            return {ALL_HEADS: "olmoe", True: "qwen3_moe"}.get(self.qk_norm, "mixtral")
        if self.window is not None:
            return "mistral"
        return "qwen2" if self.qkv_bias else "qwen3" if self.qk_norm else "llama"

    @property
    def misfit(self) -> str:
        """The first field that no network of the transformers package has, with its value; or ""."""
        of, model = self, self._nearest
        fitting: dict[str, Any] = {"window": None, "qkv_bias": False, "qk_norm": False}
        if model == "gpt2":
            fitting = {"experts": 0, "window": None, "kv_heads": of.heads}
        elif of.experts:
            fitting |= {"scores": "softmax", "bias_rate": 0.0, "shared": 0}
        if model in WINDOWED:
            del fitting["window"]
        if model in ("qwen2", "qwen2_moe"):
            fitting["qkv_bias"] = True
        if model == "qwen2_moe":
            fitting |= {"shared": of.shared or "a number of columns", "shared_gate": True}
        if model in ("qwen3", "qwen3_moe"):
            fitting["qk_norm"] = True
        if model == "olmoe":
            fitting["qk_norm"] = ALL_HEADS
        if model in ("mixtral", "olmoe"):
            fitting["every"] = 1
        if model == "mixtral":
            fitting["normalize"] = True
        if model in ("gpt2", "llama", "olmoe", "qwen2_moe") and of.hidden % of.heads:  # which the package refuses
            fitting["heads"] = f"a divisor of hidden = {of.hidden}"
        elif model in ("gpt2", "olmoe"):
            fitting["head_dim"] = of.hidden // of.heads
        for field, value in fitting.items():
            if getattr(self, field) != value:
                wanted = "no limit" if value is None else value
                return f"{field} is {getattr(self, field)!r}, and the nearest published network, {model}, has {wanted}"
        return ""

    @property
    def facts(self) -> dict[str, Any]:
        """Facts of the network that `facts_of` returns too."""
        return {f"network.{name}": fact(value) for name, value in self.options.items() if name in LAYERS}


def mixture_problem(given: Mapping[str, Any], names: Mapping[str, str] = {}) -> str:
    """Return what is wrong with the settings of a mixture of experts, or "". given: fields of `Architecture`, and
    arguments of a `Router`; names: as in `Architecture.checked`.

    >>> mixture_problem({"experts": 0, "top_k": 2})
    'top_k is 2, but the network has no experts. Set experts, the number of experts, or leave top_k out'
    """

    def name(field: str) -> str:
        return names.get(field, field)

    experts = given.get("experts") or 0
    defaults = {**Architecture._field_defaults, "z_loss": 0.0}
    for field in (*MIXTURE, *OF_ROUTER) if not experts else ():
        if (value := given.get(field)) is not None and value != defaults.get(field):
            return (
                f"{name(field)} is {value!r}, but the network has no experts. Set {name('experts')}, the number of "
                f"experts, or leave {name(field)} out"
            )
    if experts and (top_k := TOP_K if given.get("top_k") is None else given["top_k"]) > experts:
        return f"{name('top_k')} is {top_k}, more than {name('experts')} = {experts}. Choose at most {experts}"
    every, layers = given.get("every") or 1, given.get("layers")
    if experts and layers is not None and every > layers:
        return (
            f"{name('every')} is {every}, but the network has {layers} blocks, so no block would have experts. Choose "
            f"at most {layers}, or leave the experts out"
        )
    if given.get("shared_gate") and not given.get("shared"):
        return (
            f"{name('shared_gate')} is for the shared expert: set {name('shared')}, its number of columns, or leave "
            f"{name('shared_gate')} out"
        )
    return ""


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
        for name, part in zip("qkv", _qkv(of, f"{here}.attention.qkv.weight")):
            tensors[f"{there}.self_attn.{name}_proj.weight"] = Stored((part,), True)
        for name, part in zip("qkv", _qkv(of, f"{here}.attention.qkv.bias") if of.qkv_bias else ()):
            tensors[f"{there}.self_attn.{name}_proj.bias"] = Stored((part,))
        for name in ("q_norm", "k_norm") if of.qk_norm else ():
            tensors[f"{there}.self_attn.{name}.weight"] = _stored(f"{here}.attention.{name}.gain")
        tensors[f"{there}.self_attn.o_proj.weight"] = _stored(f"{here}.attention.out.weight", True)
        tensors |= _mixture(of, there, here) if of.is_mixture(index) else _gated(f"{there}.mlp", f"{here}.mlp", of.mlp)
    return tensors | {"model.norm.weight": _stored(f"{of.layers + 1}.norm.gain")}


PROJECTIONS = "gate_proj", "up_proj", "down_proj"


def _gated(there: str, here: str, inner: int, names: Sequence[str] = PROJECTIONS) -> dict[str, Stored]:
    """Tensors of a gated MLP. there, here: its path in a file and in the network. names: of gate, factor and `down`."""
    unit = gate_unit(inner)
    gate, factor = _in_turns(f"{here}.up.weight", unit, unit)
    stored = Stored((gate,), True), Stored((factor,), True), _stored(f"{here}.down.weight", True)
    return {f"{there}.{name}.weight": each for name, each in zip(names, stored)}


def _mixture(of: Architecture, there: str, here: str) -> dict[str, Stored]:
    """Tensors of a mixture of experts. there, here: the path of its block in a file and in the network."""
    mixtral = of.model_type == "mixtral"
    room, names = (f"{there}.block_sparse_moe", ("w1", "w3", "w2")) if mixtral else (f"{there}.mlp", PROJECTIONS)
    tensors = {f"{room}.gate.weight": _stored(f"{here}.mlp.router.weight", True)}
    for expert in range(of.experts):
        path = f"experts.{expert}"
        tensors |= _gated(f"{room}.{path}", f"{here}.mlp.{path}", of.expert_mlp or of.mlp, names)
    if of.shared:
        tensors |= _gated(f"{room}.shared_expert", f"{here}.mlp.shared", of.shared)
        tensors[f"{room}.shared_expert_gate.weight"] = _stored(f"{here}.mlp.shared_gate.weight", True)
    return tensors


def config_of(of: Architecture) -> dict[str, Any]:
    """Contents of config.json for the transformers package. What the network does not limit is left out."""
    common = {"bos_token_id": None, "eos_token_id": None}
    keys = KEYS[of.kind] | (KEYS_OF_MIXTURE[of.model_type] if of.experts else {})
    sizes = {key: value for field, key in keys.items() if (value := getattr(of, field)) is not None}
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
QWEN_MOE = {
    "experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "expert_mlp": "moe_intermediate_size",
    "every": "decoder_sparse_step",
    "normalize": "norm_topk_prob",
}
KEYS_OF_MIXTURE = {
    "mixtral": {"experts": "num_local_experts", "top_k": "num_experts_per_tok", "expert_mlp": "intermediate_size"},
    "qwen2_moe": {**QWEN_MOE, "shared": "shared_expert_intermediate_size"},
    "qwen3_moe": QWEN_MOE,
    "olmoe": {
        "experts": "num_experts", "top_k": "num_experts_per_tok", "expert_mlp": "intermediate_size",
        "normalize": "norm_topk_prob",
    },
}  # fmt: skip
"""model_type of a mixture of experts -> further fields of `Architecture` -> key of config.json."""
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
    "mixtral": {
        "num_key_value_heads": 8, "rope_theta": 1e6, "rms_norm_eps": 1e-5, "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen2_moe": {
        "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632, "decoder_sparse_step": 1, "norm_topk_prob": False,
    },
    "qwen3_moe": {
        "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "decoder_sparse_step": 1, "norm_topk_prob": False,
    },
    "olmoe": {"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False},
}  # fmt: skip
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
    "mlp_only_layers": ([],),
    "clip_qkv": (None,),
    "qkv_bias": (True,),
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
    experts_implementation router_aux_loss_coef router_jitter_noise
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
    keys = KEYS[kind] | KEYS_OF_MIXTURE.get(model, {})
    if (other := given.get(OTHER_EXPERTS)) is not None and "experts" in keys:
        if given.get(keys["experts"]) not in (None, other):
            raise CheckpointError(
                f"{path}: {keys['experts']} is {given[keys['experts']]!r}, but {OTHER_EXPERTS} is {other!r}. Remove "
                "the wrong one"
            )
        given = {**given, keys["experts"]: other}
    given, known = {**LEFT_OUT.get(model, {}), **given}, {*keys.values(), *[OTHER_EXPERTS] * ("experts" in keys)}
    keys = {field: key for field, key in keys.items() if field != "window" or model in WINDOWED}
    for key, value in sorted(given.items(), key=lambda item: item[0] not in SAME):
        harmless = key in HARMLESS or key.startswith(HARMLESS_STARTS) or key.endswith(HARMLESS_ENDS)
        if value is None or harmless or key in known:
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
        qk_norm = ALL_HEADS if model == "olmoe" else model in ("qwen3", "qwen3_moe")
        fields |= {"qkv_bias": model in ("qwen2", "qwen2_moe"), "qk_norm": qk_norm}
        if model == "qwen2_moe":
            if not fields.get("shared"):
                raise CheckpointError(
                    f"{path}: {keys['shared']} is {fields.get('shared')!r}, but {network} supports a model_type "
                    "qwen2_moe only with a shared expert. Choose a network that has one"
                )
            fields["shared_gate"] = True
        fields |= {"normalize": True} if model == "mixtral" else {}
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
    return Architecture.checked(path, {**keys, "rotary_scaling": rotary}, CheckpointError, kind=kind, **fields)


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
