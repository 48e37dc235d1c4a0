"""Memory of training steps by technique: predicted by a dry run, measured, with the time and the loss beside those of
the same network without the technique.

    python -m pmm3d.launcher -n 1 benchmarks/memory.py
    python -m pmm3d.launcher -n 4 benchmarks/memory.py --grid 1x1x2x2 --presets "small GPT" MLP

predicted   largest number of bytes of all arrays of the library at a time, in a dry run of this rank
held        the same number, measured in a step (`nn.trace_memory`). Both are of the rank with most
buffers     bytes of weights, gradients and states, and of the buffers of the workspace, in use or not
resident    growth of the peak resident memory of the process since the network was made. A process has one peak, so it
            is measured with one preset and one technique only
ms          milliseconds of a step on the slowest rank, the median of the rounds. The techniques take turns
of none     time of a step without the technique / time with it, the median of the ratios of a round
loss        after the steps, which are the same number for all techniques
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from statistics import median
from typing import Any

from mpi4py import MPI
from records import parser, report
from timing import all_rounds, slowest

from pmm3d import DistMatrix, Grid, nn
from pmm3d.errors import Pmm3dError
from pmm3d.layout import batch_layout
from pmm3d.model.machine import peak_memory, resident_memory
from pmm3d.nn.dry import dry_grid
from pmm3d.nn.memory_trace import FIXED, MemoryTrace
from pmm3d.nn.optimizer_state import note_memory
from pmm3d.nn.training import network as of_configuration
from pmm3d.nn.training.config import Config, checked
from pmm3d.nn.training.evaluation import loss_named
from pmm3d.nn.training.step import train_step
from pmm3d.nn.transformer import token_layout

MEBIBYTE = 2**20
GPT = {"kind": "gpt", "layers": 4, "hidden": 256, "heads": 4}
PRESETS: Mapping[str, tuple[dict[str, Any], int]] = {
    "small GPT": ({"data": {"sequence": 256, "batch_size": 8}, "network": GPT}, 4096),
    "wide vocabulary": ({"data": {"sequence": 256, "batch_size": 4}, "network": GPT | {"layers": 1}}, 32768),
    "MLP": ({"data": {"batch_size": 2048}, "network": {"hidden": [1024] * 5}}, 1024),
}
"""Name -> (sections of a configuration, vocabulary or columns of the targets)."""
QUICK = {
    "small GPT": ({"data": {"sequence": 16, "batch_size": 4}, "network": GPT | {"hidden": 16, "layers": 2}}, 64),
    "wide vocabulary": ({"data": {"sequence": 16, "batch_size": 4}, "network": GPT | {"hidden": 16, "layers": 1}}, 512),
    "MLP": ({"data": {"batch_size": 64}, "network": {"hidden": [64, 64]}}, 64),
}
NONE = "none"
TECHNIQUES: Mapping[str, dict[str, Any]] = {
    NONE: {},
    "loss by tiles": {"memory.loss_tiles": 256},
    "MLP by tiles": {"memory.mlp_tiles": 256},
    "recompute selective": {"network.recompute": "selective"},
    "recompute every 2": {"network.recompute": 2},
    "recompute full": {"network.recompute": "full"},
    "recompute in 64 MiB": {"network.recompute": "64 MiB"},
    "offload activations": {"memory.offload": ["activations"]},
    "offload states": {"memory.offload": ["states"]},
    "ZeRO-1": {"optimizer.shard_over_data": "states"},
    "ZeRO-2": {"optimizer.shard_over_data": "gradients"},
    "states int8": {"optimizer.states": "int8"},
    "states bfloat16": {"optimizer.states": "bfloat16"},
    "keep bfloat16": {"memory.keep": {"*": "bfloat16"}},
    "keep int8": {"memory.keep": {"*": "int8"}},
    "gradients int8": {"memory.gradients": "int8"},
    "weights int8": {"memory.weights": "int8"},
}
"""Name -> keys of a configuration. `--techniques` chooses some of them."""


class Training:
    """Steps of a configuration on a grid, with data or without."""

    def __init__(self, grid: Grid, config: Config, outputs: int):
        self.grid, self.tokens = grid, config.data.sequence is not None
        own = of_configuration.Own.of(config, grid)
        of_configuration.set_messages(config, grid)
        features = 1 if self.tokens else outputs
        sizes = of_configuration.layer_sizes(config, features, outputs)
        self.network, layout = of_configuration.make_network(config, grid, sizes, own.network)
        self.optimizer = of_configuration.make_optimizer(config, self.network, own)
        of_configuration.set_offload(config, self.network, self.optimizer)
        rows, length = config.data.batch_size, config.data.sequence or 1
        if self.tokens:
            form = {"dtype": "int64", "layout": token_layout(grid, length)}
            x, y = (
                DistMatrix.from_function(grid, (rows * length, 1), lambda i, j, k=k: (7 * i + k) % outputs, **form)
                for k in (0, 7)
            )
            x.labels_below = y.labels_below = outputs
        else:
            x, y = (
                DistMatrix.random(grid, (rows, outputs), seed=seed, dtype="float32", layout=each)
                for seed, each in ((2, batch_layout("y")), (3, batch_layout(layout.cols[0])))
            )
        self.batch, self.loss = (x, y), loss_named("cross_entropy" if self.tokens else "mse")

    def step(self) -> float:
        return train_step(self.network, self.optimizer, self.loss, [self.batch], 1.0)[0]

    def buffers(self) -> int:
        """Bytes of weights, gradients, states and the buffers of the workspace."""
        note_memory(self.grid)
        return sum(self.grid.ledger.memory[kind] for kind in FIXED) + self.grid.workspace.allocated

    def traced(self) -> MemoryTrace:
        """The memory of the third step."""
        for _ in range(2):
            self.step()
        with nn.trace_memory(self.network) as trace:
            self.step()
        return trace


def configured(sections: Mapping[str, Any], settings: Mapping[str, Any], folder: str) -> Config:
    """Return the configuration with these settings. Raises Pmm3dError if they do not fit."""
    made = {name: dict(section) for name, section in sections.items()}
    made["data"] |= {"file": "nowhere.h5"}
    made["overlap"] = {"reshard_after_forward": True}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        made.setdefault(section, {})[name] = value
    if "offload" in made.get("memory", {}):
        made["memory"]["store"] = folder
    return checked(made)


def rows_of(preset: str, options: argparse.Namespace, folder: str) -> list[list[str]]:
    """Return the rows of the table of a preset. A technique that is refused has its reason."""
    sections, outputs = (QUICK if options.quick else PRESETS)[preset]
    made, rows, refused = dict[str, Training](), list[list[str]](), dict[str, str]()
    figures, single = dict[str, list[int]](), len(options.presets) == len(options.techniques) == 1
    *shape, data = (int(part) for part in options.grid.split("x"))
    with ExitStack() as stack:
        for name in options.techniques:
            grid, before = stack.enter_context(Grid(MPI.COMM_WORLD, shape, data)), resident_memory()
            try:
                config = configured(sections, TECHNIQUES[name], folder)
                with dry_grid(grid) as dry:
                    said = Training(dry, config, outputs).traced().most
                made[name] = training = Training(grid, config, outputs)
                held = training.traced().most
            except (Pmm3dError, ValueError) as error:
                refused[name] = str(error).splitlines()[-1]
                made.pop(name, None)
                continue
            sizes = said, held, training.buffers(), single * (peak_memory() - before)
            figures[name] = [max(grid.comm.allgather(each)) for each in sizes]
        measure: Callable[[str], float] = lambda name: slowest(made[name].grid.comm, made[name].step, options.steps)
        times = all_rounds(made, measure, options.rounds)
        losses = {name: each.step() for name, each in made.items()}
    for name in options.techniques:
        if name in refused:
            rows.append([preset, name, *[""] * 6, f"refused: {refused[name]}"])
            continue
        ratios = [own / each for own, each in zip(times[NONE], times[name])] if NONE in times else [1.0]
        rows.append(
            [
                preset,
                name,
                *(f"{each / MEBIBYTE:.2f}" if each else "" for each in figures[name]),
                f"{1e3 * median(times[name]):.1f}",
                f"{median(ratios):.3f}",
                f"{losses[name]:.6g}",
            ]
        )
    return rows


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--grid", default="", help="GxxGyxGzxGdata (default: all ranks along data)")
    made.add_argument("--presets", nargs="+", default=[*PRESETS], choices=[*PRESETS])
    made.add_argument("--techniques", nargs="+", default=[*TECHNIQUES], choices=[*TECHNIQUES])
    for name, default in (("--steps", 3), ("--rounds", 5)):
        made.add_argument(name, type=int, default=default, help=f"({default})")
    options = made.parse_args()
    if options.quick:
        options.steps = options.rounds = 1
    options.grid = options.grid or f"1x1x1x{MPI.COMM_WORLD.size}"
    rows = [["preset", "technique", "predicted", "held", "buffers", "resident", "ms", "of none", "loss"]]
    with tempfile.TemporaryDirectory() as own:
        folder = MPI.COMM_WORLD.bcast(own)
        for preset in options.presets:
            rows += rows_of(preset, options, folder)
        MPI.COMM_WORLD.Barrier()
    if MPI.COMM_WORLD.rank == 0:
        report(options, (f"Grid {options.grid} (x, y, z, data), AdamW, float32; MiB of the largest rank", rows))


if __name__ == "__main__":
    main()
