"""Escapes docstrings, plain text, for `sphinx.ext.napoleon`, which shows the sections of NumPy.

A docstring consists of paragraphs, indented blocks (formulas, programs), and lists in two columns: a name, at least two
spaces, its meaning. These lists become definition lists.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import textwrap

ENTRY = re.compile(r"(?P<name>\S(?:\S| (?! )){0,47}) {2,}(?P<meaning>\S.*)")
FURTHER = re.compile(r";  +(?=\S)")


ALL_MEMBERS = re.compile(r"^(\.\. auto(?:module|class):: .*\n)(?!(?:   :.*\n)*   :(?:no-)?members:)", re.M)


def setup(app):
    app.connect("source-read", _with_members)
    app.connect("autodoc-process-docstring", _rewrite, priority=400)  # napoleon: 500
    app.connect("autodoc-process-signature", _without_private_fields)
    return {"parallel_read_safe": True}


def _with_members(app, page, source):
    # Not a default of autodoc: it would replace the lists of members on the pages.
    source[0] = ALL_MEMBERS.sub(r"\1   :members:\n", source[0])


def _rewrite(app, what, name, obj, options, lines):
    # A comment comes first, because napoleon takes text before a colon in the first line of an attribute for a type.
    lines[:] = [*([".."] if what in ("attribute", "data", "property") else []), "", *as_rst(lines)]


def _without_private_fields(app, what, name, obj, options, signature, returns):
    """The signature of a dataclass: its fields, with the defaults that are plain values."""
    if what != "class" or not dataclasses.is_dataclass(obj):
        return None
    fields = [field for field in dataclasses.fields(obj) if field.init and not field.name.startswith("_")]
    return f"({', '.join(map(_field, fields))})", None


def _field(field) -> str:
    plain = isinstance(field.default, (str, int, float, tuple, type(None)))
    return f"{field.name}: {field.type}" + (f" = {field.default!r}" if plain else "")


def as_rst(lines: list[str]) -> list[str]:
    """The lines of a docstring in reStructuredText."""
    made: list[str] = []
    for paragraph in _paragraphs(lines):
        if paragraph[0].startswith(">>> "):
            made += [".. code-block:: pycon", "", *("    " + line for line in paragraph), ""]
        elif paragraph[0].startswith("- "):
            made += [*map(_escaped, paragraph), ""]
        elif all(line.startswith("  ") for line in paragraph):
            made += [f".. code-block:: {_language(paragraph)}", "", *("    " + line for line in paragraph), ""]
        else:
            made += _columns([re.sub("::$", ":", line) for line in paragraph])
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


def _columns(paragraph: list[str]) -> list[str]:
    """A paragraph in which some lines may be entries of a list in two columns."""
    made: list[str] = []
    in_list = False
    for line in paragraph:
        entry = ENTRY.fullmatch(line)
        if line.startswith("  ") and in_list:
            made.append("    " + _escaped(line.strip()))
        elif entry:
            made += [] if in_list or not made else [""]
            made += _term(entry["name"], entry["meaning"])
            in_list = True
        else:
            made += [""] if in_list else []
            made.append(_escaped(line))
            in_list = False
    return [*made, ""]


def _term(name: str, meaning: str) -> list[str]:
    """An entry; `a    first;   b: second` are two."""
    first, *further = FURTHER.split(meaning)
    made = [_code(name), "    " + _escaped(first)]
    for text in further:
        other, _, rest = text.partition(":" if ":" in text else "  ")
        made += [_code(other.strip()), "    " + _escaped(rest.strip())]
    return made


def _code(text: str) -> str:
    return "``" + text.replace("`", "") + "``"


def _escaped(text: str) -> str:
    """Text between backquotes as code, the rest without any markup. "A." at its beginning is no list."""
    parts = text.split("`")
    for index, part in enumerate(parts):
        if index % 2 and part:
            parts[index] = f"``{part}``"
        else:
            parts[index] = re.sub(r"([\\*|])|(_)(?!\w)", lambda found: "\\" + found[0], part)
    return re.sub(r"^(\s*(?:\w|\d+))\.(?=\s|$)", r"\1\\.", "".join(parts))
