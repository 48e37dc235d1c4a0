"""What a GPU is to show of the bridge, on the host."""

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.deadline(120)


@pytest.mark.parallel([2], thorough=[1])
def test_five_steps_of_each_case_are_those_of_the_plain_module(comm, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[2] / "apps"), *sys.path])
    from gpu_check.bridge import bridge_step
    from gpu_check.cases import SMALL, all_cases

    torch.set_num_threads(1)
    cases = [case for case in all_cases(["torch"], [comm.size], SMALL) if case.name.startswith("bridge: ")]
    assert {case.options["precision"] for case in cases} == {"float32", "bfloat16"}
    for case in cases:
        _, figures = bridge_step(comm, case)
        assert figures["error"] > 0
