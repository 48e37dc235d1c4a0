"""Permutations that are computed and not stored, and the rows that they hold out."""

from collections import Counter
from math import factorial

import numpy as np
import pytest
from loops import looped

from pmm3d import DataError
from pmm3d.io.permutation import Permutation
from pmm3d.io.split import last_rows, random_groups, random_rows


@looped("size", [*range(70), 255, 256, 257, 1000, 99_991])
def test_each_number_comes_once_and_goes_back(size):
    numbers = np.arange(size)
    images = Permutation(size, 3, size)(numbers)
    assert np.array_equal(np.sort(images), numbers) and images.dtype == "int64"
    assert np.array_equal(Permutation(size, 3, size).inverse(images), numbers)


def test_a_permutation_of_many_numbers_takes_the_memory_of_those_asked_for():
    size = 10**15
    numbers = np.array([0, 1, size // 2, size - 1])
    images = Permutation(size, 5)(numbers)
    assert ((images >= 0) & (images < size)).all() and len(set(images)) == 4
    assert np.array_equal(Permutation(size, 5).inverse(images), numbers)
    assert not np.array_equal(images, Permutation(size, 6)(numbers))


def test_the_images_are_those_of_every_machine():
    """Checkpoints depend on them."""
    assert Permutation(10, 1, 2)(np.arange(10)).tolist() == [7, 8, 0, 1, 5, 2, 9, 3, 6, 4]
    assert Permutation(1000, 0, 0)(np.arange(4)).tolist() == [833, 685, 748, 192]


@pytest.mark.parametrize("size", [3, 4])
def test_all_permutations_are_about_equally_frequent(size):
    keys, found = 200 * factorial(size), Counter()
    for key in range(keys):
        found[tuple(Permutation(size, key)(np.arange(size)))] += 1
    assert len(found) == factorial(size) and min(found.values()) > 120 and max(found.values()) < 300


def test_where_numbers_go_does_not_depend_on_where_they_are():
    """Chi-square of a table of tenths with 81 degrees of freedom: above 130 once in 3,000 tables."""
    size, counts, neighbours = 1000, np.zeros((10, 10)), 0
    for key in range(300):
        images = Permutation(size, key, 1)(np.arange(size))
        np.add.at(counts, (np.arange(size) // 100, images // 100), 1)
        neighbours += (abs(np.diff(images)) == 1).sum()
    assert ((counts - 3000) ** 2 / 3000).sum() < 130
    assert 500 < neighbours < 700  # 2 of 1000 are expected in each


@pytest.mark.parametrize(
    "split",
    [
        lambda: random_rows(150, 0.1, 7),
        lambda: last_rows(150, 0.1),
        lambda: random_groups(np.arange(150) // 5, 0.1, 7, "g"),
    ],
)
def test_the_parts_have_each_row_once(split):
    kept, held = split()
    rows = [part.in_file(np.arange(part.start, part.stop)) for part in (kept, held)]
    assert np.array_equal(np.sort(np.concatenate(rows)), np.arange(150)) and len(held) == 15
    for part, own, others in ((kept, *rows), (held, *rows[::-1])):
        assert part.has(own).all() and not part.has(others).any()


def test_rows_are_not_held_out_by_the_order_of_an_epoch():
    kept, _ = random_rows(100, 0.1, 7)
    assert not np.array_equal(kept.in_file(np.arange(100)), Permutation(100, 7, 1)(np.arange(100)))


def test_groups_are_on_one_side():
    groups = np.random.default_rng(0).integers(0, 12, 200)
    kept, held = random_groups(groups, 0.25, 1, "g")
    sides = [set(groups[part.in_file(np.arange(part.start, part.stop))]) for part in (kept, held)]
    assert not sides[0] & sides[1] and 30 < len(held) < 70
    again, other = random_groups(groups, 0.25, 1, "g")[0], random_groups(groups[::-1], 0.25, 1, "g")[0]
    assert again.split == kept.split and other.split != kept.split
    with pytest.raises(DataError, match="all rows of data set 'g' are of one group"):
        random_groups(np.ones(9), 0.1, 0, "g")
