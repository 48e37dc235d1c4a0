"""Samples whose values are their positions in the data, and the rows of batches of such samples."""

import numpy as np
from samples import integers, to_numpy

from pmm3d.layout import EMPTY

SAMPLES, DIMS, FEATURES = 37, (3, 4), 12
X = np.arange(SAMPLES * FEATURES, dtype="float64").reshape(SAMPLES, FEATURES)
"""Each value is its position in the array."""
LABELS = np.arange(SAMPLES) * 7 % 5
VECTORS = integers((SAMPLES, 5))


def rows_of(x) -> list[int]:
    """Numbers of the samples in a batch. Checks that each sample is complete, and that this rank has its shard."""
    whole = to_numpy(x.gather(), x.library)
    rows = (whole[:, 0] // FEATURES).astype(int)
    assert np.array_equal(whole, X[rows])
    assert np.array_equal(to_numpy(x.local, x.library), whole[x.box.within(EMPTY)])
    return rows.tolist()


def epoch_of(loader, targets=LABELS[:, None]) -> list[list[int]]:
    """Numbers of the samples in each remaining batch of an epoch."""
    batches = []
    for x, y in loader:
        batches.append(rows_of(x))
        whole = to_numpy(y.gather(), y.library)
        assert np.array_equal(whole, targets[batches[-1]]) and y.shape == whole.shape
        assert np.array_equal(to_numpy(y.local, y.library), whole[y.box.within(EMPTY)])
    return batches


def flat(batches) -> list[int]:
    return [row for batch in batches for row in batch]
