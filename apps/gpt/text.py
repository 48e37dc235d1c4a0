"""Write the topics of Python's help (pydoc_data.topics) as tokens for `pmm3d train apps/gpt/gpt.toml`.

    python apps/gpt/text.py runs/gpt

Every tenth topic is held out: held.h5 contains these topics, and text.h5 the others. A token is a byte. Each paragraph
occurs once: paragraphs of held-out topics are removed from the text.
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics

from pmm3d.io import convert_text


def paragraphs(held_out: bool) -> dict[str, None]:
    """The paragraphs of these topics, each once, in order."""
    chosen = [name for number, name in enumerate(sorted(topics)) if (number % 10 == 5) == held_out]
    return dict.fromkeys(part.strip("\n") for name in chosen for part in topics[name].split("\n\n"))


def main(folder: str) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    held = paragraphs(held_out=True)
    for name, found in (("held", held), ("text", [each for each in paragraphs(held_out=False) if each not in held])):
        path = Path(folder, f"{name}.txt")
        path.write_text("\n\n".join(found), encoding="utf-8")
        done = convert_text([path], path.with_suffix(".h5"), overwrite=True)
        print(f"wrote {path.with_suffix('.h5')}: {done.tokens:,} bytes")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default="runs/gpt", help="to write to (runs/gpt)")
    main(parser.parse_args().folder)
