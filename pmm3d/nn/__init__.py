"""Fully connected networks in four dimensions: tensors on a grid, layers, losses; optimizers in `pmm3d.nn.optim`."""

from importlib import import_module

_HOME = {
    "Tensor": "tensor", "Parameter": "parameter", "no_grad": "tensor", "no_sync": "tensor", "Tape": "tensor",
    "add": "tensor", "scale": "tensor", "relayout": "tensor", "in_chunks": "tensor",
    "linear": "dense",
    "relu": "functional", "gelu": "functional", "tanh": "functional", "silu": "functional", "sigmoid": "functional",
    "dropout": "functional", "layer_norm": "functional",
    "Module": "layers", "Linear": "layers", "LayerNorm": "layers", "Dropout": "layers", "Sequential": "layers",
    "MLP": "layers", "Residual": "layers", "Recompute": "layers",
    "mse": "loss", "mae": "loss", "cross_entropy": "loss", "accuracy": "loss", "r2": "loss",
    "Overlap": "parallel",
}  # fmt: skip
_MODULES = ("exchange", "functional", "layers", "loss", "memory", "optim", "parallel", "parameter", "tensor", "trainer")
__all__ = [*_HOME]


def __getattr__(name: str):
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if name not in _HOME:
        raise AttributeError(f"module 'pmm3d.nn' has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted((*__all__, *_MODULES))
