"""Types of the keys of a configuration, and its sections."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from ...errors import needs
from .described import WIDEST

with needs("train", "a configuration"):
    from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

LARGEST = 2**53
"""Beyond it whole numbers are no longer exact as floating point."""


def _expanded(value: Any) -> Any:
    """A path with ~ and environment variables expanded. Raises ValueError if it is empty."""
    if not isinstance(value, str):
        return value
    text = os.path.expandvars(os.path.expanduser(value))
    if not text or "\0" in text:
        raise ValueError("it names no file or folder")
    if "$" in text:
        raise ValueError("the environment has no such variable")
    return Path(text)


def _as_policy(value: Any) -> Any:
    return {True: "full", False: "none"}[value] if isinstance(value, bool) else value


def _in_words(values: str) -> Any:
    """A field with a text about its values, for help and errors."""
    return Field(json_schema_extra={"values": values})


Count = Annotated[int, Field(ge=1, le=LARGEST)]
Width = Annotated[int, Field(ge=1, le=WIDEST)]
Steps = Annotated[int, Field(ge=0, le=LARGEST)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Share = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
Name = Annotated[str, Field(min_length=1)]
Place = Annotated[Path, BeforeValidator(_expanded)]
Shape = Annotated[str, Field(pattern=r"^(\d+x\d+x\d+|ddp|fsdp|hsdp|megatron|auto)$"), _in_words(
    '"GxxGyxGz" in numbers, as "2x2x1", or "ddp", "fsdp", "hsdp", "megatron", or "auto"')]
Table = Annotated[Name, _in_words(
    '"1f1b", "zb-h1" or another name of pmm3d plan pipeline, or a CSV file of actions, as "mine.csv"')]
Cut = Annotated[list[Count] | Literal["cost"], _in_words('a list of whole numbers of at least 1, or "cost"')]
Function = Annotated[str, Field(pattern=r"^.+\.py:[A-Za-z_]\w*$"), _in_words(
    'a Python file, from where the command runs, and a function in it, as "model.py:build"')]
Hidden = Annotated[list[Width] | Width, _in_words(
    "a list of whole numbers of at least 1, or of a transformer one such number")]
Recompute = Annotated[Count | Literal["none", "selective", "full"], BeforeValidator(_as_policy), _in_words(
    '"none", "selective", "full", or a whole number of at least 1')]


def default_of(**values: Any) -> Any:
    """A key of some values of `kind`, with its default for each. Others refuse it."""
    return Field(default_factory=lambda given: values.get(given.get("kind")), json_schema_extra={"kinds": [*values]})


def of_tokens(default: Any) -> Any:
    return default_of(gpt=default, llama=default)


class Section(BaseModel):
    """A table of the file. Unknown keys, values of another type and keys of another kind are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False,
                              use_attribute_docstrings=True)

    @model_validator(mode="after")
    def _of_this_kind(self) -> Section:
        for name, field in type(self).model_fields.items():
            extra, kind = field.json_schema_extra, getattr(self, "kind", None)
            kinds = extra.get("kinds") if isinstance(extra, dict) else None
            if isinstance(kinds, list) and kind not in kinds and getattr(self, name) is not None:
                raise ValueError(f'{name} is no key of kind = "{kind}", but of {", ".join(map(str, kinds))}: leave it '
                                 "out, or name another kind")
        return self
