"""Texts about a configuration: the meaning of its keys, its TOML file, and its errors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from textwrap import wrap
from typing import Any, NamedTuple, cast

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
    return f"# {key} =" if value is None else f"{key} = {_inline(value)}"


def _inline(value: Any) -> str:
    """Return a value as TOML on one line."""
    if isinstance(value, list):
        return f"[{', '.join(map(_inline, value))}]"
    if isinstance(value, dict):
        table = tomlkit.inline_table()
        table.update(value)
        return table.as_string()
    return tomlkit.item(value).as_string()


def explained(error: ValidationError, model: type[BaseModel], values: Mapping[str, Any]) -> str:
    """Return the errors in these values: each unknown key with the nearest known one, and each wrong value."""
    return "; ".join(
        dict.fromkeys(_explained(problem, model, values) for problem in error.errors() if problem["type"] != CASCADE)
    )


def _explained(problem: Any, model: type[BaseModel], values: Mapping[str, Any]) -> str:
    path, kind = [str(part) for part in problem["loc"]], problem["type"]
    key, own, section = ".".join(path), problem["msg"].removeprefix("Value error, "), model
    for part in path[:-1] if kind == "extra_forbidden" else ():
        section = cast(Any, section.model_fields[part].annotation)
    if kind == "extra_forbidden":
        return f"unknown key {key}{hint(path[-1], section.model_fields)}"
    if kind == "missing":
        return f"{key} is missing"
    if kind == "value_error" and len(path) < 2:  # a check of one or several sections
        return f"{key}: {own}" if path else own
    known = [each for each in keys_of(model) if each.section == path[0]]
    if kind == "model_type":
        return (
            f"{key} = {_shown(values[key])}: it is a section, [{key}], with the keys {', '.join(k.name for k in known)}"
        )
    field = next(each for each in known if each.name == path[1])
    needed = (kind == "value_error" and own) or f"needed is {field.values}"
    return f"{path[0]}.{path[1]} = {_shown(values[path[0]], path[1])}: {needed}"


def _shown(section: Any, key: str = "") -> str:
    """Return the value of a section or of its key, as far as a message has room."""
    text = repr(section[key] if key and isinstance(section, Mapping) else section)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


class Key(NamedTuple):
    """Texts of a key. values: its possible values."""

    section: str
    name: str
    meaning: str
    values: str
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
            meaning = " ".join((each.description or "").split())
            yield Key(section, name, meaning, _values(facts["properties"][name]), default, each.is_required())


def _values(facts: dict[str, Any]) -> str:
    """Return the possible values of a key as text, from its JSON schema."""
    for one in (facts, *facts.get("anyOf", ())):
        if "values" in one:
            return str(one["values"])
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
    limits = [f"{words} {facts[name]:g}" for name, words in bounds.items() if name in facts and facts[name] < WIDEST]
    return " ".join([kind, " and ".join(limits)]).strip()
