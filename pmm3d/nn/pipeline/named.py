"""Tables of schedules, by name or from a file."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from os import PathLike, fspath
from typing import Any

from ...errors import hint
from ...layout import PIPE
from ...text import counted
from .schedules import BY_NAME
from .simulation import Times
from .table import PipelineError, PipelineSchedule, check

Schedule = str | PathLike[str] | PipelineSchedule | Callable[[int, int], PipelineSchedule]


def schedule_of(
    source: str | PathLike[str],
    ranks: int | None,
    micro_batches: int | None,
    *,
    times: Times | None = None,
    limit: float | None = None,
) -> PipelineSchedule:
    """Checked table of a schedule.

    Parameters
    ----------
    source : str or path
        A name of `schedule_names()`, or the path of a CSV table in PyTorch's notation (`PipelineSchedule.read`).
        "interleaved-4" has 4 stages on each rank, and "interleaved" has 2. A text that ends in .csv or contains a slash
        is a path.
    ranks, micro_batches : int or None
        Numbers of ranks and of micro-batches of the pipeline. For a file, None accepts the numbers of the file.
    times : Times or None
        Times of each stage, for a searched schedule. No effect on other schedules. Default: all 1.
    limit : float or None
        Memory limit in micro-batches of a rank, with the same restriction. Default: the limit of the schedule.

    Raises
    ------
    PipelineError
        If the table cannot be executed or has other numbers of ranks or micro-batches. The error names the
        place. Also if the file cannot be read.

    Examples
    --------
    >>> from pmm3d.nn.pipeline import schedule_of
    >>> schedule_of("interleaved-2", 2, 4).stages, schedule_of("zb-1p", 2, 4).name
    ({0: 0, 1: 1, 2: 0, 3: 1}, 'zb-1p')
    """
    name = fspath(source)
    if is_file(name):
        table = read_table(name)
    elif ranks is None or micro_batches is None:
        raise PipelineError(f"the schedule {name} needs the number of ranks and the number of micro-batches: give both")
    else:
        table = _by_name(name, ranks, micro_batches, times, limit)
    for what, contained, asked in (("rank", table.ranks, ranks), ("micro-batch", table.micro_batches, micro_batches)):
        if asked is not None and contained != asked:
            raise PipelineError(f"{name} is a table of {counted(contained, what)}, but {asked} were requested")
    return table


def table_of(source: Schedule, ranks: int, micro_batches: int | None) -> PipelineSchedule:
    """Checked table of a schedule for a network on these ranks. If micro_batches is None, any number of micro-batches
    is accepted. Raises PipelineError if the table does not fit."""
    if micro_batches is not None and micro_batches < 1:
        raise PipelineError(f"a step has at least 1 micro-batch; got {micro_batches}")
    number = micro_batches or 2 * ranks
    if isinstance(source, (str, PathLike)):
        table = schedule_of(source, ranks, number)
    else:
        table = source if isinstance(source, PipelineSchedule) else source(ranks, number)
        check(table)
    idle = sorted({*range(ranks)} - {*table.stages.values()})
    lengths = [len(chain) for chain in table.chains]
    if table.ranks != ranks:
        raise PipelineError(
            f"{table.name} is a table of {counted(table.ranks, 'rank')}, but the axis {PIPE} of the "
            f"grid has {ranks}. Make the grid with pipe={table.ranks}"
        )
    if idle or len({*lengths}) > 1:
        problem = f"rank {idle[0]} has no stage" if idle else f"micro-batches pass through {lengths} stages"
        raise PipelineError(
            f"{table.name}: {problem}. Each rank needs a stage, and all copies of the network need the "
            "same number of stages"
        )
    if micro_batches not in (None, table.micro_batches):
        raise PipelineError(
            f"{table.name} is a table of {counted(table.micro_batches, 'micro-batch')}, but the step "
            f"has {micro_batches}"
        )
    return table


def schedule_names() -> list[str]:
    """Names of all built-in schedules."""
    return [*BY_NAME]


def is_searched(source: str) -> bool:
    """Whether the schedule of this name is found by a search for given times."""
    return source in BY_NAME and "times" in signature(BY_NAME[source]).parameters


def is_file(source: str) -> bool:
    """Whether the source of a schedule is the path of a file."""
    return source.endswith(".csv") or "/" in source


def read_table(path: str) -> PipelineSchedule:
    """Checked table of a CSV file. Raises PipelineError."""
    try:
        with open(path, encoding="utf-8") as file:
            table = PipelineSchedule.read(file.read(), path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise PipelineError(
            f"cannot read the schedule {path}: {reason}. Name a CSV file, or one of {', '.join(BY_NAME)}"
        ) from None
    check(table)
    return table


def _by_name(name: str, ranks: int, micro_batches: int, times: Times | None, limit: float | None) -> PipelineSchedule:
    given: dict[str, Any] = {"times": times, "limit": limit}
    family, _, number = name.rpartition("-")
    if name not in BY_NAME and family in BY_NAME and number.isdecimal() and int(number):
        name, given["chunks"] = family, int(number)
    if name not in BY_NAME:
        raise PipelineError(
            f"no schedule is named {name!r}{hint(name, BY_NAME)}. For a table of your own, give a path "
            "that ends in .csv"
        )
    options = signature(BY_NAME[name]).parameters
    if "chunks" in given and "chunks" not in options:
        several = [f"{each}-{given['chunks']}" for each in BY_NAME if "chunks" in signature(BY_NAME[each]).parameters]
        raise PipelineError(f"{name} has a fixed number of stages on each rank; use {name}, or {' or '.join(several)}")
    return BY_NAME[name](
        ranks,
        micro_batches,
        **{option: value for option, value in given.items() if option in options and value is not None},
    )
