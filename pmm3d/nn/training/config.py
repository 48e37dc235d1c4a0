"""What `pmm3d train` reads: a TOML file, checked, with every default written out."""

from __future__ import annotations

import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...errors import Pmm3dError


RENAMED = {"training.micro_batches": "accumulate"}
"""Keys of earlier versions, and what they are called now."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class GridSection(Section):
    """shape: GxxGyxGz, ddp, fsdp, hsdp or megatron."""

    shape: str = "ddp"
    data: int = Field(1, ge=1)


class DataSection(Section):
    """file: HDF5, with the data sets `inputs` and `targets`; validation: the share of its rows, the last ones, that is
    held out, or `validation_file`. batch_size: rows of a batch, over the whole grid."""

    file: Path
    inputs: str = "x"
    targets: str = "y"
    validation: float = Field(0.1, ge=0, lt=1)
    validation_file: Path | None = None
    batch_size: int = Field(256, ge=1)
    shuffle: bool = True
    classes: int | None = Field(None, ge=1)
    prefetch: int = Field(2, ge=1)


class NetworkSection(Section):
    hidden: list[int] = [512, 512]
    activation: Literal["relu", "gelu", "tanh", "silu", "sigmoid"] = "gelu"
    norm: bool = False
    dropout: float = Field(0.0, ge=0, lt=1)
    bias: bool = True
    recompute: bool = False
    dtype: Literal["float32", "float64"] = "float32"
    library: str = "numpy"


class OptimizerSection(Section):
    kind: Literal["sgd", "adam", "adamw"] = "adamw"
    lr: float = Field(1e-3, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    momentum: float = Field(0.9, ge=0, lt=1)
    clip: float | None = Field(None, gt=0)
    shard_over_data: bool = False


class ScheduleSection(Section):
    kind: Literal["constant", "cosine", "step"] = "cosine"
    warm_up: int = Field(0, ge=0)
    floor: float = Field(0.0, ge=0, le=1)
    every: int = Field(1000, ge=1)
    factor: float = Field(0.1, gt=0)


class TrainingSection(Section):
    """folder: of this run (metrics.jsonl, run.json, curves.png, checkpoints/); epochs: passes over the data;
    accumulate: batches that make a step; evaluate_every and checkpoint_every: in steps, 0 for once an epoch; keep: how
    many checkpoints; prometheus: a .prom file for the latest figures, where a node exporter looks for such."""

    folder: Path = Path("runs/train")
    loss: Literal["auto", "cross_entropy", "mse", "mae"] = "auto"
    epochs: int = Field(10, ge=1)
    accumulate: int = Field(1, ge=1)
    evaluate_every: int = Field(0, ge=0)
    checkpoint_every: int = Field(0, ge=0)
    keep: int = Field(3, ge=1)
    log_every: int = Field(10, ge=1)
    seed: int = 0
    prometheus: Path | None = None


class OverlapSection(Section):
    oar: bool = True
    ors: bool = True
    oag: bool = True
    buckets: bool = True
    bucket_bytes: int = Field(2**24, ge=1)
    reshard_after_forward: bool | None = None


class Config(Section):
    grid: GridSection = GridSection()
    data: DataSection
    network: NetworkSection = NetworkSection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    training: TrainingSection = TrainingSection()
    overlap: OverlapSection = OverlapSection()


def load(path) -> Config:
    """The checked contents of a TOML file. Paths in it are relative to where the command runs.

    Raises Pmm3dError that names every unknown key, with the nearest known one, and every value that does not fit.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        with open(path, "rb") as file:
            return checked(tomllib.load(file), str(path))
    except OSError as error:
        raise Pmm3dError(f"cannot read the configuration {path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise Pmm3dError(f"{path} is not TOML: {error}") from None


def checked(values: dict, source: str = "the configuration") -> Config:
    """A Config from nested dictionaries; errors as in `load`."""
    try:
        return Config(**values)
    except ValidationError as error:
        problems = "; ".join(_explained(problem) for problem in error.errors())
        raise Pmm3dError(f"{source}: {problems}") from None


def _explained(problem: dict) -> str:
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
    model = Config
    for part in path:
        model = model.model_fields[part].annotation
    return list(model.model_fields)
