"""Docstrings of public names: a first sentence, NumPy's sections, no stale parameter, and examples that stand alone.

`test_rooms.py` runs the examples."""

import ast
import builtins
import doctest
import inspect
import re
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "extensions"))

from docstrings import as_rst

from pmm3d.layout import Tiled

SECTIONS = ("Parameters", "Attributes", "Returns", "Yields", "Raises", "Notes", "Examples")
"""Headings of sections, in their order."""
LISTS = SECTIONS[:5]
"""Sections that contain entries: a line with a name or a type, and an indented text."""
ROOMS = (
    "pmm3d",
    "pmm3d.io",
    "pmm3d.nn",
    "pmm3d.nn.optim",
    "pmm3d.nn.pipeline",
    "pmm3d.nn.training",
    "pmm3d.nn.transformer",
    "pmm3d.torch",
)
MADE_BY_OTHERS = {"Axis", "DistMatrix", "Loader", "Pending", "Tape"}
"""Classes whose constructor users do not call."""
CALLED_BY_TORCH = {"forward", "set_extra_state"}


def names_of(room):
    module = import_module(room)
    found = ((name, getattr(module, name)) for name in module.__all__ if not name.startswith("__"))
    return [(name, thing) for name, thing in found if callable(thing) and thing.__module__.startswith("pmm3d")]


@cache
def public_names():
    return {name for room in ROOMS for name, _ in names_of(room)}


def methods_of(name, kind):
    """Public attributes of a class with code: (qualified name, function or property, signature or None)."""
    bases = [base for base in kind.__mro__ if base.__module__.startswith("pmm3d")]
    above = [base for base in bases[1:] if base.__name__ in public_names()]
    own = [base for base in bases if not any(issubclass(other, base) for other in above)]
    for attribute in sorted({each for base in own for each in vars(base)}):
        found = inspect.getattr_static(kind, attribute)
        if attribute.startswith("_") or attribute in CALLED_BY_TORCH:
            continue
        if not found.__doc__ and any(hasattr(base, attribute) for base in [*above, Tiled]):
            continue  # the docstring of the public base class, or of the protocol
        if isinstance(found, (classmethod, staticmethod)) or inspect.isfunction(found):
            signature = inspect.signature(getattr(kind, attribute))
            parameters = [*signature.parameters.values()][inspect.isfunction(found) :]
            yield f"{name}.{attribute}", getattr(kind, attribute), parameters
        elif isinstance(found, property) or hasattr(found, "func"):
            yield f"{name}.{attribute}", found, None


def sections_of(lines):
    """The headings and lines of the sections of a docstring. The text before the first section has the heading ""."""
    found = [("", [])]
    for line, below in zip(lines, [*lines[1:], ""]):
        if line in SECTIONS and below == "-" * len(line):
            found.append((line, []))
        elif line != "-" * len(found[-1][0]) or not line:
            found[-1][1].append(line)
    return found


def faults_of(name, text, parameters=None):
    """What is wrong with a docstring. parameters: of the signature. An entry names one of them, in this order."""
    if not text:
        return [f"{name}: no docstring"]
    (_, before), *sections = sections_of(text.splitlines())
    headings, summary = [heading for heading, _ in sections], before[0]
    faults = []
    if not summary.endswith((".", "?")) or (len(before) > 1 and before[1]):
        faults.append(f"the first paragraph is not one line that ends with a point: {summary}")
    if headings != sorted(headings, key=SECTIONS.index) or len({*headings}) < len(headings):
        faults.append(f"sections in the order {headings}; needed is that of {SECTIONS}")
    for heading, lines in [("", before), *sections]:
        if [line for line in lines if line.strip() and not line.strip("-")]:
            faults.append(f"a heading that is none of {SECTIONS}")
        if not any(map(str.strip, lines)) or (heading in LISTS and lines[0].startswith(" ")):
            faults.append(f"an empty section: {heading}")
    if parameters:
        wanted = [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]
        entries = [line.partition(" : ") for line in dict(sections).get("Parameters", []) if line[:1].strip()]
        given = [(parameter.lstrip("*"), kind) for entry, _, kind in entries for parameter in entry.split(", ")]
        passed_on = len(wanted) < len(parameters)  # names of the options that **options passes on may come too
        found = [each for each, _ in given if each in wanted or not passed_on]
        if found != [each for each in wanted if each in found]:
            faults.append(f"Parameters {[each for each, _ in given]}; the signature has {wanted}")
        none = {each.name for each in parameters if each.default is None}
        faults += [
            f'the default of {each} is None, and its type is "{kind}": add "or None"'
            for each, kind in given
            if each in none and kind and not re.search(r"\b(None|optional)\b", kind)
        ]
    return [f"{name}: {fault}" for fault in faults]


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_have_the_sections_of_numpy(room):
    faults = []
    for name, thing in names_of(room):
        text, is_class = inspect.getdoc(thing), inspect.isclass(thing)
        if is_class and issubclass(thing, Exception):
            faults += faults_of(name, text)
            continue
        known = () if name in MADE_BY_OTHERS else inspect.signature(thing).parameters.values()
        faults += faults_of(name, text, known)
        for method, found, parameters in methods_of(name, thing) if is_class else ():
            faults += faults_of(method, inspect.getdoc(found), parameters)
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("room", ROOMS)
def test_examples_of_public_names_import_what_they_use(room):
    unknown = {}
    for name, thing in names_of(room):
        source = "".join(example.source for example in doctest.DocTestParser().get_examples(inspect.getdoc(thing)))
        nodes = [*ast.walk(ast.parse(source))]
        known = {
            *dir(builtins),
            *(node.asname or node.name.partition(".")[0] for node in nodes if isinstance(node, ast.alias)),
        }
        known |= {node.name for node in nodes if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
        known |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        known |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        used = {node.id for node in nodes if isinstance(node, ast.Name)}
        if used - known:
            unknown[name] = used - known
    assert not unknown


def test_faults_of_docstrings_are_found():
    parameters = [*inspect.signature(lambda a=None, *b, **c: None).parameters.values()]
    right = "Sum.\n\nParameters\n----------\na, *b : int or None\n    Numbers.\n**c\n    Others."
    for correct in (right, "Sum.", right.replace("a, *b", "a"), right.replace("a, *b", "*b")):
        assert faults_of("f", correct, parameters) == []
    for wrong in (
        right.replace("a, *b", "b, *a"),
        right.replace("Sum.", "Sum"),
        right.replace("Param", "Paran"),
        "",
        right.replace(" or None", ""),
        right + "\n\nReturns\n-------",
        right.replace("\n\nP", "\n\nNotes\n-----\nNone.\n\nP"),
    ):
        assert faults_of("f", wrong, parameters), wrong
    assert faults_of("f", right, parameters[:2]), "c is not in the signature"


def test_the_reference_keeps_sections_and_shows_examples_as_code():
    heading, underline = "Parameters", "-" * len("Parameters")
    lines = ["C = `a` *b.", "", heading, underline, "a, **b : int", "    A. Rows *of* `x`.", "", ">>> 1", "1"]
    assert as_rst(lines) == [
        "C = ``a`` \\*b.",
        "",
        heading,
        underline,
        "a, \\*\\*b : int",
        "    A\\. Rows \\*of\\* ``x``.",
        "",
        ".. code-block:: pycon",
        "",
        "    >>> 1",
        "    1",
        "",
    ]
    assert as_rst(["    |A| / Gx"]) == [".. code-block:: text", "", "        |A| / Gx", ""]
