"""What the checkpoints of `pmm3d train` say of their network, by which it is made again: to predict, to export."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...errors import CheckpointError, Pmm3dError, needs
from ...io import DataSet
from ...io.checkpoint import Checkpoint
from ...text import names_in_words
from .config import Config, checked
from .keys import Count, Section
from .log import logger

with needs("train", "the settings of a run"):
    from pydantic import ValidationError

SAMPLES = "samples"
"""Where a run's settings have what it found in its data."""


class Samples(Section):
    """What the network was made for: columns of a sample and of the output, the loss, names of classes and columns."""

    features: Count
    outputs: Count
    loss: str
    class_names: list[str] | None = None
    columns: list[str] | None = None


class Recalled(NamedTuple):
    config: Config
    samples: Samples


def samples_of(data: DataSet, loss: str) -> Samples:
    outputs = data.classes if loss == "cross_entropy" else None
    return Samples(features=data.features, outputs=outputs or data.outputs, loss=loss, class_names=data.class_names,
                   columns=data.columns)


def compare_classes(found: Checkpoint, names: list[str] | None) -> None:
    """Compare the classes of a checkpoint, from which weights are taken, with those of a run. Rank 0 warns if all are
    other ones.

    Raises CheckpointError if a class of both has another number in each.
    """
    settings = found.meta.get("settings") if isinstance(found.meta, dict) else None
    samples = settings.get(SAMPLES) if isinstance(settings, dict) else None
    before = samples.get("class_names") if isinstance(samples, dict) else None
    if not before or not names or before == names:
        return
    numbers, own = ({name: number for number, name in enumerate(each)} for each in (before, names))
    if moved := [name for name in names if numbers.get(name, own[name]) != own[name]]:
        raise CheckpointError(f"{found.path} has other numbers for the classes: {moved[0]!r} is class "
                              f"{numbers[moved[0]]} there and class {own[moved[0]]} in this run. Convert the data with "
                              f"--class-names {','.join(before[:8])}{',...' if len(before) > 8 else ''}")
    if not numbers.keys() & own.keys():
        logger.warning(f"{found.path} was trained on other classes ({names_in_words(before)}): the weights of the "
                       f"outputs begin as theirs for {names_in_words(names)}")


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
