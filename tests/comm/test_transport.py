"""pmm3d.comm.transport: messages below MPI's limit, and the trial of whether MPI takes device pointers."""

import subprocess
import sys
from importlib import import_module

import pytest
import standin  # noqa: F401
import standin_far  # noqa: F401
from hypothesis import given
from hypothesis import strategies as st

from pmm3d import Pmm3dError
from pmm3d.arrays import Workspace, library_named
from pmm3d.comm import device_trial
from pmm3d.comm.device_trial import try_device
from pmm3d.comm.transport import LARGEST_MESSAGE, Transport, chunks
from pmm3d.model.environment import Settings


@given(st.integers(0, 2**45), st.integers(2**24, 2**31 - 1))
def test_chunks_cover_the_bytes_in_order(nbytes, largest):
    assert LARGEST_MESSAGE < 2**31
    end = 0
    for offset, length in chunks(nbytes, largest):
        assert offset == end and 0 < length <= largest
        end += length
    assert end == nbytes


def test_an_unknown_mode_is_refused():
    with pytest.raises(Pmm3dError, match="device_transport is auto, direct, staged or nccl; got 'fast'"):
        Transport("fast", Workspace())


def test_the_environment_chooses_where_the_program_leaves_it_open(monkeypatch):
    monkeypatch.setenv("PMM3D_TRANSPORT", "staged")
    for said, expected in ((None, "staged"), ("auto", "staged"), ("direct", "direct")):
        assert Settings.chosen(device_transport=said)[0].device_transport == expected
    monkeypatch.setenv("PMM3D_TRANSPORT", "fast")
    assert "PMM3D_TRANSPORT='fast' is invalid" in str(Settings.chosen()[1])


@pytest.fixture
def child(monkeypatch):
    """The list of started child processes. No trial is cached."""
    started, run = [], subprocess.run
    monkeypatch.delenv("PYTHONPATH", raising=False)  # a child can import the same modules as this process
    device_trial._tried.cache_clear()
    monkeypatch.setattr(device_trial.subprocess, "run", lambda *a, **k: started.append(a) or run(*a, **k))
    return started


def test_a_trial_tells_pointers_that_mpi_can_read_from_others_and_is_made_once(child):
    for _ in range(2):
        found = {name: try_device(library_named(name)) for name in ("standin", "standin_far")}
        assert found["standin"].direct is True and "MPI takes device pointers" in found["standin"].why
        assert found["standin_far"].direct is False and "does not take device pointers" in found["standin_far"].why
        assert len(child) == 2


JUDGED = pytest.mark.thorough("judged() has it as an example")


@pytest.mark.parametrize(
    "library, said, direct",
    [
        ("sys.exit('no device here')", "could not be found out: no device here", False),
        pytest.param(
            "main.np.zeros_like = lambda *_: os.kill(os.getpid(), signal.SIGSEGV)",
            "died of signal 11",
            False,
            marks=JUDGED,
        ),
        ("main.np.array_equal = lambda *_: False", "other values than it sent", False),
        ("atexit.register(os.abort)", "sent itself some", True),
    ],
)
def test_what_becomes_of_the_child_is_the_outcome(child, monkeypatch, tmp_path, library, said, direct):
    """The exit code after the child has compared its values is ignored."""
    words = (
        "import __main__ as main, atexit, os, signal, sys\n"
        f"from standin import *\nif 'pytest' not in sys.modules:\n    {library}\n"
    )
    (tmp_path / "standin_child.py").write_text(words)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "standin_child", raising=False)
    import_module("standin_child")
    found = try_device(library_named("standin_child"))
    assert found.direct is direct and said in found.why
    assert try_device(library_named("standin_child")) == found and len(child) == 1


def test_a_trial_that_proves_nothing_says_so(child, monkeypatch):
    hung = try_device(library_named("standin"), timeout=1e-3)
    assert not hung.direct and "could not be found out: the child process did not end within 0.001 s" in hung.why
    assert try_device(library_named("standin")).direct  # with more time, there is a new trial
    device_trial._tried.cache_clear()
    monkeypatch.setattr(sys, "path", [])
    broken = try_device(library_named("standin"))
    assert not broken.direct and "could not be found out: ModuleNotFoundError" in broken.why
