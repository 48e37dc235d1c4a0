"""Collectives that make progress only during a wait for them, as in a dry run."""

from weakref import WeakKeyDictionary

from mpi4py import MPI

from pmm3d import Pending


class Gate:
    """Stops a collective after its first messages until its `wait` is called.

    done    whether the collective may continue
    inner   gates of the collectives for which it waits
    """

    def __init__(self):
        self.done, self.inner = False, []

    def open(self):
        self.done = True
        for gate in self.inner:
            gate.open()


def move_what_is_waited_for(engine):
    """Let collectives make progress only during a wait for them, as in a dry run."""
    gates = WeakKeyDictionary()

    class Gated(Pending):
        def wait(self):
            gates[self].open()
            return super().wait()

    def held(gate, collective):
        while True:
            try:
                awaited = next(collective)
            except StopIteration as end:
                return end.value
            if awaited and isinstance(awaited[0], MPI.Request):
                yield [gate]
            gate.inner = [gates[each] for each in awaited if isinstance(each, Pending)]
            if gate.done:
                gate.open()
            yield awaited

    def wrap(pending, collective):
        gate = gates[pending] = Gate()
        pending.__class__ = Gated
        return held(gate, collective)

    engine.wrap = wrap
