"""Skip a test if this machine lacks a program that the test needs. On CI, this is an error."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def skip_or_fail(reason: str) -> NoReturn:
    """Skip the test. If PMM3D_CI is set, fail: on CI, `make system-packages` has installed everything."""
    (pytest.fail if os.environ.get("PMM3D_CI") else pytest.skip)(reason)
