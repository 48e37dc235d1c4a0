"""Write scikit-learn's handwritten digits, 1797 images of 8 x 8 pixels, to HDF5 for `pmm3d train apps/digits.toml`.

    python apps/digits.py runs/digits.h5

Rows are shuffled, and pixels are scaled to 0 to 1.
"""

import argparse
from pathlib import Path

import h5py
import numpy as np
from sklearn.datasets import load_digits


def main(path: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    with h5py.File(path, "w") as file:
        file["x"] = (digits.data[order] / 16).astype("float32")
        file["y"] = digits.target[order].astype("int64")
        file["y"].attrs["class_names"] = [str(name) for name in digits.target_names]
    print(f"wrote {path}: {len(order)} samples")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", default="runs/digits.h5", help="to write (runs/digits.h5)")
    main(parser.parse_args().file)
