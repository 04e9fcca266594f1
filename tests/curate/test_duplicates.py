"""`sslpipe curate duplicates` on planted duplicates."""

import csv
import io

import numpy as np
import pytest
from PIL import Image

from sslpipe.cli import curate as curate_tool
from sslpipe.data.index import load_index
from sslpipe.errors import UserError
from tests.cli.test_evaluate import call
from tests.helpers.columns import add_columns
from tests.helpers.dataset import picture, png, write_dataset


def other_png(pixels):
    """The same pixels in other bytes."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=0)
    return file.getvalue()


def read_rows(folder):
    with open(folder / "groups.csv", newline="") as file:
        return list(csv.DictReader(file))


def shown_of(rows):
    names = ("split", "id", "key", "group", "kind", "nearest")
    return [tuple(str(row[name]) for name in names) for row in rows]


def run(manifest, out, *words):
    return call(curate_tool, "duplicates", manifest, "--out", out, *words)


@pytest.fixture
def planted(tmp_path):
    """Train: 3 is 9 in bytes, 5 is 11 in pixels; test: 2 is train's 5 in bytes, 4 is bad."""
    plants = {9: png(picture(3)), 11: other_png(picture(5))}
    manifest = write_dataset(tmp_path / "data", (8, 8), broken=plants)
    others = {k: png(picture(100 + k)) for k in range(8)}
    others |= {2: png(picture(5)), 4: b"no image"}
    write_dataset(tmp_path / "data", (8,), split="test", broken=others)
    return manifest


def test_exact_duplicates_are_grouped_across_splits(planted, tmp_path):
    add_columns(planted, camera=["a", "b"] * 8)
    before = {p: p.read_bytes() for p in planted.parent.glob("*.tar")}
    shown = run(planted, tmp_path / "out")
    assert "2 groups of 5 of 23 samples" in shown
    rows = shown_of(read_rows(tmp_path / "out"))
    assert rows == [
        ("train", "3", "train000003", "0", "bytes", "train:9"),
        ("train", "9", "train000009", "0", "bytes", "train:3"),
        ("train", "5", "train000005", "1", "bytes", "test:2"),
        ("train", "11", "train000011", "1", "pixels", "train:5"),
        ("test", "2", "test000002", "1", "bytes", "train:5"),
    ]
    import pyarrow.parquet as pq

    table = pq.read_table(tmp_path / "out" / "groups.parquet").to_pylist()
    assert shown_of(table) == rows
    # the column, beside what was there
    index = load_index(planted)
    column = index.split("train").column("duplicate_group")
    assert [k for k in column.show(np.arange(16)) if k is not None] == ["0", "1", "0", "1"]
    assert index.split("test").column("duplicate_group").show([2, 4]) == ["1", None]
    assert index.split("train").column("camera").show([0, 1]) == ["a", "b"]
    assert before == {p: p.read_bytes() for p in planted.parent.glob("*.tar")}


def test_one_split_without_the_column(planted, tmp_path):
    before = planted.read_bytes()
    run(planted, tmp_path / "out", "--split", "train", "--no-column")
    assert {r["split"] for r in read_rows(tmp_path / "out")} == {"train"}
    assert planted.read_bytes() == before


def test_a_second_run_replaces_the_column_of_its_splits_only(planted, tmp_path):
    run(planted, tmp_path / "out")
    run(planted, tmp_path / "out", "--split", "train")
    index = load_index(planted)
    assert index.split("test").column("duplicate_group").show([2]) == ["1"]
    again = planted.read_bytes()
    run(planted, tmp_path / "out", "--split", "train")
    assert planted.read_bytes() == again


def test_a_split_named_twice_is_refused(planted, tmp_path):
    with pytest.raises(UserError, match="names a split twice"):
        run(planted, tmp_path / "out", "--split", "train", "--split", "train")
