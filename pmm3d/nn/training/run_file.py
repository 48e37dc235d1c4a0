"""Schema of run.json, for its writer and for `pmm3d report`. Times are in seconds, sizes in bytes. A list of numbers
contains one for each rank."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from ...errors import needs
from ...layout import AXES

with needs("train", "run.json"):
    from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, model_validator

MOST_RANKS = 2**22
DIGITS = 6
"""Stored decimals of a number."""


def _valid(text: Any) -> Any:
    """Return the text without lone surrogates, which come from file names that are not UTF-8."""
    return text.encode("utf-8", "replace").decode() if isinstance(text, str) else text


def _rounded(value: float) -> float:
    return round(value, DIGITS)


def _with_axes(grid: dict[str, int]) -> dict[str, int]:
    if not set(AXES) <= grid.keys():
        raise ValueError(f"the grid must have the axes {', '.join(AXES)}")
    return grid


Text = Annotated[str, BeforeValidator(_valid)]
Count = Annotated[int, Field(ge=0, le=2**63)]
Rank = Annotated[int, Field(ge=0, lt=MOST_RANKS)]
Amount = Annotated[float, Field(ge=0, le=1e18, allow_inf_nan=False), PlainSerializer(_rounded)]
Counts = Annotated[list[Count], Field(min_length=1)]
Amounts = Annotated[list[Amount], Field(min_length=1)]
GridSizes = Annotated[dict[str, Annotated[int, Field(ge=1, le=MOST_RANKS)]], AfterValidator(_with_axes)]


class Part(BaseModel):
    """Part of the file. No value is converted to another type."""

    model_config = ConfigDict(strict=True)


class PerRank(Part):
    """Part whose lists, also in dicts, are equally long."""

    @model_validator(mode="after")
    def _as_long(self) -> Any:
        fields = dict(self).values()
        values = [each for field in fields for each in (field.values() if isinstance(field, dict) else [field])]
        if len({len(each) for each in values if isinstance(each, list)}) > 1:
            raise ValueError("the lists have different lengths")
        return self


class Host(Part):
    """Host of the run. ranks: [first, last] of each span of ranks."""

    name: Text
    ranks: list[Annotated[list[Rank], Field(min_length=2, max_length=2)]]
    cores: Count = 0


class Device(Part):
    """Device of a rank, as `Grid.devices` returns it. shared_with: other ranks on the same device."""

    host: Text
    rank: Rank
    local_rank: Rank = 0
    device: Count | None = None
    name: Text
    pci: Text
    shared_with: list[Rank] = []


class Program(Part):
    pmm3d: Text
    python: Text
    mpi: Text
    blas: Text
    kernel: Text
    threads: Count
    cpu: Text


class Network(Part):
    """Network of the run. sizes (of an MLP): columns of the input and of the output of each layer; tree: the layers as
    text."""

    kind: Text
    parameters: Count
    dtype: Text
    precision: dict[str, Any] = {}
    library: Text
    sizes: list[Count] = []
    tree: Text = ""


class Start(Part):
    """Start of the run in this folder, with totals over all ranks. resumed: the checkpoint from which it continued;
    seconds: of the slowest rank."""

    began: Text
    state: Text
    ranks: Annotated[int, Field(ge=1, le=MOST_RANKS)]
    grid: GridSizes
    hosts: Count = 0
    job: Text | None = None
    resumed: Text | None = None
    auto: dict[str, Any] | None = None
    from_step: Count | None = None
    to_step: Count | None = None
    steps: Count | None = None
    written: Text | None = None
    seconds: Amount = 0.0
    computed: Amount = 0.0
    waited: Amount = 0.0
    sent: Count = 0
    received: Count = 0


class Event(Part):
    """Event of the run. seconds: time that the run waited for the event."""

    when: Text
    step: Count | None = None
    what: Text
    text: Text
    seconds: Amount | None = None


class Passes(Part):
    steps: Count = 0
    skipped: Count = 0
    evaluations: Count = 0


class Columns(PerRank):
    """Work of the ranks since the latest start.

    seconds    of the whole run;   saving   in checkpoints;   waited   for messages and for the loader
    computed   operation -> seconds;   off_core   the part of them in which the computing thread had no core
    other      part of the run ("forward", "optimizer", ...) -> seconds neither of computing nor of waiting
    """

    seconds: Amounts
    saving: Amounts
    peak_memory: Counts
    waited: Amounts
    computed: dict[str, Amounts]
    other: dict[str, Amounts] = {}
    off_core: Amounts


class Moved(PerRank):
    """Calls, bytes and waiting of a collective on an axis, in a phase."""

    axis: Text
    phase: Text
    operation: Text
    calls: Counts
    sent: Counts
    received: Counts
    waited: Amounts


class Memory(PerRank):
    """Bytes of the arrays of each rank. work: activations, messages and all others."""

    weights: Counts
    gradients: Counts
    state: Counts
    work: Counts


class MemorySeries(PerRank):
    """Bytes of the arrays of rank 0 by kind in a step, at each time (`nn.memory_trace.MemoryTrace.document`)."""

    at: Amounts
    held: dict[str, Counts]
    peak: Count
    text: Text
    unit: Text


class MemoryStep(Part):
    """Memory of a step of rank 0. predicted: by a dry run."""

    step: Count
    measured: MemorySeries
    predicted: MemorySeries | None = None


class RankActions(PerRank):
    """Actions of a rank of a pipeline in their order, with start and end."""

    actions: list[Text]
    start: list[Amount]
    end: list[Amount]


class TimeLine(Part):
    """Step of a pipeline. bubble: share of the time, 0 to 1."""

    makespan: Amount
    bubble: Amount
    ranks: Annotated[list[RankActions], Field(min_length=1)]


class PipelineStep(Part):
    real: TimeLine
    simulated: TimeLine


class RunFile(Part):
    """Contents of run.json. Every part may be None.

    ranks, moved, memory   of the latest start;   starts, events   of all starts in the folder
    """

    format: Literal[1] = 1
    folder: Text | None = None
    state: Text = "running"
    job: Text | None = None
    command: list[Text] | None = None
    program: Program | None = None
    grid: GridSizes | None = None
    hosts: list[Host] | None = None
    devices: list[Device] | None = None
    transport: Text | None = None
    network: Network | None = None
    settings: dict[str, Any] | None = None
    starts: Annotated[list[Start], Field(min_length=1)] | None = None
    events: list[Event] | None = None
    written: Text | None = None
    step: Count | None = None
    epoch: Count | None = None
    epochs: Count | None = None
    steps: Count | None = None
    loss_scale: dict[str, int | float] | None = None
    figures: dict[str, float] | None = None
    passes: Passes | None = None
    ranks: Columns | None = None
    moved: list[Moved] | None = None
    memory: Memory | None = None
    memory_step: MemoryStep | None = None
    pipeline: PipelineStep | None = None

    @model_validator(mode="after")
    def _of_its_ranks(self) -> Any:
        columns = [
            self.ranks and self.ranks.seconds,
            self.memory and self.memory.work,
            *(entry.calls for entry in self.moved or ()),
        ]
        if len({len(column) for column in columns if column}) > 1:
            raise ValueError("ranks, moved and memory have different numbers of ranks")
        return self
