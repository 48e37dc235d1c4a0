"""Pipelines: schedules as tables that are checked, simulated and drawn without MPI. The modules `network` and
`executor` need MPI, so import them by their own names."""

from .measured import simulated_events, time_lines
from .named import is_searched, schedule_names, schedule_of
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
from .table import PipelineAction, PipelineError, PipelineSchedule, check, with_messages
from .v_shaped import v_half, v_min, zb_v
from .zero_bubble import zb_1p, zb_2p

__all__ = [
    "PipelineAction", "PipelineError", "PipelineSchedule", "TimeLine", "Times", "breadth_first", "check", "dualpipe",
    "dualpipe_v", "gpipe", "interleaved", "interleaved_zero_bubble", "is_searched", "one_f_one_b", "schedule_names",
    "schedule_of", "simulate", "simulated_events", "time_lines", "v_half", "v_min", "with_messages", "zb_1p", "zb_2p",
    "zb_h1", "zb_h2", "zb_v",
]  # fmt: skip
