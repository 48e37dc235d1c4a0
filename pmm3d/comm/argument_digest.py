"""Canonical text of arguments, so that ranks compare values and not their printed form."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import fields, is_dataclass
from functools import cached_property, lru_cache
from numbers import Complex, Number, Real
from operator import attrgetter
from typing import Any

import numpy as np

from ..arrays import NumpyLibrary
from ..layout import AXES, GridShape

LISTED_ELEMENTS = 256
"""Largest number of elements of an array that is compared by elements. Larger arrays are compared by shape, type and a
digest of their bytes."""
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
"""Address in the default repr of an object, which differs between processes."""


def canonical(value: Any) -> str:
    """Return a text that is the same for equal arguments on all ranks. Never raises.

    Numbers are compared by value: 2, 2.0 and numpy.int64(2) are equal, but True is not 1. Tuples, lists and numpy
    arrays with equal elements are equal. A Path equals its text, and an element type equals its name. Array libraries
    are compared by kind, without the device number. Other objects are compared by their repr without addresses. If
    there is no text, only the types are compared.

        >>> canonical(2) == canonical(np.float32(2)), canonical((4, 3)) == canonical(np.array([4, 3]))
        (True, True)
        >>> canonical(np.float64) == canonical("float64"), canonical(True) == canonical(1)
        (True, False)
    """
    try:
        return _form(value)
    except Exception:
        return f"a {type(value).__qualname__}"


class Compared(tuple[Any, ...]):
    """A tuple that is compared repeatedly. Its canonical form is cached."""

    @cached_property
    def form(self) -> str:
        return _listed(self)


def printed(arguments: tuple[Any, ...]) -> list[tuple[str, str]]:
    """Return the canonical form of each argument, and its text as in source code. Never raises.

    >>> printed(((2, 3), None))
    [('(0x2,0x3)', '(2, 3)'), ('None', 'None')]
    """
    return [(canonical(each), _as_printed(each)) for each in arguments]


def _as_printed(value: Any) -> str:
    try:
        return repr(value)
    except Exception:
        return f"a {type(value).__qualname__}"


def _form(value: Any) -> str:
    if (form := FORMS.get(type(value))) is not None:
        return form(value)
    if isinstance(value, (tuple, list)):
        return _listed(value)
    if isinstance(value, (bool, np.bool_)):
        return str(value)
    if isinstance(value, Number):
        return _number(value)
    if isinstance(value, np.ndarray):
        return _array(value)
    return _object(value)


def _listed(values: Iterable[Any]) -> str:
    return f"({','.join([_form(value) for value in values])})"


def _shape(shape: GridShape) -> str:
    return _listed(shape) + ",".join(shape.names[len(AXES) :]) + f"/{shape.expert}" * (shape.expert > 1)


def _number(value: Any) -> str:
    if isinstance(value, Complex) and not isinstance(value, Real):
        return _number(value.real) + (f" + {_number(value.imag)}j" if value.imag else "")
    try:
        if value == int(value):
            return hex(int(value))
    except (OverflowError, ValueError):  # infinity or NaN
        pass
    return repr(float(value))


def _array(array: np.ndarray) -> str:
    if array.size <= LISTED_ELEMENTS:
        return _form(array.tolist())
    return f"array {array.shape} {array.dtype} {hashlib.blake2b(array.tobytes(), digest_size=8).hexdigest()}"


def _object(value: Any) -> str:
    if isinstance(value, NumpyLibrary):
        return repr(value.kind)
    if (names := _field_names(value.__class__)) is not None:
        return f"{type(value).__qualname__}{_listed([getattr(value, name) for name in names])}"
    if isinstance(value, (str, os.PathLike)):
        return repr(str(os.fspath(value)))
    if (name := _element_type(value)) is not None:
        return repr(name)
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{_form(key)}: {_form(item)}' for key, item in value.items()))}}}"
    if isinstance(value, Set):
        return f"{{{', '.join(sorted(map(_form, value)))}}}"
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return ADDRESS.sub("", repr(value))


@lru_cache(maxsize=1024)
def _field_names(kind: Any) -> tuple[str, ...] | None:
    """Return the names of the fields of a dataclass; None for other types."""
    return tuple([part.name for part in fields(kind)]) if is_dataclass(kind) else None


def _element_type(value: Any) -> str | None:
    """Return the name of an element type of numpy, torch or Python, such as "float64"; None for other values."""
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, (np.generic, bool, int, complex))):
        return np.dtype(value).name
    if value is float:
        return "float64"
    text = str(value) if type(value).__name__ == "dtype" else ""
    return text.removeprefix("torch.") if text.startswith("torch.") else None


FORMS: dict[type, Callable[[Any], str]] = {
    int: hex,
    str: repr,
    tuple: _listed,
    bool: str,
    type(None): str,
    Compared: attrgetter("form"),
    GridShape: _shape,
}
"""Canonical forms of the most common types, found by one look-up."""
