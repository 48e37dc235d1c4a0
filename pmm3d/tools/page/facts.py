"""The facts at the head of the page of a run, and its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import needs
from ...layout import GridShape
from ...nn.training.run_file import Device, RunFile
from ...text import MOST_HOSTS, blas_in_words, counted, names_in_words, ranks_in_words
from .elements import Section

SAMPLES = "samples"
"""Section that `pmm3d train` adds to the settings, with the sizes that it found in the data."""
MOST_LAYERS = 16
"""Largest number of layers of a network that are listed."""
Fact = tuple[str, str]


def when(stamp: str) -> str:
    return stamp.replace("T", " ")


def run_facts(record: RunFile) -> list[Fact]:
    """Return (name, text) of each fact that is known."""
    facts = []
    if starts := record.starts:
        began = starts[-1].began
        start = f", start {len(starts)}" if len(starts) > 1 else ""
        facts.append(("when", f"{when(began)} to {when(record.written or began)}{start}"))
    if record.job:
        facts.append(("job", record.job))
    facts += _place(record)
    if network := record.network:
        layers = "-".join(map(str, network.sizes)) if 0 < len(network.sizes) <= MOST_LAYERS else network.kind
        facts.append(("network", f"{layers}, {network.parameters:,} parameters, {network.dtype}, {network.library}"))
    if program := record.program:
        facts += [
            ("BLAS", blas_in_words(program.blas, program.kernel, program.threads)),
            ("MPI", program.mpi),
            ("CPU", program.cpu),
            ("program", f"pmm3d {program.pmm3d}, Python {program.python}: {' '.join(record.command or ())}"),
        ]
    return facts


def _place(record: RunFile) -> list[Fact]:
    """Return the facts about the grid, its hosts and devices."""
    hosts, facts = record.hosts or (), []
    if record.grid:
        grid = GridShape(**record.grid)
        facts.append(
            ("grid", f"{grid}: {counted(grid.size, 'rank')}" + (f" on {counted(len(hosts), 'host')}" if hosts else ""))
        )
    if hosts:
        ranks = {host.name: [rank for first, last in host.ranks for rank in range(first, last + 1)] for host in hosts}
        facts.append(
            (
                "hosts",
                names_in_words(
                    (
                        f"{host.name} ({ranks_in_words(ranks[host.name])} on {counted(host.cores, 'core')})"
                        for host in hosts
                    ),
                    MOST_HOSTS,
                ),
            )
        )
    if record.devices:
        facts.append(("devices", names_in_words(_devices(record.devices), MOST_HOSTS)))
    if record.transport:
        facts.append(("device memory", record.transport))
    return facts


def _devices(devices: list[Device]) -> list[str]:
    """Return each device with the ranks that use it."""
    ranks: dict[str, list[int]] = {}
    for row in devices:
        if row.device is not None:
            ranks.setdefault(f"{row.name} {row.pci} of {row.host}", []).append(row.rank)
    return [f"{device} ({ranks_in_words(here)})" for device, here in ranks.items()]


def settings_section(settings: Mapping[str, Any]) -> Section | None:
    """Return the configuration as TOML, without the section SAMPLES; None if the settings are not a configuration."""
    sections = {name: values for name, values in settings.items() if name != SAMPLES}
    known = sections and all(isinstance(values, dict) for values in sections.values())
    return Section("Configuration", text=toml(sections)) if known else None


def toml(settings: Mapping[str, Any]) -> str:
    """Return the settings as TOML. TOML has no null: a None is left out, because it is the default."""
    with needs("report", "the page of a run"):
        import tomlkit
    return tomlkit.dumps(_without_none(settings)).strip()


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _without_none(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_none(each) for each in value if each is not None]
    return value
