"""Files: data sets, conversion, checkpoints. Modules are imported at first use, as in pmm3d."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names, for type checkers
    from .checkpoint import Checkpoints
    from .conversion import convert
    from .dataset import DataSet
    from .file_product import matmul_files
    from .loader import Loader
    from .mixture import Mixture
    from .safetensors import export_safetensors, import_safetensors
    from .text import Tokenizer, convert_text
    from .tokens import TokenDataSet

_MODULES = {
    "convert": "conversion",
    "DataSet": "dataset",
    "matmul_files": "file_product",
    "Loader": "loader",
    "Mixture": "mixture",
    "Checkpoints": "checkpoint",
    "export_safetensors": "safetensors",
    "import_safetensors": "safetensors",
    "Tokenizer": "text",
    "convert_text": "text",
    "TokenDataSet": "tokens",
}
__all__ = [
    "Checkpoints",
    "DataSet",
    "Loader",
    "Mixture",
    "TokenDataSet",
    "Tokenizer",
    "convert",
    "convert_text",
    "export_safetensors",
    "import_safetensors",
    "matmul_files",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'pmm3d.io' has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
