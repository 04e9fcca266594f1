"""sslpipe.data.columns: values and groups of samples, read from a parquet file a split."""

import contextlib
import hashlib
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from sslpipe.data.columns import REWRITE, digest
from sslpipe.data.index import load_index
from sslpipe.errors import DataError
from sslpipe.sharding.columns import without_splits
from sslpipe.sharding.record import save_manifest
from tests.helpers.columns import add_columns, table_of
from tests.helpers.dataset import write_dataset

PATIENT = ["b", None, "a/\n", "b", "ü\0", "a/\n", "b", None]
AGE = [7, 7, None, -5, 2**63 - 1, 7, None, 0]
DOSE = [0.5, None, 1e-300, 2.0, 2.0, -0.0, 3.5, 1.0]
SHOT_AT = [None, 0, 1_714_564_800_000_000, 0, -1, 5, 5, 5]


@pytest.fixture
def index(tmp_path):
    manifest = write_dataset(tmp_path, (3, 5))
    return add_columns(
        manifest, times=("shot_at",), patient=PATIENT, age=AGE, dose=DOSE, shot_at=SHOT_AT
    )


def test_values_come_by_id_in_any_order(index):
    ids = [7, 0, 4, 4, 2]
    split = index.split("train")
    assert split.column("patient").show(ids) == [PATIENT[i] for i in ids]
    age, dose = split.column("age"), split.column("dose")
    assert age.kind == "integer"
    assert age.values_of([0, 3, 4]).tolist() == [7, -5, 2**63 - 1]
    assert age.missing(range(8)).tolist() == [value is None for value in AGE]
    assert dose.values_of([0, 2, 6]).tolist() == [0.5, 1e-300, 3.5]
    assert dose.missing(range(8)).tolist() == [value is None for value in DOSE]
    assert split.column("shot_at").show([0, 1, 2, 4]) == [
        None,
        "1970-01-01T00:00:00Z",
        "2024-05-01T12:00:00Z",
        "1969-12-31T23:59:59.999999Z",
    ]


@pytest.mark.parametrize(("name", "values"), [("patient", PATIENT), ("age", AGE)])
def test_groups_are_the_samples_of_one_value(index, name, values):
    groups = index.split("train").column(name).groups
    expected = sorted({value for value in values if value is not None})
    assert groups.show() == [str(value) for value in expected]
    codes = [-1 if value is None else expected.index(value) for value in values]
    assert groups.code_of(range(8)).tolist() == codes
    assert groups.sizes().tolist() == [values.count(value) for value in expected]
    numbers = groups.whole_split().tolist()
    assert [n for n, code in zip(numbers, codes, strict=True) if code >= 0] == [
        code for code in codes if code >= 0
    ]
    alone = [n for n, code in zip(numbers, codes, strict=True) if code < 0]
    assert len({*alone}) == values.count(None)
    assert not {*alone} & {*codes}


def test_floats_make_no_groups_and_an_unknown_column_names_the_nearest(index):
    with pytest.raises(DataError, match="'dose' holds floats"):
        _ = index.split("train").column("dose").groups
    with pytest.raises(DataError, match="no column 'patints'; did you mean 'patient'"):
        index.split("train").column("patints")


def test_a_column_that_no_build_stored_is_met_with_what_stores_it(index):
    for name, remedy in (("camera", "shards build"), ("duplicate_group", "curate duplicates")):
        with pytest.raises(DataError, match=f"{name}.*{remedy}"):
            index.split("train").column(name)


def test_a_split_without_the_column_knows_nothing(tmp_path):
    write_dataset(tmp_path, (2,), split="test")
    index = add_columns(write_dataset(tmp_path, (2,)), patient=["a", "b"], dose=[1.0, 2.0])
    split = index.split("test")
    assert split.column("patient").missing([0, 1]).all()
    assert split.column("dose").missing([0, 1]).all()
    assert split.column("patient").groups.code_of([0, 1]).tolist() == [-1, -1]
    assert len(split.column("patient").groups) == 0


def test_a_split_that_is_added_leaves_the_other_as_it_was(tmp_path):
    manifest = write_dataset(tmp_path, (2,))
    write_dataset(tmp_path, (3,), split="test")
    before = add_columns(manifest, patient=["m", "z"]).manifest
    index = add_columns(manifest, "test", patient=["a", "z", None])
    assert index.manifest.metadata["train"] == before.metadata["train"]
    train, test = (index.split(name).column("patient") for name in ("train", "test"))
    assert train.show([0, 1]) == ["m", "z"]
    assert test.show(range(3)) == ["a", "z", None]
    assert train.groups.shared_with(test.groups).tolist() == [False, True]


def test_what_names_the_data_does_not_depend_on_who_wrote_first(tmp_path):
    """Nor on the bytes of the file, which depend on the version of pyarrow."""
    hashes = set()
    columns = {"b": ["x", "y"], "a": [1, None]}
    for number, order in enumerate((("b", "a"), ("a", "b"))):
        manifest = write_dataset(tmp_path / str(number), (2,))
        add_columns(manifest, **{name: columns[name] for name in order})
        hashes.add(load_index(manifest).sha256)
    index = load_index(manifest)
    table = index.manifest.metadata["train"].model_copy(update={"sha256": "0" * 64})
    other = index.manifest.model_copy(update={"metadata": {"train": table}})
    save_manifest(manifest.parent, other)
    hashes.add(load_index(manifest).sha256)
    assert len(hashes) == 1
    add_columns(manifest, b=["x", "z"], a=[1, None])
    assert load_index(manifest).sha256 not in hashes


def test_digests_tell_values_apart():
    tables = [
        table_of(x=values)
        for values in (["ab", "c"], ["a", "bc"], ["ab", "c", None], [None, "ab", "c"], [1, 2])
    ]
    assert len({digest(table.column("x")) for table in tables}) == 5


def test_another_kind_in_another_split_is_refused(tmp_path):
    manifest = write_dataset(tmp_path, (2,))
    write_dataset(tmp_path, (2,), split="test")
    add_columns(manifest, age=[1, 2])
    with pytest.raises(DataError, match=r"'age' is text in test, but integer in train"):
        add_columns(manifest, "test", age=["1", "x"])


def test_without_columns_the_index_is_of_the_first_schema(tmp_path):
    manifest = write_dataset(tmp_path, (2,))
    save_manifest(tmp_path, load_index(manifest).manifest)
    plain = manifest.read_bytes()
    tree = json.loads(plain)
    assert tree["schema_version"] == 1
    assert "columns" not in tree
    add_columns(manifest, age=[1, 2])
    assert json.loads(manifest.read_bytes())["schema_version"] == 2
    save_manifest(tmp_path, without_splits(load_index(manifest).manifest, ["train"]))
    assert manifest.read_bytes() == plain


def table_file(index):
    return Path(index.folder) / index.manifest.metadata["train"].file


@pytest.mark.parametrize("at", [10, -20])
def test_a_flipped_bit_is_seen(index, at):
    raw = bytearray(table_file(index).read_bytes())
    raw[at] ^= 1
    table_file(index).write_bytes(raw)
    with pytest.raises(DataError, match=rf"{table_file(index).name}: its sha256 is not the one"):
        index.split("train").column("patient")


@pytest.mark.parametrize("size", [0, 130])
def test_a_truncated_file_is_named(index, size):
    table_file(index).write_bytes(table_file(index).read_bytes()[:size])
    with pytest.raises(DataError, match=rf"{table_file(index).name} has {size} bytes, not the ind"):
        index.split("train").column("age")
    table_file(index).unlink()
    with pytest.raises(DataError, match=rf"{table_file(index).name} is missing; {REWRITE}"):
        index.split("train").column("age")


def test_a_remote_table_is_read_as_a_local_one(index):
    remote = load_index(f"file://{index.folder}")
    assert remote.split("train").column("patient").show([0, 2]) == ["b", "a/\n"]
    table_file(index).write_bytes(b"PAR1")
    with pytest.raises(DataError, match="has 4 bytes, not the index's"):
        load_index(f"file://{index.folder}").split("train").column("age")


def forged(index, raw):
    """The data set with another table, its right sha256 in dataset.json."""
    table_file(index).write_bytes(raw)
    facts = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    table = index.manifest.metadata["train"].model_copy(update=facts)
    manifest = index.manifest.model_copy(update={"metadata": {"train": table}})
    save_manifest(Path(index.folder), manifest)
    return load_index(index.folder).split("train")


def parquet_of(table, **options):
    sink = pa.BufferOutputStream()
    parquet.write_table(table, sink, **options)
    return sink.getvalue().to_pybytes()


PLAIN = {"compression": "none", "use_dictionary": False}


@pytest.mark.parametrize(
    ("table", "options", "words"),
    [
        (table_of(age=[1.0] * 8), PLAIN, "8 rows of 'age', double, not 8 of int64"),
        (table_of(age=[1] * 9), PLAIN, "9 rows of 'age', int64, not 8"),
        (table_of(old=[1] * 8), PLAIN, "8 rows of 'age', None"),
        # which may be any size once it is read
        (table_of(age=[1] * 8), {**PLAIN, "compression": "zstd"}, "is ZSTD .* any size"),
        (table_of(age=[1] * 8), {"compression": "none"}, "DICTIONARY.* any size"),
    ],
)
def test_another_table_behind_a_right_checksum_is_refused(index, table, options, words):
    split = forged(index, parquet_of(table, **options))
    with pytest.raises(DataError, match=words):
        split.column("age")


def test_texts_that_are_no_utf8_are_refused(index):
    raw = table_file(index).read_bytes().replace("ü".encode(), b"\xff\xff")
    with pytest.raises(DataError, match="cannot read column 'patient'"):
        forged(index, raw).column("patient")


@pytest.mark.parametrize("seed", range(60))
def test_forged_files_are_one_error_or_values(index, seed):
    """Bytes at random in the table, with its sha256 in the index."""
    rng = np.random.default_rng(seed)
    raw = bytearray(table_file(index).read_bytes())
    for at in rng.integers(4, len(raw), rng.integers(1, 6)).tolist():
        raw[at] = int(rng.integers(0, 256))
    split = forged(index, bytes(raw))
    for name in ("patient", "age", "dose", "shot_at"):
        with contextlib.suppress(DataError):
            column = split.column(name)
            assert len(column.show(range(8))) == len(column.values) == 8
            if name != "dose":
                assert len(column.groups.whole_split()) == 8


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("age", "7", 7),
        ("dose", "nan", None),
        ("shot_at", "2024-05-01T14:00:00+02:00", 1_714_564_800_000_000),
        ("patient", "nobody", None),
    ],
)
def test_a_text_is_parsed_as_the_column_stores_it(index, name, text, value):
    parsed = index.split("train").column(name).parse(text)
    assert parsed == value or (name == "dose" and np.isnan(parsed))


def test_a_text_of_another_kind_is_refused(index):
    column = index.split("train").column("age")
    with pytest.raises(DataError, match="'age' is of kind integer, and 'old' is not an integer"):
        column.parse("old")
    patient = index.split("train").column("patient")
    assert patient.show(np.flatnonzero(patient.values == patient.parse("ü\0"))) == ["ü\0"]
    assert patient.parse("ü\udcff") is None


def test_names_with_dots_are_told_apart(tmp_path):
    columns = {"exif": ["a", "b"], "exif.Model": ["c", None], "exif.Model.x": [1, 2]}
    split = add_columns(write_dataset(tmp_path, (2,)), **columns).split("train")
    shown = {name: split.column(name).show([0, 1]) for name in columns}
    assert shown == {"exif": ["a", "b"], "exif.Model": ["c", None], "exif.Model.x": ["1", "2"]}
