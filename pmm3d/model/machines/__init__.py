"""Machine descriptions: what GEMMs, passes over memory and collectives take on a machine, measured or published."""

from .description import Machine
from .groups import Group, groups_of

__all__ = ["Group", "Machine", "groups_of"]
