"""A Python file of the user that a configuration names, such as `network.build = "model.py:build"`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any

from ...comm import Grid
from ...errors import Pmm3dError


class UserFile:
    """A function or class in a file, "FILE.py:NAME". Collective.

    Rank 0 reads the file, and all ranks run it. The file can import modules in its folder. Raises Pmm3dError, on every
    rank, if the file cannot be read or does not run.

    key    the key of the configuration, "network.build"
    name   its value, "FILE.py:NAME"
    """

    def __init__(self, grid: Grid, key: str, name: str):
        self._grid, self.key, self.name = grid, key, name
        path, _, self._wanted = name.rpartition(":")
        self._path = Path(path)
        source = self._read()
        with grid.collective_call(key, name, always=True), self.running("does not run"):
            self._module = ModuleType(key.replace(".", "_"))
            self._module.__file__ = str(self._path)
            sys.modules[self._module.__name__] = self._module
            exec(compile(source, str(self._path), "exec"), vars(self._module))

    def named(self, what: str, fits: Callable[[Any], bool]) -> Any:
        """Return the function or class. Collective. Raises Pmm3dError, on every rank, if it does not fit. what: what is
        needed, in words."""
        wanted, module = getattr(self._module, self._wanted, None), self._module
        with self._grid.collective_call(self.key, self.name, always=True):
            if not fits(wanted):
                known = [
                    name
                    for name, value in vars(module).items()
                    if fits(value) and getattr(value, "__module__", "") == module.__name__
                ]
                raise Pmm3dError(
                    f"{self.key} = {self.name}: {self._path} has no {what} {self._wanted}; it has "
                    f"{', '.join(known) or 'none'}"
                )
        return wanted

    @contextmanager
    def running(self, what: str) -> Iterator[None]:
        """Context that runs the user's code. Modules in the folder of the file can be imported, as by `python FILE`. An
        error becomes a Pmm3dError with the line of the file."""
        folder = str(self._path.absolute().parent)
        sys.path.insert(0, folder)
        try:
            yield
        except Pmm3dError:
            raise
        except (Exception, SystemExit) as error:
            lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == str(self._path)]
            where = f" ({self._path}, line {lines[-1]})" if lines else ""
            raise Pmm3dError(f"{self.key} = {self.name} {what}: {type(error).__name__}: {error}{where}") from error
        finally:
            sys.path.remove(folder)

    def _read(self) -> str:
        """Return the text of the file, read by rank 0. Collective."""
        text, problem = "", ""
        if self._grid.rank == 0:
            try:
                text = self._path.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                problem = getattr(error, "strerror", None) or str(error)
        text, problem = self._grid.comm.bcast((text, problem))
        with self._grid.collective_call(self.key, str(self._path), always=True):
            if problem:
                raise Pmm3dError(
                    f"{self.key}: cannot read {self._path.absolute()}: {problem}. The path is relative to the current "
                    "folder"
                )
        return text
