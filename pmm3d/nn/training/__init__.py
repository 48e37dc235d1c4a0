"""Training runs: loop, configuration, record and log. A name is imported when it is first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names, for type checkers
    from .config import Config
    from .evaluation import evaluate
    from .log import RunLog
    from .loop import NonFiniteLossError, Trainer
    from .recipe import Recipe
    from .state import TrainState

_HOME = {"Config": "config", "NonFiniteLossError": "loop", "Recipe": "recipe", "RunLog": "log", "TrainState": "state",
         "Trainer": "loop", "evaluate": "evaluation"}  # fmt: skip
__all__ = ["Config", "NonFiniteLossError", "Recipe", "RunLog", "TrainState", "Trainer", "evaluate"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'pmm3d.nn.training' has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
