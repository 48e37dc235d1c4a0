"""What was trained, and how: the facts that a colleague asks for first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .elements import Section
from .schema import Json
from .words import toml

SAMPLES = "samples"
"""Where the settings of `pmm3d train` say what the data are."""
MOST_LAYERS = 16
"""That are listed in a line."""
SCHEDULES = {"cosine": "half a cosine to {floor} of it", "step": "times {factor} every {every} steps",
             "constant": "constant"}


def network_facts(record: Json) -> list[tuple[str, str]]:
    """(name, text) of the network and, of a run from a configuration, of what trains it."""
    settings = _Settings(record.get("settings", {}))
    facts = []
    if network := record.get("network"):
        layers = _layers(network["sizes"]) or network["kind"]
        facts.append(("network", f"{layers}, " + "".join(f"{part}, " for part in _parts(settings)) +
                      f"{network['parameters']:,} parameters, {network['dtype']}, {network['library']}"))
    if settings.has("optimizer", "schedule", "data", "training"):
        facts += [("optimizer", _optimizer(settings)), ("batches", _batches(settings))]
    return facts


def _layers(sizes: list[int]) -> str:
    """12-512-...-10."""
    shown = sizes if len(sizes) <= MOST_LAYERS else [*sizes[:2], f"... ({len(sizes) - 4:,} more) ...", *sizes[-2:]]
    return "-".join(map(str, shown))


class _Settings:
    """Of a configuration, as they were written; those of a program of one's own may be anything."""

    def __init__(self, sections: Mapping[str, Any]):
        self._sections = {name: values for name, values in sections.items() if isinstance(values, dict)}

    def has(self, *sections: str) -> bool:
        return self._sections.keys() >= set(sections)

    def get(self, section: str, key: str) -> Any:
        return self._sections.get(section, {}).get(key)


def _parts(settings: _Settings) -> list[str]:
    """Of a network, besides its layers."""
    if build := settings.get("network", "build"):
        return [f"of {build}"]
    parts = [str(settings.get("network", "activation"))] if settings.get("network", "hidden") else []
    parts += ["LayerNorm"] * bool(settings.get("network", "norm"))
    if dropout := settings.get("network", "dropout"):
        parts.append(f"dropout {dropout}")
    if settings.get("network", "bias") is False:
        parts.append("no biases")
    return parts


def _optimizer(settings: _Settings) -> str:
    """The optimizer with its numbers, and the schedule of its rate."""
    kind = settings.get("optimizer", "kind")
    names = ("momentum",) if kind == "sgd" else ("betas",)
    said = [f"{kind}, lr {settings.get('optimizer', 'lr')}"]
    said += [f"{name.replace('_', ' ')} {value}" for name in (*names, "weight_decay", "clip")
             if (value := settings.get("optimizer", name))]
    schedule = settings.get("schedule", "kind")
    words = SCHEDULES.get(str(schedule), str(schedule))
    for name in ("floor", "factor", "every"):
        words = words.replace(f"{{{name}}}", str(settings.get("schedule", name)))
    warm_up = settings.get("schedule", "warm_up")
    return ", ".join(said) + f"; rate {words}" + (f", after a warm-up of {warm_up} steps" if warm_up else "")


def _batches(settings: _Settings) -> str:
    """What a step is of, and of which loss."""
    parts = settings.get("grid", "micro_batches")
    each = f" in {parts} micro-batches" if parts not in (None, 1) else ""
    return (f"{settings.get('data', 'batch_size')} rows{each}, of {settings.get('data', 'file')}; loss: "
            f"{settings.get('training', 'loss')}; seed {settings.get('training', 'seed')}")


def network_section(record: Json) -> Section | None:
    """The layers as a tree, with sizes and layouts."""
    tree = record["network"]["tree"]
    return Section("Network", text=tree) if tree else None


def settings_section(record: Json) -> Section | None:
    """The configuration, if the settings are one: sections of keys. What the run found in its data is not of it."""
    settings = {name: values for name, values in record["settings"].items() if name != SAMPLES}
    known = settings and all(isinstance(values, dict) for values in settings.values())
    return Section("Configuration", text=toml(settings)) if known else None
