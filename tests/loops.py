"""Loops over values inside one test. An error message contains the values."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def given(**values: Any) -> Iterator[None]:
    """As a context: the body of a loop in a test. An error in it is raised with the values in its message.

    for size, dtype in product(SIZES, DTYPES):
        with given(size=size, dtype=dtype):
            assert doubled(size, dtype) == 2 * size
    """
    __tracebackhide__ = True
    try:
        yield
    except (Exception, pytest.fail.Exception) as error:  # the latter comes from pytest.raises
        in_words = ", ".join(f"{name}={value!r}" for name, value in values.items())
        raise AssertionError(f"with {in_words}: {type(error).__name__}: {error}") from error


def looped(names: str, values: Iterable[Any]) -> Callable[[Callable], Callable]:
    """Decorator: `pytest.mark.parametrize` as a loop inside one test. It can be used several times.

        @looped("library, dtype", TYPES)
        def test_sums(library, dtype): ...

    Each iteration has its own `monkeypatch` and an empty `caplog`. All iterations share the other fixtures.
    """
    listed, rows = [name.strip() for name in names.split(",")], list(values)

    def decorate(test: Callable) -> Callable:
        @functools.wraps(test)
        def loop(**fixtures: Any) -> None:
            __tracebackhide__ = True
            for row in rows:
                chosen = dict(zip(listed, row if len(listed) > 1 else [row]))
                if "caplog" in fixtures:
                    fixtures["caplog"].clear()
                with given(**chosen), pytest.MonkeyPatch.context() as own:
                    test(**fixtures, **chosen, **({"monkeypatch": own} if patches else {}))

        parameters = inspect.signature(test).parameters
        patches = "monkeypatch" in parameters
        loop.__signature__ = inspect.Signature(
            [value for name, value in parameters.items() if name not in (*listed, "monkeypatch")]
        )
        return loop

    return decorate
