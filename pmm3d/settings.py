"""Environment variables, in one place. Arguments of `Grid` take precedence over them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from .errors import Pmm3dError


def _variable(name: str, default, kind, meaning: str):
    def read():
        text = os.environ.get(name)
        if text is None or text == "":
            return default
        try:
            return kind(text)
        except ValueError:
            raise Pmm3dError(f"{name}={text!r} is not understood; it means {meaning}") from None

    return field(default_factory=read, metadata={"variable": name, "default": default, "meaning": meaning})


def _switch(text: str) -> bool:
    known = {"0": False, "1": True, "off": False, "on": True, "no": False, "yes": True}
    try:
        return known[text.lower()]
    except KeyError:
        raise ValueError(text) from None


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError(text)
    return value


@dataclass(frozen=True)
class Settings:
    """What the environment asks for; read once, when a Grid is made."""

    timeout: float = _variable(
        "PMM3D_TIMEOUT", 600.0, _seconds, "a number: seconds after which a collective that hangs ends the job; 0: never"
    )
    debug: bool = _variable(
        "PMM3D_DEBUG", False, _switch, "0 or 1: compare the ranks' calls before each collective; look for deadlocks"
    )
    log: bool = _variable("PMM3D_LOG", False, _switch, "0 or 1: log each collective of each rank to stderr")
    trace: bool = _variable("PMM3D_TRACE", False, _switch, "0 or 1: keep every collective and GEMM for a Chrome trace")
    check: bool = _variable("PMM3D_CHECK", True, _switch, "0 or 1: compare the ranks' arguments before each operation")
    device_transport: str = _variable(
        "PMM3D_DEVICE_TRANSPORT", "auto", str, "auto, direct or staged: how device memory reaches MPI"
    )
