"""What the overlaps hide: the time of a training step with none, then OAR, ORS, OAG and the data-axis buckets added;
with sharded activations also that of rows multiplied as they come.

    python apps/cluster.py run --nodes 2 --rate 4gbit -- apps/overlap_training.py --grids 2x1x1x1 1x1x2x1 1x1x1x2
    python apps/cluster.py run --nodes 2 --rate 4gbit -- apps/overlap_training.py --grids 2x1x1x1 --activations sharded

Worth running across nodes: within one node there is little to hide. Prints a table for each grid: the step, computing,
and waiting per kind of collective, in ms of the mean rank; and the share of the waiting that the overlaps hide.
"""

import argparse
import hashlib
from dataclasses import replace

from measuring import Figures, in_turns, markdown, slowest
from mpi4py import MPI

from pmm3d import DistMatrix, Grid, nn
from pmm3d.layout import GridShape, batch_layout
from pmm3d.nn import optim

# Gathered weights are dropped after the forward pass, so that all stages have the same messages.
NONE = nn.Overlap.none(reshard_after_forward=True, bucket_bytes=2**22)
STAGES = {
    "none": NONE,
    "+ OAR": replace(NONE, oar=True),
    "+ ORS": replace(NONE, oar=True, ors=True),
    "+ OAG": replace(NONE, oar=True, ors=True, oag=True),
    "+ buckets": replace(NONE, oar=True, ors=True, oag=True, buckets=True),
}
SHARDED = STAGES | {"+ decomposed": replace(STAGES["+ buckets"], decomposed=True)}
KINDS = ("gather W", "gather I", "gather dO", "reduce O", "reduce dI", "reduce dW", "reduce data")


class Training:
    """A network and one batch on a grid, the same numbers every time."""

    def __init__(self, grid: Grid, activations: str, layers: int, width: int, batch: int):
        self.grid, self.stages = grid, SHARDED if activations == "sharded" else STAGES
        self.net = nn.MLP(grid, [width] * (layers + 1), nn.relu, bias=False, seed=1, activations=activations)
        self.optimizer = optim.SGD(self.net.parameters(), lr=0.1)
        self.x = DistMatrix.random(grid, (batch, width), seed=2, dtype="float32", layout=batch_layout("y"))
        self.y = DistMatrix.random(grid, (batch, width), seed=3, dtype="float32", layout=self.net.output_layout)

    def step(self, stage: str) -> Figures:
        """One step; its figures: seconds of the slowest rank, the others means over the ranks."""
        comm, ledger = self.grid.comm, self.grid.ledger
        nn.Tape.of(self.grid).parallel.overlap = self.stages[stage]
        ledger.entries.clear()
        seconds = slowest(comm, self._step)
        spent = {"computing": ledger.total().computed, **{kind: ledger.total(phase=kind).waited for kind in KINDS}}
        return {"step": seconds, **{name: comm.allreduce(seconds) / comm.size for name, seconds in spent.items()}}

    def _step(self) -> None:
        nn.mse(self.net(self.x), self.y).backward()
        self.optimizer.step()

    def digest(self) -> str:
        """Of this rank's weights."""
        return hashlib.blake2b(b"".join(parameter.local.tobytes() for parameter in self.net.parameters())).hexdigest()


def measure(training: Training, rounds: int) -> dict[str, Figures]:
    """Stage -> medians of the figures, in ms, and the waiting in sum."""
    results = in_turns(training.stages, training.step, rounds)
    for figures in results.values():
        figures["waiting"] = sum(figures[kind] for kind in KINDS)
    return {stage: {name: 1e3 * seconds for name, seconds in figures.items()} for stage, figures in results.items()}


def same_weights(comm: MPI.Intracomm, shape: GridShape, activations: str, *sizes: int) -> bool:
    """Whether three steps in every stage, from the same start, give the same bits on every rank."""
    digests = set()
    for stage in SHARDED if activations == "sharded" else STAGES:
        with Grid(comm, shape[:3], shape.data) as grid:
            training = Training(grid, activations, *sizes)
            for _ in range(3):
                training.step(stage)
            digests.add(tuple(comm.allgather(training.digest())))
    return len(digests) == 1


def show(results: dict[str, Figures]) -> None:
    kinds = [kind for kind in KINDS if any(figures[kind] > 0.05 for figures in results.values())]
    rows = [[stage, *(f"{figures[name]:.1f}" for name in ("step", "computing", *kinds, "waiting"))]
            for stage, figures in results.items()]
    print(markdown([["overlap", "step", "computing", *(f"wait {kind}" for kind in kinds), "waiting"], *rows]))
    first, last = results["none"], list(results.values())[-1]
    print(f"communication {first['waiting'] / first['step']:.0%} of the step without overlap; "
          f"{1 - last['waiting'] / max(1e-9, first['waiting']):.0%} of it hidden; the step is "
          f"{1 - last['step'] / first['step']:.1%} shorter", flush=True)


def trace(training: Training, path: str) -> None:
    """Write a trace of the second step with all overlaps on, and say how much of the messages lay under GEMMs."""
    grid = training.grid
    for _ in range(2):
        grid.ledger.reset()
        training.step(list(training.stages)[-1])
    events = grid.ledger.events
    spans = lambda chosen: [(event["ts"], event["ts"] + event["dur"]) for event in events if chosen(event)]
    flights, gemms = spans(lambda event: event["tid"].startswith("axis")), spans(lambda event: event["name"] == "gemm")
    under = sum(max(0.0, min(end, stop) - max(start, begun)) for start, end in flights for begun, stop in gemms)
    total = sum(end - start for start, end in flights)
    if grid.rank == 0:
        print(f"trace, rank 0: collectives were under way for {total / 1e3:.0f} ms in sum, "
              f"{under / max(1e-9, total):.0%} of it under GEMMs ({path})")
    grid.write_trace(path)


def draw(results: dict[str, dict[str, Figures]], path: str) -> None:
    """Stacked bars, a pane for each grid."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1 + 3.2 * len(results), 3.8), layout="constrained")
    panes = figure.subplots(1, len(results), squeeze=False)[0]
    for axes, (name, found) in zip(panes, results.items()):
        floor = [0.0] * len(found)
        parts = {"computing": [run["computing"] for run in found.values()],
                 "other": [max(0.0, run["step"] - run["computing"] - run["waiting"]) for run in found.values()],
                 **{f"wait: {kind}": [run[kind] for run in found.values()] for kind in KINDS}}
        for label, heights in parts.items():
            axes.bar(list(found), heights, bottom=floor, label=label)
            floor = [low + height for low, height in zip(floor, heights)]
        axes.set(title=name, ylim=(0, 1.05 * max(floor)))
        axes.tick_params(axis="x", rotation=45)
    panes[0].set_ylabel("ms of a step")
    panes[-1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grids", nargs="+", required=True,
                        help="GxxGyxGzxGdata, as in 1x1x2x1, or with width and batch, 1x1x2x1:1024:1536")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=1024, help="of the whole grid (1024)")
    parser.add_argument("--activations", choices=("replicated", "sharded"), default="replicated",
                        help="over the axis that a layer sums over (replicated)")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each kind; medians are printed (5)")
    parser.add_argument("--check", action="store_true", help="compare the weights of all stages, bit for bit")
    parser.add_argument("--plot", help="draw stacked bars here")
    parser.add_argument("--trace", help="write a Chrome trace of a step with all overlaps on the last grid here")
    options = parser.parse_args()
    comm, results = MPI.COMM_WORLD, {}
    for text in options.grids:
        grid_text, *sizes = text.split(":")
        width, batch = map(int, sizes or (options.width, options.batch))
        shape = GridShape(*map(int, grid_text.split("x")))
        sizes = options.activations, options.layers, width, batch
        with Grid(comm, shape[:3], shape.data, trace=bool(options.trace)) as grid:
            training = Training(grid, *sizes)
            results[text] = measure(training, options.rounds)
            if grid.rank == 0:
                print(f"\ngrid {grid.shape}, {grid.hosts} hosts: {options.layers} layers of {width}, batch {batch}, "
                      f"float32; medians of {options.rounds}, ms")
                show(results[text])
            if options.trace and text == options.grids[-1]:
                trace(training, options.trace)
        if options.check:
            same = same_weights(comm, shape, *sizes)
            if comm.rank == 0:
                print(f"weights bitwise alike in all stages: {'yes' if same else 'NO'}", flush=True)
    if options.plot and comm.rank == 0:
        draw(results, options.plot)


if __name__ == "__main__":
    main()
