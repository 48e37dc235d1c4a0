"""CSV and .npz to HDF5: the written data, errors with their places, and no incomplete files."""

import json
from datetime import date

import h5py
import numpy as np
import pytest
import typer
from loops import given, looped
from samples import integers
from typer.testing import CliRunner

from pmm3d import DataError
from pmm3d.io import convert
from pmm3d.io.conversion import convert_like
from pmm3d.tools.convert import table_command


@pytest.fixture
def table(tmp_path):
    """table(text) writes a CSV file. The HDF5 file with the same name is `target`."""

    def write(text):
        path = tmp_path / "table.csv"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def target(tmp_path):
    return tmp_path / "table.h5"


def written(target) -> dict:
    with h5py.File(target) as file:
        assert all(dataset.chunks is None for dataset in file.values())
        return {name: dataset[()] for name, dataset in file.items()} | {
            "names": [str(name) for name in file["y"].attrs.get("class_names", [])] if "y" in file else None
        }


@looped("delimiter", [",", ";", "\t", "|", " "])
@looped("header", [True, False])
def test_a_table_of_numbers(table, target, delimiter, header):
    whole = integers((23, 5))
    lines = [delimiter.join("abcde")] * header + [delimiter.join(map(str, row)) for row in whole]
    shapes = convert(table("\n".join(lines)), target, overwrite=True)
    found = written(target)
    assert shapes[:2] == ((23, 4), (23, 1)) and found["x"].dtype == "float32"
    assert np.array_equal(found["x"], whole[:, :4]) and np.array_equal(found["y"], whole[:, 4:])


def test_targets_and_inputs_are_named_by_their_columns(table, target):
    path = table("u,heat flux,batch,yield\n1,2,3,4\n5,6,7,8\n")
    done = convert(path, target, targets=["heat flux", "yield"])
    assert written(target)["y"].tolist() == [[2, 4], [6, 8]] and done.columns == ["u", "batch"]
    with h5py.File(target) as file:
        assert list(file["y"].attrs["columns"]) == done.target_columns == ["heat flux", "yield"]
        assert list(file["x"].attrs["columns"]) == ["u", "batch"]
    done = convert(path, target, targets="yield", inputs=["batch", 0], overwrite=True)
    assert written(target)["x"].tolist() == [[3, 1], [7, 5]] and done.columns == ["batch", "u"]


def test_a_parquet_file_is_a_table_with_types(tmp_path, target):
    """The same data sets as from a CSV file. Row numbers of pandas are no input; messages count rows from 0."""
    pyarrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    random, (source, other) = np.random.default_rng(0), (tmp_path / name for name in ("a.parquet", "b.parquet"))
    columns = {
        "pressure": [None, *random.standard_normal(39)],
        "open": [row % 3 == 0 for row in range(40)],
        "site": [["north", "south"][row % 2] for row in range(40)],
        "__index_level_0__": list(range(40)),
        "heat flux": random.standard_normal(40).astype("float32"),
    }
    parquet.write_table(pyarrow.table(columns), source, row_group_size=7)
    names = [name for name in columns if not name.startswith("__")]
    rows = zip(*(["" if cell is None else cell for cell in columns[name]] for name in names))
    text = tmp_path / "a.csv"
    text.write_text("\n".join(",".join(map(str, row)) for row in [names, *rows]))
    found, options = [], {"targets": "heat flux", "categories": "site", "missing": "mean"}
    for path in (source, text):
        done = convert(path, target, **options, overwrite=True)
        with h5py.File(target) as file:
            known = json.loads(file["x"].attrs["pmm3d_table"])
        found.append((done, known, written(target)))
    (one, like, arrays), (two, also, right) = found
    assert one == two and like == also and one.columns == ["pressure", "open", "site=north", "site=south"]
    assert all(np.array_equal(arrays[name], right[name]) for name in ("x", "y"))
    parquet.write_table(pyarrow.table({"site": ["south"], "open": [True], "pressure": [None]}), other)
    convert_like(other, target, like, targets=False)
    assert np.allclose(written(target)["x"], [[like["means"][0], 1, 0, 1]])
    for path, changes, said in (
        (source, {"missing": "refuse"}, "a.parquet, row 0, column pressure: the value is missing.* such rows out"),
        (source, {"categories": None}, "a.parquet, row 0, column site: 'north' is not a number"),
        (source, {"delimiter": ","}, r"delimiter= \(--delimiter\) has no effect: .* has columns with names and types"),
        (source, {"encoding": "nonsense"}, r"encoding= \(--encoding\) has no effect"),
        (source, {"inputs": []}, "the list of columns is empty: name one"),
        (source, {"targets": "open,x"}, "no column 'open,x'"),
        (text.rename(tmp_path / "text.parquet"), {}, "text.parquet cannot be read as Parquet"),
    ):
        with given(said=said), pytest.raises(DataError, match=said):
            convert(path, tmp_path / "none.h5", **options | changes)


def test_the_index_of_a_table_of_pandas_is_its_first_column_if_it_has_a_name(tmp_path, target):
    """As in the CSV that pandas writes."""
    pyarrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    columns = {"a": [1.0, 2.0], "y": [3.0, 4.0], "day": [7, 8], "__index_level_1__": [0, 1], "run": [5, 6]}
    index = {"index_columns": ["run", "__index_level_1__", "day", {"kind": "range"}]}
    table = pyarrow.table(columns).replace_schema_metadata({"pandas": json.dumps(index)})
    parquet.write_table(table, tmp_path / "a.parquet")
    done = convert(tmp_path / "a.parquet", target)
    assert done.columns == ["run", "day", "a"] and done.target_columns == ["y"]
    assert written(target)["x"].tolist() == [[5, 7, 1], [6, 8, 2]]


def test_a_column_of_dates_or_structs_is_left_out_or_a_category(tmp_path, target):
    pyarrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    for value in (date(2026, 1, 2), {"p": 1}, b"x", [1]):
        parquet.write_table(pyarrow.table({"a": [1.0], "when": [value], "y": [2.0]}), tmp_path / "a.parquet")
        with given(value=value), pytest.raises(DataError, match="is not a number. Leave this column out"):
            convert(tmp_path / "a.parquet", target)
    assert convert(tmp_path / "a.parquet", target, inputs="a").columns == ["a"]


def test_a_parquet_file_is_refused_for_training_data_without_names(table, tmp_path, target):
    pyarrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    convert(table("1,2,3\n4,5,6\n"), target, header=False)
    with h5py.File(target) as file:
        known = json.loads(file["x"].attrs["pmm3d_table"])
    parquet.write_table(pyarrow.table({"q": [1.0], "p": [2.0]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="has names of columns, and the training data.* have none"):
        convert_like(tmp_path / "a.parquet", target, known, targets=False)


def test_true_and_false_are_1_and_0(table, target):
    """In columns of numbers; as labels they are texts. A first line of truth values is no header."""
    convert(table("a,b,y\nTrue,FALSE,1\nfalse,true,2\n"), target)
    assert written(target)["x"].tolist() == [[1, 0], [0, 1]]
    convert(table("a,y\n1,True\n2,False\n"), target, classes=True, overwrite=True)
    assert written(target)["names"] == ["False", "True"]
    assert convert(table("True,False\nFalse,True\n"), target, overwrite=True).inputs == (2, 1)


COLUMNS = [("a", [0]), (-2, [3]), (["d", 1], [3, 1]), (["e", "a", "b"], [4, 0, 1])]


@looped("columns, indices", COLUMNS)
def test_target_columns(table, target, columns, indices):
    whole = integers((9, 5))
    source = table("a,b,c,d,e\n" + "\n".join(",".join(map(str, row)) for row in whole))
    convert(source, target, targets=columns, dtype="float64", overwrite=True)
    found = written(target)
    assert np.array_equal(found["y"], whole[:, indices])
    assert np.array_equal(found["x"], np.delete(whole, indices, axis=1)) and found["x"].dtype == "float64"


def test_blank_lines_quotes_blanks_and_a_byte_order_mark(table, target):
    convert(table('\ufeff"a, b" , c\n\n1 ,"2"\r\n\n"3", 4\n\n'), target, targets="a, b")
    assert np.array_equal(written(target)["x"], [[2], [4]]) and np.array_equal(written(target)["y"], [[1], [3]])


def test_labels_as_text_are_numbered_in_sorted_order(table, target):
    convert(table("kind,size\ncow,1\nant,2\nbee,3\ncow,4\n"), target, targets="kind", classes=True)
    found = written(target)
    assert found["y"].tolist() == [2, 0, 1, 2] and found["y"].dtype == "int64"
    assert found["names"] == ["ant", "bee", "cow"]
    assert found["x"].tolist() == [[1], [2], [3], [4]]


NUMBERS = [
    ("0 1 2 10", [0, 1, 2, 3], ["0", "1", "2", "10"]),
    ("3 1 2", [2, 0, 1], ["1", "2", "3"]),
    ("1234 0.5 100", [2, 0, 1], ["0.5", "100", "1234"]),
    ("-1 0.5 1", [0, 1, 2], ["-1", "0.5", "1"]),
    ("cow 2 10", [2, 0, 1], ["2", "10", "cow"]),
]


@looped("labels, numbers, names", NUMBERS)
def test_labels_that_are_numbers_are_ordered_as_numbers(table, target, tmp_path, labels, numbers, names):
    source, arrays = table("".join(f"1,{label}\n" for label in labels.split())), tmp_path / "a.npz"
    np.savez(arrays, x=np.ones((len(numbers), 1)), y=np.array(labels.split(), "S"))  # bytes
    for path, options in ((source, {"header": False}), (arrays, {})):
        done = convert(path, target, classes=True, overwrite=True, **options)
        assert written(target)["y"].tolist() == numbers and written(target)["names"] == names == list(done.classes)
        assert list(done.classes.values()) == np.bincount(numbers).tolist()


def test_labels_numbered_as_the_caller_says(table, target):
    convert(table("1,bee\n2,cow\n"), target, classes=["cow", "ant", "bee"])
    assert written(target)["y"].tolist() == [2, 0] and written(target)["names"] == ["cow", "ant", "bee"]
    with pytest.raises(DataError, match="line 2: 'dog' is none of the classes cow, bee"):
        convert(table("1,bee\n2,dog\n"), target, classes=["cow", "bee"], overwrite=True)


def test_more_names_than_an_old_attribute_holds(table, target):
    convert(table("".join(f"1,name{number:05}\n" for number in range(5000))), target, classes=True, header=False)
    assert len(written(target)["names"]) == 5000


BAD_CELLS = [
    ("a,b\n1,2\n\n3,x\n", "line 4, column b: 'x' is not a number"),
    ("1,2\n3,\n", "line 2, column 1: the value is missing.*--missing drop"),
    ("1,2\nnan,4\n", "line 2, column 0: the value is missing"),
    ("1,2\n3,-inf\n", "line 2, column 1: -inf is not a finite float32"),
    ("1,2\n3,4,5\n", "line 2 has 3 cells; the first has 2"),
    ("1,2\n3\n", "line 2 has 1 cell; the first has 2"),
    ("", "is empty"),
    ("\n \n", "is empty"),
    ("a,b\n", "has no line of data"),
    ("a,b\n\n\n", "has no line of data"),
    ("1\n2\n", "no columns are left for the inputs"),
    ("1" * 400 + ",2\n", "line 1, column 0: inf is not a finite float32"),
    ("1,2\n-1e39,3\n", r"line 2, column 0: -1e\+39 is not a finite float32"),
    ("size,kind\n1,cow\n", "'cow' is not a number; labels of classes need .*--classes"),
    ('1,"2\n3,4\n', "the file ends within quotes: a quote may be opened and not closed"),
    ("1," + "2" * 200_000, "field larger than .*a quote may be opened"),
]


@looped("text, said", BAD_CELLS)
def test_bad_tables(table, target, text, said):
    with pytest.raises(DataError, match=said):
        convert(table(text), target)
    assert [path.name for path in target.parent.iterdir()] == ["table.csv"]


BAD_OPTIONS = [
    ({"targets": "c"}, "no column 'c'; it has the columns a, b"),
    ({"targets": False, "classes": True}, "there are no targets"),
    ({"targets": 2}, "index is below 2"),
    ({"targets": ["a", "b"]}, "no columns are left"),
    ({"targets": ["b", 1]}, "name one twice"),
    ({"dtype": "int8"}, "float32 or float64; got 'int8'"),
    ({"delimiter": ", "}, "one character; got ', '"),
    ({"inputs": "b", "targets": "b"}, "a column has two uses"),
    ({"categories": "b"}, "the category 'b' is no input"),
    ({"missing": "median"}, "refuse or drop or mean"),
    ({"targets": ()}, r"the list of columns is empty"),
    ({"classes": ["1"], "targets": 0}, "line 2: 'q' is none of the classes 1"),
    ({"classes": True, "targets": ["a", "b"]}, "no columns are left"),
    ({"targets": 1}, r"line 2, column a: 'q' is not a number.*--categories"),
]


@looped("options, said", BAD_OPTIONS)
def test_bad_options(table, target, options, said):
    with pytest.raises(DataError, match=said):
        convert(table("a,b\nq,2\n"), target, **options)
    assert not target.exists()


MISSING = ["", "NaN", "NA", "n/a", "#N/A", "None", "-nan"]
NO_TEXT = MISSING[:5]


@looped("cell", NO_TEXT)
def test_missing_values_are_left_out_or_replaced(table, target, cell):
    path = table(f"u,v,site,y\n1,4,a,7\n{cell},5,b,8\n3,6,{cell},9\n4,8,a,{cell}\n")
    options = {"categories": "site", "overwrite": True}
    with pytest.raises(DataError, match="line 3, column u: the value is missing.*--missing drop"):
        convert(path, target, **options)
    done = convert(path, target, missing="drop", **options)
    assert written(target)["x"].tolist() == [[1, 4, 1]] and done.columns == ["u", "v", "site=a"]
    assert (done.dropped, done.filled) == (3, 0)
    done = convert(path, target, missing="mean", **options)
    assert written(target)["x"].tolist() == [[1, 4, 1, 0], [2, 5, 0, 1], [3, 6, 0.5, 0.5]]
    assert (done.dropped, done.filled) == (1, 2) and written(target)["y"].tolist() == [[7], [8], [9]]


def test_another_table_is_converted_as_the_first(table, target, tmp_path):
    found = []
    for missing in ("refuse", "mean"):
        gap = "" if missing == "mean" else "2"
        convert(
            table(f"u,site,y\n1,a,5\n3,b,6\n{gap},a,7\n"), target, categories="site", missing=missing, overwrite=True
        )
        with h5py.File(target) as file:
            found.append(json.loads(file["x"].attrs["pmm3d_table"]))
    path, other = tmp_path / "other.csv", tmp_path / "other.h5"
    path.write_text("site,u\nb,7\na,NA\n")
    with pytest.raises(DataError, match="line 3, column u: the value is missing. Fill it, or remove the line"):
        convert_like(path, other, found[0], targets=False)
    assert convert_like(path, other, found[1], targets=False).columns == ["u", "site=a", "site=b"]
    assert written(other)["x"].tolist() == [[7, 0, 1], [2, 1, 0]]
    path.write_text("7,b\n1,a\n")
    convert_like(path, other, found[0], targets=False)
    assert written(other)["x"].tolist() == [[7, 0, 1], [1, 1, 0]]
    for text, targets, said in (
        ("u,site\n1,c\n", False, "line 2, column site: 'c' is none of the categories of the training data: a, b"),
        ("u,site\n1,a\n", True, "has no column 'y'; it has the columns u, site. The metrics need"),
        ("1\n2\n", False, "has 1 column, and the network takes 2: u, site"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=said):
            convert_like(path, other, found[0], targets=targets)


KNOWN = [  # first table, its options, another table, whether targets are read, its inputs
    ("400,410,y\n1.5,2,5\n", {}, "400,410\n3,4\n", False, [[3, 4]]),
    ("400,410,420\n1.5,2,5\n", {"header": True}, "410,400,9\n4,3,7\n", False, [[3, 4]]),
    ("1.5,2,5\n2,3,6\n", {}, "0,1,2\n3,4,7\n", True, [[0, 1], [3, 4]]),
    ("é;ü;y\n1;2;5\n", {"encoding": "latin-1"}, "ü;é\n4;3\n", False, [[3, 4]]),
    ("a:b:y\n1:2:5\n", {"delimiter": ":"}, "b:a\n4:3\n", False, [[3, 4]]),
]


@looped("first, options, second, targets, inputs", KNOWN)
def test_header_encoding_and_delimiter_of_another_table_are_those_of_the_first(
    tmp_path, target, first, options, second, targets, inputs
):
    path = tmp_path / "table.csv"
    path.write_text(first, encoding=options.get("encoding", "utf-8"))
    convert(path, target, overwrite=True, **options)
    with h5py.File(target) as file:
        known = json.loads(file["x"].attrs["pmm3d_table"])
    path.write_text(second, encoding=options.get("encoding", "utf-8"))
    convert_like(path, target, known, targets=targets)
    assert written(target)["x"].tolist() == inputs


def test_remedies_for_another_table_are_those_that_its_reader_has(table, target):
    convert(table("u,kind\n1,a\n2,b\n"), target, classes=True)
    with h5py.File(target) as file:
        known = json.loads(file["x"].attrs["pmm3d_table"])
    for cell, said in (("", "column kind: the value is missing. Fill it, or remove the line$"),
                       ("c", "'c' is none of the classes a, b. Remove the line$")):  # fmt: skip
        with pytest.raises(DataError, match=said):
            convert_like(table(f"u,kind\n1,{cell}\n"), target, known, targets=True, classes=["a", "b"])
    for first, said in (
        ("u,kind\n", "line 2, column u: 'x' is not a number$"),
        ("", "have no header: remove the first"),
    ):
        convert(table(f"{first}1,2\n2,3\n"), target, overwrite=True)
        with h5py.File(target) as file:
            known = json.loads(file["x"].attrs["pmm3d_table"])
        with pytest.raises(DataError, match=said):
            convert_like(table(f"u,kind\n{'x,1' if first else '2,3'}\n"), target, known, targets=True)


def test_texts_become_columns_of_categories(table, target):
    done = convert(table("n,site,y\n1,b,2\n3,10,4\n5,9,6\n7,b,8\n"), target, categories=["site"])
    assert done.columns == ["n", "site=9", "site=10", "site=b"]
    assert written(target)["x"].tolist() == [[1, 0, 0, 1], [3, 0, 1, 0], [5, 1, 0, 0], [7, 0, 0, 1]]
    done = convert(table("site,y\nnone,1\nNone,2\nnull,3\n"), target, categories="site", overwrite=True)
    assert done.columns == ["site=None", "site=none", "site=null"]
    many = table("site,y\n" + "".join(f"s{number},1\n" for number in range(1001)))
    with pytest.raises(DataError, match="1,001 different texts, too many.*--inputs"):
        convert(many, target, categories="site", overwrite=True)


@looped("cell", MISSING)
def test_a_missing_label(table, target, cell):
    with pytest.raises(DataError, match="line 2, column 1: the value is missing. If it is a class.*--class-names"):
        convert(table(f"1,cat\n2,{cell}\n"), target, classes=True, overwrite=True)
    convert(table("1,cat\n2,NA\n"), target, classes=["NA", "cat"], overwrite=True)
    assert written(target)["y"].tolist() == [1, 0]


def test_a_missing_label_of_a_npz_file(tmp_path, target):
    np.savez(tmp_path / "a.npz", x=np.ones((3, 1)), y=np.array([1.0, 2.0, np.nan]))
    with pytest.raises(DataError, match="row 2: 'nan' is no label"):
        convert(tmp_path / "a.npz", target, classes=True)


HEADERS = [  # first line, second line, whether the first one is a header
    ("0,1,2,3,y", "5.1,3.5,1.4,0.2,0", True),
    ("1990,1991,y", "1.5,2,3", True),
    (",0,1,y", "0,1.5,2,3", True),
    ("a,b", "1,2", True),
    ("a,b", "1,cow", True),
    ("1,2,cow", "3,4,cow", False),
    ("1,2", "3,4", False),
    ("0,5", "1,6", False),
    ("1,2,cow", "3,4,ant", False),
    ("0,cow", "1,ant", False),
    ("0,1,2,kind", "5,3,1,cow", True),
    ("0,1,y,2", "1.5,3,0,2", True),
    ("0,1,2", "5,6,7", True),
    ("5,NA,3", "1,2,3", False),
]


@looped("first, second, header", HEADERS)
def test_whether_the_first_line_is_a_header(table, target, first, second, header):
    source, options = table(f"{first}\n{second}\n{second}\n"), {"classes": True, "overwrite": True}
    if "NA" in first:
        with pytest.raises(DataError, match="line 1, column 1: 'NA' is not a number. If the first line names"):
            convert(source, target, **options)
    else:
        assert convert(source, target, **options).inputs[0] == 3 - header
    assert convert(source, target, header=True, **options).columns == first.split(",")[:-1]
    assert convert(table("1,2\n3,4\n"), target, header=False, overwrite=True).inputs[0] == 2


def test_groups_are_numbered(table, target, tmp_path):
    source = table("who,a,b\nann,1,2\nbob,3,4\nann,5,6\n")
    done = convert(source, target, group_column="who")
    found = written(target)
    assert found["groups"].tolist() == [0, 1, 0] and found["x"].tolist() == [[1], [3], [5]]
    assert found["groups"].dtype == "int64" and done.columns == ["a"] and done.target_columns == ["b"]
    (tmp_path / "unnamed.csv").write_text("who,a,b\nann,1,2\n,3,4\n")
    np.savez(tmp_path / "a.npz", x=np.ones((3, 1)), y=np.ones(3))
    for path, options, said in (
        (source, {"group_column": "b"}, "a column has two uses"),
        (tmp_path / "unnamed.csv", {"group_column": "who"}, "line 3, column who: the value is missing"),
        (tmp_path / "a.npz", {"group_column": 0}, "a.npz has arrays. Leave it out"),
        (tmp_path / "a.npz", {"targets": "groups"}, "two names, and not 'groups'"),
        (tmp_path / "a.npz", {"targets": ""}, "'' cannot name a data set"),
        (tmp_path / "a.npz", {"missing": "drop"}, "a.npz has arrays. Leave it out"),
    ):
        with given(options=options), pytest.raises(DataError, match=said):
            convert(path, target, overwrite=True, **options)


def test_samples_without_targets(table, target, tmp_path):
    done = convert(table("a,b\n1,2\n3,4\n"), target, targets=False)
    assert done.inputs == (2, 2) and done.targets is None and written(target)["names"] is None
    np.savez(tmp_path / "a.npz", x=np.ones((3, 2)))
    assert convert(tmp_path / "a.npz", target, targets=False, overwrite=True).inputs == (3, 2)
    with pytest.raises(DataError, match="there are no targets"):
        convert(table("1,2\n"), target, targets=False, classes=True)


def test_files_that_cannot_be_read_or_written(table, target, tmp_path):
    (tmp_path / "a.npz").write_text("1,2\n")
    for source, to, options, said in (
        (tmp_path / "none.csv", target, {}, "none.csv"),
        (tmp_path / "a.npz", target, {}, "is no .npz file"),
        (table("1,2\n"), tmp_path / "no/such/table.h5", {}, "cannot convert .*table.h5: .*No such file"),
    ):
        with given(said=said), pytest.raises(DataError, match=said):
            convert(source, to, **options)
    assert not target.exists()


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "utf-16-le", "cp1252"])
def test_other_encodings_are_named(tmp_path, target, encoding):
    path = tmp_path / "table.csv"
    path.write_bytes("größe,kind\n1,Kühe\n2,Bären\n".encode(encoding))
    with pytest.raises(DataError, match="cannot be read as utf-8-sig .*encoding= "):
        convert(path, target, classes=True)
    convert(path, target, classes=True, encoding=encoding, targets="kind")
    assert written(target)["names"] == ["Bären", "Kühe"] and written(target)["y"].tolist() == [1, 0]
    with pytest.raises(DataError, match="cannot be read as klingon"):
        convert(path, target, encoding="klingon", overwrite=True)


def test_line_breaks_within_quotes(table, target):
    text = 'size,"kind\nof animal"\n1,"big\ncow"\n2,"ant"\n\n3,"big\ncow"\n4,5" tall\n'
    shapes = convert(table(text), target, classes=True, targets="kind\nof animal")
    assert shapes[:2] == ((4, 1), (4,)) and written(target)["x"].tolist() == [[1], [2], [3], [4]]
    assert written(target)["names"] == ['5" tall', "ant", "big\ncow"]
    assert written(target)["y"].tolist() == [2, 1, 2, 0]
    with pytest.raises(DataError, match="line 9, column size: 'x' is not a number"):
        convert(table(text.replace("\n4,", "\nx,")), target, classes=True, overwrite=True)


@pytest.mark.parametrize("name", ["table.csv", "./a/../table.csv", "soft.h5", "hard.h5", "a/soft.h5"])
def test_the_target_is_not_the_source(table, tmp_path, monkeypatch, name):
    source = table("1,2\n3,4\n")
    (tmp_path / "a").mkdir()
    (tmp_path / "soft.h5").symlink_to("table.csv")
    (tmp_path / "a/soft.h5").symlink_to(tmp_path / "soft.h5")
    (tmp_path / "hard.h5").hardlink_to(source)
    monkeypatch.chdir(tmp_path)
    for overwrite in (True, False):
        with pytest.raises(DataError, match=f"the target .*{name} is the source itself".replace("./a/../", ".*")):
            convert("table.csv", name, overwrite=overwrite)
    assert source.read_text() == "1,2\n3,4\n" and (tmp_path / "soft.h5").is_symlink()


@looped("header, name", [("a,b,a", "a"), ("a,,", "")])
def test_columns_of_one_name(table, target, header, name):
    with pytest.raises(DataError, match=f"several columns have the name '{name}'"):
        convert(table(header + "\n1,2,3\n"), target, targets="a")


def test_numbers_too_large_for_float32_are_numbers_of_float64(table, target):
    convert(table("1,2\n-1e39,3\n"), target, dtype="float64")
    assert written(target)["x"].tolist() == [[1], [-1e39]]


def test_an_existing_target_is_left_alone(table, target):
    target.write_text("precious")
    with pytest.raises(DataError, match="exists; overwrite=True"):
        convert(table("1,2\n"), target)
    with pytest.raises(DataError, match="line 1"):
        convert(table("1,inf\n"), target, overwrite=True)
    assert target.read_text() == "precious"
    convert(table("1,2\n"), target, overwrite=True)
    assert written(target)["x"].tolist() == [[1]]


def test_arrays_of_a_npz_file_keep_their_type_and_dims(tmp_path, target):
    x, y = integers((6, 4, 4)).astype("uint8"), np.arange(6, dtype="int32") % 3
    np.savez_compressed(tmp_path / "a.npz", images=x, y=y, words=np.array(list("babacb")))
    assert convert(tmp_path / "a.npz", target, inputs="images")[:2] == ((6, 4, 4), (6,))
    found = written(target)
    assert np.array_equal(found["images"], x) and found["images"].dtype == "uint8"
    assert np.array_equal(found["y"], y) and found["y"].dtype == "int32"
    convert(tmp_path / "a.npz", target, inputs="images", targets="words", classes=True, overwrite=True)
    with h5py.File(target) as file:
        assert file["words"][:].tolist() == [1, 0, 1, 0, 2, 1]
        assert list(file["words"].attrs["class_names"]) == ["a", "b", "c"]


BAD_ARRAYS = [
    ({"x": np.ones((2, 2))}, "no array 'y'; it has 'x'"),
    ({"x": np.ones((2, 2)), "y": np.ones(3)}, "'x' has 2 rows"),
    ({"x": np.array([[1, 2], [3, np.nan]]), "y": np.ones(2)}, "row 1 of array 'x' is not finite"),
    ({"x": np.array(1.0), "y": np.ones(1)}, "array 'x' is float64 "),
    ({"x": np.ones((0, 2)), "y": []}, "array 'x'"),
    ({"x": np.ones((2, 2)) * 1j, "y": np.ones(2)}, "complex128"),
    ({"x": np.ones((2, 2), np.longdouble), "y": np.ones(2)}, "real numbers of at most 64 bits"),
    ({"x": np.array([{}, {}]), "y": np.ones(2)}, "cannot read .*pickle"),
]


@looped("arrays, said", BAD_ARRAYS)
def test_bad_npz_files(tmp_path, target, arrays, said):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError, match=said):
        convert(tmp_path / "a.npz", target)
    assert not target.exists()


@pytest.fixture
def command():
    """command(*arguments): the outcome of `pmm3d convert`."""
    app = typer.Typer(rich_markup_mode="rich")
    app.command("convert")(table_command)
    return lambda *arguments: CliRunner(env={"TERM": "dumb", "COLUMNS": "140"}).invoke(app, list(map(str, arguments)))


def test_the_command(command, table, target):
    source = table("a,b,kind\n1,2,cow\n3,4,ant\n")
    done = command(source, target, "--classes", "--targets", "kind")
    assert done.exit_code == 0 and (
        f"wrote {target}: x 2 x 2 ('a', 'b'); y 2 ('kind'); 2 classes: ant (1), cow (1); the first line is a header"
        in done.output
    )
    done = command(source, target, "--overwrite", "--class-names", 'cow, "ant"', "--targets", "-1")
    assert (
        done.exit_code == 0 and written(target)["names"] == ["cow", "ant"] and written(target)["y"].tolist() == [0, 1]
    )
    for to, options, said in (
        (target, (), f"{target} exists"),
        (target.with_suffix(".csv2"), ("--classes",), "which is another format"),
        (source, ("--overwrite", "--classes"), "is the source itself"),
        (target, ("--overwrite", "--class-names", ""), "classes are names, none of them empty"),
        (target, ("--overwrite", "--targets", ""), "column"),
        (target, ("--overwrite", "--no-targets", "--no-header"), "line 1, column 0: 'a' is not a number"),
        (target, ("--overwrite", "--targets=--1,a"), "no column"),
        (target, ("--overwrite", "--targets=²,a"), "no column"),
        (target, ("--overwrite", "--targets=,a"), "no column"),
        (target, ("--overwrite", "--targets", "a,1"), "line 2, column kind: 'cow' is not a number"),
    ):
        with given(options=options):
            done = command(source, to, *options)
            assert done.exit_code == 2 and said in done.output, done.output
    done = command(table("1,2\n3,4\n"), target, "--overwrite")
    assert "; no header: the first line is a sample" in done.output
    source.write_bytes("größe,kind\n1,cow\n".encode("latin-1"))
    assert "--encoding" in command(source, target, "--overwrite", "--classes").output
    done = command(source, target, "--overwrite", "--classes", "--encoding", "latin-1")
    assert done.exit_code == 0, done.output


def test_messages_of_the_command_name_its_options(command, table, target):
    """In Python they name keyword arguments too."""
    for text, options, said in (
        ("1,2\n3,4\n", (), f"{target} exists; --overwrite replaces it"),
        ("a,b\n1,cow\n", ("--overwrite",), "labels of classes need --classes"),
        ("1,2\na,4\n", ("--overwrite",), ". --categories 0 makes a column of 0 and 1 of each of its texts; --inputs"),
        ("p (Pa),b\n1,2\na,4\n", ("--overwrite",), "--categories 'p (Pa)' makes a column"),
        ("1,2\n3,\n", ("--overwrite",), "--missing drop leaves such lines out; --missing mean replaces"),
        ("1,a\n2,\n", ("--overwrite", "--classes"), "list all classes with --class-names"),
    ):
        target.touch()
        done = command(table(text), target, *options)
        assert done.exit_code == 2 and said in done.output and "=" not in done.output, done.output
    with pytest.raises(DataError, match=r"exists; overwrite=True \(--overwrite\) replaces it"):
        convert(table("1,2\n3,4\n"), target)
