"""Machines that `pmm3d tune machine` measured, in a file each in the user's cache folder; which one a job goes by."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from importlib import import_module
from pathlib import Path

from mpi4py import MPI

from ..errors import Pmm3dError, check_regular
from ..model.machine import cpu, loaded_blas
from ..model.machines import Machine, load, machine_from
from . import trial_cache

FORMAT = "1"
"""Of what is measured, and how: files of others are not used."""
ONE, SEVERAL = "1", "several"
"""Nodes that were measured."""
AUTO, UNMEASURED = "auto", "nominal"
logger = logging.getLogger("pmm3d.comm")
Key = dict[str, str]


def key_of(ranks_per_node: int, nodes: int) -> Key:
    """What a measured machine holds for: this kind of host, this MPI and BLAS, numpy and pmm3d, so many ranks on a
    node, and whether there are other nodes.

    Raises MissingPackageError where threadpoolctl is not installed, which tells the BLAS.
    """
    blas = loaded_blas()
    pmm3d = import_module(__package__.partition(".")[0])
    return {"format": FORMAT, "cpu": cpu().name or "unknown", "cores": str(os.cpu_count() or 1),
            "mpi": MPI.Get_library_version().strip("\0 \n"), "blas": f"{blas.name} {blas.version} {blas.kernel}".strip(),
            "threads": str(blas.threads), "numpy": import_module("numpy").__version__, "pmm3d": pmm3d.__version__,
            "ranks per node": str(ranks_per_node), "nodes": ONE if nodes == 1 else SEVERAL}


def machine_for(comm: MPI.Intracomm, ranks_per_node: int, nodes: int, asked: str = AUTO) -> Machine:
    """The machine that a job is planned for: the one that was asked for, by name or path (PMM3D_MACHINE); with "auto"
    the one measured here, or else the nominal one. Collective; the same on all ranks.

    Raises Pmm3dError, on every rank, for a machine that is not known or whose file cannot be used.
    """
    if asked == AUTO:
        return machine_here(comm, ranks_per_node, nodes) or load(UNMEASURED)
    machine: Machine | None = None
    error: Pmm3dError | None = None
    if comm.rank == 0:
        try:
            machine = load(asked)
        except Pmm3dError as raised:
            error = raised
    machine, error = comm.bcast((machine, error))
    if error is not None:
        error.everywhere = True
        raise error
    assert machine is not None
    return machine


def machine_here(comm: MPI.Intracomm, ranks_per_node: int, nodes: int) -> Machine | None:
    """The machine that was measured with so many ranks on a node, on one node or on several; None if none was.

    Rank 0 looks, and tells all others: collective, and the same on all ranks. For one node, what was measured on
    several serves too. A file that is damaged, or of another machine, is not used, which rank 0 notes.
    """
    text = comm.bcast(_text_here(ranks_per_node, nodes) if comm.rank == 0 else None)
    return None if text is None else machine_from(text, "the machine measured here")


def _text_here(ranks_per_node: int, nodes: int) -> str | None:
    with suppress(ImportError, RuntimeError):
        for measured_on in (1, 2) if nodes == 1 else (2,):
            if (text := recalled(key_of(ranks_per_node, measured_on))) is not None:
                return text
    return None


def recalled(key: Mapping[str, str]) -> str | None:
    """The text of the file with this key in all its parts; None where there is none. Raises RuntimeError for users
    without a home."""
    path = file_of(key)
    try:
        check_regular(path)
        text = path.read_text(encoding="utf-8")
        if dict(machine_from(text, str(path)).key) != dict(key):
            raise Pmm3dError(f"{path} was measured on another machine")
        return text
    except FileNotFoundError:
        return None
    except (OSError, ValueError, Pmm3dError) as error:
        logger.warning(f"what was measured of this machine is not used: {error}. pmm3d tune machine measures it anew")
    return None


def remember(key: Mapping[str, str], text: str) -> Path:
    """Write the file of a key. Readers see the old one or the new one. Raises OSError, RuntimeError where that cannot
    be done."""
    path = file_of(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
    return path


def file_of(key: Mapping[str, str]) -> Path:
    """Where the machine of a key is kept. Raises RuntimeError for users without a home."""
    digest = blake2b(json.dumps(dict(key), sort_keys=True).encode(), digest_size=16).hexdigest()
    return trial_cache.folder().parent / "machines" / f"{digest}.toml"
