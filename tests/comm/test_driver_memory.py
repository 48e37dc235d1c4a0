"""Device pointers given to a real MPI with support for devices, whose memory the host cannot touch, without a device.

That takes a stand-in CUDA driver and an MPI built for it: a folder with a script `setup PREFIX` that prints what to
source, `../shared/gpu` beside the repository, or the one that PMM3D_GPU_STANDIN names.
"""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("PMM3D_GPU_STANDIN") or Path(__file__).parents[3] / "shared/gpu")
JOB = Path(__file__).with_name("on_driver_memory.py")
SECONDS = 100


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Environment of a job with the MPI and the driver of this folder."""
    if not (FOLDER / "setup").is_file():
        pytest.skip(f"no stand-in driver: {FOLDER} has no script setup; PMM3D_GPU_STANDIN names another folder")
    prefix = tmp_path_factory.mktemp("driver")
    sourced = 'lines=$(bash "$1" "$2") && eval "$lines" && env -0'
    done = subprocess.run(["bash", "-c", sourced, "bash", FOLDER / "setup", prefix], capture_output=True, text=True)
    if not (prefix / "fake-driver/libcuda.so.1").is_file():
        pytest.skip(f"no stand-in driver: {FOLDER / 'setup'} built none (gcc and cuda.h?): {done.stderr.strip()}")
    include = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda") / "include"
    subprocess.run(
        [
            "gcc",
            "-O2",
            "-w",
            "-shared",
            "-fPIC",
            f"-I{include}",
            f"-I{FOLDER / 'fake-driver'}",
            Path(__file__).with_name("thread_context.c"),
            FOLDER / "fake-driver/rest.c",
            "-Wl,-soname,libcuda.so.1",
            "-o",
            prefix / "fake-driver/libcuda.so.1",
            "-lpthread",
        ],
        check=True,
    )
    found = dict(line.split("=", 1) for line in done.stdout.split("\0") if "=" in line)
    lacks = subprocess.run(
        [shutil.which("mpirun", path=found["PATH"]), "--version"], env=found, capture_output=True, text=True
    )
    if lacks.returncode and not os.environ.get("PMM3D_CI"):
        pytest.skip(f"the MPI of {FOLDER} does not start: {lacks.stderr.strip()}. make system-packages")
    found["PYTHONPATH"] = os.pathsep.join([*filter(None, sys.path), found["PYTHONPATH"]])
    return found


@pytest.mark.nightly
@pytest.mark.parametrize(
    "ranks, transport",
    [(2, "auto"), pytest.param(4, "direct", marks=pytest.mark.thorough("the same messages, with a data axis"))],
)
def test_device_pointers_go_to_mpi_and_the_host_touches_nothing(environment, ranks, transport):
    """MPI makes progress also in threads of the grid. They have a context, otherwise copies would fail."""
    mpirun = shutil.which("mpirun", path=environment["PATH"])
    process = subprocess.Popen(
        [mpirun, "-n", str(ranks), sys.executable, JOB, transport],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output = process.communicate(timeout=SECONDS)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"the job did not end within {SECONDS} s: {process.communicate()[0]}")
    assert process.returncode == 0 and "all right, direct: MPI takes device pointers" in output, output
    assert int(output.rpartition("device to device: ")[2].split()[0]) > 2**20, output
