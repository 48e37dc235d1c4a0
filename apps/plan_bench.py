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
that are there are read. Rounds over all grids are interleaved, each in another order; of a grid the median counts, of a
ratio that within a round. --again FILE predicts anew what was measured for an earlier --json; --every-grid lists each
with the parts of its time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
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
    grids_3d,
    grids_4d,
    name_of,
    preset,
    settings,
    write_data,
)
from plan_lab.compared import Compared
from plan_lab.places import Here, on_nodes
from plan_lab.predicted import beside, memory_of, of_product, of_step, simulated

from pmm3d.errors import Pmm3dError
from pmm3d.model.machines import Machine, machine_from

SIMULATED = ("1x1x1x8", "1x1x8", "8x1x1", "1x8x1", "2x2x2", "1x1x2x4", "2x1x2x2", "1x2x1x4")
MEASURE = "measure"
"""The command of the ranks: a task and its result."""


class Bench:
    """The options of a run, and what an earlier one had measured."""

    def __init__(self, options: argparse.Namespace, folder: Path):
        self.options, self.folder = options, folder
        self.machines: dict[str, str] = {}
        self.found: list[Compared] = []
        self._before = json.loads(options.again.read_text()) if options.again else None

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

    def measure(self, place: Here, kind: str, **asked: Any) -> list[measured.Measurement]:
        """Of that place, or what was measured there before, of what is asked for now."""
        if self._before:
            wanted = asked["products"] if kind == "products" else [*asked["networks"]]
            found = {one["what"]: one for one in self._before["found"]
                     if one["where"] == str(place) and one["kind"] == kind}
            if missing := [what for what in wanted if what not in found]:
                raise Pmm3dError(f"{self.options.again} has no {', '.join(missing)} on {place}: "
                                 "measure without --again")
            return [found[what] for what in wanted]
        return place.measure(kind, rounds=self.options.rounds, **asked)

    def settings(self, name: str, *others: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Of a network, whose data is written."""
        write_data(NETWORKS[name], self.folder)
        return settings(NETWORKS[name], self.folder, *others)

    def keep(self) -> None:
        """The figures and the picture of what was measured so far, where they are asked for."""
        if not self.found:
            return
        if self.options.json:
            kept = {"machines": self.machines, "found": [one.as_json() for one in self.found]}
            self.options.json.write_text(json.dumps(kept, indent=1))
        if self.options.plot:
            compared.draw(self.found, self.options.plot)


def compare_products(bench: Bench, place: Here) -> None:
    machine = bench.machine(place)
    grids = [name_of(grid) for grid in grids_3d(place.ranks)]
    found = bench.measure(place, "products", products=[*map(str, bench.options.products)], grids=grids)
    for one in found:
        bench.found.append(beside(one, "products", place, of_product(one["what"], place.ranks, machine)))


def compare_steps(bench: Bench, place: Here) -> None:
    machine, configs = bench.machine(place), {name: bench.settings(name) for name in bench.options.networks}
    grids = [name_of(grid) for grid in grids_4d(place.ranks)]
    for one in bench.measure(place, "steps", networks=configs, grids=grids):
        bench.found.append(beside(one, "steps", place, of_step(configs[one["what"]], place.ranks, machine)))


def products(bench: Bench) -> None:
    for ranks in bench.options.ranks or (4, 8):
        compare_products(bench, Here(ranks))
    show(bench.found, bench.options)


def steps(bench: Bench) -> None:
    for ranks in bench.options.ranks or (8,):
        compare_steps(bench, Here(ranks))
    show(bench.found, bench.options, presets=True)


def across_nodes(bench: Bench) -> None:
    options = bench.options
    for nodes in options.nodes:
        for ranks in options.ranks or (8,):
            with on_nodes(nodes, ranks, options.rate) as place:
                compare_products(bench, place)
                compare_steps(bench, place)
    show([one for one in bench.found if one.what not in NETWORKS], options)
    show([one for one in bench.found if one.what in NETWORKS], options, presets=True)
    print(compared.inner_axes(bench.found))


def show(found: Sequence[Compared], options: argparse.Namespace, *, presets: bool = False) -> None:
    if options.every_grid:
        print("\n\n".join(map(compared.every_grid, found)) + "\n")
    if found:
        print(f"{compared.table(found, presets=presets)}\n\n{compared.totals(found, presets=presets)}\n")


def simulation(bench: Bench) -> None:
    for ranks in bench.options.ranks or (8,):
        place = Here(ranks)
        machine, grids = bench.machine(place), SIMULATED if ranks == 8 else [*map(name_of, grids_4d(ranks))]
        configs = {f"{name}, {what}": bench.settings(name, {"overlap": section})
                   for name in bench.options.networks for what, section in OVERLAPS.items()}
        for one in bench.measure(place, "steps", networks=configs, grids=[*grids]):
            said = {grid: simulated(configs[one["what"]], grid, machine) for grid in one["rounds"]}
            bench.found.append(Compared(one["what"], str(place), one["rounds"], said, kind="steps", spent=one["spent"]))
        print(compared.grid_by_grid([one for one in bench.found if one.where == str(place)]) + "\n")


def memory(bench: Bench) -> None:
    write_data(MEMORY, bench.folder)
    for ranks in bench.options.ranks or (8,):
        grids = [grid for grid in grids_4d(ranks) if preset(grid) or min(grid[:3]) > 1]
        configs = {f"{preset(grid)} {name_of(grid)}, {what}".strip():
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
    parser.add_argument("--ranks", type=int, nargs="+", metavar="P", help="(products: 4 8; else 8)")
    parser.add_argument("--rounds", type=int, help="over all grids (5)")
    parser.add_argument("--products", type=Product.named, nargs="+", metavar="MxNxK:DTYPE",
                        help=f"({' '.join(map(str, PRODUCTS))})")
    parser.add_argument("--networks", nargs="*", choices=NETWORKS, metavar="NAME",
                        help=f"({' '.join(NETWORKS)})")
    parser.add_argument("--nodes", type=int, nargs="+", metavar="N", help="of cluster (2 4)")
    parser.add_argument("--rate", help="of the links of cluster (4gbit)")
    parser.add_argument("--machines", type=Path, metavar="FOLDER", help="of machine files; missing ones are written")
    parser.add_argument("--again", type=Path, metavar="FILE", help="an earlier --json: measure nothing, predict anew")
    parser.add_argument("--every-grid", action="store_true", default=None,
                        help="list all grids, with the parts of their time")
    parser.add_argument("--json", type=Path, help="keep all figures here")
    parser.add_argument("--plot", type=Path, help="draw measured against predicted times here")
    options = parser.parse_args(words)
    given = {name for name, value in vars(options).items() if value is not None} - {"command"}
    if foreign := sorted(given - OPTIONS_OF[options.command]):
        parser.error(f"{options.command} takes no {', '.join('--' + name.replace('_', '-') for name in foreign)}")
    for name in DEFAULTS.keys() - given:
        setattr(options, name, DEFAULTS[name])
    return options


def main(words: list[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    if words[:1] == [MEASURE]:
        measured.run(*map(Path, words[1:]))
        return 0
    options = parsed(words)
    try:
        with TemporaryDirectory(prefix="plan-bench-") as folder:
            bench = Bench(options, Path(folder))
            try:
                COMMANDS[options.command](bench)
            finally:
                bench.keep()
    except (ProgramError, ClusterError, Pmm3dError) as problem:
        print(f"plan_bench: {problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
