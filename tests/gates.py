"""Collectives that make progress only while somebody waits for them, as in a dry run."""

from weakref import WeakKeyDictionary, ref

from mpi4py import MPI

from pmm3d import Pending


class Gate:
    """Holds a collective back, beyond its messages, until the collective is waited for.

    done    whether the collective may go on;   inner: gates of the collectives that it waits for
    """

    def __init__(self):
        self.done, self.inner = False, []

    def open(self):
        self.done = True
        for gate in self.inner:
            gate.open()


def move_what_is_waited_for(engine):
    """Collectives make progress only while they are waited for, as in a dry run."""
    gates = WeakKeyDictionary()

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
        this = ref(pending)
        pending.wait = lambda: (gate.open(), Pending.wait(this()))[1]
        return held(gate, collective)

    engine.wrap = wrap
