"""What `pmm3d train` reads: a TOML file, checked, with every default written out."""

from __future__ import annotations

import os
import sys
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

from ...errors import Pmm3dError, check_regular, needs

with needs("train", "a configuration"):
    from pydantic import BaseModel, ConfigDict, Field, ValidationError

RENAMED = {"training.micro_batches": "accumulate"}
"""Keys of earlier versions, and what they are called now."""
Count = Annotated[int, Field(ge=1)]
Steps = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class GridSection(Section):
    """shape: GxxGyxGz, ddp, fsdp, hsdp or megatron."""

    shape: str = "ddp"
    data: Count = 1


class DataSection(Section):
    """file: HDF5, with the data sets `inputs` and `targets`; validation: the share of its rows, the last ones, that is
    held out, or `validation_file`. batch_size: rows of a batch, over the whole grid."""

    file: Path
    inputs: str = "x"
    targets: str = "y"
    validation: Share = 0.1
    validation_file: Path | None = None
    batch_size: Count = 256
    shuffle: bool = True
    classes: Annotated[int | None, Field(ge=1)] = None
    prefetch: Count = 2


class NetworkSection(Section):
    hidden: list[int] = [512, 512]
    activation: Literal["relu", "gelu", "tanh", "silu", "sigmoid"] = "gelu"
    norm: bool = False
    dropout: Share = 0.0
    bias: bool = True
    recompute: bool = False
    activations: Literal["replicated", "sharded"] = "replicated"
    dtype: Literal["float32", "float64"] = "float32"
    library: str = "numpy"


class OptimizerSection(Section):
    kind: Literal["sgd", "adam", "adamw"] = "adamw"
    lr: Positive = 1e-3
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    momentum: Share = 0.9
    clip: Annotated[float | None, Field(gt=0)] = None
    shard_over_data: bool = False


class ScheduleSection(Section):
    kind: Literal["constant", "cosine", "step"] = "cosine"
    warm_up: Steps = 0
    floor: Annotated[float, Field(ge=0, le=1)] = 0.0
    every: Count = 1000
    factor: Positive = 0.1


class TrainingSection(Section):
    """folder: of this run (metrics.jsonl, run.json, curves.png, checkpoints/); epochs: passes over the data;
    accumulate: batches that make a step; evaluate_every and checkpoint_every: in steps, 0 for once an epoch; keep: how
    many checkpoints; prometheus: a .prom file for the latest figures, where a node exporter looks for such."""

    folder: Path = Path("runs/train")
    loss: Literal["auto", "cross_entropy", "mse", "mae"] = "auto"
    epochs: Count = 10
    accumulate: Count = 1
    evaluate_every: Steps = 0
    checkpoint_every: Steps = 0
    keep: Count = 3
    log_every: Count = 10
    seed: int = 0
    prometheus: Path | None = None


class OverlapSection(Section):
    oar: bool = True
    ors: bool = True
    oag: bool = True
    buckets: bool = True
    bucket_bytes: Count = 2**24
    reshard_after_forward: bool | None = None
    regather_inputs: bool = False


class Config(Section):
    """A section each of the file.

        >>> checked({"data": {"file": "digits.h5"}, "training": {"accumulate": 2}}).training.accumulate
        2
    """

    grid: GridSection = GridSection()
    data: DataSection
    network: NetworkSection = NetworkSection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    training: TrainingSection = TrainingSection()
    overlap: OverlapSection = OverlapSection()


def load(path: str | os.PathLike[str]) -> Config:
    """The checked contents of a TOML file. Paths in it are relative to where the command runs.

    Raises Pmm3dError that names every unknown key, with the nearest known one, and every value that does not fit.
    """
    tomllib = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        check_regular(path)
        with open(path, "rb") as file:
            return checked(tomllib.load(file), str(path))
    except OSError as error:
        raise Pmm3dError(f"cannot read the configuration {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # also of text that is not UTF-8, and of numbers too long to read
        raise Pmm3dError(f"{path} is not TOML: {error}") from None


def checked(values: dict[str, Any], source: str = "the configuration") -> Config:
    """A Config from nested dictionaries; errors as in `load`."""
    try:
        return Config(**values)
    except ValidationError as error:
        problems = "; ".join(_explained(problem) for problem in error.errors())
        raise Pmm3dError(f"{source}: {problems}") from None


def _explained(problem: Any) -> str:
    path = [str(part) for part in problem["loc"]]
    key = ".".join(path)
    if problem["type"] == "extra_forbidden":
        known = _keys(path[:-1])
        near = [RENAMED[key]] if key in RENAMED else get_close_matches(path[-1], known, 1, 0.5)
        hint = f"did you mean {near[0]}?" if near else f"known there: {', '.join(known)}"
        return f"unknown key {key} ({hint})"
    if problem["type"] == "missing":
        return f"{key} is missing"
    return f"{key} = {problem['input']!r}: {problem['msg'].lower()}"


def _keys(path: list[str]) -> list[str]:
    model: Any = Config
    for part in path:
        model = model.model_fields[part].annotation
    return list(model.model_fields)
