"""The mask of dropout has the same elements in every array library."""

import numpy as np
import pytest
from loops import looped
from samples import to_library, to_numpy

from pmm3d.arrays import NumpyLibrary, random
from pmm3d.layout import Box
from pmm3d.nn.functional import fill_kept


@pytest.mark.parametrize("library", ["torch", "standin"])
def test_a_library_keeps_what_numpy_keeps(library, monkeypatch):
    monkeypatch.setattr(NumpyLibrary, "slice_elements", 100)
    monkeypatch.setattr(random, "DEVICE_ELEMENTS", 100)
    box, columns = Box(2**33, 2**33 + 40, 5, 38), 2**20
    for p in (0.0, 0.1, 0.5, 0.9, 1 - 2.0**-50):
        host, there = np.empty(box.shape, "uint8"), to_library(np.empty(box.shape, "uint8"), library)
        fill_kept(host, box, columns, p, 3, 1)
        fill_kept(there, box, columns, p, 3, 1)
        assert np.array_equal(to_numpy(there, library), host) and abs(host.mean() - (1 - p)) < 0.05


@looped("box", [Box(0, 40, 0, 33), Box(2**40, 2**40 + 7, 2**33, 2**33 + 50), Box(3, 3, 0, 5)])
@looped("p", [0.1, 0.5, 1 - 2.0**-53])
def test_the_mask_of_a_device_is_the_hosts(box, p):
    masks = [np.zeros(box.shape, "uint8"), to_library(np.zeros(box.shape, "uint8"), "standin")]
    for mask in masks:
        fill_kept(mask, box, 2**34, p, seed=-5, stream=3)
    assert np.array_equal(masks[0], to_numpy(masks[1], "standin"))
    assert p > 0.9 or not masks[0].size or 0 < masks[0].mean() < 1
