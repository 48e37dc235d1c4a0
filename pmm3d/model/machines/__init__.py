"""Machine descriptions: what GEMMs, passes over memory and collectives take on a machine, measured or published."""

from .description import Machine, flop_of
from .groups import Group, groups_of
from .reading import as_toml, known_machines, load, machine_from

__all__ = ["Group", "Machine", "as_toml", "flop_of", "groups_of", "known_machines", "load", "machine_from"]
