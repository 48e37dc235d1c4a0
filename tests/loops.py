"""A loop over values inside one test: the failure names the values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def given(**values: Any) -> Iterator[None]:
    """The body of a loop in a test. An error in it names the values.

        for size, dtype in product(SIZES, DTYPES):
            with given(size=size, dtype=dtype):
                assert doubled(size, dtype) == 2 * size
    """
    __tracebackhide__ = True
    try:
        yield
    except (Exception, pytest.fail.Exception) as error:  # the latter is of pytest.raises
        said = ", ".join(f"{name}={value!r}" for name, value in values.items())
        raise AssertionError(f"with {said}: {type(error).__name__}: {error}") from error
