"""What the files of a run may hold: run.json part by part, metrics.jsonl line by line, figures of a benchmark."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from ...errors import needs
from ...layout import AXES

with needs("report", "the page of a run"):
    from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

Json = dict[str, Any]
MOST_RANKS = 2**22
MOST_SHOWN = 40
"""Characters of a value that does not fit."""
Count = Annotated[int, Field(ge=0, le=2**63)]
Ranks = Annotated[int, Field(ge=1, le=MOST_RANKS)]
Amount = Annotated[float, Field(ge=0, le=1e18, allow_inf_nan=False)]
Span = Annotated[list[Annotated[int, Field(ge=0, lt=MOST_RANKS)]], Field(min_length=2, max_length=2)]
Counts = Annotated[list[Count], Field(min_length=1)]
Amounts = Annotated[list[Amount], Field(min_length=1)]
Text = str | None


def _with_axes(grid: dict[str, int]) -> dict[str, int]:
    if not set(AXES) <= grid.keys():
        raise ValueError(f"it must name the axes {', '.join(AXES)}")
    return grid


Grid = Annotated[dict[str, Ranks], AfterValidator(_with_axes)]


class Part(BaseModel):
    """Numbers are numbers and texts are texts; what is there besides stays."""

    model_config = ConfigDict(strict=True, extra="allow")


class Host(Part):
    name: str
    ranks: list[Span]
    cores: Count = 0


class Device(Part):
    """Of a rank."""

    host: str
    rank: Annotated[int, Field(ge=0, lt=MOST_RANKS)]
    device: Count | None
    name: str
    pci: str


class Program(Part):
    pmm3d: str = "?"
    python: str = "?"
    mpi: str = "?"
    blas: str = "?"
    kernel: str = "?"
    threads: Count = 1
    cpu: str = "?"


class Network(Part):
    kind: str
    parameters: Count
    dtype: str
    library: str
    sizes: list[Count] = []
    tree: str = ""


class Start(Part):
    began: str
    state: str
    ranks: Ranks
    grid: Grid
    job: Text = None
    steps: Count | None = None
    from_step: Count | None = None
    to_step: Count | None = None
    seconds: Amount = 0.0
    waited: Amount = 0.0
    received: Count = 0


class Event(Part):
    when: str
    step: Count | None
    what: str
    text: str
    seconds: Amount | None = None


class Passes(Part):
    steps: Count


class LossScale(Part):
    value: Amount
    skipped: Count


class Columns(Part):
    """A number for each rank."""

    seconds: Amounts
    saving: Amounts
    peak_memory: Counts
    waited: Amounts
    computed: dict[str, Amounts]
    off_core: Amounts | None = None

    @model_validator(mode="after")
    def _as_long(self) -> Columns:
        columns: list[list[Any]] = [self.saving, self.peak_memory, self.waited, *self.computed.values()]
        columns += [] if self.off_core is None else [self.off_core]
        if any(len(column) != len(self.seconds) for column in columns):
            raise ValueError("the ranks' columns are of several lengths")
        return self


class Moved(Part):
    axis: str
    phase: str
    operation: str
    calls: Counts
    sent: Counts
    received: Counts
    waited: Amounts


class Held(Part):
    weights: Counts
    gradients: Counts
    state: Counts
    work: Counts


class Memory(Part):
    held: Held


class RankActions(Part):
    """Of a pipeline: the actions of a rank in their order, and when each began and ended."""

    actions: list[str]
    start: list[Amount]
    end: list[Amount]

    @model_validator(mode="after")
    def _as_long(self) -> RankActions:
        if not len(self.actions) == len(self.start) == len(self.end):
            raise ValueError("actions, start and end are of several lengths")
        return self


class TimeLine(Part):
    """Of a step of a pipeline. bubble: a share of the time."""

    makespan: Amount
    bubble: Amount
    ranks: Annotated[list[RankActions], Field(min_length=1)]


class PipelineStep(Part):
    real: TimeLine
    simulated: TimeLine


class Record(Part):
    """run.json. Each part may be left out; a page says what is known."""

    grid: Grid | None = None
    hosts: list[Host] | None = None
    devices: list[Device] | None = None
    transport: Text = None
    starts: Annotated[list[Start], Field(min_length=1)] | None = None
    events: list[Event] | None = None
    program: Program | None = None
    network: Network | None = None
    settings: dict[str, Any] | None = None
    command: list[str] | None = None
    state: str = "running"
    job: Text = None
    written: Text = None
    step: Count | None = None
    epoch: Count | None = None
    epochs: Count | None = None
    passes: Passes | None = None
    loss_scale: LossScale | None = None
    ranks: Columns | None = None
    moved: list[Moved] | None = None
    memory: Memory | None = None
    pipeline: PipelineStep | None = None


class Line(Part):
    """Of metrics.jsonl: about a step, or an evaluation after it."""

    step: Annotated[int, Field(ge=0, le=2**53)]
    loss: float | None = None
    lr: float | None = None
    samples_per_second: float | None = None
    waiting: float | None = None
    gradient_norm: float | None = None
    loss_scale: float | None = None
    skipped: float | None = None
    validation: dict[str, float | None] | None = None


class Phase(Part):
    computed: Amount
    off_core: Amount | None = None
    waited: Amount
    waited_max: Amount


class Environment(Part):
    mpi: str
    cpu: str
    blas: str
    kernel: str
    threads: Count
    hosts: Annotated[list[str], Field(min_length=1)]
    ranks_per_host: Counts
    cores_per_host: Counts
    advice: Text = None


class Benchmark(Part):
    """Figures of `pmm3d bench --json` on one grid."""

    m: Count
    n: Count
    k: Count
    dtype: str
    array: str
    transpose: str
    ranks: Ranks
    grid: Annotated[list[Ranks], Field(min_length=3, max_length=4)]
    blocks: dict[str, Span]
    panels: Count
    overlap: str
    seconds: Amounts
    gflops: Amount
    core_gflops: Amount
    square_core_gflops: Amount
    at_once_gflops: Amount
    square: Count
    cores: Count
    unit: str
    ratio: Amount
    computed_seconds: Amount
    waited_seconds: Amount
    phases: dict[str, Phase]
    bytes_sent: dict[str, Count]
    bytes_received: dict[str, Count]
    bytes_model: dict[str, Count]
    lower_bound_bytes: Amount
    peak_memory: Count
    node_memory: Count
    verified: bool
    verification: str
    environment: Environment

    @model_validator(mode="after")
    def _of_the_same_axes(self) -> Benchmark:
        if not self.bytes_sent.keys() == self.bytes_received.keys() == self.bytes_model.keys():
            raise ValueError("bytes_sent, bytes_received and bytes_model are of different axes")
        return self


LINE = TypeAdapter(Line)


def checked_record(found: Json) -> tuple[Json, list[str]]:
    """(the parts of run.json that can be shown, what is wrong with each of the others)."""
    try:
        record = Record.model_validate(found)
    except ValidationError as error:
        wrong = {str(problem["loc"][0]): problem for problem in reversed(error.errors())}
        record = Record.model_validate({name: part for name, part in found.items() if name not in wrong})
        problems = [_explained(problem) for problem in wrong.values()]
    else:
        problems = []
    parts = record.model_dump(exclude_none=True)
    for name in _not_for_its_ranks(record):
        del parts[name]
        problems.append(f"{name} is not of as many ranks as the rest")
    return parts, problems


def _not_for_its_ranks(record: Record) -> list[str]:
    """The parts whose lists are not as long as there are ranks."""
    if record.ranks is None:
        return []
    ranks, wrong = len(record.ranks.seconds), []
    columns = {"moved": [column for entry in record.moved or () for column in _columns(entry)],
               "memory": _columns(record.memory.held) if record.memory else []}
    wrong += [name for name, lists in columns.items() if any(len(column) != ranks for column in lists)]
    spans = [span for host in record.hosts or () for span in host.ranks]
    return wrong + ["hosts"] * any(last >= ranks or last < first for first, last in spans)


def _columns(entry: Moved | Held) -> Iterable[list[Any]]:
    return [value for value in entry.__dict__.values() if isinstance(value, list)]


def problem_of_line(line: Any) -> str:
    """What is wrong with a line of metrics.jsonl; empty if nothing is."""
    try:
        LINE.validate_python(line)
    except ValidationError as error:
        return _explained(error.errors()[0])
    return ""


def problem_of_benchmark(result: Any) -> str:
    """What is wrong with the figures of a benchmark; empty if nothing is."""
    try:
        Benchmark.model_validate(result)
    except ValidationError as error:
        return _explained(error.errors()[0])
    return ""


def _explained(problem: Any) -> str:
    """The field, what it holds, what it should."""
    place, shown = ".".join(map(str, problem["loc"])), repr(problem["input"])
    shown = shown if len(shown) <= MOST_SHOWN else f"{shown[:MOST_SHOWN]}..."
    text = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "missing":
        return f"{place} is missing"
    return f"{place} is {shown}: {text[0].lower()}{text[1:]}".removeprefix(" is ")
