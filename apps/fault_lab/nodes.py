"""Faults between nodes: two virtual ones (tests/cluster/cluster.py), of which one loses its link. Loss of packets needs a
kernel with netem or nftables, which is not assumed."""

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import cluster

from .judgement import Expected, Outcome
from .lab import SHORT, Lab

PROGRAM = [sys.executable, str(Path(cluster.__file__))]
NODES = 2
CUT = ["ip", "link", "set", "node2", "down"]


@contextmanager
def two_nodes(name: str) -> Iterator[cluster.Cluster]:
    subprocess.run([*PROGRAM, "up", "--name", name, "--nodes", str(NODES)], check=True, stdout=subprocess.DEVNULL)
    try:
        yield cluster.found(name)
    finally:
        subprocess.run([*PROGRAM, "down", "--name", name], check=True, stdout=subprocess.DEVNULL)


def network(lab: Lab) -> Outcome:
    """Once some steps are done; again if the job was done before. The report says network, and nobody stays."""
    while True:
        run = lab.run(own_loop=True)
        with two_nodes(f"faults-{run.name}") as nodes:
            on_each = str(lab.ranks // NODES)
            launcher = [*PROGRAM, "run", "--on", f"faults-{run.name}", "--ranks-per-node", on_each, "--"]
            job = run.start({"PMM3D_TIMEOUT": SHORT}, launcher=launcher)
            number = lab.random.randrange(1, 4)
            there = job.until(lambda: len(run.checkpoints()) >= number)
            time.sleep(lab.random.uniform(0, 0.1))
            job.fault_at = time.time()
            subprocess.run(nodes.enter(CUT), check=True)
            ending = job.end()
        if there and ending.code != 0:
            causes = (r"messages do not arrive\s+\(the\s+network\)",)
            return lab.judge("network", f"cut after checkpoint {number}", run, ending,
                             Expected(causes, codes=(70,), everyone=True))
        shutil.rmtree(run.folder)
