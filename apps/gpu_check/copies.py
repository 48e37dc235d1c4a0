"""Copies between pinned host memory and a device, by torch or cupy themselves: what staging is held against."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

import numpy as np


class Copies(NamedTuple):
    """Functions that begin a copy of all bytes; the host's end, twice: both are pinned."""

    to_host: Callable[[], object]
    to_device: Callable[[], object]
    host: np.ndarray
    other_host: np.ndarray


def pinned_copies(library: str, nbytes: int) -> Copies:
    """Of arrays of that many bytes, on the current device and in the current stream of the library."""
    return _of_cupy(nbytes) if library == "cupy" else _of_torch(nbytes, library.startswith("torch:cuda"))


def _of_torch(nbytes: int, cuda: bool) -> Copies:
    torch = import_module("torch")
    host, other = (torch.zeros(nbytes, dtype=torch.uint8, pin_memory=cuda) for _ in range(2))
    device = torch.zeros(nbytes, dtype=torch.uint8, device="cuda" if cuda else "cpu")
    return Copies(lambda: host.copy_(device, non_blocking=True), lambda: device.copy_(host, non_blocking=True),
                  host.numpy(), other.numpy())


def _of_cupy(nbytes: int) -> Copies:
    cupy, cupyx = import_module("cupy"), import_module("cupyx")
    host, other = (cupyx.zeros_pinned(nbytes, np.uint8) for _ in range(2))
    device = cupy.zeros(nbytes, np.uint8)
    return Copies(lambda: device.get(out=host, blocking=False), lambda: device.set(host), host, other)
