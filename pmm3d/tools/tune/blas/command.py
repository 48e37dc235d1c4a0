"""The command `pmm3d tune blas`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ....errors import Pmm3dError
from ....text import blas_in_words
from ...output import FigureTable, check_writable, progress, say_written, write_json
from ...ranks import one_of, one_process
from ...terminal import console, say

if TYPE_CHECKING:
    from rich.console import Console

    from .measuring import Findings, Loaded

DTYPES = ("float32", "float64", "complex64", "complex128")


@one_process
def blas_command(
    config: Annotated[Path | None, typer.Argument(help="TOML file of a training: the GEMMs of its step.")] = None,
    m: Annotated[int, typer.Option(min=1, help="A product: rows of A and C.")] = 2048,
    n: Annotated[int, typer.Option(min=1, help="A product: columns of B and C.")] = 2048,
    k: Annotated[int, typer.Option(min=1, help="A product: columns of A, rows of B.")] = 2048,
    ranks: Annotated[int | None, typer.Option(min=1, help="Ranks of the job, which give the sizes of its local "
                                                          "GEMMs. Default: the ranks that measure.")] = None,
    ranks_per_node: Annotated[int | None, typer.Option(min=1, help="Ranks that measure at once on this node. "
                                                                   "Default: one for each core.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(callback=one_of(*DTYPES),
                                                    help=f"Type of a product: {', '.join(DTYPES)}. Repeatable. "
                                                         "Default: float32 and float64.")] = None,
    blas: Annotated[list[str] | None, typer.Option(help="Only this BLAS: scipy, mkl or a path. Repeatable. Default: "
                                                        "all that are found.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write all figures here; - is standard output.")] = None,
    keep: Annotated[bool, typer.Option(help="Store the choice for PMM3D_BLAS=auto on machines of this kind.")] = True,
) -> None:
    """Find the BLAS and kernel that is fastest for a job.

    As many processes as a node has ranks multiply at once, each on its own cores. The BLASes take turns, and the median
    of five rounds counts. Without --blas these are timed: SciPy's, the MKL of pmm3d\\[mkl], numpy's, and MKL, OpenBLAS,
    BLIS, FlexiBLAS, LibSci, NVPL and Arm's if the loader finds them. A BLAS whose results are wrong, or that lacks a
    routine, is left out and named. Of BLASes within 1%, the first one in this order is chosen.

    The choice is stored for this kind of machine and number of threads. PMM3D_BLAS=auto selects it, and so does a job
    without PMM3D_BLAS if pmm3d\\[mkl] is installed. Another kernel may be faster for one type: PMM3D_BLAS=auto:float32
    selects that. The lines for a batch script are printed.

    [bold]Examples[/]

    pmm3d tune blas --m 65536 --n 512 --k 512 --ranks 8

    pmm3d tune blas apps/digits.toml --ranks 8

    pmm3d tune blas --blas scipy --blas /opt/blis/lib/libblis.so --dtype float32
    """
    check_writable(text=json)
    _tune(config, (m, n, k), ranks, ranks_per_node, [*dict.fromkeys(dtype or DTYPES[:2])], blas or [], json, keep)


def _tune(config: Path | None, sizes: tuple[int, int, int], ranks: int | None, per_node: int | None,
          dtypes: list[str], asked: list[str], json: Path | None, keep: bool) -> None:
    from ....model.machine import cores, cpu
    from .measuring import ROUNDS, candidates, measure, of_product, of_training

    per_node = min(per_node or len(cores()), len(cores()))
    threads = len(cores()) // per_node
    job = ranks or per_node
    gemms = of_training(config, job) if config else [gemm for dtype in dtypes for gemm in of_product(sizes, dtype, job)]
    if not (gemms := [gemm for gemm in gemms if gemm.dtype in DTYPES]):
        raise Pmm3dError(f"nothing that a BLAS multiplies: its GEMMs are of {', '.join(DTYPES)}")
    found = candidates(asked, cpu())
    with progress("tune blas", True, ROUNDS * len(found) * len(gemms)) as tell:
        findings = measure(found, gemms, per_node, threads, tell)
    print_findings(findings, console(sys.stdout))
    for dtype in ("", *findings.dtypes):
        choice = findings.choice(dtype)
        if not dtype or choice != findings.choice():
            say(f"chosen{dtype and f' for {dtype} alone'}: {in_words(choice)}{choice.file and f', {choice.file}'}. "
                "For a batch script:")
            for line in script_lines(choice):
                say(f"  {line}")
    if keep:
        _remember(findings, threads)
    if json is not None:
        write_json(json, as_json(findings))
        say_written(json)


def _remember(findings: Findings, threads: int) -> None:
    from ....arrays.blas_choice import Choice, asked_of, remember

    try:
        for dtype in (*findings.dtypes, ""):
            choice = findings.choice(dtype)
            kept = remember(Choice(choice.variables, in_words(choice)), threads, dtype)
            say(f"kept for PMM3D_BLAS={asked_of(dtype)}: {in_words(choice)}")
        say(f"in {kept.parent}")
    except (OSError, RuntimeError) as error:
        say(f"the choice is not kept: {error}. The lines above do without")


def print_findings(findings: Findings, console: Console) -> None:
    """Print the candidates, the fastest first, then the GEMMs with the one that is chosen."""
    best = findings.choice()
    table = FigureTable(f"[bold]BLASes here[/], {findings.ranks} rank(s) at once, {best.threads} thread(s) each",
                        ("BLAS", "version", "kernel", "time / best"), left=("version", "kernel"))
    for loaded in sorted(findings.candidates, key=lambda loaded: findings.seconds(loaded.candidate)):
        share = findings.seconds(loaded.candidate) / findings.seconds(best.candidate)
        table.add_row(loaded.candidate.name, f"{loaded.name} {loaded.version}", loaded.kernel, f"{share:.3f}",
                      style="bold" if loaded == best else "")
    console.print(table)
    for candidate, why in findings.absent.items():
        if "no such BLAS" not in why:
            console.print(f"[yellow]{candidate}: {why}[/]")
    table = FigureTable(f"[bold]GEMMs[/] with {best.candidate}", ("m x n x k", "dtype", "form", "times", "GFLOP/s"))
    for gemm, seconds in findings.times[best.candidate].items():
        table.add_row("x".join(map(str, gemm.shape)), gemm.dtype, gemm.form, str(gemm.times),
                      f"{gemm.flop / seconds / 1e9:.1f}")
    console.print(table)


def script_lines(loaded: Loaded) -> list[str]:
    """Return the lines for a batch script."""
    threads = {"OMP_NUM_THREADS": str(loaded.threads)}
    return [f"export {name}={shlex.quote(text)}" for name, text in (loaded.variables | threads).items()]


def in_words(loaded: Loaded) -> str:
    return blas_in_words(f"{loaded.name} {loaded.version}".strip(), loaded.kernel, loaded.threads)


def as_json(findings: Findings) -> list[dict[str, Any]]:
    """Return an object for each candidate, the fastest first."""
    ordered = sorted(findings.candidates, key=lambda loaded: findings.seconds(loaded.candidate))
    return [{"variables": loaded.variables, "file": loaded.file, "name": loaded.name, "version": loaded.version,
             "kernel": loaded.kernel, "threads": loaded.threads, "ranks": findings.ranks,
             "seconds": findings.seconds(loaded.candidate), "chosen": loaded == findings.choice(),
             "gemms": [{**gemm._asdict(), "seconds": seconds}
                       for gemm, seconds in findings.times[loaded.candidate].items()]} for loaded in ordered]
