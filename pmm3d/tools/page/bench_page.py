"""The page of a benchmark of one product, on one grid or on several."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from ...layout import GridShape
from ...text import MOST_HOSTS, blas_in_words, counted, in_bytes, in_time, names_in_words, number, percent
from ..bench.result import COLOURS, time_parts
from ..plots import Part
from .drawings import grid_map, time_bars
from .elements import Cell, Figure, Page, Section, Table, Tile
from .inputs import Json


def bench_page(path: Path, results: list[Json]) -> Page:
    """Of the figures in that file, the fastest grid first."""
    results = sorted(results, key=lambda result: median(result["seconds"]))
    best = results[0]
    every_grid = [_grids(results)] if len(results) > 1 else []
    sections = [_times(results), *every_grid, _phases(best), _bytes(best), _grid(best)]
    return Page(f"C = A B, {best['m']} × {best['n']} × {best['k']}", "benchmark of a product",
                [("file", str(path.absolute())), *_facts(best)], _tiles(best, len(results)), sections,
                list(filter(None, [best["environment"].get("advice")])))


def _shape(result: Json) -> str:
    return "x".join(map(str, result["grid"]))


def _facts(best: Json) -> list[tuple[str, str]]:
    found, times = best["environment"], best["seconds"]
    hosts = names_in_words((f"{name} ({counted(ranks, 'rank')} on {counted(cores, 'core')})" for name, ranks, cores in
                            zip(found["hosts"], found["ranks_per_host"], found["cores_per_host"])), MOST_HOSTS)
    return [("numbers", f"{best['dtype']}, {best['array']}, stored {best['transpose']} (n as they are, t transposed)"),
            ("hosts", hosts),
            ("BLAS", blas_in_words(found["blas"], found["kernel"], found["threads"])),
            ("MPI", found["mpi"]), ("CPU", found["cpu"]),
            ("time", f"median of {len(times)} products {in_time(median(times))}, from {in_time(min(times))} to "
                     f"{in_time(max(times))}"),
            ("limit", f"{best['cores']} {best['unit']} × {best['core_gflops']:.1f} GFLOP/s (the same BLAS on one)"),
            ("verified", best["verification"])]


def _of_others(best: Json) -> str:
    """Ratios to two other limits: the GEMM of a cube, and the GEMM on all cores at once. A limit of 0 was not
    measured."""
    cores, together = best["cores"] * best["square_core_gflops"], best["at_once_gflops"]
    square = f"; {percent(best['gflops'] / cores)} of {best['square']} cubed" if cores else ""
    return square + (f"; {percent(best['gflops'] / together)} of the GEMM on all cores at once" if together else "")


def _tiles(best: Json, grids: int) -> list[Tile]:
    asked = best["verification"] != "not asked for"
    equal = best["bytes_sent"] == best["bytes_model"]
    bytes_are = "as modelled" if equal else "off the model"
    result = ("right", "good") if best["verified"] else ("wrong", "bad") if asked else ("not verified", "")
    return [Tile("rate", f"{best['gflops']:.4g} GFLOP/s", f"{in_time(median(best['seconds']))} a product"),
            Tile("of the limit", percent(best["ratio"]),
                 f"{best['cores']} {best['unit']}, GEMM alone{_of_others(best)}"),
            Tile("grid", _shape(best), f"the fastest of {grids}" if grids > 1 else counted(best["ranks"], "rank")),
            Tile("result", result[0], state=result[1]),
            Tile("bytes", bytes_are, "sent, largest rank", "good" if equal else "bad"),
            Tile("over the lower bound", _over_bound(best, 3), "bytes received, any algorithm"),
            Tile("memory", in_bytes(best["peak_memory"]),
                 f"resident, most of any rank; {in_bytes(best['node_memory'])} of a node")]


def _over_bound(result: Json, digits: int) -> str:
    received, bound = sum(result["bytes_received"].values()), result["lower_bound_bytes"]
    return f"{received / bound:.{digits}f}" if bound else "–"


def _times(results: list[Json]) -> Section:
    rows = [(_shape(result), [Part(part.name, 1e3 * part.seconds) for part in time_parts(result)])
            for result in results]
    limit = 1e3 * median(results[0]["seconds"]) * results[0]["ratio"]
    drawing = time_bars(rows, COLOURS, "ms", (limit, "the limit"))
    return Section("Time of a product",
                   "Mean of the repetitions and of the ranks that took part. "
                   "Dashed: what the GEMM alone would take on all cores.",
                   [Figure(drawing)])


def _grids(results: list[Json]) -> Section:
    head = ("grid", ">median", ">GFLOP/s", ">of the limit", ">computing", ">waiting", ">received", ">× bound", "result")
    rows = [(_shape(result), in_time(median(result["seconds"])), f"{result['gflops']:.1f}",
             percent(result["ratio"]), in_time(result["computed_seconds"]), in_time(result["waited_seconds"]),
             in_bytes(sum(result["bytes_received"].values())), _over_bound(result, 2),
             Cell("right", "good") if result["verified"] else Cell("not verified", "bad")) for result in results]
    return Section("Every grid", tables=[Table(head, rows)])


def _phases(best: Json) -> Section:
    parts = time_parts(best)
    rows = [(part.name, in_time(part.seconds), "–" if part.most is None else in_time(part.most), part.meaning)
            for part in parts]
    rows.append(("whole product", in_time(sum(part.seconds for part in parts)), "–", ""))
    return Section(f"Phases on {_shape(best)}", tables=[Table(("phase", ">mean", ">worst rank", ""), rows)])


def _bytes(best: Json) -> Section:
    figures = [(axis, sent, best["bytes_model"][axis]) for axis, sent in best["bytes_sent"].items()]
    rows = [(axis, in_bytes(sent), in_bytes(model), f"{sent / model:.4f}" if model else "–",
             Cell("equal", "good") if sent == model else Cell(f"off by {sent - model:,} bytes", "bad"),
             in_bytes(best["bytes_received"][axis])) for axis, sent, model in figures]
    lead = f"Largest rank, one product. Lower bound for any algorithm: {in_bytes(best['lower_bound_bytes'])}."
    return Section("Ledger beside the model", lead,
                   tables=[Table(("axis", ">sent", ">model", ">ratio", "", ">received"), rows)])


def _grid(best: Json) -> Section:
    shape, names = GridShape(*best["grid"]), best["environment"]["hosts"]
    hosts = [(names[0], [[0, best["ranks"] - 1]])] if len(names) == 1 else []
    blocks = ", ".join(f"{name} {rows} × {cols}" for name, (rows, cols) in best["blocks"].items())
    lead = f"Blocks of rank 0: {blocks}; {number(best['panels'])} panel(s) along k."
    drawing = grid_map(shape, hosts)
    return Section("Grid", lead, [Figure(drawing)] if drawing else [])
