"""One HTML file about a run or a benchmark. It contains no script, and it loads no font, picture or other file."""

from __future__ import annotations

import os
from pathlib import Path

from ...errors import Pmm3dError
from ...io.disk import replace_file


def write_page(source: str | os.PathLike[str], output: str | os.PathLike[str] | None = None) -> Path:
    """Write the page of a run's folder, or of a file of `pmm3d bench --json`. Return its path.

    output   default: report.html in the run's folder, or the name of the benchmark's file with .html

    Raises Pmm3dError if the source is neither or the page cannot be written, MissingPackageError without jinja2.

        >>> import json, pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     line = {"step": 1, "loss": 0.5}
        ...     _ = pathlib.Path(folder, "metrics.jsonl").write_text(json.dumps(line))
        ...     write_page(folder).name
        'report.html'
    """
    from .elements import render
    from .inputs import OF_A_RUN, RunFiles, read_source
    from .run_page import run_page

    path = Path(source)
    contents = read_source(path)
    if isinstance(contents, RunFiles):
        page, target = run_page(contents), contents.path / "report.html"
    else:
        from ..bench.result import Result
        from .bench_page import bench_page

        try:
            page, target = bench_page(path, [*map(Result.from_json, contents)]), path.with_suffix(".html")
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise Pmm3dError(
                f"{path} contains no figures of pmm3d bench --json ({type(error).__name__}: {error}): name {OF_A_RUN}"
            ) from None
    target = target if output is None else Path(output)
    try:
        replace_file(target, render(page).encode("utf-8", "replace"))
    except OSError as error:
        raise Pmm3dError(f"cannot write {target}: {error.strerror}; --out names another place") from None
    return target
