"""Execution of the collectives of all ranks of a group in one process. Messages are copies of arrays."""

import numpy as np

from pmm3d.arrays import NumpyLibrary, Workspace
from pmm3d.comm.transport import Link
from pmm3d.model.node_map import FLAT


class FakeRecord:
    def __init__(self, size):
        self.members = range(size)
        self.sent = self.received = self.across = 0


class FakeLink:
    """The parts of a Link that `comm.executor` uses.

    steps      number of exchanges;   messages   largest number of messages in one exchange
    record     bytes, as in the ledger
    mail       (sender, receiver) -> sent arrays of the whole group that are not received yet
    each       number of ranks on a node
    """

    check, dry, off_node = True, False, frozenset()

    def __init__(self, rank, size, mail, node_map=FLAT, each=None):
        self.rank, self.size, self._mail, self.node_map = rank, size, mail, node_map
        self._each = each or size
        self.record, self.workspace = FakeRecord(size), Workspace()
        self.steps = self.messages = 0

    def posted(self, library, sends, receives, work=None):
        for requests in Link.posted(self, library, sends, receives, work):
            yield requests
            while not all(request.done for request in requests):
                yield []

    exchange = posted

    def uncounted(self, collective):
        return collective

    def _packed(self, library, sends, receives, work):
        return Link._packed(self, library, sends, receives, work)

    def post_all(self, library, sends, receives):
        for peer, array in sends:
            assert library.is_contiguous(array)
            self.record.sent += array.nbytes
            self._mail.setdefault((self.rank, peer), []).append(np.array(array))
        self.steps += bool(sends or receives)
        self.messages = max(self.messages, len(sends), len(receives))
        return [FakeRequest(self, peer, array) for peer, array in receives]


class FakeRequest:
    """A receive, which ends when it is asked whether it has ended, once the message is there."""

    def __init__(self, link, peer, array):
        self._link, self._peer, self._array, self._ended = link, peer, array, False

    @property
    def done(self):
        link, peer, array = self._link, self._peer, self._array
        if not self._ended and link._mail.get((peer, link.rank)):
            message = link._mail[peer, link.rank].pop(0)
            assert message.shape == array.shape and message.dtype == array.dtype
            array[...] = message
            link.record.received += array.nbytes
            link.record.across += array.nbytes * (peer // link._each != link.rank // link._each)
            self._ended = True
        return self._ended


def run(size, collective, node_map=FLAT, each=None):
    """Run collective(link) for each rank. Returns (results, links) of the ranks."""
    mail = {}
    links = [FakeLink(rank, size, mail, node_map, each) for rank in range(size)]
    under_way = {link.rank: collective(link) for link in links}
    results = [None] * size
    for _ in range(100 * size + 1000):
        for rank, generator in list(under_way.items()):
            try:
                next(generator)
            except StopIteration as end:
                results[rank] = end.value
                del under_way[rank]
    assert not under_way and not any(mail.values())
    return results, links


LIBRARY = NumpyLibrary()
