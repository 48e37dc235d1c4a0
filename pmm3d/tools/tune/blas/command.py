"""The command `pmm3d tune blas`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from ....errors import Pmm3dError
from ....text import blas_in_words, counted, shell_command
from ...output import FigureTable, check_writable, progress, say_written, write_json
from ...ranks import MOST_RANKS, one_of, one_process, size
from ...terminal import console, say

if TYPE_CHECKING:
    from rich.console import Console

    from .measuring import Candidate, Timed

DTYPES = ("float32", "float64", "complex64", "complex128")


@one_process
def blas_command(
    config: Annotated[
        Path | None,
        typer.Argument(help="TOML file of a training. The GEMMs of a step are timed. Default: the GEMMs of a product."),
    ] = None,
    m: Annotated[int | None, size(1, "Rows of A and C of the product. Default: 2048.")] = None,
    n: Annotated[int | None, size(1, "Columns of B and C of the product. Default: 2048.")] = None,
    k: Annotated[int | None, size(1, "Columns of A, rows of B of the product. Default: 2048.")] = None,
    ranks: Annotated[
        int | None,
        size(
            1, "Ranks of the job, which determine the sizes of its local GEMMs. Default: --ranks-per-node.", MOST_RANKS
        ),
    ] = None,
    ranks_per_node: Annotated[
        int | None, size(1, "Processes that measure at once on this node. Default: one for each core.")
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            callback=one_of(*DTYPES),
            help=f"Type of the product: {', '.join(DTYPES)}. Repeatable. Default: float32 and float64.",
        ),
    ] = None,
    blas: Annotated[
        list[str] | None,
        typer.Option(help="Only this BLAS: scipy, mkl or a path. Repeatable. Default: all that are found."),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write all figures here; - is standard output.")] = None,
    store: Annotated[bool, typer.Option(help="Store the choice for PMM3D_BLAS=auto on machines of this kind.")] = True,
) -> None:
    """Find the BLAS and kernel that is fastest for a job.

    As many processes as ranks on a node multiply at once, each on its own cores. The BLASes take turns, and the median
    of five rounds counts. Default without --blas: SciPy's, the MKL of pmm3d\\[mkl], numpy's, and MKL, OpenBLAS, BLIS,
    FlexiBLAS, LibSci, NVPL and Arm's if the loader finds them. A BLAS whose results are wrong, or that lacks a routine,
    is left out and named. If times differ by less than 1%, the first BLAS in this order is chosen.

    The choice is stored for this kind of machine and number of threads. PMM3D_BLAS=auto selects it, and so does a job
    without PMM3D_BLAS if pmm3d\\[mkl] is installed. PMM3D_BLAS=auto:float32 selects the fastest BLAS for this type.
    The lines for a batch script are printed.

    [bold]Examples[/]

    pmm3d tune blas --m 65536 --n 512 --k 512 --ranks 8

    pmm3d tune blas apps/digits.toml --ranks 8

    pmm3d tune blas --blas scipy --blas /opt/blis/lib/libblis.so --dtype float32
    """
    if config and (given := [name for name, value in zip(("--m", "--n", "--k", "--dtype"), (m, n, k, dtype)) if value]):
        raise Pmm3dError(f"{given[0]} describes a product, but {config} is a training: leave one of them out")
    check_writable(text=json)
    _tune(
        config,
        (m or 2048, n or 2048, k or 2048),
        ranks,
        ranks_per_node,
        [*dict.fromkeys(dtype or DTYPES[:2])],
        blas or [],
        json,
        store,
    )


def _tune(
    config: Path | None,
    sizes: tuple[int, int, int],
    ranks: int | None,
    per_node: int | None,
    dtypes: list[str],
    asked: list[str],
    json: Path | None,
    store: bool,
) -> None:
    from ....model.machine import cores, cpu
    from .measuring import ROUNDS, candidates, choice, measure, of_product, of_training

    per_node = per_node or len(cores())
    if per_node > len(cores()):
        raise Pmm3dError(
            f"--ranks-per-node {per_node} is more than the {counted(len(cores()), 'core')} of this node "
            "that this process may use: give at most this number"
        )
    threads = len(cores()) // per_node
    job = ranks or per_node
    gemms = of_training(config, job) if config else [gemm for dtype in dtypes for gemm in of_product(sizes, dtype, job)]
    if not (gemms := [gemm for gemm in gemms if gemm.dtype in DTYPES]):
        raise Pmm3dError(f"no GEMM of this training has a type of BLAS ({', '.join(DTYPES)})")
    tried = candidates(asked, cpu())
    with progress("tune blas", True, ROUNDS * len(tried) * len(gemms)) as tell:
        timed, absent = measure(tried, gemms, per_node, threads, tell)
    named = {candidate: why for candidate, why in absent.items() if asked or "no such BLAS" not in why}
    print_timed(timed, named, per_node, console(sys.stdout))
    chosen = {dtype: choice(timed, dtype) for dtype in ("", *dict.fromkeys(gemm.dtype for gemm in gemms))}
    for dtype, best in chosen.items():
        if not dtype or best != chosen[""]:
            say(
                f"chosen{dtype and f' for {dtype} alone'}: {in_words(best)}{best.file and f', {best.file}'}. "
                "For a batch script:"
            )
            for name, text in (best.variables | {"OMP_NUM_THREADS": str(best.threads)}).items():
                say(f"  export {name}={shell_command(text)}")
    if store:
        _remember(chosen, threads)
    if json is not None:
        write_json(json, as_json(timed, chosen[""], per_node))
        say_written(json)


def _remember(chosen: dict[str, Timed], threads: int) -> None:
    from ....arrays.blas_choice import Choice, asked_of, remember

    try:
        for dtype, best in chosen.items():
            stored = remember(Choice(best.variables, in_words(best)), threads, dtype)
            say(f"stored for PMM3D_BLAS={asked_of(dtype)}: {in_words(best)}")
        say(f"in {stored.parent}")
    except (OSError, RuntimeError) as error:
        say(f"The choice is not stored: {error}. The lines above select it too")


def print_timed(timed: list[Timed], absent: dict[Candidate, str], ranks: int, console: Console) -> None:
    """Print the BLASes, the fastest first, and the GEMMs of the chosen BLAS."""
    from .measuring import choice

    best = choice(timed)
    table = FigureTable(
        f"[bold]BLASes here[/], {counted(ranks, 'rank')} at once, each with {counted(best.threads, 'thread')}",
        ("BLAS", "version", "kernel", "time / best"),
        left=("version", "kernel"),
    )
    for each in sorted(timed, key=lambda each: each.seconds()):
        table.add_row(
            each.candidate.name,
            f"{each.name} {each.version}",
            each.kernel,
            f"{each.seconds() / best.seconds():.3f}",
            style="bold" if each == best else "",
        )
    console.print(table)
    for candidate, why in absent.items():
        console.print(f"[yellow]{escape(f'{candidate}: {why}')}[/]")
    table = FigureTable(f"[bold]GEMMs[/] with {best.candidate}", ("m x n x k", "dtype", "form", "times", "GFLOP/s"))
    for gemm, seconds in best.times.items():
        table.add_row(
            "x".join(map(str, gemm.shape)), gemm.dtype, gemm.form, str(gemm.times), f"{gemm.flop / seconds / 1e9:.1f}"
        )
    console.print(table)


def in_words(timed: Timed) -> str:
    return blas_in_words(f"{timed.name} {timed.version}".strip(), timed.kernel, timed.threads)


def as_json(timed: list[Timed], best: Timed, ranks: int) -> list[dict[str, Any]]:
    return [
        {
            "variables": each.variables,
            "file": each.file,
            "name": each.name,
            "version": each.version,
            "kernel": each.kernel,
            "threads": each.threads,
            "ranks": ranks,
            "seconds": each.seconds(),
            "chosen": each == best,
            "gemms": [{**gemm._asdict(), "seconds": seconds} for gemm, seconds in each.times.items()],
        }
        for each in sorted(timed, key=lambda each: each.seconds())
    ]
