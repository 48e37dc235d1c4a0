"""Parameter groups of an optimizer by patterns of names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from ..errors import Pmm3dError
from .module import Module
from .optimizer import Group, Parameters


def groups_by_name(
    network: Module, patterns: Sequence[Mapping[str, Any]], groups: Parameters | None = None
) -> list[Group]:
    """Parameter groups by patterns of names, for an optimizer.

    Parameters
    ----------
    network : Module
        Also a Pipeline, whose stages share the patterns.
    patterns : sequence of mapping
        The options of a group, and "match": a pattern of names in `named_parameters()`, such as "*.bias" or "head.*".
        `*` matches any text, also with dots, `?` a character, and `[ab]` one of these; upper and lower case differ. A
        parameter has the options of the first pattern that matches.
    groups : iterable or None
        Groups that are divided further, such as `optim.Muon.groups_of(network)`. Default: all parameters.

    Returns
    -------
    list of dict
        First the groups of the parameters without a match. A group can be empty, on a stage of a pipeline for example.

    Raises
    ------
    Pmm3dError
        On every rank, for a pattern that is the first match of no parameter.

    Examples
    --------
    >>> from pmm3d import Grid, nn
    >>> from pmm3d.nn import optim
    >>> with Grid(shape="ddp") as grid:
    ...     net = nn.MLP(grid, [4, 8, 2])
    ...     groups = optim.groups_by_name(net, [{"match": "*.bias", "lr": 1e-4}, {"match": "2.*", "weight_decay": 0.1}])
    ...     opt = optim.AdamW(groups, lr=1e-3)
    ...     [([each.name for each in group["params"]], group["lr"], group["weight_decay"]) for group in opt.groups]
    [(['0.weight'], 0.001, 0.01), (['0.bias', '2.bias'], 0.0001, 0.01), (['2.weight'], 0.001, 0.1)]
    """
    own = network.named_parameters()
    given = list[Any](own.values() if groups is None else groups)
    divided = given if all(isinstance(each, Mapping) for each in given) else [{"params": given}]
    held = {each for group in divided for each in group.get("params", ())}
    names = getattr(network, "all_names", [name for name in own if own[name] in held])  # of all stages of a pipeline
    for each in patterns:
        if not isinstance(each, Mapping) or not isinstance(each.get("match"), str) or "params" in each:
            raise Pmm3dError(f'a group by name has "match", a pattern such as "*.bias", and no "params"; got {each!r}')
    texts = [each["match"] for each in patterns]
    first = {name: next((n for n, text in enumerate(texts) if fnmatchcase(name, text)), -1) for name in names}
    for number, text in enumerate(texts):
        if number not in first.values():
            near = get_close_matches(text, names, 3, 0)
            taken = any(fnmatchcase(name, text) for name in names)
            raise Pmm3dError(
                f'no parameter is in the group match = "{text}": '
                + ("all of its parameters match an earlier pattern" if taken else f"near names are {', '.join(near)}")
            )
    numbers, made = {parameter: first[name] for name, parameter in own.items()}, list[Group]()
    for number, pattern in enumerate([{}, *patterns], -1):
        options = {name: value for name, value in pattern.items() if name != "match"}
        for group in divided:
            params = [each for each in group.get("params", ()) if numbers.get(each, -1) == number]
            made.append({**group, **options, "params": params})
    return made
