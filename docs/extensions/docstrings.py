"""Convert docstrings to reStructuredText. `sphinx.ext.napoleon` then renders the sections of NumPy.

A docstring is plain text: paragraphs, NumPy's sections, and indented blocks (formulas, programs).
"""

from __future__ import annotations

import ast
import dataclasses
import re
import textwrap

ALL_MEMBERS = re.compile(r"^(\.\. auto(?:module|class):: .*\n)(?!(?:   :.*\n)*   :(?:no-)?members:)", re.M)


def setup(app):
    app.connect("source-read", _with_members)
    app.connect("autodoc-process-docstring", _rewrite, priority=400)  # napoleon: 500
    app.connect("autodoc-process-signature", _without_private_fields)
    return {"parallel_read_safe": True}


def _with_members(app, page, source):
    # A default option of autodoc would replace the lists of members on the pages.
    source[0] = ALL_MEMBERS.sub(r"\1   :members:\n", source[0])


def _rewrite(app, what, name, obj, options, lines):
    # Napoleon reads text before a colon in an attribute's first line as a type. A comment before it prevents this.
    lines[:] = [*([".."] if what in ("attribute", "data", "property") else []), "", *as_rst(lines)]


def _without_private_fields(app, what, name, obj, options, signature, returns):
    """Return the signature of a dataclass: its fields, and defaults that are plain values."""
    if what != "class" or not dataclasses.is_dataclass(obj):
        return None
    fields = [field for field in dataclasses.fields(obj) if field.init and not field.name.startswith("_")]
    return f"({', '.join(map(_field, fields))})", None


def _field(field) -> str:
    plain = isinstance(field.default, (str, int, float, tuple, type(None)))
    return f"{field.name}: {field.type}" + (f" = {field.default!r}" if plain else "")


def as_rst(lines: list[str]) -> list[str]:
    """Return the lines of a docstring in reStructuredText."""
    made: list[str] = []
    for paragraph in _paragraphs(lines):
        if paragraph[0].startswith(">>> "):
            made += [".. code-block:: pycon", "", *("    " + line for line in paragraph), ""]
        elif all(line.startswith("  ") for line in paragraph):
            made += [f".. code-block:: {_language(paragraph)}", "", *("    " + line for line in paragraph), ""]
        else:
            made += [*map(_escaped, paragraph), ""]
    return made


def _language(lines: list[str]) -> str:
    try:
        ast.parse(textwrap.dedent("\n".join(lines)))
    except SyntaxError:
        return "text"
    return "python"


def _paragraphs(lines: list[str]) -> list[list[str]]:
    found: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            found[-1].append(line.rstrip())
        elif found[-1]:
            found.append([])
    return [paragraph for paragraph in found if paragraph]


def _escaped(text: str) -> str:
    """Return text with code between backquotes and without other markup. A first word such as "A." starts no list."""
    parts = text.split("`")
    for index, part in enumerate(parts):
        if index % 2 and part:
            parts[index] = f"``{part}``"
        else:
            parts[index] = re.sub(r"([\\*|])|(_)(?!\w)", lambda found: "\\" + found[0], part)
    return re.sub(r"^(\s*(?:\w|\d+))\.(?=\s|$)", r"\1\\.", "".join(parts))
