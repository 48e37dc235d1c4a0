"""Files: data sets, their conversion, checkpoints. Loaded when first used, as in pmm3d."""

from importlib import import_module

from .convert import convert  # here, since the function has the name of its module; it loads neither numpy nor h5py

_HOME = {
    "DataSet": "dataset",
    "Loader": "dataset",
    "Checkpoints": "checkpoint",
    "export_safetensors": "safetensors",
    "import_safetensors": "safetensors",
}
__all__ = ["convert", *_HOME]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'pmm3d.io' has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__():
    return sorted(__all__)
