"""Signals as requests, which all ranks carry out together between two steps."""

from __future__ import annotations

import signal
from contextlib import suppress
from typing import Any

SAVE, END, INTERRUPT = 1, 2, 3
"""SAVE requests a checkpoint. END and larger numbers request a checkpoint and the end of the run."""
REQUESTS = {signal.SIGUSR1: SAVE, signal.SIGTERM: END, signal.SIGINT: INTERRUPT}


class Signals:
    """Context in which SIGUSR1, SIGTERM and SIGINT are collected instead of ending the process.

    The context may be nested. A second SIGINT ends the process at once. Outside the main thread, where Python handles
    no signals, it has no effect.
    """

    def __init__(self) -> None:
        self._request, self._depth = 0, 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        self._depth += 1
        if self._depth == 1:
            with suppress(ValueError):
                self._before = {number: signal.signal(number, self._note) for number in REQUESTS}
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            for number, handler in self._before.items():
                signal.signal(number, handler or signal.SIG_DFL)
            self._before.clear()

    def retire(self) -> None:
        """Ignore the signals from the end of the context to the end of the process."""
        self._before = dict.fromkeys(self._before, signal.SIG_IGN)

    def _note(self, number: int, frame: object) -> None:
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
        self._request = max(self._request, REQUESTS[signal.Signals(number)])

    def taken(self) -> int:
        """Return the most urgent request that this rank received since the last call; 0 for none."""
        own, self._request = self._request, 0
        return own
