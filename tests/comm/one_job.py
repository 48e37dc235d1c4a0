"""One job for several tests: each rank prints its findings, which the tests check."""

import json

from launching import LAUNCHER
from mpi_runner.script_job import ScriptJobs

SAY = """
    import json
    from mpi4py import MPI
    comm = MPI.COMM_WORLD

    def say(name, *found):
        print("said", json.dumps([name, comm.rank, found]))
"""


def said_by_ranks(folder, ranks, script, *args):
    """Run a script in which every rank calls say(name, ...). Return (name -> values of each rank, the job's stderr)."""
    jobs = ScriptJobs(folder, LAUNCHER)
    try:
        done = jobs.run(ranks, SAY + script, *args)
    finally:
        jobs.end()
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("said ")]
    said = {name: [] for name, _, _ in lines}
    for name, _, found in sorted(lines, key=lambda line: line[1]):
        said[name].append(found)
    assert all(len(found) == ranks for found in said.values()), done.stdout
    return said, done.stderr
