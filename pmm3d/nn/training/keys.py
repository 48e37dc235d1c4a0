"""Sections of a configuration: what values their keys take, and when these have an effect."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from ...errors import needs

with needs("train", "a configuration"):
    from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

LARGEST = 2**53
"""Beyond it whole numbers are no longer exact as floating point."""
WIDEST = 2**28
"""Columns: so that bytes of a matrix are counted in 64 bits."""


class Only(NamedTuple):
    """A key counts only where another one of its section fits; words: how that one is then."""

    key: str
    fits: Callable[[Any], bool]
    words: str


def only(key: str, *values: Any) -> Only:
    """A key that counts only where another one is one of these values."""
    return Only(key, lambda value: value in values, f"{key} is {' or '.join(map(str, values))}")


def without(key: str) -> Only:
    """A key that counts only where another one is left out."""
    return Only(key, lambda value: value is None, f"{key} is left out")


def _expanded(value: Any) -> Any:
    """A path with the home folder for ~ and the values of environment variables. Raises ValueError where it names
    nothing."""
    if not isinstance(value, str):
        return value
    text = os.path.expandvars(os.path.expanduser(value))
    if not text or "\0" in text:
        raise ValueError("it names no file or folder")
    if "$" in text:
        raise ValueError("the environment has no such variable")
    return Path(text)


Count = Annotated[int, Field(ge=1, le=LARGEST)]
Width = Annotated[int, Field(ge=1, le=WIDEST)]
Steps = Annotated[int, Field(ge=0, le=LARGEST)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Share = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
Name = Annotated[str, Field(min_length=1)]
Place = Annotated[Path, BeforeValidator(_expanded)]


class NoEffect(ValueError):
    """Of keys that are of no use beside others. problems: each with where it counts."""

    def __init__(self, problems: list[str]):
        super().__init__()
        self.problems = problems


class Section(BaseModel):
    """A table of the file. What was given and has no effect is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False,
                              use_attribute_docstrings=True)

    @classmethod
    def rules(cls, key: str) -> list[Only]:
        """When the key has an effect."""
        return [rule for rule in cls.model_fields[key].metadata if isinstance(rule, Only)]

    def idle(self, key: str) -> list[Only]:
        """The rules of a key that do not hold: it has no effect if there are any."""
        return [rule for rule in self.rules(key) if not rule.fits(getattr(self, rule.key))]

    @model_validator(mode="after")
    def _has_effect(self) -> Section:
        problems = [f"{key} has no effect here: it counts where {' and '.join(rule.words for rule in rules)}"
                    for key in sorted(self.model_fields_set) if (rules := self.idle(key))]
        if problems:
            raise NoEffect(problems)
        return self
