"""Training runs: loop, configuration, record and log. A name is imported when it is first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names, for type checkers
    from .callbacks import Callback
    from .config import Config
    from .evaluation import evaluate
    from .log import RunLog
    from .loop import NonFiniteLossError, Trainer
    from .recipe import Recipe
    from .state import TrainState
    from .states import TrainStates

_HOME = {"Callback": "callbacks", "Config": "config", "NonFiniteLossError": "loop", "Recipe": "recipe", "RunLog": "log",
         "TrainState": "state", "TrainStates": "states", "Trainer": "loop", "evaluate": "evaluation"}  # fmt: skip
__all__ = ["Callback", "Config", "NonFiniteLossError", "Recipe", "RunLog", "TrainState", "TrainStates", "Trainer",
           "evaluate"]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'pmm3d.nn.training' has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
