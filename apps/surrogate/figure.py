"""The picture of train.py."""

import numpy as np
from matplotlib.figure import Figure

QUANTILES = (0.1, 0.5, 0.95)


def draw(path, losses, true, predicted, errors) -> None:
    """Draw held-out fields (samples, n, n) of low, median and high error, and the losses below."""
    chosen = [int(np.argsort(errors)[round(q * (len(errors) - 1))]) for q in QUANTILES]
    whole = Figure(figsize=(8, 2.5 * len(chosen) + 2.6), layout="constrained")
    above, below = whole.subfigures(2, height_ratios=(len(chosen), 1))
    rows = above.subplots(len(chosen), 3)
    for axes, sample, quantile in zip(rows, chosen, QUANTILES):
        field, answer = true[sample], predicted[sample]
        highest, largest = field.max(), abs(answer - field).max() or 1.0
        shown = (
            (field, "viridis", 0, highest),
            (answer, "viridis", 0, highest),
            (answer - field, "RdBu_r", -largest, largest),
        )
        for axis, (values, colours, low, high) in zip(axes, shown):
            image = axis.imshow(values, origin="lower", extent=(0, 1, 0, 1), cmap=colours, vmin=low, vmax=high)
            above.colorbar(image, ax=axis)
            axis.set(xticks=[], yticks=[])
        axes[0].set_ylabel(f"error {errors[sample]:.3f}\n(quantile {quantile:g})")
    for axis, title in zip(rows[0], ("solver", "network", "difference")):
        axis.set_title(title)
    axis = below.subplots()
    for curve, name in zip(np.transpose(losses), ("training samples", "held out")):
        axis.semilogy(np.arange(1, len(curve) + 1), curve, label=name)
    axis.set(xlabel="epoch", ylabel="mean squared error")
    axis.legend()
    axis.grid(alpha=0.3)
    whole.savefig(path, dpi=120)
