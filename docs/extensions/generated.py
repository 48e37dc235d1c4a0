"""Directives: the commands, and the results of benchmarks."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from enum import Enum
from itertools import groupby
from pathlib import Path

import typer.main
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parent.parent.parent
PLAIN = {"TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "100", "PYTHONPATH": str(ROOT)}
PROGRAMS = ("pmm3d ", "python ", "srun ", "mpiexec ")


def setup(app):
    app.add_directive("commands", Commands)
    app.add_directive("said-by", SaidBy)
    app.add_directive("results", Results)
    return {"parallel_read_safe": True}


class SaidBy(SphinxDirective):
    """The output of `python` with the arguments of the directive, as in {said-by} -m pmm3d.launcher --help."""

    required_arguments, final_argument_whitespace = 1, True

    def run(self):
        done = subprocess.run(
            [sys.executable, *self.arguments[0].split()],
            env=os.environ | PLAIN,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return [_literal(done.stdout.strip("\n"))]


class Commands(SphinxDirective):
    """A section for each command of `pmm3d`, with its help and a table of its arguments and options."""

    def run(self):
        from pmm3d.tools.commands import app

        return [self._section(name, command) for name, command in _commands(typer.main.get_command(app))]

    def _section(self, name: str, command):
        section = nodes.section(ids=[f"pmm3d-{name.replace(' ', '-')}"], names=[f"pmm3d {name}"])
        section += nodes.title(text=f"pmm3d {name}")
        section += _help(command.help or "")
        rows = [_parameter(parameter) for parameter in command.params if parameter.name != "help"]
        if rows:
            section += _table(("argument or option", "meaning", "default"), rows)
        self.state.document.note_explicit_target(section)
        return section


class Results(SphinxDirective):
    """A section for each result of a benchmark, with all its tables."""

    def run(self):
        sys.path.append(str(ROOT / "benchmarks"))
        from tables import all_sections

        return [self._section(name, text) for name, text in all_sections()]

    def _section(self, name: str, text: str):
        from docutils.statemachine import StringList

        section = nodes.section(ids=[name], names=[name])
        section += nodes.title(text=name)
        self.state.nested_parse(StringList(text.splitlines(), source=name), 0, section)
        self.state.document.note_explicit_target(section)
        return section


def _commands(group, before=""):
    """Yield (name, command). The name of a command in a group contains the group: "tune machine"."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            if command.invoke_without_command:
                yield before + name, command
            yield from _commands(command, f"{before}{name} ")
        else:
            yield before + name, command


def _help(text: str):
    """Yield the nodes of a command's help: paragraphs, headings in [bold], lines of programs."""
    for is_program, paragraphs in groupby(inspect.cleandoc(text).split("\n\n"), lambda text: text.startswith(PROGRAMS)):
        if is_program:
            yield _literal("\n".join(paragraphs))
            continue
        for paragraph in paragraphs:
            heading = re.fullmatch(r"\[bold\](.*)\[/\]", paragraph.strip())
            yield nodes.rubric(text=heading[1]) if heading else nodes.paragraph("", "", *_inline(_one_line(paragraph)))


def _parameter(parameter) -> tuple[str, str, str]:
    names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    name = names if parameter.param_type_name == "option" else parameter.name.upper()
    default = "needed" if parameter.required else _plain(parameter.default, ("off", "on"))
    return name, getattr(parameter, "help", "") or "", default


def _plain(value, switch=("false", "true")) -> str:
    if isinstance(value, bool):
        return switch[value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float):
        return f"{value:g}"
    return "" if value is None else str(value)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _literal(text: str):
    block = nodes.literal_block(text, text)
    block["language"] = "text"
    return block


def _inline(text: str):
    """Yield nodes of the text, with code between backquotes."""
    for index, part in enumerate(text.split("`")):
        yield nodes.literal(text=part) if index % 2 else nodes.Text(part)


def _table(head, rows):
    """Return a table whose first column is code."""
    group = nodes.tgroup(cols=len(head))
    group += [nodes.colspec(colwidth=1) for _ in head]
    body = (_row([nodes.literal(text=row[0])], *map(_inline, row[1:])) for row in rows)
    group += [nodes.thead("", _row(*map(_inline, head))), nodes.tbody("", *body)]
    return nodes.table("", group, classes=["colwidths-auto"])


def _row(*cells):
    return nodes.row("", *(nodes.entry("", nodes.paragraph("", "", *cell)) for cell in cells))
