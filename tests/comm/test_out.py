"""`out` of collectives: shared memory and read-only arrays are refused. All ranks raise the error of one."""

from itertools import product

import numpy as np
import pytest
from loops import given

from pmm3d import DTypeError, Grid, LayoutError, OutOfMemoryError
from pmm3d.arrays import NumpyLibrary

pytestmark = pytest.mark.parallel([3])


@pytest.fixture
def axis(comm):
    with Grid(comm, "ddp") as grid:
        yield grid.everyone
        assert np.array_equal(grid.everyone.all_reduce(np.ones(1)).wait(), [comm.size])


def refused(*calls, kinds=LayoutError):
    """Each call, (text, function that begins a collective), raises an error with the text on all ranks."""
    for number, (text, call) in enumerate(calls):
        with given(number=number), pytest.raises(kinds, match=text) as raised:
            call().wait()
        assert raised.value.everywhere


def memory(axis, rows):
    return np.arange(float(rows * axis.size))


@pytest.mark.parallel([3], thorough=[2, 4])
def test_out_that_shares_memory_with_what_comes_in(axis):
    """From 3 ranks on, a reduce-scatter into a part of its own array gave 12 in place of 10."""
    shared, whole = "out shares memory with an array that is read", memory(axis, 4)
    own = slice(4 * axis.index, 4 * axis.index + 4)
    refused(
        (shared, lambda: axis.reduce_scatter(whole, out=whole[own])),
        (shared, lambda: axis.reduce_scatter(whole, out=whole[own], counts=[4] * axis.size, beta=1)),
        (shared, lambda: axis.all_reduce(whole[:-1], out=whole[1:])),
        (shared, lambda: axis.all_to_all(whole, out=whole)),
        (shared, lambda: axis.shift(whole[:-1], out=whole[1:])),
        (shared, lambda: axis.all_gather(whole[:4] if axis.index else whole[4:8], out=whole)),
    )
    assert np.array_equal(whole, memory(axis, 4))


@pytest.mark.parallel([3], thorough=[2, 4])
def test_out_in_the_same_memory_without_a_common_byte(axis):
    both = np.ones((4 * axis.size, 6))
    out = both[4 * axis.index : 4 * axis.index + 4, 3:]
    assert axis.reduce_scatter(np.ascontiguousarray(both[:, :3]), out=out).wait() is out
    assert np.all(out == axis.size) and np.all(both[:, :3] == 1)


@pytest.mark.parallel([3], thorough=[2, 4])
def test_where_out_may_be_what_comes_in(axis):
    whole = memory(axis, 2)
    part = whole[2 * axis.index : 2 * axis.index + 2]
    whole[:] = 0
    part[:] = axis.index
    assert np.array_equal(axis.all_gather(part, out=whole).wait(), np.repeat(np.arange(axis.size), 2))
    assert np.array_equal(axis.all_reduce(whole, out=whole).wait(), axis.size * np.repeat(np.arange(axis.size), 2))


@pytest.mark.parallel([3], thorough=[2, 4])
def test_out_that_is_read_only(axis):
    """`shift` wrote into an immutable bytes object."""
    text, array = bytes(8), np.ones(1)
    out = np.frombuffer(text)
    refused(
        ("out is read-only", lambda: axis.shift(array, out=out)),
        ("out is read-only", lambda: axis.all_reduce(array, out=out)),
        ("out is read-only", lambda: axis.all_to_all(array[:0], out=out[:0])),
    )
    assert text == bytes(8)


@pytest.mark.parallel([3], thorough=[2, 4])
def test_a_bad_out_of_one_rank_is_raised_by_all(axis):
    for counts, wrong in product([True, False], [lambda rows: rows + 1, lambda rows: ()]):
        with given(counts=counts, wrong=wrong(1)):

            def out(rows, wrong=wrong):
                return np.ones(wrong(rows) if axis.index == axis.size - 1 else rows)

            even, part, whole = [2] * axis.size if counts else None, np.ones(2), np.ones(2 * axis.size)
            said = rf"failed on 1 of {axis.size} ranks. rank {axis.size - 1}: LayoutError: .*out is"
            refused(
                (said, lambda: axis.all_gather(part, out=out(2 * axis.size), counts=even)),
                (said, lambda: axis.reduce_scatter(whole, out=out(2), counts=even)),
                (said, lambda: axis.all_to_all(whole, out=out(2 * axis.size), counts=even, received=even)),
                (said, lambda: axis.all_reduce(part, out=out(2))),
                (said, lambda: axis.shift(part, out=out(2))),
            )


@pytest.mark.parallel([2, 3], thorough=[4])
def test_options_that_differ_between_ranks_are_refused(axis):
    """Also if they fit the arrays of each rank. A gather with such counts returned rows that were never written."""
    last, size = axis.index == axis.size - 1, axis.size
    even, uneven = [2] * size, [2] * (size - 1) + [1]
    part, whole = np.ones(1 if last else 2), np.ones(2 * size - 1)
    swapped, one_more = [1, 6] + [1] * (size - 2), [2 if last and rank == 0 else 1 for rank in range(size)]
    differs = "do not fit together.*counts=.*"
    refused(
        (differs, lambda: axis.all_gather(part, counts=uneven if last else even)),
        (differs, lambda: axis.all_gather(np.ones(2), counts=None if last else even)),
        (differs, lambda: axis.all_gather(np.ones(2, "float32" if last else "float64"), counts=even)),
        (differs, lambda: axis.reduce_scatter(whole, counts=uneven[::-1] if last else uneven)),
        (differs, lambda: axis.reduce_scatter(whole, counts=None if last else uneven)),
        ("do not fit together", lambda: axis.shift(part, by=1 + last)),
        ("do not fit together", lambda: axis.all_to_all(np.ones(size), received=None if last else [1] * size)),
        (
            f"failed on 1 of .*: rank {size - 1} sends 2, and received= has 1",
            lambda: axis.all_to_all(np.ones(size + last), counts=one_more, received=[1] * size),
        ),
        (
            "rank 1 sends 1, and received= has 6",
            lambda: axis.all_to_all(np.ones(sum(swapped)), counts=swapped, received=swapped),
        ),
        ("failed on 1 of", lambda: axis.all_gather(np.ones(1 + (axis.index == 0)), counts=[1] * size)),
        (
            "received .* is not a number of rows for each",
            lambda: axis.all_to_all(np.ones(size), received=[1] * (size + 1)),
        ),
    )
    axis.reduce_scatter(whole, counts=uneven, beta=0.0 if last else 0).wait()


@pytest.mark.parallel([3], thorough=[2, 4])
def test_memory_that_one_rank_lacks(axis, monkeypatch):
    if axis.index == 1:

        def refuse(self, shape, dtype):
            raise MemoryError("Unable to allocate it")

        monkeypatch.setattr(NumpyLibrary, "empty", refuse)
    with pytest.raises(OutOfMemoryError, match="rank 1: .*out of memory: Unable to allocate it"):
        axis.all_gather(np.ones(3)).wait()
    monkeypatch.undo()


WRONG = {
    "a masked array": lambda array: np.ma.array(array),
    "a list": lambda array: array.tolist(),
    "without dims": lambda array: np.float64(1),
    "objects": lambda array: array.astype(object),
    "texts": lambda array: array.astype(str),
}


def test_an_array_that_one_rank_cannot_send_is_refused_on_every_rank(axis):
    for name, make in WRONG.items():
        for operation in (axis.all_gather, axis.reduce_scatter, axis.all_reduce, axis.all_to_all, axis.shift):
            with given(name=name, operation=operation.__name__):
                array = memory(axis, 2)
                wrong = make(array) if axis.index == 1 else array
                refused(
                    ("", lambda operation=operation, wrong=wrong: operation(wrong)), kinds=(LayoutError, DTypeError)
                )


def test_an_option_that_one_rank_gets_wrong_is_refused_on_every_rank(axis):
    scattered = lambda array, out, beta: lambda: axis.reduce_scatter(array, out=out, beta=beta)
    wrong = ["2", 1j, True] if axis.index == 1 else [2, 2, 2]
    refused(*(("", scattered(memory(axis, 2), np.ones(2), beta)) for beta in wrong), kinds=(LayoutError, DTypeError))
    with pytest.raises(DTypeError):
        scattered(memory(axis, 2).astype(int), np.ones(2, int), 0.5)().wait()


def test_an_inference_tensor_is_written_to_in_inference_mode_only(axis):
    torch = pytest.importorskip("torch")
    with torch.inference_mode():
        out = torch.zeros(2)
        axis.all_reduce(torch.ones(2), out=out).wait()
    assert out.tolist() == [axis.size] * 2
    refused(("read-only", lambda: axis.all_reduce(torch.ones(2), out=out)))
