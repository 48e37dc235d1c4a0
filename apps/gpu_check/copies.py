"""Copies between pinned host memory and a device, by torch or cupy themselves: what staging is held against."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

import numpy as np


class Copies(NamedTuple):
    """both_ways: copies all bytes to the host, and as many back from it, each in a stream of its own, and waits for
    both. hosts: the two ends on the host, pinned."""

    both_ways: Callable[[], None]
    hosts: tuple[np.ndarray, np.ndarray]


def pinned_copies(library: str, nbytes: int) -> Copies:
    """Of arrays of that many bytes, on the current device of the library."""
    if library == "cupy":
        return _of_cupy(nbytes)
    return _of_torch(nbytes) if library.startswith("torch:cuda") else _of_numpy(nbytes)


def _of_torch(nbytes: int) -> Copies:
    torch = import_module("torch")
    coming, leaving = (torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    source, target = (torch.zeros(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    down, up = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()

    def both_ways() -> None:
        with torch.cuda.stream(down):
            coming.copy_(source, non_blocking=True)
        with torch.cuda.stream(up):
            target.copy_(leaving, non_blocking=True)
        down.synchronize()
        up.synchronize()

    return Copies(both_ways, (coming.numpy(), leaving.numpy()))


def _of_cupy(nbytes: int) -> Copies:
    cupy, cupyx = import_module("cupy"), import_module("cupyx")
    coming, leaving = (cupyx.zeros_pinned(nbytes, np.uint8) for _ in range(2))
    source, target = (cupy.zeros(nbytes, np.uint8) for _ in range(2))
    down, up = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    cupy.cuda.Device().synchronize()

    def both_ways() -> None:
        source.get(stream=down, out=coming, blocking=False)
        target.set(leaving, stream=up)
        down.synchronize()
        up.synchronize()

    return Copies(both_ways, (coming, leaving))


def _of_numpy(nbytes: int) -> Copies:
    """Where there is no device: copies of host memory."""
    coming, leaving, source, target = (np.zeros(nbytes, np.uint8) for _ in range(4))

    def both_ways() -> None:
        coming[...] = source
        target[...] = leaving

    return Copies(both_ways, (coming, leaving))
