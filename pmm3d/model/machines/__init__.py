"""Machine descriptions: measured or published times of GEMMs, passes over memory and collectives."""

from .description import Machine, flop_of
from .groups import Group, groups_of
from .reading import as_toml, assumed_machines, load, machine_from

__all__ = ["Group", "Machine", "as_toml", "assumed_machines", "flop_of", "groups_of", "load", "machine_from"]
