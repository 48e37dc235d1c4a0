"""Kill -9 a rank of a training run at random moments, resume, and compare with a run that nobody disturbed.

    python apps/kill_resume.py --kills 20 --ranks 4

Every time a disturbed run comes to its end, its weights and optimizer state must be bitwise those of the undisturbed
run; after every kill, each checkpoint must be readable and whole. At the end a checkpoint of the undisturbed run is
resumed on other grids: the losses must agree to rounding. The exit code is 1 if anything differs.
"""

import argparse
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from random import Random

from fault_lab.lab import Lab, Run, contents, step_of


def disturbed(lab: Lab, kills: int, longest: float, undisturbed: Run) -> tuple[int, int]:
    """Kill that often; whenever a run ends by itself, compare it and begin a new one. Returns how many ended so, and
    how many checkpoints were read."""
    expected = undisturbed.final()
    done = ended = read = 0
    run = Run(lab, "disturbed-0", undisturbed.shape, undisturbed.data)
    while done < kills or not ended:
        job = run.start()
        victim, delay = lab.random.randrange(lab.ranks), lab.random.uniform(0, longest)
        killed = done < kills and job.until(job.all_there) and job.strike(signal.SIGKILL, victim, delay)
        done += killed
        job.end() if killed else run.finish(job)
        paths = run.checkpoints()
        matrices = [contents(path / "checkpoint.h5") for path in paths]
        read += len(matrices)
        print(f"{run.name}, {done} kills: newest checkpoint {max(map(step_of, paths), default='none')}",
              file=sys.stderr, flush=True)
        if not killed:
            assert matrices[-1] == expected, f"{run.name}: the weights differ from the undisturbed run's"
            ended += 1
            run = Run(lab, f"disturbed-{ended}", run.shape, run.data)
    return ended, read


def losses(run: Run) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in run.metrics() if "loss" in line}


def other_grid(undisturbed: Run, shape: str, data: int, ranks: int) -> float:
    """Resume the undisturbed run's oldest kept checkpoint on another grid; compare the losses from there on."""
    run, oldest = Run(undisturbed.lab, f"on-{shape}-{data}", shape, data), undisturbed.checkpoints()[0]
    shutil.copytree(oldest, run.folder / "checkpoints" / oldest.name)
    run.finish(run.start(ranks=ranks))
    expected, resumed = losses(undisturbed), losses(run)
    assert resumed and min(resumed) == step_of(oldest) + 1 and max(resumed) == max(expected)
    return max(abs(resumed[step] / expected[step] - 1) for step in resumed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=4, help="of the disturbed runs, a multiple of 2 (4)")
    parser.add_argument("--epochs", type=int, default=60, help="of 20 steps each (60)")
    parser.add_argument("--longest", type=float, default=15.0, help="kills come within so many seconds of the start")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random = Random(options.seed)
    with tempfile.TemporaryDirectory() as folder, Lab(Path(folder), options.ranks, random, options.epochs) as lab:
        undisturbed = Run(lab, "undisturbed", "2x1x1", options.ranks // 2)
        undisturbed.finish(undisturbed.start())
        ended, read = disturbed(lab, options.kills, options.longest, undisturbed)
        print(f"{options.kills} kills, {ended} disturbed runs came to their end, all bitwise as the undisturbed one; "
              f"{read} checkpoints read, none broken")
        for shape, data, ranks in (("1x1x1", 1, 1), ("1x2x2", 1, 4), ("2x2x1", 2, 8)):
            print(f"resumed on {shape} data {data}: largest relative difference of a loss "
                  f"{other_grid(undisturbed, shape, data, ranks):.1e}")


if __name__ == "__main__":
    main()
