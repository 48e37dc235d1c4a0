"""Figures, times, bytes, ranks and names as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isfinite
from re import fullmatch
from typing import Any

BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
"""Units of `in_bytes`."""
MOST_SPANS = 20
"""Largest number of spans of ranks in a list."""
MOST_HOSTS = 8
"""Largest number of hosts that are listed with a text each."""
HOUR = 3600
OFF, ON = ("replicated", "none", "false"), ("full", "true")
"""Values of settings that `in_short` leaves out with their name, or alone."""


def in_bytes(nbytes: float) -> str:
    """Three digits and a unit.

    >>> in_bytes(1.5 * 2**30), in_bytes(2**19), in_bytes(12)
    ('1.5 GiB', '512 KiB', '12 B')
    """
    for unit in BYTE_UNITS:
        if abs(nbytes) < 1024 or unit == "TiB":
            break
        nbytes /= 1024
    return f"{nbytes:,.0f} {unit}" if abs(nbytes) >= 100 else f"{nbytes:.3g} {unit}"


def bytes_in(text: str) -> int | None:
    """The bytes that a number with a unit of `BYTE_UNITS` names; None for another text, and for less than a byte.

    >>> bytes_in("1.5 GiB") == 1.5 * 2**30, bytes_in("512KiB"), bytes_in("2 GB"), bytes_in("0 B")
    (True, 524288, None, None)
    """
    found = fullmatch(rf"(\d+(?:\.\d+)?) ?({'|'.join(BYTE_UNITS)})", text)
    return (int(float(found[1]) * 1024 ** BYTE_UNITS.index(found[2])) or None) if found else None


def in_time(seconds: float) -> str:
    """A time: three digits and a unit, or two units.

    >>> [in_time(seconds) for seconds in (0.00025, 0.0314, 3.14159, 725.0, 720.0, 7300.0, 86400.0, 864000.0)]
    ['250 µs', '31.4 ms', '3.14 s', '12 min 5 s', '12 min', '2 h 2 min', '24 h', '10 days']
    """
    if seconds >= 48 * HOUR:
        return f"{seconds / (24 * HOUR):,.3g} days"
    if seconds >= 59.95:
        size, larger, smaller = (HOUR, "h", "min") if seconds >= HOUR - 0.5 else (60, "min", "s")
        number, rest = divmod(round(60 * seconds / size), 60)
        return f"{number} {larger}" + f" {rest} {smaller}" * bool(rest)
    scale, unit = (1, "s") if seconds >= 0.9995 or not seconds else (1e3, "ms") if seconds >= 0.9995e-3 else (1e6, "µs")
    return f"{scale * seconds:.3g} {unit}"


def figure(value: float, decimals: int) -> str:
    """A figure of a column: this number of decimals, and none from 10,000 on.

    >>> figure(1727.4, 2), figure(171757.3, 2)
    ('1,727.40', '171,757')
    """
    return f"{value:,.{decimals if abs(value) < 1e4 else 0}f}"


def milliseconds(seconds: float) -> str:
    """A time of a column in milliseconds, with two decimals."""
    return figure(1e3 * seconds, 2)


def number(value: float | None) -> str:
    """A number by itself: four digits, and all digits of a whole number; "–" for None."""
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if isfinite(value) and abs(value) >= 1e4 else f"{value:.4g}"


def percent(share: float) -> str:
    """A share from 0 to 1 in percent: one decimal below 10%."""
    return f"{share:.1%}" if share < 0.1 else f"{share:.0%}"


def in_flops(rate: float) -> str:
    """A rate in flop/s: three digits or more, and a unit.

    >>> in_flops(48.21e9), in_flops(1.234e12), in_flops(1234e15)
    ('48.2 GFLOP/s', '1.23 TFLOP/s', '1,234 PFLOP/s')
    """
    scale, unit = next(((scale, unit) for scale, unit in ((1e15, "P"), (1e12, "T")) if rate >= scale), (1e9, "G"))
    return f"{rate / scale:,.0f} {unit}FLOP/s" if rate >= 100 * scale else f"{rate / scale:.3g} {unit}FLOP/s"


def counted(number: int, noun: str) -> str:
    """A number of things, with the noun in the singular or the plural.

    >>> counted(1, "rank"), counted(1024, "rank"), counted(2, "micro-batch"), counted(0, "epoch")
    ('1 rank', '1,024 ranks', '2 micro-batches', '0 epochs')
    """
    plural = "es" if noun.endswith(("tch", "s", "x")) else "s"
    return f"{number:,} {noun}{plural * (number != 1)}"


def shell_command(*words: object) -> str:
    """A command that the user can copy into a shell: words with blanks and other special characters are quoted.

    >>> shell_command("pmm3d", "report", "run 1")
    "pmm3d report 'run 1'"
    """
    import shlex  # only commands need it

    return shlex.join(map(str, words))


def blas_in_words(blas: str, kernel: str, threads: int) -> str:
    """The BLAS of a run; that of a device has neither a kernel nor threads.

    >>> blas_in_words("openblas 0.3.30", "SkylakeX", 1), blas_in_words("cuBLAS 13.1.0", "", 0)
    ('openblas 0.3.30, kernel SkylakeX, 1 thread a rank', 'cuBLAS 13.1.0')
    """
    return ", ".join(
        [
            blas,
            *([f"kernel {kernel}"] if kernel else []),
            *([f"{counted(threads, 'thread')} a rank"] if threads else []),
        ]
    )


def spans(numbers: Iterable[int]) -> list[list[int]]:
    """Consecutive numbers as [first, last]: [[0, 2], [7, 7]] of 0, 1, 2, 7."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return runs


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Ranks as people name them.

    >>> ranks_in_words([0, 1, 2, 7]), ranks_in_words([3])
    ('ranks 0-2, 7', 'rank 3')
    """
    listed = list(ranks)
    runs = spans(listed)
    words = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:MOST_SPANS]]
    more = " and more" if len(runs) > MOST_SPANS else ""
    return f"rank{'s' * (len(listed) != 1)} {', '.join(words)}{more}"


def names_in_words(names: Iterable[str], most: int = 4) -> str:
    """The first names, each once, and how many more there are: n1, n2 and 1 more."""
    listed = list(dict.fromkeys(names))
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def in_toml(settings: Mapping[str, Any]) -> str:
    """Return settings as lines of a configuration would have them.

    >>> in_toml({"optimizer.shard_over_data": "states", "network.recompute": 2, "overlap.reshard_after_forward": True})
    'optimizer.shard_over_data = "states", network.recompute = 2, overlap.reshard_after_forward = true'
    """
    return ", ".join(f"{key} = {value_in_toml(value)}" for key, value in settings.items())


def in_short(settings: Mapping[str, Any]) -> str:
    """Return settings in a few words, without those that are off.

    >>> in_short({"network.activations": "sharded", "network.recompute": "full", "optimizer.shard_over_data": "none"})
    'sharded recompute'
    >>> in_short({"network.recompute": 2, "overlap.reshard_after_forward": True, "memory.offload": ["states"]})
    'recompute 2 reshard_after_forward offload [states]'
    """
    words = list[str]()
    for key, value in settings.items():
        name, text = key.rpartition(".")[2], value_in_toml(value).replace('"', "")
        if text not in OFF:
            words.append(name if text in ON else text if key == "network.activations" else f"{name} {text}")
    return " ".join(words)


def value_in_toml(value: Any) -> str:
    """Return a value as a configuration would have it.

    >>> value_in_toml({"*": "int8"}), value_in_toml(["states"]), value_in_toml(True)
    ('{"*" = "int8"}', '["states"]', 'true')
    """
    if isinstance(value, dict):
        return "{" + ", ".join(f'"{key}" = {value_in_toml(each)}' for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(value_in_toml, value)) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value).lower()
