"""sslpipe.sharding.cells: kinds of columns, found or named, and hostile cells."""

import datetime as dt
import math

import numpy as np
import pytest

from sslpipe.errors import DataError
from sslpipe.sharding.cells import CellReader, ColumnSpec, parse_columns

MICRO = 10**6
NOON = 1_714_564_800 * MICRO  # 2024-05-01 12:00 UTC


def read(cells, kind=None, origin="table"):
    """(kind, values as Python has them, None where missing) of a column made of one chunk."""
    reader = CellReader(ColumnSpec("age", "age", kind), origin)
    reader.add("train", cells, [f"row {k}" for k in range(len(cells))])
    column = reader.finish()["train"]
    plain = [
        None if gone else column.strings[value] if column.kind == "text" else value
        for value, gone in zip(column.values.tolist(), column.missing.tolist(), strict=True)
    ]
    return column.kind, plain


@pytest.mark.parametrize(
    ("cells", "kind", "values"),
    [
        (["3", "", "-7", " ", "+0"], "integer", [3, None, -7, None, 0]),
        (["3", "nan", "1e3", ".5"], "float", [3.0, None, 1000.0, 0.5]),
        (["3", "nan"], "float", [3.0, None]),
        (["007", "12"], "text", ["007", "12"]),  # digits that are no number: a postcode
        (["a", "null", "NaN", "a"], "text", ["a", "null", "NaN", "a"]),  # somebody's name
        (["a/b\n", "ü", "a\0"], "text", ["a/b\n", "ü", "a\0"]),
        (["", "", ""], "text", [None] * 3),
        (["2024-05-01T12:00:00Z", "2024-05-01 14:00+02:00"], "time", [NOON, NOON]),
        (["2024:05:01 12:00:00", "2024-05-01"], "time", [NOON, NOON - 43200 * MICRO]),
        (["9223372036854775807"], "integer", [2**63 - 1]),
        # floats would make one of these two
        (
            ["98765432109876543210", "98765432109876543211", "7"],
            "text",
            ["98765432109876543210", "98765432109876543211", "7"],
        ),
        ([str(2**63), "0.5"], "text", [str(2**63), "0.5"]),
        (["1970-01-01T00:00:00.0000015Z"], "time", [1]),
    ],
)
def test_a_table_has_the_kind_of_all_its_cells(cells, kind, values):
    assert read(cells) == (kind, values)


@pytest.mark.parametrize(
    ("cells", "kind", "values"),
    [
        ([3, None, 2**63 - 1], "integer", [3, None, 2**63 - 1]),
        ([3, 0.5, math.nan], "float", [3.0, 0.5, None]),
        ([np.int64(3), np.float32(0.5)], "float", [3.0, 0.5]),
        (["12", "", "x"], "text", ["12", None, "x"]),  # a text in JSON is a text
        ([True, None, False], "text", ["true", None, "false"]),
        ([b"caf\xc3\xa9"], "text", ["café"]),
        ([dt.datetime(2024, 5, 1, 12), dt.date(2024, 5, 1)], "time", [NOON, NOON - 43200 * MICRO]),
        (["2024-05-01T12:00:00Z"], "time", [NOON]),
        ([None, None], "text", [None, None]),
    ],
)
def test_typed_cells_keep_their_types(cells, kind, values):
    assert read(cells, origin="typed") == (kind, values)


@pytest.mark.parametrize(
    ("cells", "kind", "values"),
    [
        (["12", 12, 0.5, True], "text", ["12", "12", "0.5", "true"]),
        (["12", 3.0, 5], "integer", [12, 3, 5]),
        (["12", 3, "nan"], "float", [12.0, 3.0, None]),
        ([1_714_564_800, "1714564800.25", 0.5], "time", [NOON, NOON + 250_000, 500_000]),
        (["-0.5", -0.5], "time", [-500_000, -500_000]),
    ],
)
def test_a_named_kind_converts(cells, kind, values):
    assert read(cells, kind, "typed") == (kind, values)


@pytest.mark.parametrize(
    ("cells", "kind", "words"),
    [
        (["3", "n/a"], None, r"row 0 holds '3' .*, row 1 holds 'n/a' \(text\); .* age:text"),
        ([3, "4"], None, r"row 0 holds 3 \(integer\), row 1 holds '4' \(text\)"),
        (["2024-05-01", "soon"], None, r"'2024-05-01' \(time\), row 1 holds 'soon' \(text\)"),
        (["2024-05-01T12:00", "2024-05-01T12:00Z"], None, "write the offset of all"),
        (["2024-05-01T12:00", "2024-05-01T12:00Z"], "time", "write the offset of all"),
        (["3", "n/a"], "integer", "row 1: age = 'n/a' is not an integer; mend it"),
        ([2**63], None, "row 0: age = 9223372036854775808 does not fit 64 bits"),
        ([-(2**63)], None, "does not fit 64 bits"),
        ([10**5000], None, "an integer of 16610 bits does not fit"),
        (["9" * 5000], "integer", "does not fit 64 bits"),
        ([10**400], "float", "is not finite"),
        ([0.5], "integer", "is not an integer"),
        (["1_000"], "float", "is not a number"),
        (["inf"], "float", "is not a number"),
        ([math.inf], None, "is not finite"),
        (["1714564800000"], "time", "no time of the years 1 to 9999 in seconds since 1970"),
        (["2024-13-01"], "time", "is no time"),
        ([b"\xff"], None, "bytes that are no text in UTF-8; mend it, or leave it empty$"),
        ([[1, 2]], None, "is a list, no value of a column; mend it, or leave it empty$"),
        ([{"a": 1}], "text", "is a dict, no value of a column"),
        ([2**53 + 1, 0.5], None, r"9007199254740993 \(large integer\), row 1 holds 0.5 \(float\)"),
        ([str(2**53 + 1), "0.5"], None, "give age:float to round"),
        (["2024-05-01", "9" * 20], None, r"'2024-05-01' \(time\), row 1 holds '9{20}' \(text\)"),
    ],
)
def test_a_cell_of_another_kind_is_named(cells, kind, words):
    with pytest.raises(DataError, match=words):
        read(cells, kind, "typed" if any(not isinstance(c, str) for c in cells) else "table")


def test_parts_of_names_are_texts_where_one_is():
    assert read(["3", "n/a", "2024-05-01"], origin="name")[0] == "text"
    assert read(["3", "4"], origin="name")[0] == "integer"
    assert read(["9" * 20, "0.5"], origin="name") == ("text", ["9" * 20, "0.5"])


def test_chunks_and_splits_share_kind_and_strings():
    reader = CellReader(ColumnSpec("age", "age", None), "typed")
    reader.add("train", [None, None], ["a", "b"])
    reader.add("train", [3], ["c"])
    reader.add("test", [0.5, None], ["d", "e"])
    columns = reader.finish()
    assert columns["train"].kind == columns["test"].kind == "float"
    assert columns["train"].values.tolist()[2:] == [3.0]
    assert np.isnan(columns["train"].values[:2]).all()
    texts = CellReader(ColumnSpec("age", "age", None), "typed")
    texts.add("train", ["z", None, "b"], ["a", "b", "c"])
    texts.add("test", ["a", "b"], ["d", "e"])
    columns = texts.finish()
    assert list(columns["train"].strings) == ["a", "b", "z"]
    assert columns["train"].values.tolist() == [2, -1, 1]
    assert columns["test"].values.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("text", "specs"),
    [
        ("patient, age:integer", [("patient", "patient", None), ("age", "age", "integer")]),
        ("sku=Product id:text", [("sku", "Product id", "text")]),
        ("model=exif:Model", [("model", "exif:Model", None)]),
    ],
)
def test_columns_are_named_renamed_and_given_kinds(text, specs):
    assert [tuple(spec) for spec in parse_columns(text, "--columns")] == specs


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("age:integr", "'integr' is no kind; did you mean 'integer'"),
        ("age,age", "names 'age' twice"),
        ("a=x,b=x", "twice"),
        ("", "no list of names"),
        ("Patient ID", "to rename it write NAME=Patient ID"),
        ("../x", "a name is a letter"),
        ("age,Age", "differ in case only"),
    ],
)
def test_a_wrong_list_of_columns_is_one_line(text, words):
    with pytest.raises(DataError, match=words):
        parse_columns(text, "--columns")
