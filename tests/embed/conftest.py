"""The library of these tests, which `make embed` builds, and programs that call it."""

from __future__ import annotations

from pathlib import Path

import pytest
from callers import ENVIRONMENT, LIBRARIES, Caller, compiled


@pytest.fixture(scope="session", autouse=True)
def libraries() -> Path:
    assert (LIBRARIES / "libpmm3d.so").exists(), "make test-embed builds them"
    return LIBRARIES


@pytest.fixture(scope="session")
def program(tmp_path_factory):
    """program("apps/embed/product.c"): compiled once."""
    made: dict[tuple[str, ...], Caller] = {}

    def find(*sources: str, flags: tuple[str, ...] = ()) -> Caller:
        if sources not in made:
            made[sources] = compiled(tmp_path_factory.mktemp("program"), *sources, flags=flags)
        return made[sources]

    return find


@pytest.fixture(scope="session")
def site_packages() -> Path:
    """Of the Python that the library starts."""
    [found] = ENVIRONMENT.glob("lib/python*/site-packages")
    return found
