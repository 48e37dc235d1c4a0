"""Write a text that ships with Python, the topics of its help (pydoc_data.topics, 0.5 MB), as tokens for
`pmm3d train apps/gpt/gpt.toml`.

    python apps/gpt/text.py runs/gpt

Every tenth topic is held out: held.h5 contains these topics, text.h5 the others. A token is a byte.
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics

from pmm3d.io import convert_text


def main(folder: str) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, held_out in (("text", False), ("held", True)):
        path = Path(folder, f"{name}.txt")
        chosen = [topic for number, topic in enumerate(sorted(topics)) if (number % 10 == 5) == held_out]
        path.write_text("\n".join(topics[topic] for topic in chosen), encoding="utf-8")
        done = convert_text([path], path.with_suffix(".h5"), overwrite=True)
        print(f"wrote {path.with_suffix('.h5')}: {len(chosen)} topics, {done.tokens} bytes")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default="runs/gpt", help="to write to (runs/gpt)")
    main(parser.parse_args().folder)
