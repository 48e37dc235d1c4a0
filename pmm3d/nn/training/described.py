"""Texts about a configuration: the meaning of its keys, its TOML file, and its errors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from textwrap import wrap
from typing import Any, NamedTuple

from ...errors import hint, needs

with needs("train", "a configuration"):
    import tomlkit
    from pydantic import BaseModel, ValidationError

WIDEST = 2**28
"""Largest number of columns, because the bytes of a matrix must fit into 64 bits."""
CASCADE = "default_factory_not_called"
"""pydantic's error for a default that depends on a wrong value."""
MOST_SHOWN = 60
"""Characters of a wrong value in an error."""
WIDTH = 118
"""Characters of a comment's line."""
HEAD = (
    "Configuration of pmm3d train with every key: its meaning, its possible values, and its value. A key without a "
    "value is a comment. Relative paths start at the current folder; ~ and $NAME are expanded."
)


def as_toml(config: BaseModel) -> str:
    """Return the configuration as a TOML file. Comments give the meaning and the possible values of each key."""
    lines, keys = _comment(HEAD), list(keys_of(type(config)))
    for name in type(config).model_fields.keys():
        section: Any = getattr(config, name)
        about = " ".join((type(section).__doc__ or "").split())
        lines += ["", *_comment(about), f"[{name}]"]
        for key in keys:
            if key.section == name:
                lines += [*_comment(f"{key.meaning} ({key.values})"), _line(section, key.name)]
    return "\n".join(lines)


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in wrap(text, WIDTH)]


def _line(section: BaseModel, key: str) -> str:
    """Return the line of a key; a comment if the key has no value."""
    value = section.model_dump(mode="json")[key]
    if isinstance(value, dict):
        table = tomlkit.inline_table()
        table.update(value)
        return f"{key} = {table.as_string()}"
    return f"# {key} =" if value is None else f"{key} = {tomlkit.item(value).as_string()}"


def explained(error: ValidationError, model: type[BaseModel], values: Mapping[str, Any]) -> str:
    """Return the errors in these values: each unknown key with the nearest known one, and each wrong value."""
    return "; ".join(
        dict.fromkeys(_explained(problem, model, values) for problem in error.errors() if problem["type"] != CASCADE)
    )


def _explained(problem: Any, model: type[BaseModel], values: Mapping[str, Any]) -> str:
    path = [str(part) for part in problem["loc"]]
    key, kind = ".".join(path), problem["type"]
    if kind == "extra_forbidden":
        known = list(fields_of(model, path[:-1]))
        return f"unknown key {key}{hint(path[-1], known)}"
    if kind == "missing":
        return f"{key} is missing"
    if not path:  # a check of several sections
        return str(problem["msg"]).removeprefix("Value error, ")
    words = next((found.words for found in keys_of(model) if [found.section, found.name] == path[:2]), "")
    section = values[path[0]]
    shown = repr(section[path[1]] if words and isinstance(section, Mapping) else problem["input"])
    shown = shown if len(shown) <= MOST_SHOWN else f"{shown[:MOST_SHOWN]}..."
    if words:
        return f"{path[0]}.{path[1]} = {shown}: needed is {words}"
    if kind == "model_type":
        return f"{key} = {shown}: it is a section, [{key}], with the keys {', '.join(fields_of(model, path))}"
    return f"{key} = {shown}: {problem['msg'].removeprefix('Value error, ').lower()}"


def fields_of(model: Any, path: list[str]) -> dict[str, Any]:
    """Return the keys of the section at a path."""
    for part in path:
        model = model.model_fields[part].annotation
    return dict(model.model_fields)


class Key(NamedTuple):
    """Texts of a key. values: its possible values; words: the same if the field has a text about them, else empty."""

    section: str
    name: str
    meaning: str
    values: str
    words: str
    default: Any
    needed: bool


def keys_of(model: type[BaseModel]) -> Iterator[Key]:
    """Yield every key of every section."""
    schema = model.model_json_schema()
    for section, field in model.model_fields.items():
        part: Any = field.annotation
        facts = schema["$defs"][part.__name__]
        for name, each in part.model_fields.items():
            default = None if each.is_required() else each.get_default(call_default_factory=True, validated_data={})
            values, words = _values(facts["properties"][name]), _words(facts["properties"][name])
            meaning = " ".join((each.description or "").split())
            yield Key(section, name, meaning, values, words, default, each.is_required())


def _words(facts: dict[str, Any]) -> str:
    """Return the text about possible values in the JSON schema of a key; empty if there is none."""
    return next((str(one["values"]) for one in (facts, *facts.get("anyOf", ())) if "values" in one), "")


def _values(facts: dict[str, Any]) -> str:
    """Return the possible values of a key as text, from its JSON schema."""
    if words := _words(facts):
        return words
    facts = next((one for one in facts.get("anyOf", ()) if one["type"] != "null"), facts)
    if "enum" in facts:
        return ", ".join(map(json.dumps, facts["enum"]))
    if facts["type"] == "array":
        return f"a list, each {_values(facts['items'])}"
    if facts["type"] == "object":
        return "a table"
    kinds = {"integer": "a whole number", "number": "a number", "boolean": "true or false", "string": "text"}
    kind = "a path" if facts.get("format") == "path" else kinds[facts["type"]]
    bounds = {"minimum": "of at least", "exclusiveMinimum": "above", "maximum": "up to", "exclusiveMaximum": "below"}
    found = [f"{words} {facts[name]:g}" for name, words in bounds.items() if name in facts and facts[name] < WIDEST]
    return " ".join([kind, " and ".join(found)]).strip()
