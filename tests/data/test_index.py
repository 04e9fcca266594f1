"""sslpipe.data.index: what it promises of dataset.json, sidecars and sample ids."""

import io
import tarfile
from hashlib import sha256

import numpy as np
import pytest

from sslpipe.data.index import load_index, manifest_text
from sslpipe.data.storage import read_range
from sslpipe.errors import DataError
from tests.helpers.dataset import picture, png, write_dataset

SIZES = (3, 5, 2)


@pytest.fixture
def folder(tmp_path):
    write_dataset(tmp_path, SIZES)
    return tmp_path


def test_ids_run_through_shards_in_order_and_locate_inverts_them(folder):
    index = load_index(folder)
    text = manifest_text(index.manifest)
    assert index.sha256 == load_index(folder / "dataset.json").sha256
    assert index.sha256 == sha256(text.encode()).hexdigest()
    split = index.split("train")
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


@pytest.mark.promise(8)
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
    before = sha256(path.read_bytes()).hexdigest()
    np.save(path, np.array([{"an": "object"}], dtype=object), allow_pickle=True)
    manifest = folder / "dataset.json"
    after = sha256(path.read_bytes()).hexdigest()
    manifest.write_text(manifest.read_text().replace(before, after))
    split = load_index(folder).split("train")
    with pytest.raises(DataError, match="allow_pickle"):
        split.offsets(0)
    with pytest.raises(DataError, match="no split 'tran'; it has: train"):
        load_index(folder).split("tran")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema_version": 99}', "schema_version = 99"),
        ('{"schema_version": 1, "clases": ["a"]}', "did you mean 'classes'"),
        ('{"schema_version": 1, "splits": {"train": [{"file": "a.tar"}]}}', "missing"),
        ("{", "is not JSON"),
        ("[" * 10**5, "is not JSON"),
        ('{"a":' * 10**5, "is not JSON"),
        ('{"schema_version": 1, "name": "\\ud800", "splits": {}}', "is not JSON of UTF-8"),
        ('{"schema_version": "' + "9" * 10**5 + '"}', "schema_version = '9"),
        (None, r"a folder without dataset\.json: .*`sslpipe shards build OUT --root "),
    ],
)
def test_a_wrong_manifest_is_named_with_its_key(tmp_path, text, message):
    if text is not None:
        (tmp_path / "dataset.json").write_text(text)
    with pytest.raises(DataError, match=message):
        load_index(tmp_path)
