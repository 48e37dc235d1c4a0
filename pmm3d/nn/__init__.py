"""Networks in four dimensions: tensors on a grid and their tape, operations, layers, losses, optimizers, training."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names, for type checkers
    from .arithmetic import add, cast, divide, maximum, minimum, multiply, scale, subtract, where
    from .compression import Compression
    from .containers import MLP, Residual, Sequential
    from .contexts import defer_weights, no_grad, no_sync, unchanged
    from .contract import Gradient, LazyMatrix
    from .dense import linear, matmul
    from .elementary import abs, clip, exp, log, pow, sqrt
    from .elementwise import map_elementwise
    from .experts.layer import MoE
    from .experts.routing import Router
    from .feed_forward import FeedForward
    from .functional import dropout, gelu, gelu_tanh, layer_norm, relu, rms_norm, sigmoid, silu, tanh
    from .grouped import grouped_linear
    from .keep import keep_as
    from .layers import Dropout, LayerNorm, Linear, RMSNorm
    from .lookup import scatter_add, take
    from .loss import binary_cross_entropy_with_logits, cross_entropy, huber, kl_div, mae, mse
    from .memory_trace import trace_memory
    from .module import Module
    from .offloaded_arrays import offload
    from .operations import argmax, log_softmax, max, mean, min, softmax, sum
    from .overlap import Overlap
    from .parameter import Parameter
    from .parts import columns, concat, matrix_transpose, rows, split
    from .pipeline.network import Pipeline
    from .precision import Precision
    from .ragged_rows import ragged
    from .recompute import Recompute
    from .recorded_steps import replay
    from .scores import accuracy, r2
    from .seeds import manual_seed
    from .store import Store
    from .tape import Tape
    from .tensor import Tensor, relayout, results_of
    from .tiled import Tiled, TiledHead
    from .transformer.blocks import Attention, TransformerBlock
    from .transformer.embedding import Embedding
    from .transformer.generate import generate
    from .transformer.networks import GPT, Encoder, Llama

_MODULES = {
    "elementwise": ("map_elementwise",),
    "contract": ("Gradient", "LazyMatrix"),
    "contexts": ("defer_weights", "no_grad", "no_sync", "unchanged"),
    "tape": ("Tape",),
    "tensor": ("Tensor", "relayout", "results_of"),
    "ragged_rows": ("ragged",),
    "arithmetic": ("add", "cast", "divide", "maximum", "minimum", "multiply", "scale", "subtract", "where"),
    "elementary": ("abs", "clip", "exp", "log", "pow", "sqrt"),
    "operations": ("argmax", "log_softmax", "max", "mean", "min", "softmax", "sum"),
    "parts": ("columns", "concat", "matrix_transpose", "rows", "split"),
    "dense": ("linear", "matmul"),
    "grouped": ("grouped_linear",),
    "lookup": ("scatter_add", "take"),
    "parameter": ("Parameter",),
    "pipeline.network": ("Pipeline",),
    "precision": ("Precision",),
    "seeds": ("manual_seed",),
    "functional": ("dropout", "gelu", "gelu_tanh", "layer_norm", "relu", "rms_norm", "sigmoid", "silu", "tanh"),
    "containers": ("MLP", "Residual", "Sequential"),
    "layers": ("Dropout", "LayerNorm", "Linear", "RMSNorm"),
    "memory_trace": ("trace_memory",),
    "module": ("Module",), "offloaded_arrays": ("offload",), "store": ("Store",),
    "loss": ("binary_cross_entropy_with_logits", "cross_entropy", "huber", "kl_div", "mae", "mse"),
    "recompute": ("Recompute",),
    "tiled": ("Tiled", "TiledHead"),
    "recorded_steps": ("replay",),
    "scores": ("accuracy", "r2"),
    "overlap": ("Overlap",), "compression": ("Compression",), "keep": ("keep_as",),
    "transformer.blocks": ("Attention", "TransformerBlock"),
    "experts.layer": ("MoE",), "experts.routing": ("Router",), "experts": (),
    "feed_forward": ("FeedForward",),
    "transformer.embedding": ("Embedding",),
    "transformer.generate": ("generate",), "transformer.networks": ("GPT", "Encoder", "Llama"),
    "transformer": (), "optim": (), "pipeline": (), "training": (), "exchange": (), "dry": (),
}  # fmt: skip
__all__ = [
    "Attention", "Compression", "Dropout", "Embedding", "Encoder", "FeedForward", "GPT", "Gradient", "LayerNorm",
    "LazyMatrix", "Linear", "Llama", "MLP", "MoE", "Module", "Overlap", "Parameter", "Pipeline", "Precision", "RMSNorm",
    "Recompute", "Residual", "Router", "Sequential", "Store", "Tape", "Tensor", "Tiled", "TiledHead",
    "TransformerBlock", "abs", "accuracy", "add", "argmax", "binary_cross_entropy_with_logits", "cast", "clip",
    "columns", "concat", "cross_entropy", "defer_weights", "divide", "dropout", "exp", "gelu", "gelu_tanh", "generate",
    "grouped_linear", "huber", "keep_as", "kl_div", "layer_norm", "linear", "log", "log_softmax", "mae", "manual_seed",
    "map_elementwise", "matmul", "matrix_transpose", "max", "maximum", "mean", "min", "minimum", "mse", "multiply",
    "no_grad", "no_sync", "offload", "pow", "r2", "ragged", "relayout", "relu", "replay", "results_of", "rms_norm",
    "rows", "scale", "scatter_add", "sigmoid", "silu", "softmax", "split", "sqrt", "subtract", "sum", "take", "tanh",
    "trace_memory", "unchanged", "where",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            globals()[name] = attribute = getattr(import_module(f".{module}", __name__), name)
            return attribute
        if name == module:
            return import_module(f".{module}", __name__)
    raise AttributeError(f"module 'pmm3d.nn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted((*__all__, *_MODULES))
