"""sslpipe.data.columns: values and groups of samples, read from files that are mapped."""

import contextlib
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from sslpipe.data import columns
from sslpipe.data.columns import Column, ColumnEntry
from sslpipe.data.index import load_index
from sslpipe.errors import DataError
from tests.helpers.columns import add_columns
from tests.helpers.dataset import write_dataset

PARTS = ("values", "groups", "members")
PATIENT = ["b", None, "a/\n", "b", "ü\udcff", "a/\n", "b", None]
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


def members(groups, code):
    [begin], [size] = groups.spans([code])
    return groups.ids[begin : begin + size]


def sizes_of(groups, ids):
    return groups.spans(groups.code_of(ids))[1].tolist()


@pytest.mark.parametrize(("name", "values"), [("patient", PATIENT), ("age", AGE)])
def test_groups_are_the_samples_of_one_value(index, name, values):
    groups = index.split("train").column(name).groups
    expected = {
        value: [i for i, other in enumerate(values) if other == value]
        for value in values
        if value is not None
    }
    codes = groups.code_of(range(8)).tolist()
    assert len(groups) == len(expected)
    assert sorted(set(codes) - {-1}) == list(range(len(expected)))
    for i, value in enumerate(values):
        if value is None:
            assert codes[i] == -1
        else:
            assert members(groups, codes[i]).tolist() == expected[value]
    sizes = [0 if value is None else len(expected[value]) for value in values]
    assert sizes_of(groups, range(8)) == sizes
    assert groups.sizes().tolist() == [len(members(groups, code)) for code in range(len(groups))]


def test_floats_make_no_groups_and_an_unknown_column_names_the_nearest(index):
    with pytest.raises(DataError, match=r"'dose' .* holds floats"):
        _ = index.split("train").column("dose").groups
    with pytest.raises(DataError, match="no column 'patints'; did you mean 'patient'"):
        index.split("train").column("patints")


def test_a_split_without_the_column_knows_nothing(tmp_path):
    write_dataset(tmp_path, (2,), split="test")
    index = add_columns(write_dataset(tmp_path, (2,)), patient=["a", "b"], dose=[1.0, 2.0])
    split = index.split("test")
    assert split.column("patient").missing([0, 1]).all()
    assert split.column("dose").missing([0, 1]).all()
    assert split.column("patient").groups.code_of([0, 1]).tolist() == [-1, -1]
    assert sizes_of(split.column("patient").groups, [1]) == [0]


def test_codes_on_disk_stay_when_a_split_is_added(tmp_path):
    manifest = write_dataset(tmp_path, (2,))
    write_dataset(tmp_path, (3,), split="test")
    before = add_columns(manifest, patient=["m", "z"]).split("train").column("patient")
    codes = before.values_of([0, 1]).tolist()
    index = add_columns(manifest, "test", patient=["a", "z", None])
    train, test = (index.split(name).column("patient") for name in ("train", "test"))
    assert train.values_of([0, 1]).tolist() == codes
    assert train.show([0, 1]) == ["m", "z"]
    assert test.show(range(3)) == ["a", "z", None]
    assert test.values_of([1]) == train.values_of([1])  # one table for all splits


def test_another_kind_in_another_split_is_refused(tmp_path):
    manifest = write_dataset(tmp_path, (2,))
    write_dataset(tmp_path, (2,), split="test")
    add_columns(manifest, age=[1, 2])
    with pytest.raises(DataError, match=r"'age' is text in test, but integer in train"):
        add_columns(manifest, "test", age=["1", "x"])


def test_without_columns_the_index_is_of_the_first_schema(tmp_path):
    from sslpipe.sharding.record import save_manifest

    manifest = write_dataset(tmp_path, (2,))
    save_manifest(tmp_path, load_index(manifest).manifest)
    plain = manifest.read_bytes()
    tree = json.loads(plain)
    assert tree["schema_version"] == 1
    assert "columns" not in tree
    add_columns(manifest, age=[1, 2])
    assert json.loads(manifest.read_bytes())["schema_version"] == 2
    save_manifest(tmp_path, load_index(manifest).manifest.model_copy(update={"columns": {}}))
    assert manifest.read_bytes() == plain


@pytest.mark.parametrize("part", ["values", "groups", "members", "strings"])
def test_a_flipped_bit_is_seen(index, tmp_path, part):
    (path,) = (tmp_path / "columns/patient").glob(f"*{part}*.npy")
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    column = index.split("train").column("patient")
    with pytest.raises(DataError, match=rf"{path.name}: its sha256 is not the one"):
        column.show([0]), members(column.groups, 0)


@pytest.mark.parametrize("size", [0, 130])
def test_a_truncated_file_is_named(index, tmp_path, size):
    path = tmp_path / "columns/age/train.values.npy"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DataError, match=rf"train.values.npy has {size} bytes, not the index's"):
        index.split("train").column("age").values_of([0])


def forged(index, name, change):
    """A column whose files `change` may rewrite, with their right sha256 in its entry."""
    tree = index.manifest.columns[name].model_dump()
    for part, file in [*tree["splits"]["train"].items(), ("strings", tree["strings"])]:
        path = Path(index.folder) / file["file"] if file else None
        if path and change(part, path):
            raw = path.read_bytes()
            file |= {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    return Column(index.folder, "train", name, ColumnEntry(**tree), 8)


def test_a_file_of_another_type_is_named(index):
    def change(part, path):
        return part != "values" or np.save(path, np.zeros(8, np.float64)) is None

    with pytest.raises(DataError, match=r"float64 \(8,\), not int64 \(8,\)"):
        forged(index, "age", change).values_of([0])


def test_values_and_groups_are_mapped_and_not_read(index):
    column = index.split("train").column("age")
    for array in (column.values, column.groups.ids, column.groups.values.base):
        assert isinstance(array, np.memmap)


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
    assert patient.show(np.flatnonzero(patient.values == patient.parse("ü\udcff"))) == ["ü\udcff"]


@pytest.mark.parametrize("seed", range(60))
def test_forged_files_are_one_error_or_values(index, seed):
    """Files of random bytes behind a good header, with their sha256 in the index."""
    rng = np.random.default_rng(seed)

    def change(part, path):
        raw = bytearray(path.read_bytes())
        for at in rng.integers(128, len(raw), rng.integers(0, 4)).tolist():
            raw[at] = int(rng.integers(0, 256))
        return path.write_bytes(raw)

    column = forged(index, "patient", change)
    for read in (
        lambda: column.show(range(8)),
        lambda: sizes_of(column.groups, range(8)),
        lambda: [members(column.groups, code) for code in range(len(column.groups))],
        lambda: column.groups.whole_split(),
        lambda: column.parse("a"),
    ):
        with contextlib.suppress(DataError):
            read()


FORGED = {
    "an id out of range": ("members", lambda a: a.__setitem__(0, 99)),
    "a negative id": ("members", lambda a: a.__setitem__(-1, -1)),
    "an id twice": ("members", lambda a: a.__setitem__(0, a[1])),
    "ids of other groups": ("members", lambda a: a.__setitem__(slice(None), a[::-1].copy())),
    "a start out of range": ("groups", lambda a: a.__setitem__((1, 1), 2**40)),
    "a negative start": ("groups", lambda a: a.__setitem__((1, 0), -2)),
    "starts that overlap": ("groups", lambda a: a.__setitem__((1, 1), 0)),
    "another value": ("groups", lambda a: a.__setitem__((0, -1), 10**6)),
}


@pytest.mark.parametrize("name", ["age", "patient", "shot_at"])
@pytest.mark.parametrize("kind", FORGED)
def test_forged_groups_behind_a_right_checksum_are_refused(index, kind, name):
    forged_part, forge = FORGED[kind]

    def change(part, path):
        array = np.load(path)
        if part == forged_part:
            forge(array)
            np.save(path, array)
        return part == forged_part

    with pytest.raises(DataError, match="its groups are damaged"):
        _ = forged(index, name, change).groups


@pytest.mark.parametrize("part", [1, 2, 3, 100])
def test_groups_are_checked_a_part_at_a_time(index, part, monkeypatch):
    monkeypatch.setattr(columns, "_CHECKED", part)
    for name in ("age", "patient", "shot_at"):
        assert len(index.split("train").column(name).groups)
