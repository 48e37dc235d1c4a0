"""Accuracy of training in low precision, compared with float32: the digits of `make run`, and the surrogate of a PDE.

    python -m pmm3d.launcher -n 2 apps/surrogate/generate.py --samples 3000 --points 16
    python benchmarks/low_precision.py --surrogate surrogate.h5 --results runs/low_precision.json

The same training in float32, bfloat16 and float16, on the presets of 4 ranks, with torch arrays in host memory. For the
digits: the accuracy on the test set in %, and its difference from float32 in points. For the surrogate: the error of
held-out fields as a percentage of their spread, and its difference in percent. The exit code is 1 if bfloat16 differs
by more than 0.5 points or 10 percent.

Finished trainings are stored in the file of results, and not repeated. Another version of pmm3d needs another file.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tomlkit
from records import Rows, parser, report
from timing import in_minutes, on_ranks, output_of

RANKS = 4
DIGITS = Path(__file__).parent.parent / "apps/digits.py"
PRESETS = (("ddp", 1), ("fsdp", 1), ("hsdp", 2), ("megatron", 2))
PRECISIONS = ("float32", "bfloat16", "float16")
MOST = {"digits": 0.5, "surrogate": 10.0}
"""Largest difference of bfloat16: points of the accuracy; percent of the error."""
EXAMPLE = tomlkit.parse(DIGITS.with_suffix(".toml").read_text()).unwrap()
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "digits": EXAMPLE
    | {
        "network": EXAMPLE["network"] | {"library": "torch"},
        "optimizer": EXAMPLE["optimizer"] | {"shard_over_data": True},
    },
    "surrogate": {
        "data": {"batch_size": 250, "validation": 0.1},
        "network": {"hidden": [256, 256, 256], "library": "torch"},
        "optimizer": {"lr": 4e-3, "weight_decay": 1e-4, "decay_vectors": False},
        "schedule": {"warm_up": 20},
        "training": {"epochs": 30},
    },
}
"""Configurations without the grid, the precision and the paths. The digits are those of apps/digits.toml."""


class Training(NamedTuple):
    """One of the compared trainings. copies: ranks along data."""

    task: str
    shape: str
    copies: int
    precision: str

    def key(self, data: Path) -> str:
        """Key in the file of results. Other settings or data give another key."""
        settings = hashlib.sha256(json.dumps(SETTINGS[self.task]).encode() + data.read_bytes()).hexdigest()[:8]
        return f"{self.task}, {self.shape}, data {self.copies}, {self.precision}, settings {settings}"

    def figure(self, data: Path, folder: Path) -> float:
        """Percentage in the last validation: the accuracy, or the error."""
        own, config = SETTINGS[self.task], folder / "train.toml"
        config.write_text(
            tomlkit.dumps(
                own
                | {
                    "grid": {"shape": self.shape, "data": self.copies},
                    "data": own["data"] | {"file": str(data)},
                    "training": own["training"]
                    | {"folder": str(folder / "run"), "precision": self.precision, "evaluate_every": 0},
                }
            )
        )
        on_ranks(RANKS, ["-m", "pmm3d", "train", str(config)], os.environ)
        lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        found = next(line["validation"] for line in reversed(lines) if "validation" in line)
        return 100 * (found["accuracy"] if self.task == "digits" else (1 - found["r2"]) ** 0.5)


def all_trainings(tasks: Mapping[str, Path]) -> list[Training]:
    """All trainings, with float16, which has no limit, at the end."""
    return [
        Training(task, shape, copies, precision)
        for some in (PRECISIONS[:2], PRECISIONS[2:])
        for task in tasks
        for shape, copies in PRESETS
        for precision in some
    ]


def figures(tasks: Mapping[str, Path], results: Path) -> dict[Training, float]:
    """Figures of all trainings. A training that is not in the file is run, and written there."""
    known: dict[str, float] = json.loads(results.read_text()) if results.exists() else {}
    everyone = all_trainings(tasks)
    missing = [each for each in everyone if each.key(tasks[each.task]) not in known]
    print(f"{len(missing)} of {len(everyone)} trainings to do; the others are in {results}", file=sys.stderr)
    begun = time.monotonic()
    for number, each in enumerate(missing, 1):
        with tempfile.TemporaryDirectory() as folder:
            known[each.key(tasks[each.task])] = figure = each.figure(tasks[each.task], Path(folder))
        partial = results.with_suffix(".partial")
        partial.write_text(json.dumps(known, indent=1))
        partial.replace(results)
        left = (time.monotonic() - begun) / number * (len(missing) - number)
        print(
            f"{number} of {len(missing)}: {each.task}, {each.shape}, {each.precision}: {figure:.2f}; "
            f"{in_minutes(left)} left",
            file=sys.stderr,
            flush=True,
        )
    return {each: known[each.key(tasks[each.task])] for each in everyone}


def difference(task: str, low: float, whole: float) -> float:
    """Difference in points of the digits' accuracy, or in percent of the surrogate's error."""
    return low - whole if task == "digits" else 100 * (low / whole - 1)


def table(tasks: Mapping[str, Path], found: Mapping[Training, float]) -> Rows:
    """A row for each task and preset."""
    rows = [["", *PRECISIONS]]
    for task in tasks:
        unit = " points" if task == "digits" else " %"
        for shape, copies in PRESETS:
            whole, *low = (found[Training(task, shape, copies, precision)] for precision in PRECISIONS)
            rows.append(
                [
                    f"{task}, {shape}{f', data {copies}' * (copies > 1)}",
                    f"{whole:.2f}",
                    *(f"{each:.2f} ({difference(task, each, whole):+.2f}{unit})" for each in low),
                ]
            )
    return rows


def too_far(found: Mapping[Training, float]) -> list[Training]:
    """The bfloat16 trainings whose difference exceeds the limit."""
    return [
        each
        for each in found
        if each.precision == "bfloat16"
        and not abs(difference(each.task, found[each], found[each._replace(precision="float32")])) <= MOST[each.task]
    ]


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--surrogate", type=Path, metavar="FILE", help="file of generate.py; without it, only the digits")
    made.add_argument(
        "--results",
        type=Path,
        metavar="FILE",
        default=Path("runs/low_precision.json"),
        help="file of finished trainings (runs/low_precision.json)",
    )
    options = made.parse_args()
    results = options.results.resolve()
    results.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        tasks = {"digits": Path(scratch) / "digits.h5"}
        output_of([sys.executable, str(DIGITS), str(tasks["digits"])])
        if options.surrogate:
            tasks["surrogate"] = options.surrogate.resolve(strict=True)
        if options.quick:
            alone = Training("digits", *PRESETS[0], PRECISIONS[0])
            report(
                options,
                (
                    "One training",
                    [["", alone.precision], ["digits", f"{alone.figure(tasks['digits'], Path(scratch)):.2f}"]],
                ),
            )
            return 0
        found = figures(tasks, results)
    report(options, ("Digits: % right. Surrogate: error in % of the spread", table(tasks, found)))
    for each in (far := too_far(found)):
        print(f"{each.task}, {each.shape}: bfloat16 differs by more than {MOST[each.task]:g}", file=sys.stderr)
    return 1 if far else 0


if __name__ == "__main__":
    sys.exit(main())
