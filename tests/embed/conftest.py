"""Fixtures: the library that `make embed` builds, and programs that call it."""

from pathlib import Path

import pytest
from callers import ENVIRONMENT, LIBRARIES, Caller, compiled, lacks
from missing import skip_or_fail


@pytest.fixture(autouse=True)
def _callers_can_be_made(request):
    if lacking := lacks():
        skip_or_fail(lacking)
    if request.node.get_closest_marker("thorough"):
        assert (LIBRARIES / "libpmm3d.so").exists(), "make test-embed builds them"


@pytest.fixture(scope="session")
def program(tmp_path_factory):
    """program("apps/embed/product.c") compiles the program at the first call, and returns its Caller."""
    made: dict[tuple[tuple[str, ...], ...], Caller] = {}

    def find(*sources: str, flags: tuple[str, ...] = ()) -> Caller:
        if (sources, flags) not in made:
            made[sources, flags] = compiled(tmp_path_factory.mktemp("program"), *sources, flags=flags)
        return made[sources, flags]

    return find


@pytest.fixture(scope="session")
def site_packages() -> Path:
    """Folder site-packages of the Python that the library starts."""
    [found] = ENVIRONMENT.glob("lib/python*/site-packages")
    return found
