"""Signal handlers that raise while a rank waits: the error belongs to the caller, and to no other collective."""

import os
import signal
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from loops import given

from pmm3d import DistMatrix, Grid, GridError, Layout, MatmulPlan
from pmm3d.comm import Buffers, executor
from pmm3d.model.rounds import IN, OUT, Round, Schedule, Span

pytestmark = pytest.mark.parallel([2])
SIGNAL = signal.SIGUSR1


class Walltime(Exception):
    """An error of the program."""


class Handler:
    """Several forms of a handler, which Python calls with the signal and the interrupted frame."""

    def __init__(self, kind):
        self.kind = kind

    def method(self, signum, frame):
        self._deeper()

    def _deeper(self):
        raise self.kind("of the handler")

    def __call__(self, number, interrupted):
        signal.signal(SIGNAL, signal.SIG_IGN)
        raise self.kind("of the handler")


@pytest.fixture
def handled(monkeypatch):
    """handled(handler) sets the handler of SIGNAL."""
    before = signal.getsignal(SIGNAL)
    yield partial(signal.signal, SIGNAL)
    signal.signal(SIGNAL, before)


def interrupt():
    os.kill(os.getpid(), SIGNAL)
    for _ in range(10):  # Python calls the handler at the end of an iteration
        pass


CASES = [
    (kind, form)
    for kind in (Walltime, TimeoutError, KeyboardInterrupt, SystemExit)
    for form in ("method", "object", "partial")
]


def test_the_error_is_of_the_caller_and_not_of_the_collective_that_ran(comm, handled):
    for kind, form in CASES:
        handler = Handler(kind)
        forms = {"method": handler.method, "object": handler, "partial": partial(handler.method)}
        with given(kind=kind, form=form), Grid(comm, (2, 1, 1)) as grid:
            handled(forms[form])
            gate, other = SimpleNamespace(done=False), SimpleNamespace(done=False)

            def interrupted(link):
                yield [other]
                interrupt()
                return "lost"

            def waited(link):
                yield [gate]
                return "done"

            first, second = grid.x.begin("interrupted", interrupted), grid.x.begin("waited", waited)
            other.done = True
            with pytest.raises(kind, match="of the handler"):
                second.wait()
            gate.done = True
            assert second.wait() == "done"
            for _ in range(2):
                with pytest.raises(GridError, match=r"interrupted #1 on axis x.*signal handler.*Close this grid"):
                    first.wait()
            assert grid.engine.idle()
            assert grid.everyone.all_reduce(np.ones(1)).wait() == 2


def test_a_collective_goes_on_if_the_handler_did_not_interrupt_its_steps(comm, handled, monkeypatch):
    """The handler interrupts the pause between two tests of the requests, or the loop of the tests."""
    for where in ("_pause", "_progress"):
        with given(where=where), Grid(comm, (2, 1, 1)) as grid, monkeypatch.context() as patch:
            handled(Handler(Walltime).method)
            if grid.rank == 0:
                engine, whole = grid.engine, getattr(grid.engine, where)

                def interrupted(*arguments, engine=engine, where=where, whole=whole):
                    patch.setattr(engine, where, whole)
                    interrupt()

                gate = SimpleNamespace(done=False)
                pending = grid.y.begin("waited", lambda link, gate=gate: (yield [gate]))
                patch.setattr(engine, where, interrupted)
                with pytest.raises(Walltime):
                    pending.wait()
                gate.done = True
                pending.wait()
            else:
                grid.y.begin("waited", lambda link: iter(())).wait()
            assert grid.everyone.all_reduce(np.ones(1)).wait() == 2


def test_messages_of_a_collective_that_began_stay_under_way(comm, handled):
    """The handler interrupts the start, after the first messages were posted."""
    with Grid(comm, (2, 1, 1)) as grid:
        handled(Handler(Walltime).method)
        into = np.zeros(2)

        class Interrupts:
            @property
            def done(self):
                if grid.rank == 0 and not met:
                    met.append(True)
                    interrupt()
                return True

        def exchange(link):
            requests = [
                link.comm.Irecv(into, 1 - link.rank, link.tag),
                link.comm.Isend(np.ones(2), 1 - link.rank, link.tag),
            ]
            yield [Interrupts()]
            yield requests

        met = []
        if grid.rank == 0:
            with pytest.raises(Walltime):
                grid.x.begin("exchange", exchange)
            [pending] = grid.engine.active
        else:
            pending = grid.x.begin("exchange", exchange)
        pending.wait()
        assert (into == 1).all()


def test_a_persistent_exchange_can_be_awaited_again(comm, handled, monkeypatch):
    """One rank does not send the messages of the second round twice."""
    with Grid(comm, (2, 1, 1)) as grid:
        handled(Handler(Walltime).method)
        peer, given_, out = 1 - grid.rank, np.zeros((2, 1)), np.zeros((2, 1))
        rounds = tuple(
            Round(sends=((peer, Span(IN, row, row + 1)),), receives=((peer, Span(OUT, row, row + 1)),))
            for row in (0, 1)
        )
        schedule = Schedule(rounds)
        library = DistMatrix.ones(grid, (2, 2), library="numpy").library
        buffers = Buffers(schedule, library, (given_, out), (0, 0), None)
        persistent = grid.x._persistent("exchange", "", schedule, buffers, 8, 1)
        whole = grid.engine.wait_persistent
        for number in range(3):
            given_[...] = [[10 * number + 1], [10 * number + 2]]
            calls = []

            def waits(*arguments, calls=calls, number=number):
                whole(*arguments)
                calls.append(1)
                if number == 1 and len(calls) == 2 and grid.rank == 0:
                    interrupt()

            monkeypatch.setattr(grid.engine, "wait_persistent", waits)
            persistent.begin()
            if number == 1 and grid.rank == 0:
                with pytest.raises(Walltime):
                    persistent.wait()
            persistent.wait()
            assert out.tolist() == given_.tolist()
        persistent.free()


def test_a_product_that_was_interrupted_is_refused_and_the_grid_can_be_closed(comm, handled, monkeypatch):
    with Grid(comm, (1, 2, 1)) as grid:
        handled(Handler(Walltime).method)
        a, b = DistMatrix.ones(grid, (8, 8)), DistMatrix.ones(grid, (8, 8), layout=Layout.B)
        plan = MatmulPlan(a, b)
        with monkeypatch.context() as patch:
            patch.setattr(executor, "sum_in_order", lambda *_: interrupt())
            with pytest.raises(Walltime):
                plan()
        with pytest.raises(GridError, match="under way"):
            plan()
        plan.close()
        assert (MatmulPlan(a, b)().gather() == 8).all()
    assert not grid.engine.persistent
