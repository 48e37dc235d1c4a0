"""The command `pmm3d tune blas`."""

from __future__ import annotations

import json as json_format
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ....errors import Pmm3dError
from ....model.environment import task_rank
from ...output import check_writable, progress, say_written, write_text
from ...terminal import complaining, console, say

if TYPE_CHECKING:
    from .measuring import Findings

DTYPES = ("float32", "float64", "complex64", "complex128")


def _dtypes(given: list[str] | None) -> list[str]:
    for dtype in given or ():
        if dtype not in DTYPES:
            raise typer.BadParameter(f"{dtype!r} is none of {', '.join(DTYPES)}")
    return list(dict.fromkeys(given or DTYPES[:2]))


def blas_command(
    config: Annotated[Path | None, typer.Argument(help="TOML file of a training: the GEMMs of its step.")] = None,
    m: Annotated[int, typer.Option(min=1, help="A product: rows of A and C.")] = 2048,
    n: Annotated[int, typer.Option(min=1, help="A product: columns of B and C.")] = 2048,
    k: Annotated[int, typer.Option(min=1, help="A product: columns of A, rows of B.")] = 2048,
    ranks: Annotated[int | None, typer.Option(min=1, help="Ranks of the job, which give the sizes of its local "
                                                          "GEMMs. Left out: as many as measure.")] = None,
    ranks_per_node: Annotated[int | None, typer.Option(min=1, help="Ranks that measure at once on this node. Left "
                                                                   "out: one for each core.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help=f"Types of a product: {', '.join(DTYPES)}; may be given more "
                                                         "than once. Left out: float32 and float64.",
                                                    callback=_dtypes)] = None,
    blas: Annotated[list[str] | None, typer.Option(help="Only this one, by name or path; may be given more than once. "
                                                        "Left out: all that are found.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write all figures here; - is standard output.")] = None,
    quick: Annotated[bool, typer.Option(help="Time the GEMMs in the storage orders of the job alone, not in all "
                                             "eight: an eighth of the time.")] = False,
    keep: Annotated[bool, typer.Option(help="Remember the choice for PMM3D_BLAS=auto on machines of this "
                                            "kind.")] = True,
) -> None:
    """Which BLAS and kernel is fastest for a job, and in which storage order.

    As many processes as ranks of a node multiply at once, each on its own cores; every BLAS that is found takes its
    turn, and the median of five rounds counts. Looked for: SciPy's, the MKL of pmm3d\\[mkl], MKL, OpenBLAS, BLIS,
    FlexiBLAS, LibSci, NVPL and Arm's where the loader finds them, numpy's; --blas names others. A BLAS whose results
    are wrong, or that lacks a routine, is left out and named. Of those within 1% the first in this order is taken.

    The choice is remembered for this kind of machine and number of threads: PMM3D_BLAS=auto goes by it (and, if
    pmm3d\\[mkl] is installed, a job without PMM3D_BLAS), and
    PMM3D_BLAS=auto:float32 by that for one type, for which another kernel may be faster. The lines to be put into a
    batch script are printed. If a GEMM is faster by columns, pass order="F" to matrices and products.

    [bold]Examples[/]

    pmm3d tune blas --m 65536 --n 512 --k 512 --ranks 8

    pmm3d tune blas apps/digits.toml --ranks 8

    pmm3d tune blas --blas scipy --blas /opt/blis/lib/libblis.so --dtype float32
    """
    if task_rank(os.environ):
        return
    import mpi4py

    mpi4py.rc(initialize=False, finalize=False)
    with complaining():
        check_writable(text=json)
        _tune(config, (m, n, k), ranks, ranks_per_node, dtype or list(DTYPES[:2]), blas or [], json, quick, keep)


def _tune(config: Path | None, sizes: tuple[int, int, int], ranks: int | None, per_node: int | None,
          dtypes: list[str], asked: list[str], json: Path | None, quick: bool, keep: bool) -> None:
    from ....model.machine import cores, cpu
    from .candidates import candidates
    from .measuring import measure, stages
    from .shapes import of_product, of_training
    from .tables import as_json, in_words, print_findings, script_lines

    per_node = min(per_node or len(cores()), len(cores()))
    threads = len(cores()) // per_node
    job = ranks or per_node
    gemms = of_training(config, job) if config else [gemm for dtype in dtypes for gemm in of_product(sizes, dtype, job)]
    if not (gemms := [gemm for gemm in gemms if gemm.dtype in DTYPES]):
        raise Pmm3dError(f"nothing that a BLAS multiplies: its GEMMs are of {', '.join(DTYPES)}")
    found = candidates(asked, cpu())
    with progress("tune blas", True, stages(len(found), gemms)) as tell:
        findings = measure(found, gemms, per_node, threads, tell, quick)
    print_findings(findings, console(sys.stdout))
    for dtype in _apart(findings):
        choice = findings.choice_for(dtype)
        say(f"chosen{dtype and f' for {dtype} alone'}: {in_words(choice)}" + (f", {choice.file}" if choice.file else "")
            + ". For a batch script:")
        for line in script_lines(choice):
            say(f"  {line}")
    if keep:
        _remember(findings, threads)
    if json is not None:
        write_text(json, json_format.dumps(as_json(findings), indent=1))
        say_written(json)


def _apart(findings: Findings) -> list[str]:
    """"" for the whole job, and the types for which another BLAS, or kernel, is faster than for all together."""
    return ["", *(dtype for dtype in findings.dtypes if findings.choice_for(dtype) != findings.choice)]


def _remember(findings: Findings, threads: int) -> None:
    from ....arrays.blas_choice import Choice, asked_of, remember
    from .tables import in_words

    try:
        for dtype in (*findings.dtypes, ""):
            choice = findings.choice_for(dtype, in_time=True)
            kept = remember(Choice(choice.variables, in_words(choice)), threads, dtype)
            where = "" if choice == findings.choice_for(dtype) else ", the fastest that a running Python can still take"
            say(f"kept for PMM3D_BLAS={asked_of(dtype)}: {in_words(choice)}{where}")
        say(f"in {kept.parent}")
    except (OSError, RuntimeError) as error:
        say(f"the choice is not kept: {error}. The lines above do without")
