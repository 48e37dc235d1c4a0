"""Process grid and its axes: collectives, their engine, agreement between ranks, ledger and watchdog."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..model.choose_grid import Auto, chosen_shape
from ..model.launch import check_launcher

check_launcher()

from .agreement import Terms, digest, gather_small
from .argument_digest import Compared
from .arrivals import Arrivals, Departures
from .axis import Axis
from .communicator import LEAVING, all_leave, check_communicator, own_duplicate
from .compressed_sum import NOTHING, OWN, TOTAL, Coded, Feedback, LowRank, Method, finite, sum_compressed, sum_named
from .engine import Engine, Pending, PlanResources
from .executor import (
    Awaited,
    Buffers,
    Persistent,
    compute,
    following,
    run_rounds,
    run_schedule,
    wait_for_all,
    work_bytes,
)
from .grid import Grid, free_memory
from .guard import at_end, one_thread
from .hang import CallersCall
from .ledger import Entry, Key, Ledger, Record, clock
from .nodes import Host, Processes, hosts, mpi_name, set_node_maps
from .point_to_point import TAGS
from .program import LEAST_WORK, Argument, Counted, Instruction, Kernel, Look, Program, Recorder, Wait, assign, call
from .repeated_sum import RepeatedSum
from .shutdown import all_come, leaves_in_order
from .strided_collectives import (
    all_gather_work,
    all_reduce_work,
    flattened,
    gathered_encoded,
    reduce_scatter_work,
    sum_gathered,
)
from .transport import Collective, Link
from .watch import abort_job

if TYPE_CHECKING:  # imported at first use by __getattr__
    from .device_trial import TRIAL_SECONDS, try_device
    from .machine_cache import AUTO_MACHINE, key_of, machine_here, measured_here, remember_machine
    from .program_check import check_program
    from .windows import can_share, one_for_each_node, ranks_that_share, shared_array

_FILES = {
    "TRIAL_SECONDS": "device_trial",
    "try_device": "device_trial",
    "AUTO_MACHINE": "machine_cache",
    "key_of": "machine_cache",
    "machine_here": "machine_cache",
    "measured_here": "machine_cache",
    "remember_machine": "machine_cache",
    "can_share": "windows",
    "check_program": "program_check",
    "one_for_each_node": "windows",
    "ranks_that_share": "windows",
    "shared_array": "windows",
}

__all__ = ["Axis", "Grid", "Ledger", "Pending"]
"""Public names. Other names are for the subpackages built on this one."""


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module 'pmm3d.comm' has no attribute {name!r}")
    return getattr(import_module(f".{_FILES[name]}", __name__), name)
