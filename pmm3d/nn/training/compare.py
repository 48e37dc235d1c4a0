"""Comparison of the settings of a run with those of the checkpoint from which it continues."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import Pmm3dError

NETWORK = ("kind", "hidden", "activation", "norm", "bias", "layers", "heads", "kv_heads", "mlp", "positions", "window",
           "rotary_base", "tied", "dtype", "build")  # fmt: skip
"""Keys of [network] that define the network; the other keys define how it is computed."""
DATA = ("data.inputs", "data.targets", "data.sequence", "data.documents", "data.classes", "data.batch_size",
        "data.validation", "data.shuffle", "data.hold_out", "data.groups", "training.seed")  # fmt: skip
BATCHES = ("data", "samples", "rows", "batch_size", "shuffle", "seed", "drop_last", "split", "shuffling")
"""Keys of a loader's state that define the rows of each batch; "data" is the fingerprint of their contents."""
ACCEPTED = ("network", "data")
REMEDY = {
    "network": "Set it back; or begin a new run, in a folder of its own; or, if the weights fit and it is meant, go on "
               "with --accept network",
    "data": "Set it back; or begin a new run, in a folder of its own; or go on with --accept data: the epoch under way "
            "begins anew, with the data as they are now",
}  # fmt: skip


@dataclass(frozen=True)
class Difference:
    """A setting that differs. kind: "network", "data", or "free" to change."""

    key: str
    before: Any
    now: Any
    kind: str

    def __str__(self) -> str:
        return f"{self.key} was {self.before!r}, is {self.now!r}"


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """The keys that both settings contain, with different values.

        >>> [str(each) for each in differences({"data": {"classes": 2, "file": "a"}}, {"data": {"classes": 3}})]
        ['data.classes was 2, is 3']
    """
    earlier, here = dict(_flat(_plain(before))), dict(_flat(_plain(now)))
    return [Difference(key, earlier[key], here[key], _kind(key))
            for key in here if key in earlier and earlier[key] != here[key]]


def batch_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Differences between the states of two loaders, except their positions."""
    earlier, here = _plain(before), _plain(now)
    return [Difference("the data's fingerprint" if key == "data" else f"the loader's {key}", earlier.get(key),
                       here[key], "data") for key in BATCHES if earlier.get(key) != here[key]]


def refuse(found: Collection[Difference], accept: Collection[str], what: str = "the checkpoint") -> None:
    """Raises Pmm3dError for differences of a kind that is neither free nor accepted; and for unknown kinds."""
    if unknown := [kind for kind in accept if kind not in ACCEPTED]:
        raise Pmm3dError(f"accept is {' or '.join(ACCEPTED)}; got {', '.join(map(repr, unknown))}")
    for kind in ACCEPTED:
        if kind not in accept and (wrong := [str(each) for each in found if each.kind == kind]):
            raise Pmm3dError(f"{what} is of another {kind}, and nothing was changed: {'; '.join(wrong)}. "
                             f"{REMEDY[kind]}")


def _kind(key: str) -> str:
    section, _, name = key.partition(".")
    if section == "network" and name in NETWORK:
        return "network"
    return "data" if key in DATA else "free"


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as a checkpoint returns them."""
    plain: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    return plain
