"""What the tests of verdicts on made-up facts share."""

import json

from pmm3d.tools.doctor.finding import Verdict

ONE, FOUR, TWO_HOSTS = ["n1"], ["n1"] * 4, ["n1", "n1", "n2", "n2"]
OK, NOTE, WARNING, FAILURE = Verdict
GIB = 2**30


def assert_says(finding, verdict, *parts):
    """The verdict is that, and the parts are in what it says; every problem has a remedy."""
    whole = " ".join([finding.found, *(f"{problem.text} -> {problem.remedy}" for problem in finding.problems)])
    assert finding.verdict == verdict, whole
    assert all(problem.text and problem.remedy for problem in finding.problems)
    assert all(part in whole for part in parts), whole
    json.dumps(finding.as_json())
