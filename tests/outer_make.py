"""The environment of a make that a test starts."""

from __future__ import annotations

import os

OF_MAKE = ("MAKEFLAGS", "MFLAGS", "ARGS", "N")


def without_outer_make() -> dict[str, str]:
    """Environment of this process without the variables of an outer make, which would change targets and jobs."""
    return {name: value for name, value in os.environ.items() if name not in OF_MAKE}
