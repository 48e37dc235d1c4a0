"""What each rank did when, as a file that chrome://tracing and ui.perfetto.dev show."""

from __future__ import annotations

import json
import os
from typing import Any


def write_chrome_trace(path: str | os.PathLike[str], ranks_events: list[list[dict[str, Any]]]) -> None:
    """One file from the events of all ranks: a process per rank, a track per axis, one for computing, one for waits."""
    names = [{"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
             for rank in range(len(ranks_events))]
    with open(path, "w") as file:
        json.dump({"traceEvents": names + [event for events in ranks_events for event in events]}, file)
