"""Tables of schedules by name or from a file."""

from __future__ import annotations

from inspect import signature
from os import PathLike, fspath

from ...errors import hint
from .schedules import BY_NAME
from .simulation import Times
from .table import PipelineError, PipelineSchedule, check


def schedule_of(source: str | PathLike[str], ranks: int | None, micro_batches: int | None, *,
                chunks: int | None = None, times: Times | None = None, limit: float | None = None) -> PipelineSchedule:
    """Table of a schedule, which is checked.

    Parameters
    ----------
    source : str or path
        A name of `schedule_names()`; "interleaved-4" is "interleaved" with 4 chunks. A text that ends in .csv or
        contains a slash is the path of a table in PyTorch's notation (`PipelineSchedule.read`).
    ranks, micro_batches : int
        Of the pipeline. None, for a file only: those of the file.
    chunks : int
        Stages of a rank. Default: as many as the schedule has; 2 if it takes any number.
    times : Times
        Times of each stage, for a searched schedule. Default: all 1.
    limit : float
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


def schedule_names() -> list[str]:
    """Names of all schedules."""
    return [*BY_NAME]


def is_searched(source: str) -> bool:
    """Whether the schedule of this name is searched for given times."""
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
