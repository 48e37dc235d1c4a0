"""Options of optimizers: their defaults, and which values and parameters are possible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Any, NamedTuple

from ..errors import DTypeError, Pmm3dError, hint
from .parameter import Parameter


class Option(NamedTuple):
    """Default and values of an option of an optimizer, for `Optimizer.defaults`.

    Parameters
    ----------
    default : object
        Value in a program, if the option is left out.
    needed : str
        The possible values, for errors and for the documentation: "a number of at least 0".
    fits : callable
        Whether a value is possible. Default: all are.
    meaning : str
        Meaning of the option, for the documentation of a configuration.
    configured : object or None
        Value in a configuration, if the option is left out. Default: `default`.

    Examples
    --------
    >>> from pmm3d.nn.optim import Option
    >>> beta = Option(0.9, "a number of at least 0 and below 1", lambda value: 0 <= value < 1)
    >>> beta.problem("beta", 0.5), beta.problem("beta", 2)
    ('', 'beta = 2: needed is a number of at least 0 and below 1')
    """

    default: Any
    needed: str
    fits: Callable[[Any], bool] = lambda value: True
    meaning: str = ""
    configured: Any = None

    def problem(self, name: str, value: Any) -> str:
        """Sentence about a value that is not possible, or ""."""
        try:
            fits = self.fits(value)
        except (TypeError, ValueError):
            fits = False
        return "" if fits else f"{name} = {value!r}: needed is {self.needed}"

    @property
    def in_configuration(self) -> Any:
        """Default in a configuration."""
        return self.default if self.configured is None else self.configured


def _not_negative(value: Any) -> bool:
    return bool(0 <= value < inf)


def is_share(value: Any) -> bool:
    return bool(0 <= value < 1)


BELOW_1 = "a number of at least 0 and below 1"
FLAG = Option(False, "True or False", (False, True).__contains__)
COMMON: dict[str, Any] = {
    "lr": Option(None, "a number of at least 0", _not_negative),
    "weight_decay": Option(0.0, "a number of at least 0", _not_negative),
    "decay_vectors": FLAG._replace(default=True),
}
"""Options of all optimizers."""


def check_known(owner: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Raise Pmm3dError for unknown options. owner: the optimizer, and the place of the options."""
    if unknown := [f"unknown option {name}{hint(name, known)}" for name in given if name not in known]:
        raise Pmm3dError(f"{owner}: {'; '.join(unknown)}")


def check_parameters(name: str, parameters: Sequence[Parameter], had: Sequence[Parameter], needs_real: bool) -> None:
    """Raise Pmm3dError or DTypeError for parameters that an optimizer cannot take. had: those of its groups before."""
    if not parameters:
        raise Pmm3dError(f"{name} has no parameters: pass net.parameters()")
    for parameter in parameters:
        if not isinstance(parameter, Parameter):
            raise Pmm3dError(
                f'{name}: parameters, or groups of them ({{"params": [...]}}), are needed; got a '
                f"{type(parameter).__name__}"
            )
    parameter, times = Counter(parameters).most_common(1)[0]
    if times > 1:
        raise Pmm3dError(f"{name}: the parameter {parameter.name} is given {times} times: pass it once, in one group")
    if lost := [each.name for each in had if each not in {*parameters}]:
        raise Pmm3dError(
            f"{name}: groups lack {', '.join(lost)}, which they had. To stop the training of a "
            "parameter, call its requires_grad_(False)"
        )
    if others := [each.name for each in parameters if each.grid is not parameters[0].grid]:
        raise Pmm3dError(
            f"{name}: {', '.join(others)} is on another Grid than {parameters[0].name}: make an optimizer for each grid"
        )
    if needs_real and (others := [each.name for each in parameters if each.dtype.startswith("complex")]):
        text = f"{name}: {', '.join(others)} is complex, and {name} needs real parameters"
        raise DTypeError(f"{text}: give complex parameters an optimizer of their own, such as SGD")
