"""One rank: runs pytest on the planned tests and appends what happens to its own file.

    python -m mpi_runner.inside FOLDER

FOLDER holds plan.json from the outer pytest. This rank adds rank-N.jsonl, one line per event
({"pid": ...}, {"ready": true}, {"test": index, "reports": [...]}), and rank-N.stacks, into which
faulthandler writes every thread's stack at SIGUSR1, at a crash, and when this rank itself runs
far past the deadline because there is no outer pytest left to end it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol
from mpi4py import MPI

from mpi_runner.agreement import agree_in_hypothesis, any_rank, wait

SPARE = 30.0  # seconds after which a rank that the outer pytest should have ended ends itself


class RankPlugin:
    """Runs each test between a fresh communicator and an agreement on how it went."""

    __name__ = "mpi-rank"  # pytest registers it under this name

    def __init__(self, folder: Path, plan: dict):
        world = MPI.COMM_WORLD
        self.folder = folder
        self.nranks = world.Get_size()
        self.plan = plan
        self.indices = {nodeid: index for index, nodeid in enumerate(plan["nodeids"])}
        self.sync = world.Dup()
        self.comm = None
        self.index = None
        name = f"rank-{world.Get_rank()}"
        self.events = open(folder / f"{name}.jsonl", "w")
        self.stacks = open(folder / f"{name}.stacks", "w")
        faulthandler.enable(self.stacks)
        faulthandler.register(signal.SIGUSR1, self.stacks, all_threads=True)
        self.limit(plan["startup"])
        self.write(pid=os.getpid())

    def write(self, **event):
        self.events.write(json.dumps(event) + "\n")
        self.events.flush()

    def limit(self, seconds: float):
        """From now on this rank ends itself, with its stacks, once it takes far longer than that."""
        faulthandler.dump_traceback_later(seconds + SPARE, exit=True, file=self.stacks)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        """Keep exactly the planned tests, in the planned order."""
        found = {item.nodeid: item for item in items}
        missing = [nodeid for nodeid in self.indices if nodeid not in found]
        if missing:
            raise pytest.UsageError(f"collected by the outer pytest but not on this rank: {missing[:5]}")
        items[:] = [found[nodeid] for nodeid in self.indices]

    def pytest_runtestloop(self):
        self.limit(self.plan["startup"])
        wait(self.sync.Ibarrier())
        self.write(ready=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item, nextitem):
        self.index = self.indices[item.nodeid]
        self.limit(self.plan["deadlines"][self.index])
        self.comm = MPI.COMM_WORLD.Dup()
        agree_in_hypothesis(item, self.sync)
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        to_json = item.config.hook.pytest_report_to_serializable
        self.write(test=self.index, reports=[to_json(config=item.config, report=report) for report in reports])
        self.finish(any(report.failed for report in reports))
        return True

    def finish(self, failed: bool):
        """Wait for all ranks, then free the communicator unless a rank may still have requests on it."""
        failed_somewhere = any_rank(failed, self.sync)
        if not failed_somewhere:
            self.comm.Free()

    def shared_path(self) -> Path:
        path = self.folder / "shared" / str(self.index)
        path.mkdir(parents=True, exist_ok=True)
        return path


def main(folder: Path) -> int:
    for stream in (sys.stdout, sys.stderr):  # whole lines, which are there when the rank is killed
        stream.reconfigure(line_buffering=True, write_through=False)
    plan = json.loads((folder / "plan.json").read_text())
    if MPI.COMM_WORLD.Get_size() != plan["nranks"]:
        print(
            f"mpiexec was asked for {plan['nranks']} ranks, but COMM_WORLD has {MPI.COMM_WORLD.Get_size()}: "
            f"it belongs to another MPI than mpi4py, which uses {MPI.Get_library_version().splitlines()[0]}"
        )
        return 1
    rank = RankPlugin(folder, plan)
    basetemp = f"--basetemp={folder / f'tmp-{MPI.COMM_WORLD.Get_rank()}'}"
    status = pytest.main([*plan["arguments"], basetemp], plugins=[rank])
    rank.limit(plan["startup"])
    return int(status)


if __name__ == "__main__":
    status = main(Path(sys.argv[1]))
    if status:
        # Not sys.exit: MPI_Finalize would wait for ranks that are still at work.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
