"""Which grid serves a training: by dry runs of its step, priced by a machine."""

from .dry_step import SampleSizes, Step, step_of

__all__ = ["SampleSizes", "Step", "step_of"]
