"""States of AdamW in float32, 8 bits and bfloat16: the results of two trainings, bytes, and the time of an update.

    python benchmarks/states.py
    python benchmarks/states.py --seeds 0 1 2 --steps 600

On one rank. Except the times, the figures do not depend on the load of the machine.

digits          accuracy on the held-out images of apps/digits.toml in %, the mean over the seeds
nats            cross-entropy of the held-out text of apps/gpt/gpt.toml after --steps steps, the mean over the seeds
bytes           of the states, for each parameter of this text network, in a dry run
ns              CPU time of an update for each element of a matrix of 2048 x 2048, on one thread, the shortest of 8

The exit code is 1 if 8 bits or bfloat16 are worse than float32 by more than 0.5 points of accuracy or 1% of the nats.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

from mpi4py import MPI
from records import parser, report

from pmm3d import Grid, GridShape, nn
from pmm3d.nn import optim
from pmm3d.nn.training import evaluate
from pmm3d.nn.training.build import trainer
from pmm3d.nn.training.config import checked
from pmm3d.nn.training.dry_step import DrySteps
from pmm3d.nn.training.samples import SampleSizes

APPS = Path(__file__).parent.parent / "apps"
FORMS = {"": "float32", "int8": "8 bits", "bfloat16": "bfloat16"}
NEVER = 10**6
"""More steps than a training has."""


def tables_of(file: str, folder: Path, states: str, seed: int, **limits: Any) -> dict[str, Any]:
    """The configuration of an app, with other states, and data and results in the folder. limits: of its length."""
    tables = tomllib.loads((APPS / file).read_text()) | {"grid": {}}
    tables["data"] |= {
        key: f"{folder}/{Path(tables['data'][key]).name}"
        for key in ("file", "validation_file")
        if key in tables["data"]
    }
    tables["optimizer"] |= {"states": states}
    tables["training"] |= {"folder": f"{folder}/{Path(file).stem}-{states}-{seed}", "seed": seed, **limits}
    tables["training"] |= {"evaluate_every": NEVER, "checkpoint_every": NEVER}
    return tables


def trained(tables: dict[str, Any]) -> dict[str, float]:
    """Figures of the held-out samples after a training."""
    with trainer(checked(tables), MPI.COMM_SELF) as run:
        run.run()
        return evaluate(run.state.network, run.validation, nn.cross_entropy)


def nanoseconds(states: str, library: str, size: int, calls: int) -> float:
    """CPU time of an update for each element."""
    found = []
    with Grid(MPI.COMM_SELF, (1, 1, 1)) as grid:
        net = nn.Linear(grid, size, size, bias=False, seed=0, library=library)
        optimizer, buffer = optim.AdamW(net.parameters(), states=states), net.weight.grad_buffer
        for _ in range(calls):
            buffer.array, buffer.layout = net.weight.library.copy(net.weight.shard), net.weight.layout
            begun = time.thread_time()
            optimizer.step()
            found.append(time.thread_time() - begun)
    return 1e9 * min(found) / size**2


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--steps", type=int, default=300, help="steps of a training on the text (300)")
    made.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N", help="seeds (0 1 2)")
    options = made.parse_args()
    import torch

    torch.set_num_threads(1)
    size, calls, limits = 2048, 8, {}
    if options.quick:
        options.steps, options.seeds, size, calls, limits = 2, [0], 128, 2, {"epochs": 1}
    rows, good = [["states", "digits, %", "nats", "bytes", "ns, numpy", "ns, torch"]], True
    first = list[float]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for script, target in (("digits.py", folder / "digits.h5"), ("gpt/text.py", folder)):
            subprocess.run([sys.executable, str(APPS / script), str(target)], check=True, stdout=subprocess.DEVNULL)
        for states, label in FORMS.items():
            digits, text = list[float](), list[float]()
            for seed in options.seeds:
                digits.append(100 * trained(tables_of("digits.toml", folder, states, seed, **limits))["accuracy"])
                tables = tables_of("gpt/gpt.toml", folder, states, seed, steps=options.steps)
                text.append(trained(tables)["loss"])
                print(f"{label}, seed {seed}: {digits[-1]:.2f} %, {text[-1]:.4f}", file=sys.stderr, flush=True)
            step = DrySteps(checked(tables), SampleSizes(1, 256, True)).of(GridShape(1, 1, 1), 1)
            means = sum(digits) / len(digits), sum(text) / len(text)
            first = first or [*means]
            good &= means[0] >= first[0] - 0.5 and means[1] <= 1.01 * first[1]
            times = (f"{nanoseconds(states, library, size, calls):.1f}" for library in ("numpy", "torch"))
            nbytes = 4 * step.memory["state"] / step.memory["weights"]
            rows.append([label, f"{means[0]:.2f}", f"{means[1]:.4f}", f"{nbytes:.2f}", *times])
    report(options, (f"AdamW, {len(options.seeds)} seeds, {options.steps} steps of the text", rows))
    return 0 if good or options.quick else 1


if __name__ == "__main__":
    sys.exit(main())
