"""A mixture of experts that learns a text, compared with the dense network of equal flops.

    python benchmarks/mixture.py                                             (2 ranks, 600 steps, seed 0)
    python benchmarks/mixture.py --seeds 0 1 2 --steps 300

Both networks are trained by `pmm3d train` on the help of Python, a byte a token: apps/gpt/gpt.toml, and
apps/gpt/experts.toml with 8 experts in place of each MLP, two of half of its columns for each token. The data, the
optimizer and the learning rates are equal. A tenth of the topics is held out. The figures do not depend on the load of
the machine.

Mflop           of the GEMMs of a token in a training step, counted in a dry run
bits a byte     cross-entropy of the held-out text after each part of the steps

The exit status is 1 unless the mixture has the lower figure at the end, for each seed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from records import parser, report
from timing import on_ranks, one_thread

from pmm3d import Grid, GridShape
from pmm3d.nn.training.config import Config, checked
from pmm3d.nn.training.dry_step import DrySteps
from pmm3d.nn.training.network import make_network
from pmm3d.nn.training.samples import SampleSizes
from pmm3d.text import counted

APP = Path(__file__).parent.parent / "apps" / "gpt"
KINDS = {"dense": "gpt.toml", "mixture": "experts.toml"}
PARTS, BYTES = 3, 256
"""Validations of a run, and number of different tokens."""
Tables = dict[str, dict[str, Any]]


def tables_of(kind: str, folder: Path, steps: int, seed: int) -> Tables:
    """The configuration of a network, with data and results in the folder."""
    tables: Tables = tomllib.loads((APP / KINDS[kind]).read_text())
    tables["data"] |= {"file": f"{folder}/text.h5", "validation_file": f"{folder}/held.h5"}
    tables["training"] |= {"folder": f"{folder}/{kind}-{seed}", "steps": steps, "seed": seed}
    tables["training"] |= {"evaluate_every": -(-steps // PARTS), "checkpoint_every": steps}
    return tables


def as_toml(tables: Tables) -> str:
    lines = list[str]()
    for name, table in tables.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def sizes_of(config: Config) -> tuple[int, float]:
    """Parameters of the network, and flop of a token in a training step, on one rank."""
    samples = SampleSizes(1, BYTES, True)
    config = config.model_copy(update={"grid": config.grid.model_copy(update={"expert": 1})})
    with Grid.dry((1, 1, 1)) as dry:
        size = make_network(config, dry, [1, BYTES], None)[0].size
    tokens = config.data.batch_size * (config.data.sequence or 1)
    return size, DrySteps(config, samples).of(GridShape(1, 1, 1), 1).flop / tokens


def trained(tables: Tables, ranks: int) -> list[float]:
    """Bits a byte of the validations of a run."""
    folder = Path(tables["training"]["folder"])
    path = folder.with_suffix(".toml")
    path.write_text(as_toml(tables))
    environ = one_thread()
    on_ranks(ranks, ["-m", "pmm3d", "train", str(path)], environ)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["validation"]["bits_per_byte"] for line in lines if "validation" in line]


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--ranks", type=int, default=2, help="number of ranks, a multiple of 2 (2)")
    made.add_argument("--steps", type=int, default=600, help="steps of a run (600)")
    made.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="N", help="seeds of weights and batches (0)")
    options = made.parse_args()
    if options.quick:
        options.steps = PARTS
    if options.ranks % 2:
        made.error(f"--ranks {options.ranks}: two ranks share the experts, so the number must be even")
    rows: list[list[str]] = []
    lower = list[bool]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([sys.executable, str(APP / "text.py"), name], check=True, stdout=subprocess.DEVNULL)
        for seed in options.seeds:
            last = dict[str, float]()
            for kind in KINDS:
                tables = tables_of(kind, folder, options.steps, seed)
                size, flop = sizes_of(checked(tables))
                bits = trained(tables, options.ranks)
                figures = f"{size:,}", f"{flop / 1e6:.3f}", *(f"{each:.4f}" for each in bits)
                rows.append([kind, str(seed), *figures])
                last[kind] = bits[-1]
                print(f"seed {seed}, {kind}: {bits[-1]:.4f} bits a byte", file=sys.stderr, flush=True)
            lower.append(last["mixture"] < last["dense"])
    every = -(-options.steps // PARTS)
    ends = [min(options.steps, every * (part + 1)) for part in range(PARTS)]
    heading = ["network", "seed", "parameters", "Mflop", *(f"bits a byte, {end} steps" for end in ends)]
    report(
        options,
        (
            f"apps/gpt on {counted(options.ranks, 'rank')}, {counted(options.steps, 'step')} of 1,024 tokens, float32",
            [heading, *rows],
        ),
    )
    return 0 if all(lower) or options.quick else 1


if __name__ == "__main__":
    sys.exit(main())
