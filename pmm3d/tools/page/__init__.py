"""One HTML file about a run or a benchmark, which needs nothing else: no network, no script of others, no fonts."""

from __future__ import annotations

import os
from pathlib import Path

from ...errors import Pmm3dError
from ...io.disk import replace_file


def write_page(source: str | os.PathLike[str], output: str | os.PathLike[str] | None = None,
               mtbf: float | None = None) -> Path:
    """Make the page of a run's folder, or of a file of `pmm3d bench --json`, and return where it is.

    output   report.html in the run's folder, or the name of the file with .html, if left out
    mtbf     hours between failures of the whole job, for how often to write checkpoints; a day if left out

    Raises Pmm3dError if the source is neither, if mtbf is not above 0 or goes with a benchmark, or if the page cannot
    be written; MissingPackageError without jinja2.

        >>> import json, pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     line = {"step": 1, "loss": 0.5}
        ...     _ = pathlib.Path(folder, "metrics.jsonl").write_text(json.dumps(line))
        ...     write_page(folder).name
        'report.html'
    """
    from .bench_page import bench_page
    from .elements import render
    from .inputs import RunFiles, read_source
    from .run_page import run_page

    path = Path(source)
    found = read_source(path)
    if isinstance(found, RunFiles):
        page, target = run_page(found, mtbf), found.path / "report.html"
    elif mtbf is not None:
        raise Pmm3dError(f"{path} is a benchmark, which writes no checkpoints: leave --mtbf out")
    else:
        page, target = bench_page(path, found), path.with_suffix(".html")
    target = target if output is None else Path(output)
    try:
        replace_file(target, render(page).encode("utf-8", "replace"))
    except OSError as error:
        raise Pmm3dError(f"cannot write {target}: {error.strerror}; --output names another place") from None
    return target
