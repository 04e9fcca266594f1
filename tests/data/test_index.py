"""sslpipe.data.index: what it promises of dataset.json, sidecars and sample ids."""

import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sslpipe.cli.app import run
from sslpipe.data.index import load_index
from sslpipe.data.storage import read_range
from sslpipe.errors import DataError

SAMPLES = ((3, 5, 2), (0, 1, -1, 1, 0, 1, 0, 0, 1, -1))  # per shard; labels of all


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three shards of unlike size, written with tarfile and indexed by sslpipe.cli.shards."""
    labels = iter(SAMPLES[1])
    for shard, samples in enumerate(SAMPLES[0]):
        with tarfile.open(tmp_path / f"train-{shard}.tar", "w") as tar:
            for row in range(samples):
                label = next(labels)
                add(tar, f"s{shard}r{row}.png", b"image %d %d" % (shard, row) * 100)
                if label >= 0:
                    add(tar, f"s{shard}r{row}.cls", str(label).encode())
    main_quietly("index", str(tmp_path))
    return tmp_path


def main_quietly(*arguments: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["sslpipe", "shards", *arguments])
        with pytest.raises(SystemExit) as stopped:
            run()
    assert not stopped.value.code


def add(tar: tarfile.TarFile, name: str, raw: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(raw)
    tar.addfile(member, io.BytesIO(raw))


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "dataset.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_ids_run_through_shards_in_order_and_locate_inverts_them(folder: Path) -> None:
    split = load_index(folder).split("train")
    assert len(split) == 10
    shards, rows = split.locate(np.arange(10))
    expected = [(shard, row) for shard, samples in enumerate(SAMPLES[0]) for row in range(samples)]
    assert list(zip(shards.tolist(), rows.tolist(), strict=True)) == expected
    np.testing.assert_array_equal(split.starts[shards] + rows, np.arange(10))


def test_the_bytes_between_offsets_are_a_tar_of_one_sample(folder: Path) -> None:
    split = load_index(folder).split("train")
    for sample in range(10):
        shard, row = (int(x[0]) for x in split.locate([sample]))
        start, end, label = split.offsets(shard)[row].tolist()
        raw = read_range(split.url(shard), start, end)
        with tarfile.open(fileobj=io.BytesIO(raw + bytes(1024))) as tar:
            names = tar.getnames()
            image = tar.extractfile(names[0])
            assert image is not None
            assert image.read() == b"image %d %d" % (shard, row) * 100
        keys = [f"s{shard}r{row}.png"] + ([f"s{shard}r{row}.cls"] if label >= 0 else [])
        assert names == keys


def test_labels_come_in_id_order_with_minus_one_for_none(folder: Path) -> None:
    labels = load_index(folder).split("train").labels
    assert labels.dtype == np.int64
    np.testing.assert_array_equal(labels, SAMPLES[1])


def test_the_index_is_named_by_the_sha256_of_its_file(folder: Path) -> None:
    expected = hashlib.sha256((folder / "dataset.json").read_bytes()).hexdigest()
    assert load_index(folder).sha256 == expected
    assert load_index(folder / "dataset.json").sha256 == expected


def test_missing_and_resized_shards_are_all_named_at_once(folder: Path) -> None:
    index = load_index(folder)
    index.check_files("train")
    (folder / "train-0.tar").unlink()
    with open(folder / "train-2.tar", "ab") as file:
        file.truncate(700)
    with pytest.raises(DataError, match=r"train-0\.tar is missing; train-2\.tar has 700 bytes"):
        index.check_files("train")


def test_a_changed_sidecar_is_refused(folder: Path) -> None:
    path = folder / "train-1.offsets.npy"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(DataError, match=r"train-1\.offsets\.npy: its sha256"):
        load_index(folder).split("train").offsets(1)


def test_a_sidecar_that_would_unpickle_is_refused(folder: Path) -> None:
    path = folder / "train-0.offsets.npy"
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
def test_a_wrong_manifest_names_the_key(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    edit(folder, **changes)
    with pytest.raises(DataError, match=message):
        load_index(folder)


def test_an_unknown_split_names_those_there_are(folder: Path) -> None:
    with pytest.raises(DataError, match="no split 'tran'; it has: train"):
        load_index(folder).split("tran")


def test_no_index_and_no_json_are_clear(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"dataset\.json"):
        load_index(tmp_path)
    (tmp_path / "dataset.json").write_text("{")
    with pytest.raises(DataError, match="is not JSON"):
        load_index(tmp_path)


def test_labels_of_some_samples_read_only_their_shards_sidecars(folder):
    split = load_index(folder).split("train")
    first = folder / split.shards[0].offsets
    first.write_bytes(b"")  # ids 0 to 2: none of them is requested
    ids = [9, 3, 4, 7, 3]
    assert split.labels_of(ids).tolist() == [SAMPLES[1][i] for i in ids]
    with pytest.raises(DataError, match="sha256"):
        split.labels_of([0])
