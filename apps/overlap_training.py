"""What the overlaps hide: the time of a training step with none, then OAR, ORS, OAG and the data-axis buckets added.

    python apps/cluster.py run --nodes 2 --rate 4gbit -- apps/overlap_training.py --grids 2x1x1x1 1x1x2x1 1x1x1x2

Worth running across nodes: within one node there is little to hide. Rounds over the stages are interleaved, so that a
busy moment of the machine touches all of them. Prints a table for each grid: the step, computing, and waiting per kind
of collective, in ms of the mean rank; and the share of the waiting that the overlaps hide.
"""

import argparse
import hashlib
import json
import time
from dataclasses import replace
from statistics import median

import numpy as np
from mpi4py import MPI

from pmm3d import DistMatrix, Grid, nn
from pmm3d.layout import batch_layout
from pmm3d.nn import optim

STAGES = {
    "none": nn.Overlap.none(),
    "+ OAR": nn.Overlap(oar=True, ors=False, oag=False, buckets=False),
    "+ ORS": nn.Overlap(oar=True, ors=True, oag=False, buckets=False),
    "+ OAG": nn.Overlap(oar=True, ors=True, oag=True, buckets=False),
    "+ buckets": nn.Overlap(),
}
KINDS = ("gather W", "reduce O", "reduce dI", "reduce dW", "reduce data")


class Training:
    """A network and one batch on a grid, the same numbers every time."""

    def __init__(self, grid: Grid, options):
        width = options.width
        self.grid, self.tape = grid, nn.Tape.of(grid)
        self.net = nn.MLP(grid, [width] * (options.layers + 1), nn.relu, bias=False, seed=1)
        self.optimizer = optim.SGD(self.net.parameters(), lr=0.1)
        self.x = DistMatrix.random(grid, (options.batch, width), seed=2, dtype="float32", layout=batch_layout("y"))
        self.y = DistMatrix.random(grid, (options.batch, width), seed=3, dtype="float32", layout=self.net.output_layout)

    def step(self, overlap) -> dict:
        """One step; its figures: seconds of the slowest rank, the others means over the ranks."""
        self.tape.parallel.overlap = overlap
        ledger = self.grid.ledger
        ledger.entries.clear()
        self.grid.comm.Barrier()
        begun = time.perf_counter()
        nn.mse(self.net(self.x), self.y).backward()
        self.optimizer.step()
        seconds = time.perf_counter() - begun
        figures = {"step": max(self.grid.comm.allgather(seconds)), "computing": self._mean(ledger.total().computed)}
        return figures | {kind: self._mean(ledger.total(phase=kind).waited) for kind in KINDS}

    def _mean(self, value: float) -> float:
        return sum(self.grid.comm.allgather(value)) / self.grid.size

    def digest(self) -> str:
        """Of this rank's weights."""
        weights = [np.ascontiguousarray(parameter.local).tobytes() for parameter in self.net.parameters()]
        return hashlib.blake2b(b"".join(weights)).hexdigest()


def with_options(overlap, options):
    return replace(overlap, reshard_after_forward=not options.keep, bucket_bytes=options.bucket_bytes)


def measure(grid: Grid, options) -> dict[str, dict[str, float]]:
    """Stage -> medians of the figures, in ms."""
    training = Training(grid, options)
    found: dict[str, list[dict]] = {stage: [] for stage in STAGES}
    for turn in range(options.rounds + 1):
        for stage, overlap in STAGES.items():
            figures = training.step(with_options(overlap, options))
            if turn:
                found[stage].append(figures)
    middle = lambda runs: {name: 1e3 * median(run[name] for run in runs) for name in runs[0]}
    return {stage: middle(runs) for stage, runs in found.items()}


def same_weights(comm, shape, options) -> bool:
    """Whether three steps in every stage, from the same start, give the same bits on every rank."""
    digests = set()
    for overlap in STAGES.values():
        with Grid(comm, shape[:3], shape[3]) as grid:
            training = Training(grid, options)
            for _ in range(3):
                training.step(with_options(overlap, options))
            digests.add(tuple(comm.allgather(training.digest())))
    return len(digests) == 1


def waiting(figures: dict) -> float:
    return sum(figures[kind] for kind in KINDS)


def show(grid: Grid, found: dict, same: bool | None, options) -> None:
    kinds = [kind for kind in KINDS if any(figures[kind] > 0.05 for figures in found.values())]
    first, last = found["none"], found["+ buckets"]
    print(f"\ngrid {grid.shape}, {grid.hosts} hosts: {options.layers} layers of {options.width}, batch "
          f"{options.batch}, float32; medians of {options.rounds}, ms")
    print("| overlap | step | computing | " + " | ".join(f"wait {kind}" for kind in kinds) + " | waiting |")
    print("|---|" + "---|" * (len(kinds) + 3))
    for stage, figures in found.items():
        cells = [figures["step"], figures["computing"], *(figures[kind] for kind in kinds), waiting(figures)]
        print(f"| {stage} | " + " | ".join(f"{cell:.1f}" for cell in cells) + " |")
    print(f"communication {waiting(first) / first['step']:.0%} of the step without overlap; "
          f"{1 - waiting(last) / max(1e-9, waiting(first)):.0%} of it hidden; the step is "
          f"{1 - last['step'] / first['step']:.1%} shorter"
          + ("" if same is None else f"; weights bitwise alike in all stages: {'yes' if same else 'NO'}"), flush=True)


def traced(grid: Grid, options) -> None:
    """Write a trace of the second step with all overlaps on, and say how much of the messages lay under GEMMs."""
    training = Training(grid, options)
    for _ in range(2):
        grid.ledger.reset()
        training.step(with_options(STAGES["+ buckets"], options))
    events = grid.ledger.chrome_events()
    spans = lambda chosen: [(event["ts"], event["ts"] + event["dur"]) for event in events if chosen(event)]
    flights, gemms = spans(lambda event: event["tid"].startswith("axis")), spans(lambda event: event["name"] == "gemm")
    under = sum(max(0.0, min(end, stop) - max(start, begun)) for start, end in flights for begun, stop in gemms)
    total = sum(end - start for start, end in flights)
    if grid.rank == 0:
        print(f"trace, rank 0: collectives were under way for {total / 1e3:.0f} ms in sum, {under / total:.0%} of it "
              f"under GEMMs ({options.trace})")
    grid.write_trace(options.trace)


def draw(results: dict, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panes = pyplot.subplots(1, len(results), figsize=(1 + 3.2 * len(results), 3.8), squeeze=False)
    for axes, (name, found) in zip(panes[0], results.items()):
        floor = [0.0] * len(found)
        other = [max(0.0, run["step"] - run["computing"] - waiting(run)) for run in found.values()]
        parts = {"computing": [run["computing"] for run in found.values()], "other": other}
        parts |= {f"wait: {kind}": [run[kind] for run in found.values()] for kind in KINDS}
        for label, heights in parts.items():
            axes.bar(list(found), heights, bottom=floor, label=label)
            floor = [low + height for low, height in zip(floor, heights)]
        axes.set_ylim(0, 1.05 * max(floor))
        axes.set_title(name)
        axes.tick_params(axis="x", rotation=45)
    panes[0][0].set_ylabel("ms of a step")
    panes[0][-1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grids", nargs="+", required=True,
                        help="GxxGyxGzxGdata, as in 1x1x2x1, or with width and batch, 1x1x2x1:1024:1536")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=1024, help="of the whole grid (1024)")
    parser.add_argument("--bucket-bytes", type=int, default=2**22)
    parser.add_argument("--keep", action="store_true", help="keep gathered weights for the backward pass")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each kind; medians are printed (5)")
    parser.add_argument("--check", action="store_true", help="compare the weights of all stages, bit for bit")
    parser.add_argument("--plot", help="draw stacked bars here")
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--trace", help="write a Chrome trace of a step with all overlaps on the last grid here")
    options = parser.parse_args()
    comm, results = MPI.COMM_WORLD, {}
    for text in options.grids:
        grid_text, *sizes = text.split(":")
        options.width, options.batch = map(int, sizes or (options.width, options.batch))
        shape = [int(part) for part in grid_text.split("x")]
        same = same_weights(comm, shape, options) if options.check else None
        with Grid(comm, shape[:3], shape[3], trace=bool(options.trace)) as grid:
            results[text] = measure(grid, options)
            if grid.rank == 0:
                show(grid, results[text], same, options)
            if options.trace and text == options.grids[-1]:
                traced(grid, options)
    if comm.rank == 0:
        if options.json:
            with open(options.json, "w") as file:
                json.dump(results, file, indent=1)
        if options.plot:
            draw(results, options.plot)


if __name__ == "__main__":
    main()
