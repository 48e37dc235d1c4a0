"""What the checkpoints of `pmm3d train` say of their network, by which it is made again: to predict, to export."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...errors import CheckpointError, Pmm3dError, needs
from ...io import DataSet
from ...io.checkpoint import Checkpoint
from .config import Config, checked
from .keys import Count, Section

with needs("train", "the settings of a run"):
    from pydantic import ValidationError

SAMPLES = "samples"
"""Where a run's settings have what it found in its data."""


class Samples(Section):
    """What the network was made for: columns of a sample and of the output, the loss, the names of the classes."""

    features: Count
    outputs: Count
    loss: str
    class_names: list[str] | None = None


class Recalled(NamedTuple):
    config: Config
    samples: Samples


def samples_of(data: DataSet, loss: str) -> Samples:
    names = data.targets.attrs.get("class_names") if data.classes is not None else None
    outputs = data.classes if loss == "cross_entropy" else None
    return Samples(features=data.features, outputs=outputs or data.outputs, loss=loss,
                   class_names=None if names is None else [_text(name) for name in names])


def _text(name: Any) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else str(name)


def recalled(found: Checkpoint) -> Recalled:
    """Raises CheckpointError for a checkpoint that is not of `pmm3d train`."""
    settings = found.meta.get("settings") if isinstance(found.meta, dict) else None
    if not isinstance(settings, dict) or SAMPLES not in settings:
        raise CheckpointError(f"{found.path} does not say how its network is made, as the checkpoints of pmm3d train "
                              "do: make the network in a program and load it with nn.exchange.load_weights")
    try:
        return Recalled(checked(_given(settings), str(found.path)), Samples(**settings[SAMPLES]))
    except (ValidationError, TypeError, AttributeError, KeyError, Pmm3dError) as error:
        raise CheckpointError(f"{found.path} is of another version of pmm3d, whose settings this one does not "
                              f"understand: {error}. Make the network in a program and load it with "
                              "nn.exchange.load_weights") from None


def _given(settings: dict[str, Any]) -> dict[str, Any]:
    """What of the settings is not as by default: keys without effect must not be given."""
    default = checked({"data": {"file": settings["data"]["file"]}}).model_dump(mode="json")
    default["data"].pop("file")
    return {name: {key: value for key, value in section.items() if (key, value) not in default[name].items()}
            for name, section in settings.items() if name != SAMPLES}
