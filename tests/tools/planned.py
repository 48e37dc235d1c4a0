"""`pmm3d plan` in this process: its output, its figures, and its refusals."""

import json

from typer.testing import CliRunner

from pmm3d.tools.commands import app


def invoked(*words, columns=160, **environ):
    environ = {"COLUMNS": f"{columns}", "TERM": "dumb", **environ}
    return CliRunner().invoke(app, ["plan", *map(str, words)], env=environ)


def planned(*words, columns=160, **environ) -> str:
    """The output. Only a line with the name of a file may be longer than the terminal."""
    done = invoked(*words, columns=columns, **environ)
    assert done.exit_code == 0, done.output
    assert all(len(line) <= columns or line.startswith("wrote ") for line in done.stdout.splitlines()), done.stdout
    return done.stdout


def refused(*words, **options) -> str:
    """The line with the reason."""
    done = invoked(*words, **options)
    assert (done.exit_code, done.stdout) == (2, "") and done.stderr.count("\n") == 1, done.output
    return done.stderr


def figures_of(path, *words, **options):
    """The figures that --json writes to this path."""
    planned(*words, "--json", path, **options)
    return json.loads(path.read_text())
