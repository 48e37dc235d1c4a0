"""Helpers of tests that check the verdicts of `pmm3d doctor` on invented facts."""

import json

from pmm3d.tools.doctor.checks import CHECKS
from pmm3d.tools.doctor.finding import Finding, Verdict

ONE, FOUR, TWO_HOSTS = ["n1"], ["n1"] * 4, ["n1", "n1", "n2", "n2"]
OK, NOTE, WARNING, FAILURE = Verdict
GIB = 2**30


def judged(name, facts, hosts):
    """The finding of a check, from the facts of all ranks."""
    finding = Finding(name)
    next(check for check in CHECKS if check.name == name).judge(finding, facts, hosts)
    return finding


def assert_says(finding, verdict, *parts):
    """Assert the verdict of a finding, and that its text contains the parts. Every problem must have a remedy."""
    whole = " ".join([finding.found, *(f"{problem.text} -> {problem.remedy}" for problem in finding.problems)])
    assert finding.verdict == verdict, whole
    assert all(problem.text and problem.remedy for problem in finding.problems)
    assert all(part in whole for part in parts), whole
    json.dumps(finding.as_json())
