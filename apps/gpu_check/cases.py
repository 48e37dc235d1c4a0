"""What is checked, as data: the cases of a run on some libraries and numbers of ranks, full or small."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from .outcome import Case

PRECISIONS = ("float32", "tf32", "float16", "bfloat16", "float64", "complex64", "complex128")
TRAINED = ("float32", "tf32", "bfloat16", "float16", "float64")
OPTIMIZERS = ("SGD", "AdamW")
FUNCTIONS = ("relu", "tanh", "sigmoid", "silu", "gelu", "dropout", "layer_norm", "mse")
STORED, PANELS = ("nn", "tn", "nt", "tt"), (1, 4)
TRANSPORTS = ("direct", "staged", "nccl")
GRIDS = {1: ((1, 1, 1),), 2: ((2, 1, 1), (1, 2, 1), (1, 1, 2)), 4: ((2, 2, 1), (2, 1, 2)),
         8: ((2, 2, 2),)}
LAST = 4
"""Ranks that are checked after the others."""
NETWORKS = {1: (((1, 1, 1), 1),), 2: (((2, 1, 1), 1), ((1, 1, 2), 1), ((1, 1, 1), 2)),
            4: (((2, 2, 1), 1), ((1, 1, 2), 2)), 8: (((2, 1, 2), 2),)}
"""Grid and data."""
HUGE = 2**58
"""Bytes that no machine has; a device is asked for a size that its driver may believe."""
TERABYTE = 2**40


@dataclass(frozen=True)
class Sizes:
    """How large the cases are, how long a timing lasts (seconds) and how many there are, what is wanted of the rates.

    product   m, n, k of the products that are compared
    gemm      of the cube whose rate is measured;   message   bytes through pinned host memory
    layers, width, batch, step   of the step that is timed; step: its precision
    wanted    of the GEMM's rate; of a pinned copy's; of the GEMM limit and of torch in a step. None: nothing is
    """

    product: tuple[int, int, int]
    gemm: int
    message: int
    layers: int
    width: int
    batch: int
    step: str
    sample: float
    rounds: int
    wanted: tuple[float | None, float | None, float | None, float | None] = (None, None, None, None)


FULL = Sizes((515, 389, 641), 8192, 2**28, 8, 8192, 8192, "bfloat16", 0.1, 7, (0.97, 0.8, 0.85, 0.97))
SMALL = Sizes((35, 29, 41), 64, 2**16, 2, 32, 16, "float32", 1e-3, 1)


def all_cases(libraries: Sequence[str], ranks: Sequence[int], sizes: Sizes) -> list[Case]:
    """In the order in which they run: what tells most first, should the time be used up. What 4 ranks show, 2 and 8
    show for the most part, so they are last."""
    counts = sorted(ranks, key=(*(count for count in GRIDS if count != LAST), LAST).index)
    cases = [case for count in counts for library in libraries for case in _of(library, count, sizes, libraries)]
    names = [case.name for case in cases]
    assert len(set(names)) == len(names), "names of cases are unique"
    return cases


def _of(library: str, ranks: int, sizes: Sizes, libraries: Sequence[str]) -> Iterator[Case]:
    name = f"{library}, {ranks} rank{'s' * (ranks > 1)}"
    yield Case(f"surroundings: {name}", ranks, library, "gpu_check.surroundings.surroundings")
    if ranks == 1:
        yield from _rates(library, sizes, libraries)
    else:
        yield from _transports(library, ranks, name)
    if ranks == 2:
        yield from _staged(library, sizes)
    yield from _products(library, ranks, sizes)
    yield from _bridges(library, ranks)
    yield from _trainings(library, ranks)
    if ranks == 1:
        yield from _functions(library)
        yield from _bits(library, name)


def _rates(library: str, sizes: Sizes, libraries: Sequence[str]) -> Iterator[Case]:
    """Beside torch; where it is not there, of the library beside its own matmul, of which nothing is wanted."""
    torchs = next((name for name in libraries if name.startswith("torch")), "")
    of_gemm, _, of_limit, of_torch = sizes.wanted
    for precision in (_low(library), "float32"):
        yield Case(f"rate: {library}, {precision}, {sizes.gemm} cubed, beside {torchs or library}", 1, library,
                   "gpu_check.rates.bench", {
                       "size": sizes.gemm, "precision": precision, "rounds": sizes.rounds,
                       "reference": torchs or library, "wanted": of_gemm if torchs else None}, limit=120)
    if library != torchs and torchs:
        return
    network = {"layers": sizes.layers, "width": sizes.width, "batch": sizes.batch, "precision": sizes.step}
    title = f"{library}, {sizes.step}, {sizes.layers} layers of {sizes.width}, batch {sizes.batch}"
    if not torchs:
        yield from (Case(f"{what}: {title}", 1, library, "gpu_check.rates.without_torch") for what in
                    ("step", "launches"))
        return
    yield Case(f"step: {title}", 1, library, "gpu_check.rates.step", network | {
        "sample": sizes.sample, "rounds": sizes.rounds, "of_limit": of_limit, "of_torch": of_torch}, limit=120)
    yield Case(f"launches: {title}", 1, library, "gpu_check.rates.launches", network)


def _low(library: str) -> str:
    """The 2-byte type in which people train with the library."""
    return "bfloat16" if library.startswith("torch") else "float16"


def _functions(library: str) -> Iterator[Case]:
    for name in FUNCTIONS:
        for precision in filter(lambda precision: _has(library, precision), ("float32", "float16", "bfloat16")):
            yield Case(f"function: {library}, {name}, {precision}", 1, library, "gpu_check.functions.function",
                       {"function": name, "precision": precision})


def _bits(library: str, name: str) -> Iterator[Case]:
    yield Case(f"random matrices: {name}", 1, library, "gpu_check.bits.random_matrices")
    yield Case(f"dropout: {name}", 1, library, "gpu_check.bits.dropout")
    yield Case(f"checkpoint: {name}", 1, library, "gpu_check.bits.checkpoint")
    nbytes = TERABYTE if _on_device(library) else HUGE
    yield Case(f"out of memory: {name}", 1, library, "gpu_check.bits.out_of_memory", {"nbytes": nbytes})


def _bridges(library: str, ranks: int) -> Iterator[Case]:
    precisions = ("float32", "bfloat16", "tf32") if ranks == 1 else ("float32", "bfloat16")
    for number, precision in enumerate(precisions if library.startswith("torch") else ()):
        grid, data = NETWORKS[ranks][number % len(NETWORKS[ranks])]
        if _has(library, precision):
            yield Case(f"bridge: {library}, {precision}, {_written(grid)} data {data}", ranks, library,
                       "gpu_check.bridge.bridge_step",
                       {"grid": grid, "data": data, "precision": precision, "transport": "auto"},
                       needs=_trial(library, "auto", ranks))


def _on_device(library: str) -> bool:
    return library not in ("numpy", "torch")


def _trial(library: str, transport: str, ranks: int) -> str:
    """The name of the case that says whether a transport is there; one rank sends nothing."""
    return f"transport: {library}, {transport}, {ranks} ranks" if ranks > 1 else ""


def _transports(library: str, ranks: int, name: str) -> Iterator[Case]:
    for transport in ("auto", *TRANSPORTS) if _on_device(library) else ("auto",):
        yield Case(_trial(library, transport, ranks), ranks, library, "gpu_check.arithmetic.transport",
                   {"transport": transport}, limit=90)


def _staged(library: str, sizes: Sizes) -> Iterator[Case]:
    transport = "staged" if _on_device(library) else "auto"
    options = {"transport": transport, "nbytes": sizes.message, "sample": sizes.sample, "rounds": sizes.rounds,
               "wanted": sizes.wanted[1]}
    yield Case(f"message: {library}, {transport}, {sizes.message} bytes, 2 ranks", 2, library,
               "gpu_check.rates.staged", options, limit=90, needs=_trial(library, transport, 2))


def _of_each(library: str, ranks: int, precisions: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(precision, transport): each precision by the transport that is found, but for the ranks that come last; float32,
    and the library's type of 2 bytes, by each of them."""
    transports = TRANSPORTS if _on_device(library) and ranks > 1 else ()
    for transport in ("auto", *transports):
        for precision in precisions if transport == "auto" and ranks != LAST else ("float32", _low(library)):
            if _has(library, precision):
                yield precision, transport


def _has(library: str, precision: str) -> bool:
    """Whether the library has it: bfloat16 is torch's; rounding to tf32 a device's."""
    return (library.startswith("torch") or precision != "bfloat16") and (_on_device(library) or precision != "tf32")


def _products(library: str, ranks: int, sizes: Sizes) -> Iterator[Case]:
    """On 1 rank each precision with operands stored in each way; else grids and ways change from one to the next."""
    ways = [*product(STORED, PANELS)]
    for number, (precision, transport) in enumerate(_of_each(library, ranks, PRECISIONS)):
        grid = GRIDS[ranks][number % len(GRIDS[ranks])]
        for stored, panels in zip(STORED, PANELS * 2) if ranks == 1 else (ways[number % len(ways)],):
            yield Case(f"product: {library}, {precision}, {_written(grid)}, {transport}, {stored}, {panels} panels",
                       ranks, library, "gpu_check.arithmetic.product",
                       {"shape": sizes.product, "grid": grid, "precision": precision, "transport": transport,
                        "stored": stored, "panels": panels}, needs=_trial(library, transport, ranks))


def _trainings(library: str, ranks: int) -> Iterator[Case]:
    """On 1 rank each precision with each optimizer; else these and networks change from one to the next. float16 also
    with a loss scale that overflows at first."""
    ways = [*product(NETWORKS[ranks], OPTIMIZERS)]
    for number, (precision, transport) in enumerate(_of_each(library, ranks, TRAINED)):
        for (grid, data), optimizer in ways if ranks == 1 else (ways[number % len(ways)],):
            overflow = precision == "float16" and transport == "auto" and (ranks > 1 or optimizer == "AdamW")
            name = f"training: {library}, {precision}, {_written(grid)} data {data}, {transport}, {optimizer}"
            yield Case(name + ", overflowing at first" * overflow, ranks, library, "gpu_check.training.training", {
                "grid": grid, "data": data, "precision": precision, "transport": transport, "optimizer": optimizer,
                "overflow": overflow}, needs=_trial(library, transport, ranks))


def _written(grid: tuple[int, int, int]) -> str:
    return "x".join(map(str, grid))
