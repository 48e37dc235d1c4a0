"""One HTML file about a run or a benchmark, which needs nothing else: no network, no script of others, no fonts."""

from __future__ import annotations

import os
from pathlib import Path

from ...errors import Pmm3dError


def write_page(source, output=None) -> Path:
    """Make the page of a run's folder, or of a file of `pmm3d bench --json`, and return where it is.

    output   report.html in the run's folder, or the name of the file with .html, if left out

    Raises Pmm3dError if the source is neither, or the page cannot be written.
    """
    from . import of_bench, of_run
    from .source import read_source
    from .template import page

    found = read_source(source)
    sections = of_run.sections(found) if found.is_run else of_bench.sections(found.results, found.path)
    target = Path(output) if output is not None else found.default_output
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        temporary.write_text(page(sections), encoding="utf-8", errors="replace")
        os.replace(temporary, target)
    except OSError as error:
        raise Pmm3dError(f"cannot write {target}: {error.strerror}; --output names another place") from None
    return target
