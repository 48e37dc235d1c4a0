"""Errors of many calls."""

import pytest
from loops import given


@pytest.fixture
def all_fail(fails):
    """all_fail(case, ...): check each case (kind, text, call) by `fails`."""

    def check(*cases):
        for kind, text, call in cases:
            with given(text=text):
                fails(kind, text, call)

    return check
