"""Whether the planner's predictions hold: every grid timed in one run, beside what it says of them.

    python apps/plan_bench.py products --json runs/plan-products.json --plot runs/plan-products.png
    python apps/plan_bench.py steps
    python apps/plan_bench.py cluster --nodes 2 4 --rate 4gbit        across virtual nodes; Linux, as root
    python apps/plan_bench.py simulation | scaling | memory

products     every grid of 4 and of 8 ranks, for 12 products
steps        the training step of networks of 8 layers on all grids of 8 ranks, beside the presets
cluster      both, with links of a chosen rate between nodes
simulation   the simulated step of 8 ranks beside the measured one, with the overlaps and without
scaling      the simulated weak scaling of GPT on Frontier beside the published one
memory       what a rank is said to hold beside what it holds

The machine is measured first, on the same ranks, by `pmm3d tune machine`; --machines FOLDER keeps the files, and those
that are there are read. Rounds over all grids of a product or network are interleaved, each in another order; of a grid
the median counts, of a ratio that within a round. --again FILE predicts anew what was measured for an earlier --json;
--every-grid lists each with the parts of its time. What was measured before a failure is shown, and kept by --json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cluster import ClusterError
from measuring import ProgramError
from plan_lab import compared, measured, published
from plan_lab.cases import (
    MEMORY,
    NETWORKS,
    OPTIONS,
    OVERLAPS,
    PRODUCTS,
    Product,
    grid_named,
    grids_3d,
    name_of,
    settings,
    write_data,
)
from plan_lab.compared import Compared
from plan_lab.places import Here, OnNodes
from plan_lab.predicted import beside, memory_of, of_product, of_step, simulated

from pmm3d.errors import Pmm3dError
from pmm3d.layout import GridShape
from pmm3d.model.candidates import preset_of
from pmm3d.model.gpt_ranking import grids_4d
from pmm3d.model.machines import Machine, machine_from
from pmm3d.tools.bench.plot import check_picture
from pmm3d.tools.outputs import check_writable

SIMULATED = ("1x1x1x8", "1x1x8", "8x1x1", "1x8x1", "2x2x2", "1x1x2x4", "2x1x2x2", "1x2x1x4")
MEASURE = "measure"
"""The command of the ranks: a task and its result."""


class Bench:
    """The options of a run, and what an earlier one had measured. measures: whether there is anything to measure."""

    def __init__(self, options: argparse.Namespace, folder: Path):
        self.options, self.folder = options, folder
        self.machines: dict[str, str] = {}
        self.found: list[Compared] = []
        self._before = earlier(options.again) if options.again else None
        self.measures = self._before is None or options.machines is not None

    def machine(self, place: Here) -> Machine:
        """The description of the machine as it is there."""
        where = str(place)
        if self._before and not self.options.machines:
            if where not in self._before["machines"]:
                raise Pmm3dError(f"{self.options.again} has nothing of {where}: measure without --again")
            self.machines[where] = self._before["machines"][where]
        else:
            self.machines[where] = place.tune(self.options.machines or self.folder)
        return machine_from(self.machines[where], where)

    def measure(self, place: Here, kind: str, cases: Mapping[str, Any], grids: Iterable[GridShape]) -> (
            Iterator[measured.Measurement]):
        """Each case by a job of its own, so that a later one that fails takes none with it; or what was measured there
        before."""
        if self._before:
            found = {one["what"]: one for one in self._before["found"]
                     if one["where"] == str(place) and one["kind"] == kind}
            if missing := [what for what in cases if what not in found]:
                raise Pmm3dError(f"{self.options.again} has no {', '.join(missing)} on {place}: "
                                 "measure without --again")
            yield from (found[what] for what in cases)
            return
        names, rounds = [*map(name_of, grids)], self.options.rounds
        for what, case in cases.items():
            asked: dict[str, Any] = {"products": [what]} if kind == "products" else {"networks": {what: case}}
            yield from place.measure(kind, rounds=rounds, grids=names, **asked)

    def settings(self, name: str, *others: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Of a network, whose data is written."""
        write_data(NETWORKS[name], self.folder)
        return settings(NETWORKS[name], self.folder, *others)

    def add(self, found: Compared) -> None:
        """It is kept at once, where figures are asked for."""
        self.found.append(found)
        if self.options.json:
            kept = {"machines": self.machines, "found": [one.as_json() for one in self.found]}
            self.options.json.write_text(json.dumps(kept, indent=1))

    def of(self, place: Here, kind: str) -> list[Compared]:
        return [one for one in self.found if one.where == str(place) and one.more["kind"] == kind]


def earlier(path: Path) -> dict[str, Any]:
    """What --json wrote."""
    try:
        before = json.loads(path.read_text())
        return {"machines": before["machines"], "found": before["found"]}
    except (OSError, ValueError, KeyError, TypeError) as reason:
        raise Pmm3dError(f"--again {path}: not a file that --json wrote ({reason})") from None


def compare_products(bench: Bench, place: Here) -> None:
    machine, cases = bench.machine(place), {str(product): product for product in bench.options.products}
    for one in bench.measure(place, "products", cases, grids_3d(place.ranks)):
        bench.add(beside(one, "products", place, of_product(one["what"], place.ranks, machine)))


def compare_steps(bench: Bench, place: Here) -> None:
    machine, cases = bench.machine(place), {name: bench.settings(name) for name in bench.options.networks}
    for one in bench.measure(place, "steps", cases, grids_4d(place.ranks)):
        bench.add(beside(one, "steps", place, of_step(cases[one["what"]], place.ranks, machine)))


def compare(bench: Bench, place: Here, *comparisons: Callable[[Bench, Here], None]) -> None:
    """What is measured before a failure is shown, too."""
    try:
        for each in comparisons:
            each(bench, place)
    finally:
        for kind in ("products", "steps"):
            if found := bench.of(place, kind):
                show(found, bench.options, presets=kind == "steps")


def products(bench: Bench) -> None:
    for ranks in bench.options.ranks or (4, 8):
        compare(bench, Here(ranks), compare_products)


def steps(bench: Bench) -> None:
    for ranks in bench.options.ranks or (8,):
        compare(bench, Here(ranks), compare_steps)


def across_nodes(bench: Bench) -> None:
    options = bench.options
    places = [OnNodes(ranks, nodes, options.rate) for nodes in options.nodes for ranks in options.ranks or (8,)]
    for place in places:
        with place.standing() if bench.measures else nullcontext():
            compare(bench, place, compare_products, compare_steps)


def show(found: Sequence[Compared], options: argparse.Namespace, *, presets: bool) -> None:
    if options.every_grid:
        print("\n\n".join(map(compared.every_grid, found)) + "\n")
    print(f"{compared.table(found, presets=presets)}\n\n{compared.totals(found, presets=presets)}\n", flush=True)
    if options.command == "cluster":
        print(f"{compared.inner_axes(found)}\n\n{compared.axes_of_grids(found)}\n", flush=True)


def simulation(bench: Bench) -> None:
    for ranks in bench.options.ranks or (8,):
        place = Here(ranks)
        machine, grids = bench.machine(place), SIMULATED if ranks == 8 else [*map(name_of, grids_4d(ranks))]
        cases = {f"{name}, {what}": bench.settings(name, {"overlap": section})
                 for name in bench.options.networks for what, section in OVERLAPS.items()}
        try:
            for one in bench.measure(place, "steps", cases, map(grid_named, grids)):
                said = {grid: simulated(cases[one["what"]], grid, machine) for grid in one["rounds"]}
                bench.add(Compared(one["what"], str(place), one["rounds"], said, kind="steps", spent=one["spent"]))
        finally:
            if found := bench.of(place, "steps"):
                print(compared.grid_by_grid(found) + "\n", flush=True)


def memory(bench: Bench) -> None:
    write_data(MEMORY, bench.folder)
    for ranks in bench.options.ranks or (8,):
        grids = [grid for grid in grids_4d(ranks) if preset_of(grid) or min(grid[:3]) > 1]
        configs = {f"{preset_of(grid)} {name_of(grid)}, {what}".strip():
                   {"settings": settings(MEMORY, bench.folder, others), "grid": name_of(grid)}
                   for grid in grids for what, others in OPTIONS.items()}
        held = Here(ranks).measure("memory", configs=configs)
        said = {name: memory_of(config["settings"], config["grid"]) for name, config in configs.items()}
        print(compared.memory_table(said, held) + "\n")


def scaling(bench: Bench) -> None:
    print(published.scaling())


COMMANDS: dict[str, Callable[[Bench], None]] = {"products": products, "steps": steps, "cluster": across_nodes,
                                                "simulation": simulation, "scaling": scaling, "memory": memory}
MEASURED = {"ranks", "rounds", "machines", "again", "json", "plot"}
OPTIONS_OF = {"products": MEASURED | {"products", "every_grid"}, "steps": MEASURED | {"networks", "every_grid"},
              "cluster": MEASURED | {"products", "networks", "nodes", "rate", "every_grid"},
              "simulation": MEASURED | {"networks"}, "scaling": set[str](), "memory": {"ranks"}}
DEFAULTS = {"rounds": 5, "products": PRODUCTS, "networks": [*NETWORKS], "nodes": (2, 4), "rate": "4gbit"}


def parsed(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--ranks", type=at_least_one, nargs="+", metavar="P", help="(products: 4 8; else 8)")
    parser.add_argument("--rounds", type=at_least_one, help="over all grids (5)")
    parser.add_argument("--products", type=Product.named, nargs="+", metavar="MxNxK:DTYPE",
                        help=f"({' '.join(map(str, PRODUCTS))})")
    parser.add_argument("--networks", nargs="*", choices=NETWORKS, metavar="NAME",
                        help=f"({' '.join(NETWORKS)})")
    parser.add_argument("--nodes", type=at_least_one, nargs="+", metavar="N", help="of cluster (2 4)")
    parser.add_argument("--rate", help="of the links of cluster (4gbit)")
    parser.add_argument("--machines", type=Path, metavar="FOLDER", help="of machine files; missing ones are written")
    parser.add_argument("--again", type=Path, metavar="FILE", help="an earlier --json: measure nothing, predict anew")
    parser.add_argument("--every-grid", action="store_true", default=None,
                        help="list all grids, with the parts of their time")
    parser.add_argument("--json", type=Path, help="keep all figures here")
    parser.add_argument("--plot", type=Path, help="draw measured against predicted times here")
    options = parser.parse_args(words)
    given = {name for name, value in vars(options).items() if value is not None} - {"command"}
    if foreign := given - OPTIONS_OF[options.command]:
        parser.error(f"{options.command} takes no {flags(foreign)}; it takes {flags(OPTIONS_OF[options.command])}")
    if {"again", "rounds"} <= given:
        parser.error("--again measures nothing: no --rounds")
    if options.networks == [] and options.command != "cluster":
        parser.error(f"--networks: {options.command} needs one")
    for name in DEFAULTS.keys() - given:
        setattr(options, name, DEFAULTS[name])
    return options


def flags(names: Iterable[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in sorted(names)) or "none"


def at_least_one(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


def main(words: list[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    if words[:1] == [MEASURE]:
        measured.run(*map(Path, words[1:]))
        return 0
    options = parsed(words)
    try:
        check_writable(options.json, options.plot)
        if options.plot:
            check_picture(options.plot)
        with TemporaryDirectory(prefix="plan-bench-") as folder:
            bench = Bench(options, Path(folder))
            try:
                COMMANDS[options.command](bench)
            finally:
                if options.plot and bench.found:
                    compared.draw(bench.found, options.plot)
    except (ProgramError, ClusterError, Pmm3dError) as problem:
        print(f"plan_bench: {problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
