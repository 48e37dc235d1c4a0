"""The state of an optimizer in a checkpoint: its arrays by name, and further facts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from ..errors import Pmm3dError
from ..product import DistMatrix
from .parameter import Parameter

STATE = "optimizer/"
"""Beginning of names of state arrays in a checkpoint."""


def is_state(name: str) -> bool:
    """Whether a matrix of this name in a checkpoint is a state array of an optimizer."""
    return name.startswith(STATE)


def state_name(parameter: str, state: str) -> str:
    """Name of a state array of a parameter in a checkpoint."""
    return f"{STATE}{parameter}/{state}"


class WithState:
    """The part of an `Optimizer` that writes and reads checkpoints."""

    def matrices(
        self: Any, paths: Mapping[str, Parameter] | None = None, stored: Collection[str] = ()
    ) -> dict[str, DistMatrix]:
        """State arrays by name, such as "optimizer/0.weight/momentum", for a checkpoint.

        Parameters
        ----------
        paths : mapping or None
            `named_parameters()` of the network. Default: each parameter's `name`.
        stored : collection of str
            Names in a checkpoint that is to be loaded.

        Returns
        -------
        dict
            Name -> DistMatrix. Master weights are included under the names of their parameters. A frozen parameter
            without a state is left out, unless `stored` contains its state.

        Raises
        ------
        Pmm3dError
            Without `paths`, if two parameters have the same name.
        """
        found, options = dict[str, DistMatrix](), self._options()
        for path, parameter in self._by_path(paths).items():
            names = self.states(options[parameter])
            if parameter.requires_grad or parameter in self._state or self._is_stored(path, names, stored):
                layout = self._layout(parameter)
                found |= {
                    state_name(path, name): DistMatrix(self.grid, array, parameter.shape, layout)
                    for name, array in zip(names, self._states(parameter, options[parameter]))
                }
                if parameter.precision.has_master:
                    found[path] = parameter.master_in(layout)
        return found

    def state(self: Any, paths: Mapping[str, Parameter] | None = None) -> dict[str, Any]:
        """Further facts for a checkpoint, for JSON.

        Parameters
        ----------
        paths
            As in `matrices`.

        Returns
        -------
        dict
        """
        named = self._by_path(paths) if self.missed else {}
        missed = {path: times for path, each in named.items() if (times := self.missed[each])}
        return {
            "kind": type(self).__name__,
            "steps": self.steps,
            "lr": self.lr,
            "states": list(self.states()),
            "missed": missed,
        }

    def load_state(
        self: Any,
        state: dict[str, Any],
        paths: Mapping[str, Parameter] | None = None,
        stored: Collection[str] | None = None,
    ) -> None:
        """Load facts of a checkpoint. Options such as `lr` do not change.

        Parameters
        ----------
        state : dict
            Result of `state`.
        paths, stored
            As in `matrices`.

        Raises
        ------
        Pmm3dError
            For the state of another kind of optimizer.
        """
        if state["kind"] != type(self).__name__:
            raise Pmm3dError(f"the state is of {state['kind']}; this optimizer is {type(self).__name__}")
        self.steps, missed = state["steps"], state.get("missed", {})
        named = self._by_path(paths) if missed or stored is not None else {}
        options = self._options()
        begin = {
            path
            for path, each in named.items()
            if stored is not None and not self._is_stored(path, self.states(options[each]), stored)
        }
        self.missed = +Counter(
            {each: self.steps if path in begin else missed.get(path, 0) for path, each in named.items()}
        )

    def _is_stored(self: Any, path: str, names: Collection[str], stored: Collection[str]) -> bool:
        """Whether a checkpoint contains the state of a parameter, or if the optimizer has no states, the parameter."""
        return any(state_name(path, name) in stored for name in names) if names else path in stored

    def _by_path(self: Any, paths: Mapping[str, Parameter] | None) -> dict[str, Parameter]:
        """Parameters of this optimizer by path, or by name. Raises Pmm3dError for two parameters with one name."""
        if paths is not None:
            own = set(self.parameters)
            return {path: parameter for path, parameter in paths.items() if parameter in own}
        named = dict[str, Parameter]()
        for parameter in self.parameters:
            if named.setdefault(parameter.name, parameter) is not parameter:
                raise Pmm3dError(
                    f"{type(self).__name__}: two parameters are named {parameter.name!r}, so a checkpoint "
                    "would contain the state of one of them. Make both networks attributes of one Module, "
                    "and pass its named_parameters() to this call"
                )
        return named
