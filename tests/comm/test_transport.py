"""pmm3d.comm.transport: messages below MPI's limit, and the trial whether MPI takes device pointers."""

import os
import sys

import pytest
import standin  # noqa: F401
import standin_far  # noqa: F401
from hypothesis import given
from hypothesis import strategies as st

from pmm3d import Pmm3dError
from pmm3d.arrays import Workspace, library_named
from pmm3d.comm.device_trial import takes_device_pointers
from pmm3d.comm.transport import LARGEST_MESSAGE, Transport, chunks


@given(st.integers(0, 2**45), st.integers(2**24, 2**31 - 1))
def test_chunks_cover_the_bytes_in_order(nbytes, largest):
    end = 0
    for offset, length in chunks(nbytes, largest):
        assert offset == end and 0 < length <= largest
        end += length
    assert end == nbytes


@pytest.mark.parametrize(
    "nbytes, count",
    [(0, 0), (1, 1), (2**30, 1), (2**30 + 1, 2), (2**31 - 1, 2), (2**31, 2), (2**31 + 1, 3), (2**33 + 5, 9)],
)
def test_messages_stay_below_what_mpi_counts(nbytes, count):
    found = chunks(nbytes)
    assert len(found) == count
    assert all(length <= LARGEST_MESSAGE < 2**31 for _, length in found)
    assert [offset for offset, _ in found] == [index * LARGEST_MESSAGE for index in range(count)]
    assert sum(length for _, length in found) == nbytes


def test_an_unknown_mode_is_refused():
    with pytest.raises(Pmm3dError, match="device_transport is auto, direct or staged; got 'fast'"):
        Transport("fast", Workspace())


def test_host_memory_is_never_staged():
    for mode in ("auto", "direct", "staged"):
        assert not Transport(mode, Workspace()).staged(library_named("numpy"))
        assert not Transport(mode, Workspace()).staged(library_named("torch"))


@pytest.fixture
def child_path(monkeypatch):
    """Let the child process of a trial import what this one can."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))


def test_the_trial_takes_pointers_that_mpi_can_read(child_path):
    assert takes_device_pointers(library_named("standin"))


def test_the_trial_survives_pointers_that_mpi_cannot_read(child_path, caplog):
    library = library_named("standin_far")
    assert not takes_device_pointers(library)
    transport = Transport("auto", Workspace())
    assert transport.staged(library) and transport.staged(library)
    assert caplog.text.count("does not take device pointers") == 1


def test_a_trial_that_hangs_means_no(child_path):
    assert not takes_device_pointers(library_named("standin"), timeout=1e-3)
