"""sslpipe.data.index: what it promises of dataset.json, sidecars and sample ids."""

import hashlib
import io
import json
import tarfile

import numpy as np
import pytest

from sslpipe.data.index import load_index
from sslpipe.data.storage import read_range
from sslpipe.errors import DataError
from tests.helpers.dataset import picture, png, write_dataset

SIZES = (3, 5, 2)


@pytest.fixture
def folder(tmp_path):
    write_dataset(tmp_path, SIZES)
    return tmp_path


def edit(folder, **changes):
    path = folder / "dataset.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_ids_run_through_shards_in_order_and_locate_inverts_them(folder):
    split = load_index(folder).split("train")
    assert len(split) == 10
    shards, rows = split.locate(np.arange(10))
    expected = [(shard, row) for shard, samples in enumerate(SIZES) for row in range(samples)]
    assert list(zip(shards.tolist(), rows.tolist(), strict=True)) == expected
    np.testing.assert_array_equal(split.starts[shards] + rows, np.arange(10))


def test_the_bytes_between_offsets_are_a_tar_of_one_sample(folder):
    split = load_index(folder).split("train")
    for sample in range(10):
        shard, row = (int(x[0]) for x in split.locate([sample]))
        start, end, label = split.offsets(shard)[row].tolist()
        raw = read_range(split.url(shard), start, end)
        with tarfile.open(fileobj=io.BytesIO(raw + bytes(1024))) as tar:
            files = {member.name: tar.extractfile(member).read() for member in tar}
        name = f"train{sample:06d}"
        assert files == {f"{name}.png": png(picture(sample)), f"{name}.cls": b"%d" % label}


def test_labels_come_in_id_order_and_only_from_the_sidecars_they_need(folder):
    split = load_index(folder).split("train")
    assert split.labels.dtype == np.int64
    assert split.labels.tolist() == [i % 4 for i in range(10)]
    (folder / split.shards[0].offsets).write_bytes(b"")  # ids 0 to 2
    split = load_index(folder).split("train")
    ids = [9, 3, 4, 7, 3]
    assert split.labels_of(ids).tolist() == [i % 4 for i in ids]
    with pytest.raises(DataError, match="sha256"):
        split.labels_of([0])


def test_the_index_is_named_by_the_sha256_of_its_file(folder):
    expected = hashlib.sha256((folder / "dataset.json").read_bytes()).hexdigest()
    assert load_index(folder).sha256 == load_index(folder / "dataset.json").sha256 == expected


def test_missing_and_resized_shards_are_all_named_at_once(folder):
    index = load_index(folder)
    index.check_files("train")
    (folder / "train-000000.tar").unlink()
    with open(folder / "train-000002.tar", "ab") as file:
        file.truncate(700)
    with pytest.raises(DataError, match=r"-000000\.tar is missing; .*-000002\.tar has 700 bytes"):
        index.check_files("train")


def test_a_sidecar_that_would_unpickle_is_refused(folder):
    path = folder / "train-000000.offsets.npy"
    np.save(path, np.array([{"an": "object"}], dtype=object), allow_pickle=True)
    splits = json.loads((folder / "dataset.json").read_text())["splits"]
    splits["train"][0]["offsets_sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    edit(folder, splits=splits)
    with pytest.raises(ValueError, match="allow_pickle"):
        load_index(folder).split("train").offsets(0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema_version": 99}, "schema_version = 99"),
        ({"clases": ["a"]}, "did you mean 'classes'"),
        ({"splits": {"train": [{"file": "a.tar"}]}}, "missing"),
    ],
)
def test_a_wrong_manifest_names_the_key(folder, changes, message):
    edit(folder, **changes)
    with pytest.raises(DataError, match=message):
        load_index(folder)


def test_no_split_no_index_and_no_json_are_clear(folder, tmp_path):
    with pytest.raises(DataError, match="no split 'tran'; it has: train"):
        load_index(folder).split("tran")
    with pytest.raises(DataError, match=r"dataset\.json"):
        load_index(tmp_path / "nowhere")
    (tmp_path / "dataset.json").write_text("{")
    with pytest.raises(DataError, match="is not JSON"):
        load_index(tmp_path)
