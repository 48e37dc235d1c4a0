"""Slots of a store: reuse, views, errors of copies."""

import os
from time import sleep

import numpy as np
import pytest

from pmm3d.arrays import NumpyLibrary
from pmm3d.arrays.slots import PAGE, FileSlots, rounded


@pytest.fixture
def slots(tmp_path):
    made = FileSlots(str(tmp_path))
    yield made
    made.close()


def test_sizes_are_few_and_at_most_an_eighth_larger():
    for pages in range(1, 3000):
        size = rounded(pages * PAGE - 1)
        assert pages * PAGE <= size <= max(1, -(-pages * 9 // 8)) * PAGE
    assert len({rounded(nbytes) for nbytes in range(2**20, 2**21, 999)}) <= 9


def test_a_slot_is_reused_and_the_file_has_no_name(slots, tmp_path):
    for number in range(20):
        array = np.arange(3000.0 + number)
        slot = slots.slot(array.nbytes)
        assert slots.write(slot, array).wait() is None
        copy = np.zeros_like(array)
        assert slots.read_into(slot, copy).wait() is None and np.array_equal(copy, array)
        del slot
    assert slots.capacity == rounded(3019 * 8) and slots.written == slots.read == 8 * sum(range(3000, 3020))
    assert os.listdir(tmp_path) == []


def test_copies_to_a_slot_have_the_order_of_the_calls(slots):
    """A slot that was given up while it is written serves the next array."""
    for number in range(50):
        array = np.full(50_000, number)
        slots.write(slots.slot(array.nbytes), array)
    last, found = slots.slot(400_000), np.empty(50_000, int)
    assert slots.read_into(last, found).wait() is None
    assert (found == 49).all() and slots.capacity == last.nbytes


def test_a_view_shares_memory_with_the_slot(slots):
    library = NumpyLibrary()
    slots.slot(1)
    slot, array = slots.slot(96), np.arange(12.0).reshape(3, 4)
    slots.write(slot, array).wait()
    view = slots.view(slot, (3, 4), "float64", library)
    assert np.array_equal(view, array)
    view[0] = 7
    slots.read_into(slot, array[:2], 0).wait()
    assert (array[0] == 7).all()
    assert slots.view(slot, (0, 4), "float64", library).shape == (0, 4)


def test_a_view_keeps_its_slot_and_is_written_last(slots):
    """Also if the array that had the slot before is still under way, on a slow disk."""
    write, array = slots._write, np.full(12, 5.0)
    slots._write = lambda start, data: (sleep(0.2), write(start, data))
    slots.write(slots.slot(96), array)
    view = slots.view(slots.slot(96), (12,), "float64", NumpyLibrary())
    view[...] = 7
    for _ in range(2):
        slots.write(slots.slot(96), array).wait()
        assert (view == 7).all()


def test_any_error_of_a_copy_ends_its_wait(slots):
    def fails(start, data):
        raise MemoryError

    slots._write = fails
    assert isinstance(slots.write(slots.slot(8), np.zeros(1)).wait(), MemoryError)
    del slots._write
    assert slots.write(slots.slot(8), np.zeros(1)).wait() is None


def test_a_truncated_file_and_empty_arrays(tmp_path):
    slots = FileSlots(str(tmp_path))
    slot = slots.slot(PAGE)
    assert slots.write(slot, np.empty((0, 3))).wait() is None
    os.truncate(slots._file, 10)
    for call in (slots.check, lambda: slots.slot(2 * PAGE)):  # a file that grew again would hide it
        with pytest.raises(OSError, match="it was truncated"):
            call()
    assert "it was truncated" in str(slots.read_into(slot, np.zeros(PAGE, np.uint8)).wait())
    slots.close()
    slots.close()
