"""Facts beside weights and data: what no shape shows, such as heads, columns and the tokenizer; and their comparison.

Facts are a flat mapping. `facts_of` returns those of a network ("network.heads"), and `DataSet.facts` and
`TokenDataSet.facts` those of a file ("columns", "targets", "classes", "tokenizer"). Checkpoints and exported files
contain them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

import numpy as np

from ..errors import CheckpointError, Pmm3dError
from ..text import names_in_words
from .module import Module, functions_in

logger = logging.getLogger("pmm3d.nn")
Facts = dict[str, Any]
FACTS = "facts"
"""Key of the facts in a checkpoint's meta, and in the metadata of an exported file."""
STATES = "states"
"""Key of the facts of each state in a checkpoint of `TrainStates`."""
LAYERS = ("vocabulary", "heads", "causal", "window", "rotary_base", "rotary_scaling", "eps", "top_k", "scores",
          "normalize", "scale", "choice")  # fmt: skip
"""Attributes of layers that change results. Except vocabulary, they change no shape."""
NETWORK = ("kind", "hidden", "activation", "norm", "bias", "layers", "kv_heads", "head_dim", "qkv_bias", "qk_norm",
           "mlp", "positions", "tied", "dtype", "build", "experts", "expert_mlp", "every", "shared", "shared_gate",
           *LAYERS)  # fmt: skip
"""Keys of [network] and facts that define the network; the other keys define how it is computed."""
DATA = ("data.inputs", "data.targets", "data.sequence", "data.documents", "data.classes", "data.batch_size",
        "data.validation", "data.shuffle", "data.hold_out", "data.groups", "training.seed")  # fmt: skip
BATCHES = ("data", "samples", "rows", "batch_size", "shuffle", "seed", "drop_last", "split", "shuffling")
"""Keys of a loader's state that define the rows of each batch; "data" is the fingerprint of their contents."""
REMEDY = {"network": "Restore the settings", "data": "Restore the settings and the data",
          "columns": "Give the columns of the training data, in their order",
          "targets": "Give the targets of the training data, in their order",
          "classes": "Convert the data with the same --class-names",
          "tokenizer": "Use a file that was converted with the same tokenizer"}  # fmt: skip
"""Kind of a difference -> remedy."""
EFFECT = {"network": ", if the weights fit", "data": ": the current epoch then starts again, with the new data"}
"""Kind of a difference -> condition or effect of accepting it."""
ACCEPTED = tuple(REMEDY)


@dataclass(frozen=True)
class Difference:
    """A setting or fact with two values. kind: a name of `ACCEPTED`, or "free" to change."""

    key: str
    before: Any
    now: Any
    kind: str

    def __str__(self) -> str:
        start = 0
        if isinstance(self.before, list) and isinstance(self.now, list):
            start = len(commonprefix([[*map(repr, each)] for each in (self.before, self.now)]))
        return f"{self.key} was {_text(self.before, start)}, is {_text(self.now, start)}"


def facts_of(network: Module) -> Facts:
    """Return the facts of a network; a list if layers differ. For a `Pipeline`, of all stages.

    >>> from pmm3d import Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     facts_of(nn.MLP(grid, [3, 4, 2], nn.gelu, norm=True))
    {'network.activation': 'gelu', 'network.eps': 1e-05}
    """
    by_name = dict[str, list[Any]]()
    for _, module in getattr(network, "dry", network).named_modules():
        own = [
            (name, fact(value))
            for name, value in vars(module).items()
            if name in LAYERS and (value is None or isinstance(value, (int, float, str, tuple, np.number)))
        ]
        for name, value in (*own, *(("activation", name) for name in functions_in(module))):
            by_name.setdefault(f"network.{name}", []).append(value)
    return {
        name: values[0] if all(each == values[0] for each in values) else values for name, values in by_name.items()
    }


def fact(value: Any) -> Any:
    """Return the value of an attribute as a fact: None, a number, or a text, also of a scaling of rotary positions."""
    return value.item() if isinstance(value, np.number) else str(value) if isinstance(value, tuple) else value


def facts_in(meta: Any) -> Facts:
    """Return the facts in a checkpoint's meta, or in the metadata of a file."""
    facts = meta.get(FACTS) if isinstance(meta, dict) else None
    return facts if isinstance(facts, dict) else {}


def compare(
    before: Facts,
    now: Facts,
    accept: Collection[str],
    what: str,
    *,
    rank: int,
    error: type[Pmm3dError] = CheckpointError,
) -> None:
    """Compare the facts that both sides have. Rank 0 logs accepted differences. Raises `error` for others.

    accept: as in `TrainState.resume`; what: the file whose facts are compared, for messages.
    """
    changes = differences(before, now)
    refuse(changes, accept, what, error=error)
    for each in changes if rank == 0 else ():
        logger.warning(f"{what} is accepted with a difference: {each}")


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Return the keys that both mappings contain with different values.

    >>> [str(each) for each in differences({"data": {"classes": 2, "file": "a"}}, {"data": {"classes": 3}})]
    ['data.classes was 2, is 3']
    """
    earlier, here = dict(_flat(_plain(before))), dict(_flat(_plain(now)))
    return [
        Difference(key, earlier[key], here[key], _kind(key))
        for key in here
        if key in earlier and earlier[key] != here[key]
    ]


def batch_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Return the differences between the states of two loaders, without their positions."""
    earlier, here = _plain(before), _plain(now)
    return [
        Difference(
            "the data's fingerprint" if key == "data" else f"the loader's {key}", earlier.get(key), here[key], "data"
        )
        for key in BATCHES
        if earlier.get(key) != here[key]
    ]


def refuse(
    changes: Collection[Difference],
    accept: Collection[str],
    what: str = "the checkpoint",
    other: str = "",
    *,
    error: type[Pmm3dError] = CheckpointError,
) -> None:
    """Raises `error` for differences of a kind that is neither free nor accepted, and Pmm3dError for unknown kinds in
    `accept`. other: a further remedy."""
    if unknown := [kind for kind in accept if kind not in ACCEPTED]:
        raise Pmm3dError(
            f"accept must be {', '.join(ACCEPTED[:-1])} or {ACCEPTED[-1]}; got {', '.join(map(repr, unknown))}"
        )
    for kind in ACCEPTED:
        if kind not in accept and (wrong := [str(each) for each in changes if each.kind == kind]):
            differ = "differ" if kind.endswith("s") else "differs"
            raise error(
                f"the {kind} of {what} {differ}, and nothing was changed: {'; '.join(wrong)}. {REMEDY[kind]}; "
                f'or {other}accept the difference: --accept {kind} (in a program: accept=["{kind}"])'
                f"{EFFECT.get(kind, '')}"
            )


def _text(value: Any, start: int) -> str:
    """Return a value in words, of a list from this number on."""
    if not isinstance(value, list):
        return repr(value)
    return f"[{'..., ' * (start > 0)}{names_in_words(map(repr, value[start:]))}]"


def _kind(key: str) -> str:
    section, _, name = key.partition(".")
    if section == "network" and name.partition(".")[0] in NETWORK:
        return "network"
    return "data" if key in DATA else key if key in ACCEPTED else "free"


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings as JSON returns them."""
    plain: dict[str, Any] = json.loads(
        json.dumps(
            settings,
            default=lambda value: value.tolist() if isinstance(value, (np.generic, np.ndarray)) else str(value),
        )
    )
    return plain
