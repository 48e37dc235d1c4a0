"""The cheapest settings with which a step fits a limit of memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import product
from math import inf
from typing import Any, NamedTuple

from ...layout import SEQ, ULYSSES, GridShape
from ...model.candidates import Candidate
from ..optim import KINDS, Optimizer
from .config import Config

Settings = Mapping[str, Any]
"""Keys of a configuration, such as "network.recompute", with values."""
HOPELESS = 1.25
"""Share of the limit above which the last values of all remedies end the search. Others may need a little less."""
LEAST_TILE = 16
"""Smallest number of rows of a tile. A smaller product takes the time of one of this size."""
TRIES = 8
"""Largest number of combinations that are simulated for a grid, after each setting alone."""


class Remedy(NamedTuple):
    """Alternative values of a key that need less memory, the fastest first.

    fits      whether the key has an effect for a configuration on a grid. Of tiles, `values` are rows of a rank by rows
              of a tile
    lossy     whether the values of a training change, by more than the order of its sums
    price     name of a pass without which a machine has no price for the values; "" for none
    """

    key: str
    values: Sequence[Any]
    fits: Callable[[Config, GridShape], bool]
    lossy: bool = False
    price: str = ""


REMEDIES = (
    Remedy("overlap.reshard_after_forward", (True,), lambda config, grid: grid.z > 1),
    Remedy("optimizer.shard_over_data", ("states", "gradients"), lambda config, grid: grid.data > 1),
    Remedy("network.activations", ("sharded",), lambda config, grid: grid.x * grid.y > 1),
    Remedy("memory.loss_tiles", (4, 16), lambda config, grid: config.network.of_tokens),
    Remedy(
        "memory.mlp_tiles",
        (4, 16),
        lambda config, grid: config.network.of_tokens and not (config.network.experts and config.network.every == 1),
    ),
    Remedy("network.recompute", ("selective", 2, "full"), lambda config, grid: config.network.of_tokens),
    Remedy("network.recompute", (2, "full"), lambda config, grid: not config.network.of_tokens),
    Remedy(
        "memory.offload",
        (["states"], ["activations"], ["activations", "states"]),
        lambda config, grid: not config.network.on_host,
        price="offload",
    ),
    Remedy(
        "optimizer.states",
        ("int8",),
        lambda config, grid: KINDS.get(config.optimizer.kind or "", Optimizer)._updates_elements(),
        lossy=True,
    ),
    Remedy("memory.keep", ({"*": "bfloat16"}, {"*": "int8"}), lambda config, grid: True, lossy=True),
)
"""Settings that a plan may choose. Those that are not lossy change no values, except by the order of sums."""


def remedies_of(config: Config, grid: GridShape, lossy: bool = False, passes: Collection[str] = ()) -> list[Remedy]:
    """Return the remedies for a configuration on a grid. Keys that the configuration sets are not changed.

    lossy    also those that change values;   passes   names of the passes of which the machine has figures

        >>> from .config import checked
        >>> config = checked({"data": {"file": "x.h5"}, "optimizer": {"shard_over_data": True}})
        >>> [each.key for each in remedies_of(config, GridShape(1, 1, 2, 2))]
        ['overlap.reshard_after_forward', 'network.recompute']
    """
    found = [
        each._replace(values=_tiles(each.values, config, grid)) if each.key.endswith("_tiles") else each
        for each in REMEDIES
        if (lossy or not each.lossy)
        and each.fits(config, grid)
        and (not each.price or each.price in passes)
        and not (config.network.build and each.key.startswith("network."))
        and not _is_set(config, each.key)
    ]
    return [each for each in found if each.values]


def budgets_of(room: int) -> list[str]:
    """Return budgets of recomputation, as values of network.recompute, if work memory may take `room` bytes.

    Work memory contains more than the arrays that the budget limits, so a smaller one is a candidate too.

        >>> budgets_of(8000), budgets_of(-1)
        (['8000 B', '6000 B'], [])
    """
    return [f"{share * room // 4} B" for share in (4, 3) if room > 0]


def _tiles(parts: Sequence[int], config: Config, grid: GridShape) -> list[int]:
    """Return rows of a tile that cut the rows of a rank into these numbers of parts, without those that do not cut.

    >>> from .config import checked
    >>> tokens = {"file": "x.h5", "sequence": 50, "batch_size": 8}
    >>> config = checked({"data": tokens, "network": {"kind": "gpt"}})
    >>> [_tiles((4, 16), config, GridShape(1, 1, 1, data)) for data in (1, 8)]
    [[100, 25], [16]]
    """
    sharing = getattr(grid, SEQ, 1) * getattr(grid, ULYSSES, 1)
    rows = -(-config.data.batch_size // (config.grid.micro_batches * grid.data * grid.z))
    rows *= -(-(config.data.sequence or 1) // sharing)
    tiles = dict.fromkeys(max(LEAST_TILE, -(-rows // part)) for part in parts)
    return [tile for tile in tiles if tile < rows]


def _is_set(config: Config, key: str) -> bool:
    section, _, name = key.partition(".")
    return section in config.model_fields_set and name in getattr(config, section).model_fields_set


def cheapest(
    plain: Candidate, remedies: Sequence[Remedy], limit: int, priced: Callable[[Settings], Candidate]
) -> Candidate:
    """Return the fastest combination of remedies that holds at most `limit` bytes, or the smallest one if none fits.

    The last values of all remedies are priced first: if they need far more, nothing else is priced. Then each value is
    priced alone. Combinations whose savings add up to enough are priced in the order of their added
    seconds, until one fits. Savings overlap, so up to `TRIES` are priced. The last one has the largest saving of each
    remedy.

    plain    the candidate without remedies
    priced   prices a combination. A refused one has no memory
    """
    if not remedies:
        return plain
    last = {each.key: each.values[-1] for each in remedies}
    if not _agrees(last):
        del last["optimizer.states"]
    held, strongest = _bytes_of(plain), priced(last)
    if strongest.memory and _bytes_of(strongest) > HOPELESS * limit:
        return strongest
    options = list[list[tuple[Settings, float, float]]]()
    single = dict[str, Candidate]()
    for each in remedies:
        alone = list[tuple[Settings, float, float]]()
        for value in each.values:
            found = single[str({each.key: value})] = priced({each.key: value})
            if found.memory and _bytes_of(found) < held:
                alone.append(({each.key: value}, found.seconds - plain.seconds, held - _bytes_of(found)))
        options.append(alone)
    best = plain
    for settings in _promising(options, held - limit):
        key = str(settings)
        found = single[key] if key in single else priced(settings)
        if found.memory and _bytes_of(found) <= limit:
            return found
        if found.memory and _bytes_of(found) < _bytes_of(best):
            best = found
    return best


def _promising(options: Sequence[Sequence[tuple[Settings, float, float]]], needed: float) -> Iterator[Settings]:
    """Yield combinations that may save the needed bytes, the fastest first, and at last the one that saves most."""
    none: tuple[Settings, float, float] = ({}, 0.0, 0.0)
    combined, last, most = list[tuple[float, int, dict[str, Any]]](), dict[str, Any](), 0.0
    for parts in product(*[[none, *each] for each in options]):
        seconds, saved = sum(part[1] for part in parts), sum(part[2] for part in parts)
        settings = {key: value for part in parts for key, value in part[0].items()}
        if not _agrees(settings):
            continue
        if saved > most:
            last, most = settings, saved
        if saved >= needed:
            combined.append((seconds, len(settings), settings))
    combined.sort(key=lambda each: each[:2])
    chosen = [settings for _, _, settings in combined[: TRIES - 1]]
    yield from chosen
    if last and last not in chosen:
        yield last


def _agrees(settings: Settings) -> bool:
    """Whether settings can be joined: a store does not take states in fewer bits."""
    return not ("states" in settings.get("memory.offload", ()) and settings.get("optimizer.states"))


def _bytes_of(candidate: Candidate) -> float:
    return sum(candidate.memory.values()) if candidate.memory else inf
