"""The page of a benchmark of one product, on one grid or on several."""

from __future__ import annotations

from pathlib import Path

from ...comm.words import in_bytes
from ...layout import GridShape
from .grid import grid_drawing, told
from .parts import Cell, Figure, Page, Section, Table, Tile
from .svg import bars
from .text import median, number, seconds, share

PHASES = {"gather A": "wait-x", "gather B": "wait-z", "reduce C": "wait-y", "redistribute": "wait-data",
          "agreement": "wait-all"}


def sections(results: list[dict], path: Path) -> Page:
    """The fastest grid first."""
    results = sorted(results, key=lambda result: median(result["seconds"]))
    best = results[0]
    parts = [_times(results), _grids(results) if len(results) > 1 else None, _phases(best), _bytes(best), _grid(best)]
    return Page(title=f"C = A B, {best['m']} × {best['n']} × {best['k']}", subtitle="benchmark of a product",
                facts=_facts(best, path), tiles=_tiles(best, len(results)),
                sections=[part for part in parts if part is not None], notes=_notes(best))


def _shape(result: dict) -> str:
    return "x".join(map(str, result["grid"]))


def _facts(best: dict, path: Path) -> list[tuple[str, str]]:
    found = best["environment"]
    hosts = ", ".join(f"{name} ({ranks} ranks on {cores} cores)" for name, ranks, cores in
                      zip(found["hosts"][:8], found["ranks_per_host"], found["cores_per_host"]))
    more = f" and {len(found['hosts']) - 8} more" if len(found["hosts"]) > 8 else ""
    low, high = min(best["seconds"]), max(best["seconds"])
    return [("file", str(path.absolute())),
            ("numbers", f"{best['dtype']}, {best['array']}, stored {best['transpose']} (n as they are, t transposed)"),
            ("hosts", hosts + more),
            ("BLAS", f"{found['blas']}, kernel {found['kernel']}, {found['threads']} thread(s) a rank"),
            ("MPI", found["mpi"]), ("CPU", found["cpu"]),
            ("time", f"median of {len(best['seconds'])} products {seconds(median(best['seconds']))}, "
                     f"from {seconds(low)} to {seconds(high)}"),
            ("limit", f"{best['cores']} cores × {best['core_gflops']:.1f} GFLOP/s (the same BLAS on one core)"),
            ("verified", best["verification"])]


def _notes(best: dict) -> list[str]:
    return [best["environment"]["advice"]] if best["environment"].get("advice") else []


def _tiles(best: dict, grids: int) -> list[Tile]:
    received, bound = sum(best["bytes_received"].values()), best["lower_bound_bytes"]
    asked = best["verification"] != "not asked for"
    equal = best["bytes_sent"] == best["bytes_model"]
    return [
        Tile("rate", f"{best['gflops']:.4g} GFLOP/s", f"{seconds(median(best['seconds']))} a product"),
        Tile("of the limit", share(best["ratio"]), f"{best['cores']} cores, GEMM alone"),
        Tile("grid", _shape(best), f"the fastest of {grids}" if grids > 1 else f"{best['ranks']} ranks"),
        Tile("result", "right" if best["verified"] else "wrong" if asked else "not verified", "",
             "good" if best["verified"] else "bad" if asked else ""),
        Tile("bytes", "as modelled" if equal else "off the model", "sent, largest rank", "good" if equal else "bad"),
        Tile("over the lower bound", f"{received / bound:.3f}" if bound else "–", "bytes received, any algorithm"),
        Tile("memory", in_bytes(best["peak_memory"]), "resident, most of any rank"),
    ]


def _parts(result: dict) -> list[tuple[str, str, float, str]]:
    """Where the time of a product goes, in milliseconds."""
    phases, whole = result["phases"], 1e3 * median(result["seconds"])
    found = [("computing: GEMM", "compute0", 1e3 * phases.get("multiply", {}).get("computed", 0.0))]
    found += [(f"waiting: {name}", class_, 1e3 * phases[name]["waited"]) for name, class_ in PHASES.items()
              if phases.get(name, {}).get("waited")]
    rest = max(0.0, whole - sum(length for _, _, length in found))
    found.append(("copies, sums, the rest", "rest", rest))
    return [(name, class_, length, f"{length:.3g} ms") for name, class_, length in found]


def _times(results: list[dict]) -> Section:
    rows = [(_shape(result), _parts(result)) for result in results]
    best = results[0]
    limit = 1e3 * median(best["seconds"]) * best["ratio"]
    legend = tuple(dict.fromkeys((class_, name) for _, parts in rows for name, class_, *_ in parts))
    drawing = bars("time of one product on each grid", rows, "ms", (limit, f"the limit: {limit:.3g} ms"))
    return Section("Time of a product", "Mean over the ranks. Dashed: what the GEMM alone would take on all cores.",
                   [Figure("", drawing, legend, wide=True)])


def _grids(results: list[dict]) -> Section:
    head = ("grid", ">median", ">GFLOP/s", ">of the limit", ">computing", ">waiting", ">received", ">× bound", "result")
    rows = [(_shape(result), seconds(median(result["seconds"])), f"{result['gflops']:.1f}", share(result["ratio"]),
             seconds(result["computed_seconds"]), seconds(result["waited_seconds"]),
             in_bytes(sum(result["bytes_received"].values())),
             f"{sum(result['bytes_received'].values()) / result['lower_bound_bytes']:.2f}"
             if result["lower_bound_bytes"] else "–",
             Cell("right", "good") if result["verified"] else Cell("not verified", "bad")) for result in results]
    return Section("Every grid", tables=[Table(head, rows)])


def _phases(best: dict) -> Section:
    rows = [(name, *(seconds(phase[key]) for key in ("computed", "waited", "waited_max")))
            for name, phase in best["phases"].items()]
    return Section(f"Phases on {_shape(best)}", tables=[
        Table(("phase", ">computing, mean", ">waiting, mean", ">waiting, worst rank"), rows)])


def _bytes(best: dict) -> Section:
    rows = []
    for axis in best["bytes_sent"]:
        sent, model = best["bytes_sent"][axis], best["bytes_model"][axis]
        rows.append((axis, in_bytes(sent), in_bytes(model), f"{sent / model:.4f}" if model else "–",
                     Cell("equal", "good") if sent == model else Cell(f"off by {sent - model:,} bytes", "bad"),
                     in_bytes(best["bytes_received"][axis])))
    bound = best["lower_bound_bytes"]
    lead = f"Largest rank, one product. Lower bound for any algorithm: {in_bytes(bound)}."
    return Section("Ledger beside the model", lead,
                   tables=[Table(("axis", ">sent", ">model", ">ratio", "", ">received"), rows)])


def _grid(best: dict) -> Section:
    shape, names = GridShape(*best["grid"]), best["environment"]["hosts"]
    hosts = [{"name": names[0], "ranks": [[0, best["ranks"] - 1]]}] if len(names) == 1 else []
    blocks = ", ".join(f"{name} {rows} × {cols}" for name, (rows, cols) in best["blocks"].items())
    lead = f"Blocks of rank 0: {blocks}; {number(best['steps'])} step(s) along k, {best['panels']} panel(s) of C."
    return Section("Grid", f"{lead} {told(shape)}".strip(), [Figure("", grid_drawing(shape, hosts), wide=True)])
