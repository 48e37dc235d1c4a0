"""Types of the keys of a configuration, and the base class of its sections."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from ...errors import needs
from ...text import bytes_in
from .described import WIDEST

with needs("train", "a configuration"):
    from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
    from pydantic_core import PydanticCustomError

LARGEST = 2**53
"""Larger whole numbers are not exact in floating point."""


def _expanded(value: Any) -> Any:
    """Return a path with ~ and environment variables expanded. Raises ValueError if it is empty."""
    if not isinstance(value, str):
        return value
    text = os.path.expandvars(os.path.expanduser(value))
    if not text or "\0" in text:
        raise ValueError("the path is empty, or contains a null character")
    if "$" in text:
        raise ValueError("this environment variable is not set")
    return Path(text)


def _as_policy(value: Any) -> Any:
    return {True: "full", False: "none"}[value] if isinstance(value, bool) else value


def _budget(value: str) -> str:
    if bytes_in(value) is None:
        raise PydanticCustomError("budget", "no bytes")  # a message lists the possible values once
    return value


def _in_words(values: str) -> Any:
    """Return a field with a text about its values, for help and errors."""
    return Field(json_schema_extra={"values": values})


Count = Annotated[int, Field(ge=1, le=LARGEST)]
Width = Annotated[int, Field(ge=1, le=WIDEST)]
Steps = Annotated[int, Field(ge=0, le=LARGEST)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Share = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
Name = Annotated[str, Field(min_length=1)]
Place = Annotated[Path, BeforeValidator(_expanded)]
Shape = Annotated[
    str,
    Field(pattern=r"^(\d+x\d+x\d+|ddp|fsdp|hsdp|megatron|auto)$"),
    _in_words('three numbers, such as "2x2x1", or "ddp", "fsdp", "hsdp", "megatron", or "auto"'),
]
Table = Annotated[
    Name,
    _in_words('"1f1b", "zb-h1", another schedule of pmm3d plan pipeline, or a CSV file of actions, such as "mine.csv"'),
]
Cut = Annotated[list[Count] | Literal["cost"], _in_words('a list of whole numbers of at least 1, or "cost"')]
Function = Annotated[
    str,
    Field(pattern=r"^.+\.py:[A-Za-z_]\w*$"),
    _in_words('a Python file, relative to the current folder, and a function or class in it, such as "model.py:build"'),
]
Weights = Annotated[
    dict[Place, Positive],
    Field(min_length=1),
    _in_words('a table of files with weights above 0, such as {"web.h5" = 3, "books.h5" = 1}'),
]
LossName = Annotated[
    Literal["auto", "cross_entropy", "mse", "mae", "huber", "binary_cross_entropy_with_logits"] | Function,
    _in_words(
        '"auto", "cross_entropy", "mse", "mae", "huber", "binary_cross_entropy_with_logits", or a Python file and a '
        'function in it, such as "loss.py:asymmetric"'
    ),
]
ClassWeights = Annotated[
    list[Annotated[float, Field(ge=0)]] | Literal["balanced"],
    _in_words('"balanced", or a list of numbers of at least 0'),
]
Hidden = Annotated[
    list[Width] | Width, _in_words("a list of whole numbers of at least 1; for a transformer, one such number")
]
WarmUp = Annotated[Steps | Literal["auto"], _in_words('a whole number of at least 0, or "auto"')]
Recompute = Annotated[
    Count | Literal["none", "selective", "full"] | Annotated[str, AfterValidator(_budget)],
    BeforeValidator(_as_policy),
    _in_words('"none", "selective", "full", a whole number of at least 1, or bytes with a unit, such as "2 GiB"'),
]


def default_of(description: str | None = None, values: str = "", **defaults: Any) -> Any:
    """Return the field of a key that only these values of `kind` have, with a default for each. values: text about the
    possible values."""
    extra: dict[str, Any] = {"kinds": [*defaults], **({"values": values} if values else {})}
    factory = lambda given: defaults.get(given.get("kind"))
    return Field(default_factory=factory, description=description, json_schema_extra=extra)


def of_tokens(default: Any) -> Any:
    return default_of(gpt=default, llama=default)


class Section(BaseModel):
    """Table of a configuration file. Unknown keys, values of another type and keys of another `kind` are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @model_validator(mode="after")
    def _of_this_kind(self) -> Section:
        for name, field in type(self).model_fields.items():
            extra, kind = field.json_schema_extra, getattr(self, "kind", None)
            kinds = extra.get("kinds") if isinstance(extra, dict) else None
            if isinstance(kinds, list) and kind not in kinds and getattr(self, name) is not None:
                of = ", ".join(map(str, kinds))
                raise ValueError(
                    f'kind = "{kind}" has no key {name}, which is for {of}: leave it out, or set another kind'
                    if kind
                    else f"{name} is for {of}, not for build: write it into the table options"
                )
        return self
