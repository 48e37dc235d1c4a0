"""The record of a run of `make gpu-check`, and its report in JSON and Markdown."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

OK, FAILED, ABSENT, NOT_RUN = "ok", "FAILED", "absent", "NOT RUN"
"""Absent: a package, a second GPU or a transport does not exist here. This is no failure."""
GIVEN_UP = "not run: "
"""How the reason begins if a test is skipped because others on the same library ended their ranks or hung."""
Entry = dict[str, Any]


class Record:
    """Pytest plugin that writes the outcome of each test to results.json, after each test."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.entries: dict[str, Entry] = {}

    def pytest_collection_finish(self, session: Any) -> None:
        for item in session.items:
            params = item.callspec.params
            self.entries[item.nodeid] = {
                "name": item.name,
                "check": item.originalname.removeprefix("test_").replace("_", " "),
                "ranks": params["nranks"],
                **{name: str(params.get(name, "")) for name in ("library", "precision")},
                "state": NOT_RUN,
                "said": "not run",
                "figures": {},
                "seconds": 0.0,
                "output": "",
            }
        self._write()

    def pytest_runtest_logreport(self, report: Any) -> None:
        entry = self.entries[report.nodeid]
        entry["seconds"] = round(entry["seconds"] + report.duration, 3)
        properties = dict(report.user_properties)
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            said = [crash.message if crash else "", properties.get("said", "")]
            entry |= properties | {
                "state": FAILED,
                "said": "; ".join(filter(None, said)),
                "output": report.longreprtext[-4000:],
            }
        elif report.skipped:
            said = str(report.longrepr[-1]).removeprefix("Skipped: ")
            entry |= {"state": NOT_RUN if said.startswith(GIVEN_UP) else ABSENT, "said": said}
        elif report.when == "call":
            entry |= {"state": OK, "said": ""} | properties
        self._write()

    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, str] | None:
        """The sentence of a test in the verbose output of pytest."""
        said = dict(report.user_properties).get("said")
        return ("passed", ".", f"ok: {said}") if report.when == "call" and report.passed and said else None

    def _write(self) -> None:
        (self.folder / "results.json").write_text(json.dumps([*self.entries.values()], default=str))


def results(folder: Path) -> list[Entry]:
    """The outcomes of a run, also of one that was ended."""
    file = folder / "results.json"
    return json.loads(file.read_text()) if file.exists() else []


def write(folder: Path, facts: Mapping[str, Any], entries: Sequence[Entry], seconds: float) -> str:
    """Write report.json and report.md. Return the text of report.md."""
    named = [entry["figures"]["MPI"] for entry in entries if "MPI" in entry["figures"]]
    facts = {**facts, **({"MPI": named[0]} if named else {})}
    document = {"facts": facts, "seconds": round(seconds, 1), "counts": counts(entries), "cases": entries}
    (folder / "report.json").write_text(json.dumps(document, indent=1))
    text = markdown(facts, entries, seconds)
    (folder / "report.md").write_text(text)
    return text


def counts(entries: Sequence[Entry]) -> dict[str, int]:
    found = Counter(entry["state"] for entry in entries)
    return {state: found[state] for state in (OK, FAILED, ABSENT, NOT_RUN)}


def summary(entries: Sequence[Entry], seconds: float) -> str:
    words = ", ".join(f"{number} {state}" for state, number in counts(entries).items() if number)
    return f"gpu-check: {words} of {len(entries)} in {seconds:.0f} s"


def markdown(facts: Mapping[str, Any], entries: Sequence[Entry], seconds: float) -> str:
    """Facts; failures; comparisons by check, library and precision; all other checks."""
    groups: dict[tuple[str, ...], list[Entry]] = {}
    others = []
    for entry in entries:
        if entry["precision"] and entry["check"] not in ("rate", "step", "launches"):
            groups.setdefault((entry["check"], entry["library"], entry["precision"]), []).append(entry)
        else:
            others.append([entry["name"], _cell(entry["said"]), entry["state"]])
    compared = [_compared(key, group) for key, group in groups.items()]
    failed = [
        f"{entry['name']}: {entry['said']}\n\n{_indented(entry['output'])}"
        for entry in entries
        if entry["state"] == FAILED
    ]
    said = "; ".join(f"{name} {_in_words(fact)}" for name, fact in facts.items() if name != "command")
    return (
        "\n\n".join(
            [
                f"    {facts.get('command', '')}",
                f"{said}. {summary(entries, seconds)}.",
                *failed,
                _table([["check", "library", "precision", "ranks", "right", "largest relative error"], *compared]),
                _table([["check", "result", ""], *others]),
            ]
        )
        + "\n"
    )


def _compared(key: Sequence[str], group: Sequence[Entry]) -> list[str]:
    """The row of comparisons by check, library and precision."""
    there = [entry for entry in group if entry["state"] != ABSENT]
    absent = f", {len(group) - len(there)} absent" if len(there) < len(group) else ""
    right = f"{sum(entry['state'] == OK for entry in there)} of {len(there)}{absent}"
    errors = [entry["figures"]["error"] for entry in group if "error" in entry["figures"]]
    ranks = ", ".join(map(str, sorted({entry["ranks"] for entry in group})))
    return [*key, ranks, right, f"{max(errors):.1e}" if errors else "-"]


def _in_words(fact: Any) -> str:
    if isinstance(fact, dict):
        return ", ".join(f"{name} {_in_words(value)}" for name, value in fact.items())
    return "; ".join(map(_in_words, fact)) if isinstance(fact, list) else str(fact)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")[:400]


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines()[-12:])


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])
