"""Which arguments of the ranks count as equal. Without MPI."""

from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
from loops import given

from pmm3d import GridShape, Layout
from pmm3d.arrays.device_library import DeviceLibrary
from pmm3d.arrays.torch_library import TorchLibrary
from pmm3d.comm.argument_digest import LISTED_ELEMENTS, canonical, printed

EQUAL = [
    (2, 2.0, np.int64(2), np.float32(2), 2 + 0j, np.array(2), Fraction(4, 2)),
    (2**70, float(2**70)),
    (0, -0.0, np.uint8(0)),
    (0.1, np.float64(0.1), np.array(0.1)),
    (float("nan"), np.float32("nan")),
    (1 + 2j, np.complex64(1 + 2j)),
    ((4, 3), [4, 3], np.array([4, 3]), np.array([4.0, 3.0]), [np.int32(4), 3.0]),
    (GridShape(1, 2, 3), (1, 2, 3, 1)),
    (Layout.A, Layout(rows=["z", "x"], cols="y")),
    ("a/b", Path("a/b"), np.str_("a/b")),
    (True, np.True_),
    ({"a": 1, "b": (2,)}, {"b": [2.0], "a": 1}),
    ({1, 2}, frozenset([2, 1])),
    ("float64", np.float64, np.dtype(float), np.dtype(">f8"), float),
    ("complex64", np.complex64, np.dtype("c8")),
    (TorchLibrary("cuda:0"), TorchLibrary("cuda:1"), "torch:cuda"),
    (TorchLibrary("cpu"), "torch"),
    (DeviceLibrary("cupy"), "cupy"),
]
DIFFERENT = [
    (2, 3), (2, "2"), (True, 1), (False, 0), (False, None), (0, None), (0.1, np.float32(0.1)), (1, 1j),
    (2**70, 2**70 + 1), (float("inf"), -float("inf")), ((4, 3), (3, 4)), ((4, 3), ((4, 3),)), ((1,), 1), ((), ""),
    (("a", "b"), ("a, b",)), (("a', 'b",), ("a", "b")), (Layout.A, Layout.B), ("float64", np.float32),
    (TorchLibrary("cpu"), TorchLibrary("cuda")), ({"a": 1}, {"a": 2}), (np.sin, np.cos), (Path("a"), [Path("a")]),
    (np.zeros(LISTED_ELEMENTS + 1), np.arange(LISTED_ELEMENTS + 1.0)),
]  # fmt: skip


def test_equal_arguments_have_one_form():
    for group in EQUAL:
        with given(group=group):
            assert len(set(map(canonical, group))) == 1


def test_different_arguments_have_two():
    for one, other in DIFFERENT:
        with given(one=one, other=other):
            assert canonical(one) != canonical(other)


class Unspeakable:
    def __repr__(self):
        raise RuntimeError("no")


class Plain:
    pass


@dataclass
class Options:
    rows: object


def test_objects_are_compared_without_their_address():
    for make in [Plain, Unspeakable, lambda: partial(max, key=Plain()), lambda: Options((1, Plain()))]:
        with given(make=make):
            retained = make(), make()
            assert canonical(retained[0]) == canonical(retained[1])
            assert printed((retained[0], 2))[1] == ("0x2", "2")


def test_dataclasses_are_compared_by_their_fields():
    assert canonical(Options(2)) == canonical(Options(np.int8(2))) != canonical(Options(3))


def test_a_list_within_itself_has_a_form():
    endless = [1]
    endless.append(endless)
    assert canonical(endless) == "a list"
