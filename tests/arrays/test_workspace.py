"""Workspace: work arrays are reused, so that repeated steps allocate nothing."""

import gc
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import LIBRARIES

from pmm3d.arrays import Arena, NumpyLibrary, Workspace, library_named

MEGABYTE = 2**20


class Counting(NumpyLibrary):
    """numpy that counts its allocations."""

    def __init__(self):
        object.__setattr__(self, "sizes", [])

    def empty(self, shape, dtype):
        self.sizes.append(shape[0])
        return np.empty(shape, dtype)

    __hash__ = object.__hash__
    __eq__ = object.__eq__


@st.composite
def cycles(draw):
    """Random order of takes and returns. At the end, all is returned. An event is (size to take, or None and the number
    to return)."""
    events, held = [], 0
    for size in draw(st.lists(st.integers(0, 64 * MEGABYTE // 8), min_size=1, max_size=8)):
        events.append(("take", size))
        held += 1
        for _ in range(draw(st.integers(0, held))):
            events.append(("give", draw(st.integers(0, held - 1))))
            held -= 1
    return events


def play(workspace, library, events):
    """Check after each event that the arrays in use do not overlap, and that they are counted."""
    held = []
    for event, number in events:
        if event == "take":
            held.append(workspace.take((number // 8,), "float64", library))
        else:
            workspace.give(held.pop(number)[1])
        spans = sorted((array.ctypes.data, array.nbytes) for array, _ in held if array.nbytes)
        assert all(start + nbytes <= other for (start, nbytes), (other, _) in itertools.pairwise(spans))
        assert workspace.allocated >= sum(nbytes for _, nbytes in spans)
    for _, ticket in held:
        workspace.give(ticket)


@given(cycles())
def test_repeated_cycles_come_to_allocate_nothing_more(events):
    """After at most as many cycles as there are buffers."""
    workspace, library = Workspace(), Counting()
    for _ in events:
        play(workspace, library, events)
    before = workspace.allocated
    library.sizes.clear()
    play(workspace, library, events)
    assert workspace.allocated == before and not library.sizes
    workspace.clear()
    assert workspace.allocated == 0


def test_small_requests_do_not_take_large_buffers():
    workspace, library = Workspace(), Counting()
    with workspace.borrow((64 * MEGABYTE,), "uint8", library):
        pass
    with workspace.borrow((2 * MEGABYTE,), "uint8", library), workspace.borrow((60 * MEGABYTE,), "uint8", library):
        pass
    assert library.sizes == [64 * MEGABYTE, 2 * MEGABYTE]


def test_the_second_of_many_cycles_allocates_the_last():
    """If a smaller buffer was freed for it, it would be requested again, get a larger one, and so on in each cycle."""
    workspace, library = Workspace(), Counting()
    cycle = [("take", MEGABYTE)] * 3 + [("give", 0), ("take", 2 * MEGABYTE)]
    held = [(play(workspace, library, cycle), workspace.allocated // MEGABYTE)[1] for _ in range(6)]
    assert held == [4, 6, 6, 6, 6, 6]


def test_libraries_share_host_memory_and_no_other():
    workspace = Workspace()
    for name in LIBRARIES:
        library = library_named(name)
        with workspace.borrow((3, 5), "complex64", library) as array:
            assert tuple(array.shape) == (3, 5) and library.dtype(array) == "complex64"
            assert type(array) is type(library.empty((1,), "uint8"))
    kinds = {library_named(name).memory for name in LIBRARIES}
    assert len(kinds) == 2 and workspace.allocated == len(kinds) * 3 * 5 * 8


def test_arrays_that_come_back_by_themselves_are_of_the_same_pool():
    workspace, library = Workspace(), Counting()
    array = workspace.array((MEGABYTE,), "uint8", library)
    part = array[5:].reshape(-1)
    assert workspace.in_use() == MEGABYTE == workspace.most_lent
    del array
    assert workspace.in_use() == MEGABYTE
    del part
    assert workspace.in_use() == 0
    with workspace.borrow((MEGABYTE,), "uint8", library):
        other = workspace.array((MEGABYTE,), "uint8", library)
    assert library.sizes == [MEGABYTE, MEGABYTE] and workspace.allocated == 2 * MEGABYTE
    del other
    workspace.clear()
    assert workspace.allocated == 0


def test_device_arrays_of_an_arena_share_its_memory():
    """Outside of it, device memory comes from the library."""
    workspace, library = Workspace(), library_named("standin")
    arena, array = Arena(workspace), workspace.array((1024, 2), "float64", library)
    assert workspace.in_use() == workspace.allocated == 0
    with workspace.apart(arena):
        array = workspace.array((1024, 2), "float32", library)
        array[...] = 3
        part, address = array[1:].T, library.address(array)
        del array
        assert workspace.in_use() == 8192 and library.to_numpy(part)[1, 1022] == 3
        del part
        array = workspace.array((512, 4), "float32", library)
        assert library.address(array) == address and library.address(arena.buffers[0]) == address
        assert workspace.array((4, 4), "float32", library).shape == (4, 4)
    assert workspace.allocated == 8192
    del arena, array
    gc.collect()
    assert workspace.allocated == 0


def test_memory_that_cannot_be_had_is_not_counted():
    class Exhausted(NumpyLibrary):
        def empty(self, shape, dtype):
            raise MemoryError

    workspace = Workspace()
    for take in (workspace.array, workspace.take):
        with pytest.raises(MemoryError):
            take((MEGABYTE,), "uint8", Exhausted())
    assert workspace.allocated == workspace.in_use() == 0
    library = Counting()
    for _ in range(3):  # a buffer comes back if its borrower fails
        with pytest.raises(ValueError), workspace.borrow((10, 10), "float32", library):
            raise ValueError
    assert library.sizes == [400]


def test_rehearsals_of_growing_sizes_keep_the_last():
    workspace = Workspace()
    for size in range(10**6, 10**6 + 5):
        workspace.rehearse([size, size], NumpyLibrary())
    assert workspace.allocated == 2 * size
