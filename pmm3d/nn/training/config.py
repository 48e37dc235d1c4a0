"""The configuration of `pmm3d train`: a TOML file, checked and with every default."""

from __future__ import annotations

import os
from typing import Any

from ...errors import Pmm3dError, check_regular, needs
from ...layout import SEQ, ULYSSES
from ..precision import Precision
from .described import explained
from .fields import Section
from .sections import (
    OF_TOKENS,
    DataSection,
    GridSection,
    MemorySection,
    NetworkSection,
    OptimizerSection,
    OverlapSection,
    ScheduleSection,
    TrainingSection,
)

with needs("train", "a configuration"):
    from pydantic import ValidationError, field_validator, model_validator


class Config(Section):
    """Configuration of `pmm3d train`, with an attribute for each section of the file.

    `load(path)` reads a TOML file, and `checked(values)` takes nested dictionaries.

    Parameters
    ----------
    grid, data, network, optimizer, schedule, training, overlap, memory : Section
        Sections of the file, with the keys of docs/reference/configuration.md. Only `data` is needed.

    Raises
    ------
    Pmm3dError
        By `load` and `checked`, with every unknown key and every wrong value.

    Examples
    --------
    >>> from pmm3d.nn.training.config import checked
    >>> checked({"data": {"file": "digits.h5"}, "grid": {"micro_batches": 2}}).grid.micro_batches
    2
    """

    grid: GridSection = GridSection()
    data: DataSection
    network: NetworkSection = NetworkSection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    training: TrainingSection = TrainingSection()
    overlap: OverlapSection = OverlapSection()
    memory: MemorySection = MemorySection()

    @property
    def precision(self) -> Precision:
        """Precision of weights and activations."""
        dtype = self.network.dtype
        return Precision.named(self.training.precision if dtype == "float32" else dtype)

    @property
    def unscheduled(self) -> Config:
        """This configuration without grid.schedule and grid.cut."""
        section = self.grid.model_copy(update=dict.fromkeys(("schedule", "cut")))
        return self.model_copy(update={"grid": section})

    def settings(self) -> dict[str, dict[str, Any]]:
        """Return all keys by section, for JSON. `checked` makes the same configuration from them."""
        return self.model_dump(mode="json")

    @field_validator("network", "optimizer", mode="before")
    @classmethod
    def _short(cls, section: Any) -> Any:
        return {"build": section} if isinstance(section, str) else section

    @model_validator(mode="before")
    @classmethod
    def _with_defaults_of_tokens(cls, values: Any) -> Any:
        """Add the defaults of `OF_TOKENS` to the sections, which do not know the data."""
        data = values.get("data") if isinstance(values, dict) else None
        if (data.get("sequence") if isinstance(data, dict) else getattr(data, "sequence", None)) is None:
            return values
        given = {name: cls._short(values.get(name, {})) for name in OF_TOKENS}
        return values | {name: _with_defaults(given[name], defaults) for name, defaults in OF_TOKENS.items()}

    @model_validator(mode="after")
    def _tokens_fit(self) -> Config:
        data, network, training, length = self.data, self.network, self.training, self.data.sequence or 0
        given = [
            f"data.{name}"
            for name in ("targets", "groups", "classes", "standardize")
            if getattr(data, name) is not None
        ]
        needing = [f"grid.{axis}" for axis in (SEQ, ULYSSES) if axis in self.grid.axes]
        needing += [f"data.{name}" for name in ("documents", "vocabulary", "token_dtype") if getattr(data, name)]
        tiles = [f"memory.{name}" for name in ("loss_tiles", "mlp_tiles") if getattr(self.memory, name)]
        for wrong, text in (
            (
                not length and network.of_tokens,
                f'network.kind = "{network.kind}" is a network of tokens: set '
                "data.sequence, the number of tokens of a sequence",
            ),
            (
                (self.grid.expert or 1) > 1 and network.build is None and not network.experts,
                f"grid.expert = {self.grid.expert} is for a network with experts: set network.experts, or leave it out",
            ),
            (not length and needing, f"{''.join(needing[:1])} is for tokens: set data.sequence, or leave it out"),
            (
                length and not network.of_tokens and network.build is None,
                "data.sequence makes the data tokens, "
                'which fully connected layers do not take: set network.kind = "gpt" or "llama", or leave '
                "data.sequence out",
            ),
            (length and given, f"{''.join(given[:1])} is not for tokens (data.sequence): leave it out"),
            (
                length and training.class_weights is not None,
                "training.class_weights is for labels, not for tokens (data.sequence): leave it out",
            ),
            (
                length and training.of_values,
                f'training.loss = "{training.loss}": the loss of tokens is cross_entropy; leave it out',
            ),
            (
                tiles and network.build is not None,
                f"{''.join(tiles[:1])} is for networks of network.kind: leave it out, and use nn.Tiled or nn.TiledHead "
                "in the function of network.build",
            ),
            (
                tiles and not network.of_tokens,
                f'{"".join(tiles[:1])} is for transformers, and network.kind is "{network.kind}": leave it out, '
                "or set grid.micro_batches or network.recompute to save memory",
            ),
            (
                self.memory.mlp_tiles and network.experts and (network.every or 1) == 1,
                "memory.mlp_tiles is for MLPs, and network.experts replaces them by experts: leave one of them out",
            ),
            (
                length > (network.positions or length),
                f"data.sequence = {length} is longer than network.positions = {network.positions}",
            ),
        ):
            if wrong:
                raise ValueError(text)
        return self

    @model_validator(mode="after")
    def _precision_fits(self) -> Config:
        dtype, precision, library = self.network.dtype, self.training.precision, self.network.library
        if dtype != "float32" and precision != "float32":
            raise ValueError(
                f'training.precision = "{precision}" needs network.dtype = "float32", which is '
                f'"{dtype}": leave one of them out'
            )
        if precision == "bfloat16" and library.partition(":")[0] != "torch":
            raise ValueError(
                f'training.precision = "bfloat16" needs torch arrays, and network.library is {library}: '
                'set network.library = "torch" (or "torch:cuda")'
            )
        if precision == "tf32" and self.network.on_host:
            raise ValueError(
                'training.precision = "tf32" needs a GPU, and the arrays of network.library = '
                f'"{library}" are in host memory: set it to "torch:cuda" or "cupy", or the '
                'precision to "float32"'
            )
        return self


def _with_defaults(section: Any, defaults: dict[str, Any]) -> Any:
    """Return a section, a dictionary or an object, with these values of keys that it does not set."""
    if isinstance(section, dict):
        return defaults | section
    if isinstance(section, Section):
        unset = defaults.keys() - section.model_fields_set
        return section.model_copy(update={key: defaults[key] for key in unset})
    return section


def load(path: str | os.PathLike[str], open_pipe: bool = False) -> Config:
    """Return the configuration in a TOML file. Its paths are relative to the current folder. Raises Pmm3dError with
    every unknown key, the nearest known one, and every wrong value.

    open_pipe   accept a pipe that is open, as `check_regular` does
    """
    import tomllib

    try:
        check_regular(path, open_pipe)
        with open(path, "rb") as file:
            values = tomllib.load(file)
    except OSError as error:
        raise Pmm3dError(f"cannot read the configuration {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # ValueError: TOML, UTF-8, or a number with too many digits
        raise Pmm3dError(f"{path} is not TOML: {error}") from None
    return checked(values, str(path))


def checked(values: dict[str, Any], source: str = "the configuration") -> Config:
    """Return a Config from nested dictionaries; errors as in `load`."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise Pmm3dError(f"{source}: {explained(error, Config, values)}") from None
