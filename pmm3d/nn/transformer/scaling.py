"""Scaling of rotary positions for sequences that are longer than those of the first training: linear, dynamic NTK, YaRN
(Peng et al. 2023, arXiv 2309.00071), and that of Llama 3.1. Keys are those of the transformers package.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, floor, log, pi
from typing import Any, NamedTuple

import numpy as np

from ...errors import LayoutError
from ...layout import natural, real

ORIGINAL = "original_max_position_embeddings"
OPTIONS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", ORIGINAL),
    "yarn": ("factor", ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "llama3": ("factor", ORIGINAL, "low_freq_factor", "high_freq_factor"),
}
"""rope_type -> its keys."""
NEEDED = "factor", ORIGINAL, "low_freq_factor", "high_freq_factor"
"""Keys without a default."""
DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}


class RotaryScaling(NamedTuple):
    """Scaling of the frequencies of rotary positions. Values that the type does not use are None."""

    rope_type: str
    factor: float
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None

    @classmethod
    def of(
        cls,
        given: RotaryScaling | Mapping[str, Any] | None,
        what: str,
        positions: int | None = None,
        error: type[Exception] = LayoutError,
    ) -> RotaryScaling | None:
        """Scaling of a mapping with the keys of `rope_parameters` in a config.json; None without a scaling.

        what: name of the mapping in messages; positions: default of original_max_position_embeddings. Raises `error`,
        with the key, for an unknown type, and for values that are missing, unknown, or out of range.

        >>> print(RotaryScaling.of({"rope_type": "linear", "factor": 4}, "rotary_scaling"))
        linear, factor=4.0
        >>> RotaryScaling.of({"rope_type": "default"}, "rotary_scaling")
        """
        if given is None or isinstance(given, RotaryScaling):
            return given
        if not isinstance(given, Mapping):
            raise error(f'{what} is a mapping, such as {{"rope_type": "linear", "factor": 4.0}}; got {given!r}')
        values = {key: value for key, value in given.items() if value is not None}
        if values and "rope_type" not in values:
            raise error(f"{what}.rope_type is missing; supported are {', '.join(OPTIONS)}")
        kind = values.pop("rope_type", "default")
        if not isinstance(kind, str) or kind not in OPTIONS:
            raise error(f"{what}.rope_type is {kind!r}; supported are {', '.join(OPTIONS)}")
        if unknown := [key for key in values if key not in OPTIONS[kind]]:
            raise error(
                f"{what}.{unknown[0]} is {values[unknown[0]]!r}, and pmm3d knows no such key of rope_type {kind}. Its "
                f"keys are {', '.join(OPTIONS[kind]) or 'none'}"
            )
        if kind == "default":
            return None
        values = {key: value for key, value in DEFAULTS.items() if key in OPTIONS[kind]} | values
        if ORIGINAL in OPTIONS[kind] and positions is not None:
            values.setdefault(ORIGINAL, positions)
        for key in OPTIONS[kind]:
            if key in NEEDED and key not in values:
                raise error(f"{what}.{key} is missing, which rope_type {kind} needs")
        made = cls(kind, **{key: _checked(f"{what}.{key}", key, value, error) for key, value in values.items()})
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            one, other = getattr(made, low), getattr(made, high)
            if one is not None and one >= other:
                raise error(f"{what}.{high} must be larger than {low}; got {other} and {one}")
        return made

    def __str__(self) -> str:
        return ", ".join(
            [self.rope_type, *(f"{key}={value}" for key, value in self.keys.items() if key != "rope_type")]
        )

    @property
    def keys(self) -> dict[str, Any]:
        """Keys for a config.json."""
        return {key: value for key, value in self._asdict().items() if value is not None}

    def check(self, size: int, base: float, what: str, error: type[Exception] = LayoutError) -> None:
        """Raises `error` if the formula has no value for heads of this size, or for this base."""
        if self.rope_type == "dynamic" and size < 4:
            raise error(f"{what}: rope_type dynamic needs heads of at least 4 columns, got {size}")
        if self.rope_type == "yarn" and base <= 1:
            raise error(f"{what}: rope_type yarn needs a rotary base above 1, got {base}")

    def length(self, rows: int) -> int:
        """Length on which the frequencies depend, for sequences of this number of rows. Only dynamic depends on it."""
        return max(rows, self.original_max_position_embeddings or 0) if self.rope_type == "dynamic" else 0

    def frequencies(self, size: int, base: float, length: int) -> np.ndarray:
        """Angle of a step by one position for each pair of columns, (size / 2,). length: as from `length`."""
        if self.rope_type == "dynamic":
            assert self.original_max_position_embeddings is not None
            stretch = self.factor * length / self.original_max_position_embeddings - (self.factor - 1)
            return frequencies(size, base * stretch ** (size / (size - 2)))
        plain = frequencies(size, base)
        if self.rope_type == "yarn":
            kept = 1 - self._ramp(size, base)
        elif self.rope_type == "llama3":
            kept = self._smooth(plain)
        else:
            return plain / self.factor
        scaled: np.ndarray = plain / self.factor * (1 - kept) + plain * kept
        return scaled

    @property
    def magnitude(self) -> float:
        """Factor of queries and keys."""
        if self.rope_type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    def _magnitude(self, mscale: float) -> float:
        return 0.1 * mscale * log(self.factor) + 1 if self.factor > 1 else 1.0

    def _ramp(self, size: int, base: float) -> np.ndarray:
        """Share of the interpolation of each pair: 0 for pairs with many rotations, 1 for pairs with few."""
        assert self.original_max_position_embeddings and self.beta_fast and self.beta_slow
        low, high = (
            size * log(self.original_max_position_embeddings / (2 * pi * rotations)) / (2 * log(base))
            for rotations in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = floor(low), ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        span = high - low or 0.001
        ramp: np.ndarray = np.clip((np.arange(size // 2) - low) / span, 0, 1)
        return ramp

    def _smooth(self, plain: np.ndarray) -> np.ndarray:
        """Share of the plain frequency of each pair: 1 for short waves, 0 for long ones."""
        assert self.original_max_position_embeddings and self.low_freq_factor and self.high_freq_factor
        waves = self.original_max_position_embeddings * plain / (2 * pi)
        share: np.ndarray = np.clip(
            (waves - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1
        )
        return share


def frequencies(size: int, base: float) -> np.ndarray:
    """Angle of a step by one position for each pair of columns, without a scaling (Su et al. 2021)."""
    found: np.ndarray = base ** (-np.arange(0, size, 2) / size)
    return found


def _checked(name: str, key: str, value: Any, error: type[Exception]) -> Any:
    """Return the value of a key in a type of Python."""
    if key == ORIGINAL:
        return natural(value, f"{name} is a whole number, at least 1", 1, error)
    if key == "truncate":
        if value not in (True, False):
            raise error(f"{name} is true or false; got {value!r}")
        return bool(value)
    least = {"factor": 1.0, "mscale": 0.0, "mscale_all_dim": 0.0}.get(key, np.nextafter(0, 1).item())
    return real(value, f"{name} is a number {f'of at least {least:g}' if least in (0, 1) else 'above 0'}", least, error)
