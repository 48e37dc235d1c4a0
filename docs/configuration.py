"""Write docs/reference/configuration.md, a page of every key of `pmm3d train`, from the configuration itself.

    python docs/configuration.py

A test compares the page with what this makes.
"""

from pathlib import Path

from pmm3d.nn.training.config import Config
from pmm3d.nn.training.described import Key, keys_of

PAGE = Path(__file__).resolve().parent / "reference" / "configuration.md"
COLUMNS = "| key | default | values | meaning |\n|---|---|---|---|"
HEAD = """# The configuration of `pmm3d train`

A TOML file. `pmm3d train x.toml --show` prints it with every key, its meaning and its value. Unknown keys, wrong
values, and options that the chosen optimizer or schedule does not have, are errors before the training starts.
Relative paths start at the current folder; `~` and `$NAME` are expanded. A resumed run takes some settings from its
checkpoint: [training](../training.md#what-a-resume-takes-from-where).

`python docs/configuration.py` writes this page.
"""


def page() -> str:
    """Markdown: a table for each section."""
    parts = [HEAD]
    for section, field in Config.model_fields.items():
        about = " ".join((field.annotation.__doc__ or "").split())
        rows = [_row(key) for key in keys_of(Config) if key.section == section]
        parts += [f"## [{section}]\n", f"{about}\n", COLUMNS, *rows, ""]
    return "\n".join(parts).rstrip() + "\n"


def _row(key: Key) -> str:
    cells = f"`{key.name}`", _default(key), key.values, key.meaning
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _default(key: Key) -> str:
    if key.default is None:
        return "needed" if key.needed else ""
    shown = str(key.default).lower() if isinstance(key.default, bool) else str(key.default)
    return f"`{shown}`"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
