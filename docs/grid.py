"""Draws grid.png: a 2 x 2 x 2 grid as a cube of ranks, and which of its faces hold A, B and C.

python docs/grid.py
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.patches import Polygon

RIGHT, DOWN, BACK = (1.0, -0.28), (0.0, -1.0), (0.62, 0.42)
"""Directions of x, z and y on paper."""
COLORS = {"A": "#4477aa", "B": "#ccbb44", "C": "#aa3377"}
INK = {"A": "white", "B": "black", "C": "white"}


def point(x, y, z):
    return tuple(x * right + y * back + z * down for right, back, down in zip(RIGHT, BACK, DOWN))


def cell(axes, corners, color, text):
    corners = [point(*corner) for corner in corners]
    axes.add_patch(Polygon(corners, facecolor=color, edgecolor="white", linewidth=2, alpha=0.85))
    middle = [sum(values) / 4 for values in zip(*corners)]
    axes.text(*middle, text, ha="center", va="center", fontsize=11, color=INK[text[0]], fontweight="bold")


def arrow(axes, start, end, text, offset):
    start, end = point(*start), point(*end)
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "linewidth": 1.6, "color": "black"})
    axes.text(end[0] + offset[0], end[1] + offset[1], text, fontsize=12, ha="center", va="center")


def main():
    figure, axes = pyplot.subplots(figsize=(9, 5.6), layout="constrained")
    for i in range(2):
        for j in range(2):
            cell(axes, [(j, 0, i), (j + 1, 0, i), (j + 1, 0, i + 1), (j, 0, i + 1)], COLORS["C"], f"C$_{{{i}{j}}}$")
            cell(axes, [(2, j, i), (2, j + 1, i), (2, j + 1, i + 1), (2, j, i + 1)], COLORS["A"], f"A$_{{{i}{j}}}$")
            cell(axes, [(j, i, 0), (j + 1, i, 0), (j + 1, i + 1, 0), (j, i + 1, 0)], COLORS["B"], f"B$_{{{i}{j}}}$")
    arrow(axes, (0, 0, 2.12), (2.1, 0, 2.12), "x  (columns of B and C)", (-0.1, -0.28))
    arrow(axes, (-0.12, 0, 0), (-0.12, 0, 2.1), "z\n(rows of\nA and C)", (-0.45, 0.5))
    arrow(axes, (-0.1, 0.05, 0), (-0.1, 2.1, 0), "y  (contracted:\ncolumns of A,\nrows of B)", (-0.85, 0.16))
    notes = (
        ("A", "gathered over x: each rank along x\nbrings a part of the rows of A's block"),
        ("B", "gathered over z: each rank along z\nbrings a part of the rows of B's block"),
        ("C", "partial sums reduce-scattered over y: each\nrank along y keeps a part of the rows"),
    )
    for index, (name, text) in enumerate(notes):
        axes.text(4.05, 0.2 - 1.05 * index, name, fontsize=20, color=COLORS[name], fontweight="bold", va="center")
        axes.text(4.45, 0.2 - 1.05 * index, text, fontsize=11, va="center")
    axes.set(xlim=(-1.3, 7.9), ylim=(-3.3, 1.6), aspect="equal")
    axes.axis("off")
    figure.savefig(Path(__file__).with_name("grid.png"), dpi=80)


if __name__ == "__main__":
    main()
