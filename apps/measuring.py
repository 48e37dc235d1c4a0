"""A table for the programs of faults and hostile inputs."""

from collections.abc import Sequence


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table of which the first row is the heading."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])
