"""What the tests of verdicts on made-up facts share."""

import json

from pmm3d.tools.doctor.checks import CHECKS
from pmm3d.tools.doctor.finding import Finding, Verdict

ONE, FOUR, TWO_HOSTS = ["n1"], ["n1"] * 4, ["n1", "n1", "n2", "n2"]
OK, NOTE, WARNING, FAILURE = Verdict
GIB = 2**30


def judged(name, facts, hosts):
    """The finding of the check of that name from the facts of all ranks."""
    finding = Finding(name)
    next(check for check in CHECKS if check.name == name).judge(finding, facts, hosts)
    return finding


def assert_says(finding, verdict, *parts):
    """The verdict is that, and the parts are in what it says; every problem has a remedy."""
    whole = " ".join([finding.found, *(f"{problem.text} -> {problem.remedy}" for problem in finding.problems)])
    assert finding.verdict == verdict, whole
    assert all(problem.text and problem.remedy for problem in finding.problems)
    assert all(part in whole for part in parts), whole
    json.dumps(finding.as_json())
