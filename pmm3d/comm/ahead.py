"""Messages that go ahead of the agreement on them, and are withdrawn where not all ranks have posted the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from ..arrays import NumpyLibrary
from .algorithms import gather_parts
from .requests import MOST_AHEAD, Exchange
from .transport import Collective, Link

POSTED = 2
"""From here on what is said in an agreement is POSTED + the number of what this rank has posted, less 1."""


class Ahead:
    """The exchanges of a grid that may be posted before the ranks have agreed on the call that they belong to.

    An agreement costs a message to all ranks and back. Messages of a call that was made before, of which all ranks hold
    the requests, need not wait for it: they are posted first, and the call goes on once all ranks are known to have
    posted them. Else what was posted is withdrawn, by all ranks: `withdraw`, which the agreement does.
    """

    def __init__(self) -> None:
        self._exchanges: dict[int, Sequence[Exchange]] = {}

    def free_number(self) -> int | None:
        """The least that is not taken, from 1 on; None if all are. The same on all ranks if all keep the same."""
        return next((number for number in range(1, MOST_AHEAD + 1) if number not in self._exchanges), None)

    def keep(self, number: int, exchanges: Sequence[Exchange]) -> None:
        """From now on that number means these, on all ranks: collective."""
        self._exchanges[number] = exchanges

    def drop(self, number: int) -> None:
        """That number is free again. Collective."""
        del self._exchanges[number]

    @staticmethod
    def said(number: int) -> int:
        """What a rank that has posted them says in the agreement (`Terms.said`)."""
        return POSTED + number - 1

    def withdraw(self, link: Link, said: int) -> Collective[None]:
        """Generator: bring to an end what any rank has posted, where not all have posted the same; collective over the
        grid. A message whose receiver has posted something else is received, into its place in work memory; one that
        nobody sends is not waited for. Messages between two ranks that posted the same arrive."""
        everyones = np.empty((link.size, 1), np.int64)
        mine = np.array([[said]], np.int64)
        yield from link.uncounted(gather_parts(link, NumpyLibrary(), mine, everyones, [1] * link.size))
        posted, under_way = everyones[:, 0], list[MPI.Request]()
        for number, exchanges in self._exchanges.items():
            here = said == self.said(number)
            for message in (message for exchange in exchanges for message in exchange.messages):
                there = posted[message.rank] == self.said(number)
                if here and not there and message.receives:
                    message.request.Cancel()
                if there and not here and message.receives:
                    message.request.Start()
                if here or (there and message.receives):
                    under_way.append(message.request)
        if under_way:
            yield under_way
