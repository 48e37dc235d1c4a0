"""Tables of schedules by name or from a file."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from os import PathLike, fspath

from ...errors import hint
from ...layout import PIPE
from .schedules import BY_NAME
from .simulation import Times
from .table import PipelineError, PipelineSchedule, check

Schedule = str | PathLike[str] | PipelineSchedule | Callable[[int, int], PipelineSchedule]


def schedule_of(source: str | PathLike[str], ranks: int | None, micro_batches: int | None, *,
                chunks: int | None = None, times: Times | None = None, limit: float | None = None) -> PipelineSchedule:
    """Table of a schedule, which is checked.

    Parameters
    ----------
    source : str or path
        A name of `schedule_names()`; "interleaved-4" is "interleaved" with 4 chunks. A text that ends in .csv or
        contains a slash is the path of a table in PyTorch's notation (`PipelineSchedule.read`).
    ranks, micro_batches : int or None
        Of the pipeline. None, for a file only: those of the file.
    chunks : int or None
        Stages of a rank. Default: as many as the schedule has; 2 if it takes any number.
    times : Times or None
        Times of each stage, for a searched schedule. Default: all 1.
    limit : float or None
        Micro-batches that a rank may hold, for a searched schedule. Default: that of the schedule.

    Returns
    -------
    PipelineSchedule

    Raises
    ------
    PipelineError
        With the place, for a table that cannot be carried out; for a table of other ranks, micro-batches or chunks; and
        for a file that cannot be read.

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
        raise PipelineError(f"{name} is made for a number of ranks and of micro-batches: give both")
    else:
        table = _by_name(name, ranks, micro_batches, chunks, times, limit)
    for what, found, asked in (("ranks", table.ranks, ranks), ("micro-batches", table.micro_batches, micro_batches),
                               ("stages", len(table.stages), chunks and chunks * table.ranks)):
        if asked is not None and found != asked:
            each = f", {chunks} chunks on each rank," if what == "stages" else ""
            raise PipelineError(f"{name} is a table of {found} {what}; {asked}{each} were asked for")
    return table


def table_of(source: Schedule, ranks: int, micro_batches: int | None, chunks: int | None) -> PipelineSchedule:
    """The checked table of a schedule for a network on these ranks. micro_batches: None for any number. Raises
    PipelineError if the table does not fit."""
    if micro_batches is not None and micro_batches < 1:
        raise PipelineError(f"a step has at least 1 micro-batch; got {micro_batches}")
    number = micro_batches or 2 * ranks
    if isinstance(source, (str, PathLike)):
        table = schedule_of(source, ranks, number, chunks=chunks)
    else:
        table = source if isinstance(source, PipelineSchedule) else source(ranks, number)
        check(table)
        if chunks is not None:
            raise PipelineError(f"Pipeline: chunks is for the name of a schedule; leave it out, {table.name} has its "
                                "stages")
    idle = sorted({*range(ranks)} - {*table.stages.values()})
    lengths = [len(chain) for chain in table.chains]
    if table.ranks != ranks:
        raise PipelineError(f"{table.name} is a table of {table.ranks} ranks; the axis {PIPE} of the grid has "
                            f"{ranks}: make the grid with pipe={table.ranks}")
    if idle or len({*lengths}) > 1:
        problem = f"rank {idle[0]} has no stage" if idle else f"micro-batches pass through {lengths} stages"
        raise PipelineError(f"{table.name}: {problem}. Each rank needs a stage, and each copy of the network as many "
                            "stages as the others")
    if micro_batches not in (None, table.micro_batches):
        raise PipelineError(f"{table.name} is a table of {table.micro_batches} micro-batches; the step has "
                            f"{micro_batches}")
    return table


def schedule_names() -> list[str]:
    """Names of all schedules."""
    return [*BY_NAME]


def is_searched(source: str) -> bool:
    """Whether the schedule of this name is searched for given times.

    Parameters
    ----------
    source : str
        Name of a schedule.
    """
    return source in BY_NAME and "times" in signature(BY_NAME[source]).parameters


def is_file(source: str) -> bool:
    """Whether the source of a schedule is a path."""
    return source.endswith(".csv") or "/" in source


def read_table(path: str) -> PipelineSchedule:
    """The table of a CSV file, which is checked. Raises PipelineError."""
    try:
        with open(path, encoding="utf-8") as file:
            table = PipelineSchedule.read(file.read(), path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise PipelineError(f"cannot read the schedule {path}: {reason}. Name a CSV file, or one of "
                            f"{', '.join(BY_NAME)}") from None
    check(table)
    return table


def _by_name(name: str, ranks: int, micro_batches: int, chunks: int | None, times: Times | None, limit: float | None
             ) -> PipelineSchedule:
    family, _, number = name.rpartition("-")
    if name not in BY_NAME and family in BY_NAME and number.isdecimal():
        if chunks not in (None, int(number)):
            raise PipelineError(f"{name} has {number} chunks; {chunks} were asked for")
        name, chunks = family, int(number)
    if name not in BY_NAME:
        raise PipelineError(f"no schedule is named {name!r}{hint(name, BY_NAME)}. The path of a table of your own ends "
                            "in .csv")
    options, given = signature(BY_NAME[name]).parameters, {"chunks": chunks, "times": times, "limit": limit}
    return BY_NAME[name](ranks, micro_batches, **{option: value for option, value in given.items()
                                                  if option in options and value is not None})
