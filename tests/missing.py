"""What a test needs and this machine lacks: a reason to skip the test, and on CI an error."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def skip_or_fail(reason: str) -> NoReturn:
    """Skip the test. Where PMM3D_CI is set, fail: there, `make system-packages` has installed everything."""
    (pytest.fail if os.environ.get("PMM3D_CI") else pytest.skip)(reason)
