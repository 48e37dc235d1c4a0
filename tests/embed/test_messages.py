"""Messages for a Fortran program: the names of its calls and arguments, and only arguments that differ."""

import re

import pytest

pytestmark = pytest.mark.thorough("messages for callers")
PROGRAM = "embed/pmm3d.f90", "tests/embed/messages.f90"
PYTHON = re.compile(r"DistMatrix|MatmulPlan|Redistribution|Grid[.(]|Layout\(|float64|\.py|<init code|None|False")
"""Words of Python that no message may contain."""
DIFFERENT = "ranks 0-1: pmm3d_{0}({1}); rank 2: pmm3d_{0}({2})"
ARGUMENT, DISAGREEMENT = 1, 2


@pytest.mark.parametrize(
    "case, call, of_first, of_last, also",
    [
        ("grid", "grid", "..., gy=1, ...", "..., gy=2, ...", "grid 1x2x3"),
        ("layout", "matrix", "..., layout='A', ...", "..., layout='/', ...", ""),
        ("type", "matrix", "type='d', ...", "type='?', ...", "as in the BLAS; got the character '?' (63)"),
        ("alpha", "matmul", "..., alpha=1.0, ...", "..., alpha=2.0, ...", ""),
        ("b", "matmul", "..., b=('d', 6 x 6, yz/x, 'F'), ...", "..., b=('d', 6 x 6, zy/x, 'F'), ...", "shares memory"),
        ("order", "from_blocks", "order='F', ...", "order='C', ...", ""),
        (
            "descriptor",
            "pgemm",
            "..., desca=(M 6, N 6, MB 2, NB 2, RSRC 0, CSRC 0), ...",
            "..., desca=(M 6, N 7, MB 2, NB 2, RSRC 0, CSRC 0), ...",
            "",
        ),
    ],
)
def test_only_arguments_that_differ_are_named(program, case, call, of_first, of_last, also):
    """The leading dimensions of descriptors differ too, and need not be equal."""
    text = told(program, case, DISAGREEMENT)
    assert f"pmm3d_{call}: the ranks passed different arguments. {DIFFERENT.format(call, of_first, of_last)}" in text
    assert also in text and ("And it failed: rank 2: " in text) == bool(also)


def told(program, case, code, **how):
    """The text that all three ranks get, with this code."""
    lines = sorted(program(*PROGRAM).written(3, case, **how).splitlines())
    assert [line[:4] for line in lines] == [f"{rank} {code} " for rank in range(3)], lines
    [text] = {line[4:] for line in lines}
    assert not PYTHON.search(text), text
    return text


def test_different_calls_are_named_without_a_place(program):
    text = told(program, "calls", DISAGREEMENT)
    assert text.endswith("the ranks made different calls. ranks 0-1: pmm3d_matmul; rank 2: pmm3d_redistribute")


def test_an_error_of_one_rank_is_no_disagreement(program):
    """Its arguments that can be compared are those of the other ranks."""
    text = told(program, "leading", ARGUMENT)
    assert "pmm3d_pgemm failed on 1 of 3 ranks. rank 2: LayoutError: the leading dimension is 0" in text


def test_rows_and_columns_of_a_part_count_from_1(program):
    assert "rows 6 to 7 and columns 1 to 6, counted from 1, are not within a" in told(program, "part", ARGUMENT)


def test_a_long_wait_names_the_calls(program):
    done = program(*PROGRAM)(3, "late", PMM3D_TIMEOUT="1")
    assert done.returncode == 0 and len(re.findall("^[012] 0", done.stdout, re.M)) == 3, done.stdout + done.stderr
    said = done.stderr
    assert re.search(r"ranks 0-1 wait in agreement on pmm3d_redistribute #\d+ .* at pmm3d_redistribute$", said, re.M)
    assert re.search(r"rank 2 .* never came: .* is agreement #\d+; it is at\n +\(the program, outside of pmm3d\)", said)
    assert "PMM3D_TIMEOUT" in said and not PYTHON.search(said), said
