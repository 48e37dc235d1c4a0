"""Signals as wishes: noted as they come, heeded by all ranks together when there is a good moment."""

from __future__ import annotations

import signal

SAVE, END = 1, 2
"""A checkpoint and on; a checkpoint and the end."""
WISHES = {signal.SIGUSR1: SAVE, signal.SIGTERM: END}


class Signals:
    """As a context: SIGUSR1 and SIGTERM are noted instead of ending the process. May be entered again inside.

    Python takes signals in its main thread only; elsewhere nothing is noted.
    """

    def __init__(self):
        self._wish, self._depth = 0, 0
        self._before: dict = {}

    def __enter__(self) -> Signals:
        self._depth += 1
        if self._depth == 1:
            try:
                for number in WISHES:
                    self._before[number] = signal.signal(number, self._note)
            except ValueError:
                pass
        return self

    def __exit__(self, *_) -> None:
        self._depth -= 1
        if self._depth == 0:
            for number, handler in self._before.items():
                signal.signal(number, handler or signal.SIG_DFL)
            self._before.clear()

    def retire(self) -> None:
        """Once the context is left they are ignored to the end of the process: all that they ask for is done."""
        self._before = dict.fromkeys(self._before, signal.SIG_IGN)

    def _note(self, number, frame) -> None:
        self._wish = max(self._wish, WISHES[signal.Signals(number)])

    def asked(self, grid) -> int:
        """The most urgent wish that any rank has had since the last call; 0 for none. Collective."""
        import numpy as np

        mine, self._wish = self._wish, 0
        counts = np.array([mine == wish for wish in WISHES.values()], np.int64)
        heard = grid.everyone.all_reduce(counts, agreed=True).wait()
        return max((wish for wish, count in zip(WISHES.values(), heard) if count), default=0)
