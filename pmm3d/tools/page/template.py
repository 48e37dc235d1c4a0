"""The page as HTML."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined

from .parts import Cell, Page


def page(content: Page) -> str:
    """Everything that is not markup of ours is escaped."""
    environment = Environment(loader=PackageLoader("pmm3d.tools.page", "."), autoescape=True, undefined=StrictUndefined,
                              trim_blocks=True, lstrip_blocks=True)
    cell = lambda value: value if isinstance(value, Cell) else Cell(str(value))
    return environment.get_template("page.html").render(page=content, cell=cell)
