"""One rank: runs pytest on the planned tests and appends each event to its own file.

    python -m mpi_runner.inside FOLDER

The outer pytest writes plan.json into FOLDER. Each rank adds two files:

    rank-N.jsonl    one line per event: {"pid": ...}, {"ready": true}, {"begin": test, "rank": ...},
                    {"test": test, "rank": ..., "reports": [...]}; "rank" is the rank within the test
    rank-N.stacks   the stacks of all threads, by faulthandler: at SIGUSR1, at a crash, and when the rank ends
                    itself long after a deadline, because there is no outer pytest to end it

All ranks execute the same list of phases. In a phase, blocks of consecutive ranks run tests of one size at
the same time. The first rank of a block claims a test by adding a byte to a file of the phase. No rank waits
for a rank outside its block, so phases and blocks cannot deadlock.
"""

from __future__ import annotations

import faulthandler
import fcntl
import json
import os
import sys
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol
from mpi4py import MPI

from mpi_runner import stacks
from mpi_runner.agreement import agree_in_hypothesis, largest, wait

SPARE = 30.0  # seconds after a deadline at which a rank ends itself, if the outer pytest did not end it


class RankPlugin:
    """Run each test with a new communicator, and agree on its outcome."""

    __name__ = "mpi-rank"  # pytest registers it under this name

    def __init__(self, folder: Path, plan: dict):
        self.folder = folder
        self.plan = plan
        self.indices = {nodeid: index for index, nodeid in enumerate(plan["nodeids"])}
        self.world = MPI.COMM_WORLD.Dup()
        self.rank = self.world.Get_rank()
        self.phases = [phase for phase in plan["phases"] if self.rank < phase["ranks"] * phase["blocks"]]
        self.mine = [index for phase in self.phases for index in phase["tests"]]
        self.functions = {plan["nodeids"][index].partition("[")[0] for index in self.mine}
        self.comm = None
        self.index = None
        self.events = open(folder / f"rank-{self.rank}.jsonl", "w")
        stacks.write_to(folder / f"rank-{self.rank}.stacks")
        self.limit(plan["startup"])
        self.write(pid=os.getpid())

    def write(self, **event):
        self.events.write(json.dumps(event) + "\n")
        self.events.flush()

    def limit(self, seconds: float):
        """End this rank, and write its stacks, if the next step takes SPARE seconds longer than this."""
        stacks.limit(seconds + SPARE)

    def paths(self) -> list[str]:
        """The files of this rank's tests."""
        return list(dict.fromkeys(self.plan["paths"][index] for index in self.mine))

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(self, collector, name, obj):
        """Skip functions that this rank does not run, because to make their cases takes most of a collection."""
        if name.startswith("test") and callable(obj) and not isinstance(obj, type):
            return None if f"{collector.nodeid}::{name}" in self.functions else []
        return None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        """Keep the tests of this rank only, in the planned order."""
        found = {item.nodeid: item for item in items}
        wanted = [self.plan["nodeids"][index] for index in self.mine]
        missing = [nodeid for nodeid in wanted if nodeid not in found]
        if missing:
            raise pytest.UsageError(f"collected by the outer pytest but not on this rank: {missing[:5]}")
        items[:] = [found[nodeid] for nodeid in wanted]

    def pytest_runtestloop(self, session):
        items = {self.indices[item.nodeid]: item for item in session.items}
        self.limit(self.plan["startup"])
        wait(self.world.Ibarrier())
        blocks = [self.block(phase) for phase in self.plan["phases"]]  # before the first phase: it is collective
        self.write(ready=True)
        for number, (phase, block) in enumerate(zip(self.plan["phases"], blocks)):
            if block != MPI.COMM_NULL:
                self.run_phase(block, [items[index] for index in phase["tests"]], self.folder / f"phase-{number}")
        return True

    def block(self, phase: dict) -> MPI.Comm:
        """Communicator of this rank's block in a phase; COMM_NULL if this rank has no part in the phase."""
        number = self.rank // phase["ranks"]
        return self.world.Split(number if number < phase["blocks"] else MPI.UNDEFINED)

    def run_phase(self, block: MPI.Comm, items: list[pytest.Item], claims: Path):
        """Run tests of a phase until none is left.

        A block claims one test ahead, because pytest needs the next test to decide which fixtures to tear down.
        """

        def claim(failed: bool = False) -> tuple[bool, pytest.Item | None]:
            number = count_up(claims) if block.rank == 0 else 0
            failed, number = largest([int(failed), number], block)
            return bool(failed), items[number] if number < len(items) else None

        faulthandler.cancel_dump_traceback_later()  # the other ranks of the block may be in an earlier phase
        _, item = claim()
        _, following = claim()
        while item is not None:
            failed = self.run_test(item, following, block)
            failed_somewhere, after = claim(failed)
            if not failed_somewhere:  # after a failure, a rank may still have requests on it
                self.comm.Free()
            item, following = following, after

    def run_test(self, item, following, block: MPI.Comm) -> bool:
        """Run one test on this rank. Return whether it failed here."""
        self.index = self.indices[item.nodeid]
        stacks.listen()
        self.write(begin=self.index, rank=block.rank)
        self.limit(self.plan["deadlines"][self.index])
        self.comm = block.Dup()
        agree_in_hypothesis(item, block)
        reports = runtestprotocol(item, nextitem=following, log=False)
        to_json = item.config.hook.pytest_report_to_serializable
        reports_as_json = [to_json(config=item.config, report=report) for report in reports]
        self.write(test=self.index, rank=block.rank, reports=reports_as_json)
        return any(report.failed for report in reports)

    def shared_path(self) -> Path:
        path = self.folder / "shared" / str(self.index)
        path.mkdir(parents=True, exist_ok=True)
        return path


def count_up(path: Path) -> int:
    """Number of earlier calls for this file by all processes. Each call appends a byte."""
    with open(path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        number = os.fstat(file.fileno()).st_size
        file.write(b".")
    return number


def main(folder: Path) -> int:
    for stream in (sys.stdout, sys.stderr):  # by lines, so that the output is complete if the rank is killed
        stream.reconfigure(line_buffering=True, write_through=False)
    plan = json.loads((folder / "plan.json").read_text())
    if MPI.COMM_WORLD.Get_size() != plan["size"]:
        print(
            f"mpiexec was asked for {plan['size']} ranks, but COMM_WORLD has {MPI.COMM_WORLD.Get_size()}: "
            f"it belongs to another MPI than mpi4py, which uses {MPI.Get_library_version().splitlines()[0]}"
        )
        return 1
    rank = RankPlugin(folder, plan)
    basetemp = f"--basetemp={folder / f'tmp-{rank.rank}'}"
    status = pytest.main([*rank.paths(), *plan["arguments"], basetemp], plugins=[rank])
    rank.limit(plan["startup"])
    return int(status)


if __name__ == "__main__":
    status = main(Path(sys.argv[1]))
    if status:
        # Not sys.exit, because MPI_Finalize would wait for ranks that still run tests.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
