"""A step of a pipeline: pmm3d compared with torch.distributed.pipelining on gloo, in the same processes, in turns.

    python benchmarks/pipeline_rivals.py                                              (2 and 4 ranks, two passes)
    python benchmarks/pipeline_rivals.py --ranks 2 --schedules 1f1b --rounds 20

Both train the perceptron of torch_rivals.py (float32, plain SGD, the mean squared error) on torch arrays, with the same
weights, batch, micro-batches, cut and table of actions, and one thread per rank: 1F1B with one stage on each rank, the
interleaved zero bubble and ZB-V with two. The losses must be equal. In each round every contestant takes some steps,
and the order changes. A pass is a separate job. Figures are medians over the rounds of both passes.

ms          milliseconds of a step on the slowest rank, with the update. In pmm3d, the ranks also agree on loss and norm
bubble      fraction of the time from a rank's first action to its last one in which the rank with the most work does
            not compute (Qi et al., arXiv 2401.10241), in the middle step of a round
simulated   the bubble in the simulation, with the mean times of these actions, and messages that take no time

With more ranks than cores, ranks share cores: actions take longer, and waits are hidden.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from statistics import median
from typing import Any

from mpi4py import MPI
from records import parser, report
from timing import all_rounds, on_ranks, one_thread
from torch_rivals import batch_of, keep_to_cores, weights

from pmm3d import DistMatrix, Grid, nn
from pmm3d.layout import batch_layout
from pmm3d.nn import optim
from pmm3d.nn.pipeline import time_lines
from pmm3d.nn.training.step import train_step

SCHEDULES = {"1f1b": ("1F1B", 1), "interleaved-zero-bubble": ("InterleavedZeroBubble", 2), "zb-v": ("ZBVZeroBubble", 2)}
"""Name -> torch's name, and number of stages of a rank."""
SIZES = ("layers", "width", "rows", "micro_batches", "steps", "rounds")
QUICK = {"layers": 8, "width": 16, "rows": 8, "micro_batches": 4, "steps": 1, "rounds": 1, "passes": 1, "ranks": [2]}
LEARNING_RATE = 1.0
TOLERANCE = 1e-4
"""Largest relative difference of the losses."""
Step = Callable[[], float]
"""A step, which returns the loss: for pmm3d on all ranks, for torch on the rank with the last stage, and 0 on the
others."""
Acted = tuple[str, float, float]


class TorchPipeline:
    """The stages of this rank, and torch's schedule. actions: the actions of the last step, with their times."""

    def __init__(self, name: str, sizes: Namespace, comm: MPI.Intracomm):
        import torch
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

        self._torch, self.actions = torch, list[Acted]()
        pipeline = self

        class Stage(PipelineStage):
            """Records the times of its actions."""

            def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
                with Noted(pipeline.actions, f"{self.stage_index}F{fwd_chunk_id}"):
                    return super().forward_one_chunk(fwd_chunk_id, *args, **options)

            def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> None:
                kind = "B" if options.get("full_backward", True) else "I"
                with Noted(pipeline.actions, f"{self.stage_index}{kind}{bwd_chunk_id}"):
                    super().backward_one_chunk(bwd_chunk_id, *args, **options)

            def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> None:
                with Noted(pipeline.actions, f"{self.stage_index}W{bwd_chunk_id}"):
                    super().backward_weight_one_chunk(bwd_chunk_id, *args, **options)

        kind, chunks = SCHEDULES[name]
        number, numbers = chunks * comm.size, own_stages(name, comm.rank, comm.size)
        stages = [Stage(self._layers(sizes, stage, number), stage, number, torch.device("cpu")) for stage in numbers]
        made = get_schedule_class(kind)
        whole = issubclass(made, PipelineScheduleMulti)
        self._schedule = made(stages if whole else stages[0], sizes.micro_batches, self._loss)
        self._optimizer = torch.optim.SGD(
            [weight for stage in stages for weight in stage.submod.parameters()], LEARNING_RATE, fused=True
        )
        inputs, targets = map(torch.from_numpy, batch_of(sizes.rows * sizes.micro_batches, sizes.width))
        self._inputs = (inputs,) if 0 in numbers else ()
        self._targets = targets if number - 1 in numbers else None

    def _layers(self, sizes: Namespace, stage: int, stages: int) -> Any:
        """The layers of a stage, with an activation after each layer but the last one of the network."""
        torch, parts = self._torch, []
        for index in range(stage * sizes.layers // stages, (stage + 1) * sizes.layers // stages):
            layer = torch.nn.Linear(sizes.width, sizes.width, bias=False)
            layer.weight.data.copy_(torch.from_numpy(weights(index, sizes.width)).T)
            parts += [layer, torch.nn.ReLU()]
        return torch.nn.Sequential(*(parts[:-1] if stage == stages - 1 else parts))

    def _loss(self, output: Any, target: Any) -> Any:
        """The mean squared error. Its time is part of the last stage's forward pass."""
        loss = self._torch.nn.functional.mse_loss(output, target)
        if self.actions:  # not in the trial run in which torch determines shapes
            action, start, _ = self.actions[-1]
            self.actions[-1] = action, start, time.time()
        return loss

    def __call__(self) -> float:
        self.actions.clear()
        losses: list[Any] = []
        self._optimizer.zero_grad()
        self._schedule.step(*self._inputs, target=self._targets, losses=losses, return_outputs=False)
        self._optimizer.step()
        return sum(loss.item() for loss in losses) / len(losses) if losses else 0.0


class Noted:
    """As a context: an action whose time is appended to a list."""

    def __init__(self, actions: list[Acted], action: str):
        self._actions, self._action = actions, action

    def __enter__(self) -> None:
        self._begun = time.time()

    def __exit__(self, *_: object) -> None:
        self._actions.append((self._action, self._begun, time.time()))


def own_stages(name: str, rank: int, ranks: int) -> list[int]:
    """The stages of a rank: r, r + p, ...; for ZB-V r and 2p - 1 - r."""
    if name == "zb-v":
        return [rank, 2 * ranks - 1 - rank]
    return list(range(rank, SCHEDULES[name][1] * ranks, ranks))


class OurPipeline:
    """The same contestant by pmm3d."""

    def __init__(self, name: str, sizes: Namespace, grid: Grid):
        import torch

        make = lambda stage: nn.MLP(
            stage, [sizes.width] * (sizes.layers + 1), nn.relu, bias=False, seed=0, dtype="float32"
        )
        self._grid, self._net = grid, nn.Pipeline(grid, make, schedule=name)
        stage = self._net.grid
        for path, parameter in self._net.named_parameters().items():
            values = torch.from_numpy(weights(int(path.split(".")[0]) // 2, sizes.width))
            parameter.assign(DistMatrix.from_global(stage, values, layout=parameter.layout))
        self._optimizer = optim.SGD(self._net.parameters(), lr=LEARNING_RATE)
        both = [*map(torch.from_numpy, batch_of(sizes.rows * sizes.micro_batches, sizes.width))]
        rows = lambda micro: slice(micro * sizes.rows, (micro + 1) * sizes.rows)
        self._batches = [
            tuple(DistMatrix.from_global(stage, whole[rows(micro)], layout=batch_layout("y")) for whole in both)
            for micro in range(sizes.micro_batches)
        ]

    @property
    def actions(self) -> list[Acted]:
        return [tuple(acted) for acted in self._grid.ledger.actions]

    def __call__(self) -> float:
        return train_step(self._net, self._optimizer, nn.mse, self._batches)[0]


def measured(options: Namespace) -> dict[str, Any]:
    """On every rank: run the rounds of all contestants. Return name -> {"seconds", "bubbles", "loss"}."""
    import torch

    comm = MPI.COMM_WORLD
    torch.set_num_threads(1)
    keep_to_cores(comm.rank, 1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    losses: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, Grid(comm, (1, 1, 1), pipe=comm.size, library="torch") as grid:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{comm.bcast(folder)}/gloo", rank=comm.rank, world_size=comm.size
        )
        everyone: dict[str, TorchPipeline | OurPipeline] = {}
        for name in options.schedules:
            everyone[f"{name}, pmm3d"] = OurPipeline(name, options, grid)
            everyone[f"{name}, torch"] = TorchPipeline(name, options, comm)

        def round_of(name: str) -> dict[str, Any]:
            seconds, lines = [], []
            for _ in range(options.steps):
                comm.Barrier()
                begun = time.perf_counter()
                loss = everyone[name]()
                seconds.append(max(comm.allgather(time.perf_counter() - begun)))
                lines.append(comm.allgather(everyone[name].actions))
                losses[name] = max(comm.allgather(loss))
            return {"seconds": seconds, "bubbles": [line.bubble for line in time_lines(lines[len(lines) // 2])]}

        found = all_rounds(everyone, round_of, options.rounds)
        torch.distributed.destroy_process_group()
        comm.Barrier()
    return {name: {"rounds": rounds, "loss": losses[name]} for name, rounds in found.items()}


def rows_of(ranks: int, schedules: list[str], passes: list[dict[str, Any]]) -> list[list[str]]:
    """For each schedule: milliseconds of both, their ratio within a round, the medians of the passes, and the
    bubbles."""
    rows = []
    for name in schedules:
        ours, theirs = ([one[f"{name}, {side}"]["rounds"] for one in passes] for side in ("pmm3d", "torch"))
        ratios = [
            [median(own["seconds"]) / median(other["seconds"]) for own, other in zip(*pair)]
            for pair in zip(ours, theirs)
        ]
        sides = [[turn for rounds in side for turn in rounds] for side in (ours, theirs)]
        rows.append(
            [
                name,
                str(ranks),
                *(f"{1e3 * median(median(turn['seconds']) for turn in side):.1f}" for side in sides),
                f"{median(sum(ratios, [])):.3f} ({', '.join(f'{median(one):.3f}' for one in ratios)})",
                *(f"{100 * median(turn['bubbles'][which] for turn in side):.1f}" for side in sides for which in (0, 1)),
            ]
        )
    return rows


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--ranks", nargs="+", type=int, default=[2, 4], metavar="N", help="numbers of ranks (2 4)")
    made.add_argument(
        "--schedules",
        nargs="+",
        choices=SCHEDULES,
        default=[*SCHEDULES],
        metavar="NAME",
        help=f"some of {', '.join(SCHEDULES)} (all)",
    )
    made.add_argument("--passes", type=int, default=2, help="jobs with each number of ranks, one after the other (2)")
    made.add_argument("--rounds", type=int, default=4, help="rounds over all contestants in a pass (4)")
    made.add_argument("--steps", type=int, default=3, help="timed steps of each contestant in a round (3)")
    made.add_argument("--layers", type=int, default=16, help="linear layers (16)")
    made.add_argument("--width", type=int, default=1024, help="inputs and outputs of each (1024)")
    made.add_argument("--rows", type=int, default=64, help="rows of a micro-batch (64)")
    made.add_argument("--micro-batches", type=int, default=8, help="micro-batches of a step (8)")
    made.add_argument("--here", action="store_true", help="internal, on every rank: one pass, as JSON")
    options = made.parse_args()
    if options.here:
        found = measured(options)
        if MPI.COMM_WORLD.rank == 0:
            print(json.dumps(found), flush=True)
        return 0
    if options.quick:
        vars(options).update(QUICK)
    words = [word for name in SIZES for word in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]
    environ = one_thread()
    passes: dict[int, list[dict[str, Any]]] = {ranks: [] for ranks in options.ranks}
    for turn in range(options.passes):
        for ranks in options.ranks:
            command = [__file__, "--here", *words, "--schedules", *options.schedules]
            passes[ranks].append(json.loads(on_ranks(ranks, command, environ).splitlines()[-1]))
            print(f"pass {turn + 1} of {options.passes}: {ranks} ranks", file=sys.stderr, flush=True)
    rows = [
        [
            "schedule",
            "ranks",
            "ms",
            "torch, ms",
            "ratio (of each pass)",
            "bubble, %",
            "simulated, %",
            "torch's bubble, %",
            "simulated, %",
        ]
    ]
    for ranks, found in passes.items():
        rows += rows_of(ranks, options.schedules, found)
    report(
        options,
        (
            f"{options.layers} layers, width {options.width}, {options.micro_batches} micro-batches of "
            f"{options.rows} rows, float32, one thread a rank; medians of {options.passes} passes of "
            f"{options.rounds} rounds of {options.steps} steps",
            rows,
        ),
    )
    all_losses = [
        (ranks, name, one["loss"]) for ranks, found in passes.items() for each in found for name, one in each.items()
    ]
    first = all_losses[0][2]
    different = [
        f"{name} on {ranks} ranks: {loss}"
        for ranks, name, loss in all_losses
        if not abs(loss - first) <= TOLERANCE * abs(first)
    ]
    if different:
        print(f"the losses differ from {first}: {'; '.join(different)}", file=sys.stderr)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
