"""What `pmm3d tune blas` found, as tables and lines for a batch script."""

from __future__ import annotations

import shlex
from typing import Any

from rich.console import Console

from ....text import blas_in_words
from ...output import FigureTable
from .measuring import Findings, Loaded, Times
from .shapes import Gemm


def print_findings(findings: Findings, console: Console) -> None:
    """The candidates, then the GEMMs with the one that is chosen."""
    console.print(_candidates(findings))
    for candidate, why in findings.absent.items():
        if "no such BLAS" not in why:
            console.print(f"[yellow]{candidate}: {why}[/]")
    console.print(_gemms(findings))
    console.print("orders: of A, B and C, by rows (n) or by columns (t)")


def _candidates(findings: Findings) -> FigureTable:
    best = findings.seconds(findings.choice.candidate)
    title = f"[bold]BLASes here[/], {findings.ranks} rank(s) at once, {findings.choice.threads} thread(s) each"
    table = FigureTable(title, ("PMM3D_BLAS", "what it is", "kernel", "GFLOP/s a rank", "time / best"))
    for loaded in sorted(findings.candidates, key=lambda loaded: findings.seconds(loaded.candidate)):
        seconds = findings.seconds(loaded.candidate)
        flop = sum(gemm.flop * gemm.times for gemm in findings.times[loaded.candidate])
        mark = "[bold]" if loaded == findings.choice else ""
        table.add_row(f"{mark}{loaded.candidate.blas}", f"{loaded.name} {loaded.version}", loaded.kernel,
                      f"{flop / seconds / 1e9:.1f}", f"{seconds / best:.3f}")
    return table


def _gemms(findings: Findings) -> FigureTable:
    table = FigureTable(f"[bold]GEMMs[/] with {findings.choice.candidate}", (
        "m x n x k", "dtype", "times", "as is", "GFLOP/s", "best", "GFLOP/s", "transposing first"))
    for gemm, times in findings.times[findings.choice.candidate].items():
        given, best = times.as_given(gemm), times.orders[times.best]
        table.add_row("x".join(map(str, gemm.shape)), gemm.dtype, str(gemm.times), gemm.form + "n",
                      f"{gemm.flop / given / 1e9:.1f}", times.best, f"{gemm.flop / best / 1e9:.1f}",
                      _verdict(gemm, times))
    return table


def _verdict(gemm: Gemm, times: Times) -> str:
    if not times.copies:
        return "not timed"
    share = times.transposed_first(gemm) / times.as_given(gemm)
    return f"pays: {share:.2f} of the time" if share < 0.97 else f"no ({share:.2f})"


def script_lines(loaded: Loaded) -> list[str]:
    """For a batch script."""
    threads = {"OMP_NUM_THREADS": str(loaded.threads)}
    return [f"export {name}={shlex.quote(text)}" for name, text in (loaded.variables | threads).items()]


def in_words(loaded: Loaded) -> str:
    return blas_in_words(f"{loaded.name} {loaded.version}".strip(), loaded.kernel, loaded.threads)


def as_json(findings: Findings) -> list[dict[str, Any]]:
    """A candidate each, the fastest first."""
    ordered = sorted(findings.candidates, key=lambda loaded: findings.seconds(loaded.candidate))
    return [{"variables": loaded.variables, "file": loaded.file, "name": loaded.name,
             "version": loaded.version, "kernel": loaded.kernel, "threads": loaded.threads, "ranks": findings.ranks,
             "seconds": findings.seconds(loaded.candidate), "chosen": loaded == findings.choice,
             "gemms": [{**gemm._asdict(), "seconds": times.orders, "copies": list(times.copies)}
                       for gemm, times in findings.times[loaded.candidate].items()]} for loaded in ordered]
