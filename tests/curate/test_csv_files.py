"""Tables: what is written is read again; what is none is refused."""

import pytest

from sslpipe.curate.csv_files import labelled_ids, read_table, write_table
from sslpipe.errors import DataError

ROWS = [
    {"split": "train", "id": 4, "label": "a, b", "value": 0.25},
    {"split": "train", "id": 7, "label": None, "value": None},
    {"split": "test", "id": 4, "label": "ü\n2", "value": -1e-9},
    {"split": "test", "id": 5, "label": 'a\rb\r\n"c"', "value": 1.0},
]


def test_a_table_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "new" / "table.csv"
    write_table(path, ROWS, list(ROWS[0]))
    found = [
        row | {"id": int(row["id"]), "value": row["value"] and float(row["value"])}
        for row in read_table(path, ("split", "id"))
    ]
    assert found == ROWS


def test_what_has_a_label_is_read_as_a_spreadsheet_saves_it(tmp_path):
    path = tmp_path / "labels.csv"
    path.write_text("split,id,label\ntrain,1.0,cat\ntrain,2.0, dog\ntrain,4, \ntest,5,cat\n")
    assert labelled_ids(path, "train", 8) == {1, 2}


HEAD = "split,id,label\n"
REFUSED = {
    "split,id\ntrain,1\n": "has no column label; it has: split, id",
    f"{HEAD}train,7,a\ntrain,8,a\n": "row 3: id '8' is no sample; ids end at 7",
    **{f"{HEAD}train,{c},a\n": "row 2: id " for c in ("x", "3.7", "nan", "-1", "")},
    f"{HEAD}train,1,caf\xe9": "save it as a CSV in UTF-8",
    f"{HEAD}test,1,a\n": "its column label is empty for split 'train'",
    # what a spreadsheet of another country saves, and what would be read as something else
    "split;id;label\ntrain;1;a\n": "no column split, id, label; it has: split;id;label; separate",
    "split,id,label,label\ntrain,1,a,b\n": "two columns 'label'",
    f"{HEAD}train,1,a,\ntrain,1,a,b": "line 3 has more cells than columns",
}


def test_wrong_tables_are_refused_with_row_and_remedy(tmp_path):
    path = tmp_path / "labels.csv"
    for text, told in REFUSED.items():
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(DataError) as error:
            labelled_ids(path, "train", 8)
        assert told in str(error.value)
    with pytest.raises(DataError, match="cannot read the table"):
        read_table(tmp_path / "absent.csv", ())
