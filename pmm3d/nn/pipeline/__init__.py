"""Pipelines: schedules as tables, which are checked, simulated and drawn without MPI."""

from .named import schedule_names, schedule_of
from .schedules import (
    breadth_first,
    dualpipe,
    dualpipe_v,
    gpipe,
    interleaved,
    interleaved_zero_bubble,
    one_f_one_b,
    zb_h1,
    zb_h2,
)
from .simulation import TimeLine, Times, simulate
from .table import Action, PipelineError, PipelineSchedule, check, with_messages
from .zero_bubble import zero_bubble

__all__ = [
    "Action", "PipelineError", "PipelineSchedule", "TimeLine", "Times", "breadth_first", "check", "dualpipe",
    "dualpipe_v", "gpipe", "interleaved", "interleaved_zero_bubble", "one_f_one_b", "schedule_names", "schedule_of",
    "simulate", "with_messages", "zb_h1", "zb_h2", "zero_bubble",
]  # fmt: skip
