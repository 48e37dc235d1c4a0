"""Measured machines: only jobs of the same kind load them. Damaged files are ignored and reported."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
from loops import given

from pmm3d import Pmm3dError
from pmm3d.arrays import blas_choice
from pmm3d.arrays.blas_choice import blas_here
from pmm3d.comm import machine_cache
from pmm3d.comm.machine_cache import file_of, folder, key_of, machine_here, measured_here, recalled, remember_machine
from pmm3d.model.machine import Cpu
from pmm3d.model.machines import as_toml, load


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("PMM3D_MACHINE", raising=False)


def text_of(key, name="measured"):
    return as_toml(replace(load("nominal"), name=name, key=key))


def keep(ranks_per_node, nodes=1, name="measured", **changes):
    key = key_of(ranks_per_node, nodes) | changes
    return remember_machine(key, text_of(key, name))


def test_the_key_is_the_same_before_and_after_the_first_product():
    """The first product loads the BLAS that multiplies, in addition to that of numpy."""
    program = (
        "import mpi4py; mpi4py.rc(initialize=False, finalize=False)\n"
        "from pmm3d.comm.machine_cache import key_of\n"
        "before = key_of(1, 2)\n"
        "from pmm3d.arrays.blas_choice import chosen; chosen()\n"
        "assert key_of(1, 2) == before, (before, key_of(1, 2))"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_second_grid_reads_no_file():
    program = """
import sys
from pmm3d import Grid

opened = []

def choose(n):
    with Grid(shape="auto", product=(n, n, n), memory=2**30) as grid:
        grid.shape_for((n, n, 1))

choose(64)
sys.addaudithook(lambda event, given: event in ("open", "os.listdir", "os.scandir") and opened.append(given[0]))
choose(65)
assert not opened, opened
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parallel([1])
def test_each_part_of_the_key_tells_machines_apart(comm, tmp_path, monkeypatch):
    for part in ["format", "cpu", "cores", "mpi", "blas", "threads", "numpy", "pmm3d"]:
        with given(part=part), monkeypatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(tmp_path / part))
            keep(4, **{part: "another"})
            assert machine_here(comm, 4, 1) is None
            keep(4)
            assert machine_here(comm, 4, 1).key[part] != "another"


def test_the_key_has_what_is_found_here(monkeypatch):
    before = key_of(4, 1)
    for part, name, found in [
        ("cores", "usable_cores", lambda: 7),
        ("cpu", "cpu", lambda: Cpu("", "another", frozenset())),
        ("threads", "blas_here", lambda: replace(blas_here(), threads=7)),
        ("blas", "blas_here", lambda: replace(blas_here(), version="another")),
    ]:
        with given(part=part), monkeypatch.context() as patch:
            patch.setattr(machine_cache, name, found)
            assert {each for each, value in key_of(4, 1).items() if value != before[each]} == {part}
    monkeypatch.setenv("OMPI_MCA_btl_sm_backing_directory", "/dev/shm/of-this-job")
    assert key_of(4, 1) == before
    monkeypatch.setenv("UCX_TLS", "tcp")
    assert key_of(4, 1) != before


@pytest.mark.parallel([1])
def test_several_nodes_serve_one_but_their_own_comes_first(comm):
    assert machine_here(comm, 4, 1) is None
    keep(4, 2, "on several")
    assert machine_here(comm, 8, 1) is None
    assert (machine_here(comm, 4, 1).name, machine_here(comm, 4, 3).name) == ("on several", "on several")
    keep(4, 1, "on one")
    assert (machine_here(comm, 4, 1).name, machine_here(comm, 4, 3).name) == ("on one", "on several")


def changed(change):
    return lambda path: path.write_text(change(path.read_text()))


def as_pipe(path):
    path.unlink()
    os.mkfifo(path)


DAMAGES = {
    "cut": changed(lambda text: text[: len(text) // 2]),
    "empty": changed(lambda text: ""),
    "unknown key": changed(lambda text: text.replace("memory", "memorv")),
    "negative": changed(lambda text: text.replace("rate = ", "rate = -")),
    "zeros": changed(lambda text: "\0" * 100),
    "bytes that are no text": lambda path: path.write_bytes(b"\xff\xfe\xff"),
    "a pipe": as_pipe,
    "of another machine": changed(lambda text: text_of(key_of(4, 1) | {"cpu": "of another host"})),
}


@pytest.mark.parallel([1])
def test_a_damaged_file_is_not_used_and_told_of_once(comm, caplog, tmp_path, monkeypatch):
    for name, damage in DAMAGES.items():
        with given(damage=name), monkeypatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
            damage(path := keep(4))
            assert machine_here(comm, 4, 1) is machine_here(comm, 4, 1) is None
            [told] = caplog.records
            assert told.name == "pmm3d.comm" and "is not used" in told.getMessage() and str(path) in told.getMessage()
            assert "pmm3d tune machine measures it again" in told.getMessage()
            caplog.clear()
            keep(4)
            assert machine_here(comm, 4, 1) is not None


@pytest.mark.parallel([1, 3])
def test_all_ranks_have_what_rank_0_reads(comm, monkeypatch, tmp_path):
    shared = comm.bcast(str(tmp_path))
    if comm.rank == 0:
        keep(4)
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", shared + "/nothing")
        monkeypatch.setattr(machine_cache, "recalled", None)
    names = comm.allgather(machine_here(comm, 4, 1).name)
    assert names == ["measured"] * comm.size


@pytest.mark.parallel([1, 3])
def test_another_machine_is_named_by_the_environment(comm, monkeypatch):
    keep(4)
    monkeypatch.setenv("PMM3D_MACHINE", "perlmutter")
    assert machine_here(comm, 4, 1).name == "perlmutter"
    monkeypatch.setenv("PMM3D_MACHINE", "no-such-machine")
    with pytest.raises(Pmm3dError, match="no machine is named 'no-such-machine'") as raised:
        machine_here(comm, 4, 1)
    assert raised.value.everywhere


def test_a_file_appears_whole_or_not_at_all(monkeypatch):
    path = keep(4, name="first")

    def fails(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="No space"):
        keep(4, name="second")
    assert 'name = "first"' in path.read_text()
    assert list(folder().iterdir()) == [path]


def test_who_plans_takes_the_newest_of_this_kind_of_host():
    assert measured_here() is None
    for age, (ranks, threads, name) in enumerate([(8, "1", "eight"), (4, "2", "four"), (2, "7", "two")]):
        path = keep(ranks, name=name, threads=threads)
        os.utime(path, (1e9 - age, 1e9 - age))
    os.utime(keep(16, name="another host", cpu="another"), (2e9, 2e9))
    (folder() / "damaged.toml").write_text("= [")
    (folder() / "gone.toml").symlink_to(folder() / "nowhere.toml")
    assert measured_here().name == "eight"
    assert (measured_here(2).name, measured_here(4).name, measured_here(16)) == ("two", "four", None)
    assert measured_here(nodes=2) is None


def test_users_without_a_home_and_without_threadpoolctl_have_none(monkeypatch):
    def no_home(_):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(machine_cache.files, "folder", no_home)
    assert measured_here(4) is None
    with pytest.raises(RuntimeError):
        file_of(key_of(4, 1))


@pytest.mark.parallel([1])
def test_for_a_device_only_a_machine_that_was_named_counts(comm, monkeypatch):
    keep(4)
    assert machine_here(comm, 4, 1, on_host=False) is None
    monkeypatch.setenv("PMM3D_MACHINE", "perlmutter")
    assert machine_here(comm, 4, 1, on_host=False).name == "perlmutter"
    assert machine_here(comm, 4, 1, machine_cache.AUTO_MACHINE).name == "measured"


@pytest.mark.parametrize("whose", ["another user's", "writable by all"])
def test_a_file_that_another_user_may_have_written_is_not_read(monkeypatch, caplog, whose):
    path = keep(4)
    choice = blas_choice.remember(blas_choice.Choice({"PMM3D_BLAS": "/other/libblas.so"}, "BLAS"), 1)
    assert recalled(key_of(4, 1)) is not None and measured_here(4) is not None and blas_choice.recalled(1)
    if whose == "another user's":
        monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    else:
        path.chmod(0o666)
        choice.chmod(0o666)
    assert recalled(key_of(4, 1)) is None and measured_here(4) is None
    with pytest.raises(Pmm3dError, match="another user"):
        blas_choice.recalled(1)
    assert "another user" in caplog.text
