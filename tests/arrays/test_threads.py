"""Loops over slices on several threads: each slice once, equal bits, and errors of every thread."""

import os
import threading
import time
from itertools import product

import numpy as np
import pytest
from loops import looped

from pmm3d import DistMatrix, Grid, nn
from pmm3d.arrays import LoneThread, NumpyLibrary, by_rows, library_named, random, sum_in_order, threads
from pmm3d.layout import Box
from pmm3d.nn import optim
from pmm3d.thread_counts import THREAD_COUNTS


@pytest.fixture(params=[1, 3])
def number(request, monkeypatch):
    """Number of threads of the BLAS."""
    monkeypatch.setattr(threads, "blas_threads", lambda: request.param)
    return request.param


def loop(work, count):
    """Loop over `count` slices of one row."""
    return threads.parallel_rows(NumpyLibrary(), work, (count, 7), 8)


def who(count):
    """The thread that executed each slice of a loop."""
    found = {}

    def work(rows):
        found[rows.start] = threading.get_ident()
        time.sleep(0.001)
        return rows.start

    assert loop(work, count) == list(range(count))
    assert list(sorted(found)) == list(range(count))
    return [found[index] for index in range(count)]


def test_slices_are_dealt_out_in_order(number):
    found = who(10)
    assert found[0] == threading.get_ident() and len(set(found)) <= number
    shares = [found[0:4], found[4:7], found[7:10]] if number == 3 else [found]
    assert all(len(set(share)) == 1 for share in shares)
    if number == 3:
        assert threading.get_ident() not in found[4:]


def test_short_loops_and_those_of_other_threads_stay_where_they_are(number):
    assert set(who(threads.LEAST_SLICES - 1)) == {threading.get_ident()}
    seen, inside = [], []
    lone = LoneThread(target=lambda: seen.extend([set(who(10)), {threading.get_ident()}]))
    lone.start()
    lone.join()
    assert seen[0] == seen[1]
    loop(lambda _: inside.append(set(who(10))), 4)
    assert len(inside) == 4


@looped("failing", [0, 8])
def test_an_error_is_raised_when_all_threads_have_ended(number, failing):
    done = []

    def work(rows):
        if rows.start == failing:
            raise ValueError("a slice")
        time.sleep(0.001 * (rows.start < 4))
        done.append(rows.start)

    with pytest.raises(ValueError, match="a slice"):
        loop(work, 9)
    assert set(done) >= (set(range(8)) if failing else set(range(4, 9)) if number == 3 else set())


def test_a_thread_that_the_system_refuses_is_an_error_before_any_work(monkeypatch):
    start, started, done = threading.Thread.start, [], []

    def refused(thread):
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threads, "blas_threads", lambda: 7)
    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        loop(done.append, 10)
    started[0].join(20)
    assert not done and not started[0].is_alive()
    monkeypatch.undo()
    monkeypatch.setattr(threads, "blas_threads", lambda: 7)
    assert len(set(who(10))) > 1


def test_what_numpy_warns_of_is_the_callers(number):
    huge = np.full(2**20, 3e38, "float32")
    with np.errstate(over="ignore"):
        by_rows(NumpyLibrary(), lambda part: part * 10, huge, huge)
    assert np.isinf(huge).all()
    with np.errstate(over="raise"), pytest.raises(FloatingPointError):
        by_rows(NumpyLibrary(), lambda part: part * 10, *2 * [np.full(2**20, 3e38, "float32")])


def test_a_fork_has_threads_of_its_own(number):
    who(10)
    child = os.fork()
    if not child:
        os._exit(0 if len(set(who(10))) <= number else 1)
    deadline = time.monotonic() + 20
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert ended == (child, 0)


@looped(
    "environ, count",
    [
        ({}, 6),
        ({"OMP_NUM_THREADS": "4"}, 4),
        ({"OMP_NUM_THREADS": "4", "OPENBLAS_NUM_THREADS": "2"}, 2),
        ({"OMP_NUM_THREADS": "4", "OPENBLAS_NUM_THREADS": "64"}, 6),
        ({"OMP_NUM_THREADS": "4", "OPENBLAS_NUM_THREADS": "none"}, 4),
    ],
)
def test_threads_are_those_of_the_blas(monkeypatch, environ, count):
    for name in THREAD_COUNTS:
        monkeypatch.setenv(name, environ.get(name, ""))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(6))
    assert threads.blas_threads.__wrapped__() == count


@looped("library", ["numpy", "torch"])
def test_bits_do_not_depend_on_the_number(monkeypatch, library):
    found = []
    for number in (1, 2, 5):
        monkeypatch.setattr(threads, "blas_threads", lambda number=number: number)
        out = NumpyLibrary().empty((1000, 700), "float32")
        random.fill(out, Box(3, 1003, 2, 702), 900, 5, "normal")
        parts = [library_named(library).from_numpy(out * np.float32(factor), "float32") for factor in (1, 0.3, 7)]
        total = library_named(library).from_numpy(out, "float32")
        sum_in_order(library_named(library), parts, total, 2)
        found.append((out.tobytes(), np.asarray(total).tobytes()))
    assert found[0] == found[1] == found[2]


@looped("shape", [(2**20,), (1000, 701), (701, 1000)])
@looped("order", ["C", "F"])
@looped("types", [("float32", "float32"), ("float16", "float32"), ("float64", "float16")])
def test_large_copies_are_shared_out(number, monkeypatch, shape, order, types):
    seen, share = set(), threads.parallel_rows

    def noted(library, work, *options):
        share(library, lambda rows: (seen.add(threading.get_ident()), work(rows)), *options)

    monkeypatch.setattr(threads, "parallel_rows", noted)
    given, wanted = types
    source = np.random.default_rng(1).normal(size=(2 * shape[0], *shape[1:])).astype(given)[::2]
    out = np.zeros(shape, wanted, order)
    threads.copy_into(NumpyLibrary(), source, out)
    assert np.array_equal(out, source.astype(wanted)) and bool(seen) == (number > 1)
    small = np.zeros((3, 5), wanted)
    seen.clear()
    threads.copy_into(NumpyLibrary(), np.ones((3, 5), given), small)
    assert (small == 1).all() and not seen


@pytest.mark.parallel([1])
@pytest.mark.numpy_only("torch's kernels have threads of torch's own")
def test_an_update_in_threads_is_the_same(comm, monkeypatch):
    found = []
    for number, kind in product((1, 3), (optim.SGD, optim.AdamW)):
        monkeypatch.setattr(threads, "blas_threads", lambda number=number: number)
        with Grid(comm) as grid:
            net = nn.Linear(grid, 1100, 900, seed=1)
            optimizer = kind(net.parameters(), lr=0.1, weight_decay=0.1)
            for step in range(2):
                x, y = (DistMatrix.random(grid, (8, columns), seed=step, dtype="float32") for columns in (1100, 900))
                nn.mse(net(x), y).backward()
                optimizer.step()
            found.append(net.weight.local.tobytes())
    assert found[:2] == found[2:]
