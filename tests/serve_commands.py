"""A rank of command_worlds.py: runs the requested commands. Arguments: the folder, and the process id of the tests."""

from __future__ import annotations

import faulthandler
import itertools
import json
import os
import sys
import time
import traceback
import warnings
from pathlib import Path

SHORTEST, LONGEST = 0.005, 0.1
"""Shortest and longest interval between two checks for a command, in seconds. It grows while there is none."""


def serve(folder: Path, asking: str) -> None:
    from mpi4py import MPI

    from pmm3d.model import machine

    machine.set_blas_environment()
    from pmm3d.tools import cli, output
    from pmm3d.tools.bench import measure

    cli._leave = lambda: None  # would finalize MPI, which later commands need
    output.QUIET_SECONDS = 1e6  # lines of progress would depend on the load
    measure.SQUARE = 256  # the peak of a core is measured faster with smaller matrices
    comm, environment = MPI.COMM_WORLD, dict(os.environ)
    for number in itertools.count():
        path, pause = folder / f"{number}.json", SHORTEST
        while not path.exists():
            if (folder / "end").exists() or not os.path.exists(f"/proc/{asking}"):
                MPI.Finalize()
                os._exit(0)  # Skip atexit handlers: they would wait for other ranks.
            time.sleep(pause)
            pause = min(1.05 * pause, LONGEST)
        asked = json.loads(path.read_text())
        mine = folder / f"{number}-{comm.rank}"
        os.environ.update(asked["env"])
        for stream, kind in ((1, "out"), (2, "err")):
            _redirect(stream, f"{mine}.{kind}")
        os.chdir(asked["cwd"])
        with warnings.catch_warnings():  # so that each command shows a warning again
            code = _code_of(cli.main, asked["words"])
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        comm.Barrier()
        mine.with_suffix(".part").write_text(str(code))
        mine.with_suffix(".part").rename(f"{mine}.code")


def _redirect(stream: int, path: str) -> None:
    """Redirect a standard stream to a file, and give Python a new object for it."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, stream)
    os.close(file)
    name = {1: "stdout", 2: "stderr"}[stream]
    encoding = os.environ.get("PYTHONIOENCODING", "utf-8")
    for attribute in (name, f"__{name}__"):
        setattr(sys, attribute, open(stream, "w", closefd=False, buffering=1, encoding=encoding))


def _code_of(main, words: list[str]) -> int:
    """The exit code that a process with this command would have."""
    sys.argv = ["pmm3d", *words]
    try:
        main()
    except SystemExit as ending:
        if isinstance(ending.code, str):
            print(ending.code, file=sys.stderr)
        return int(ending.code or 0) if not isinstance(ending.code, str) else 1
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        faulthandler.cancel_dump_traceback_later()
    return 0


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.argv[2])
