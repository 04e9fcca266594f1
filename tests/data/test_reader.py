import io
import tarfile
from itertools import pairwise

import numpy as np
import pytest

from sslpipe.data.decode import BadSample
from sslpipe.data.index import load_index
from sslpipe.data.reader import Reader, _alone, _plain
from sslpipe.data.storage import read_range
from sslpipe.errors import DataError
from tests.helpers.dataset import picture, png, write_dataset


def a_reader(folder, window_bytes=2**26, **settings):
    split = load_index(write_dataset(folder, (10, 6), **settings)).split("train")
    return Reader(split, window_bytes=window_bytes)


@pytest.mark.parametrize("window_bytes", [1, 5000, 2**26])
def test_rows_come_in_the_order_asked_for_whatever_the_size_of_a_read(tmp_path, window_bytes):
    reader = a_reader(tmp_path, window_bytes)
    actual = reader.rows(1, np.array([4, 0, 5, 1]))
    assert [raw.image for raw in actual] == [png(picture(10 + row)) for row in (4, 0, 5, 1)]
    assert [raw.key for raw in actual] == [f"train0000{10 + row}" for row in (4, 0, 5, 1)]


def test_a_read_is_one_range_of_whole_members_at_most_window_bytes(tmp_path, monkeypatch):
    reader = a_reader(tmp_path, window_bytes=6000)
    asked = []

    def asking(url, start, end):
        asked.append((start, end))
        return read_range(url, start, end)

    monkeypatch.setattr("sslpipe.data.reader.read_range", asking)
    reader.rows(0, np.arange(10))
    offsets = reader.split.offsets(0)
    assert len(asked) > 1
    assert asked[0][0] == offsets[0, 0]
    assert asked[-1][1] == offsets[-1, 1]
    assert all(b - a <= 6000 for a, b in asked)
    assert all(before[1] == after[0] for before, after in pairwise(asked))


def test_far_rows_are_read_apart(tmp_path, monkeypatch):
    monkeypatch.setattr("sslpipe.data.reader.GAP_BYTES", 1000)
    reader = a_reader(tmp_path)
    assert list(reader._runs(0, np.array([0, 1, 8, 9]))) == [[0, 1], [8, 9]]
    assert reader.one(12).image == png(picture(12))


def test_a_damaged_header_loses_one_sample_and_no_other(tmp_path):
    reader = a_reader(tmp_path)
    path = tmp_path / "train-000000.tar"
    raw = bytearray(path.read_bytes())
    start = int(reader.split.offsets(0)[3, 0])
    raw[start : start + 512] = b"\xff" * 512
    path.write_bytes(raw)
    actual = reader.rows(0, np.arange(10))
    assert isinstance(actual[3].image, BadSample)
    assert " at 0x" not in str(actual[3].image)  # what people read, not a stream of webdataset's
    for row in (0, 1, 2, 4, 5, 6, 7, 8, 9):
        assert actual[row].image == png(picture(row))


def test_a_truncated_shard_is_one_clear_error(tmp_path):
    reader, path = a_reader(tmp_path), tmp_path / "train-000000.tar"
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(DataError, match=r"train-000000\.tar: bytes .* truncated"):
        reader.rows(0, np.arange(10))
    path.unlink()
    with pytest.raises(DataError, match=r"cannot read .*train-000000\.tar"):
        reader.rows(0, np.array([0]))


def test_a_shard_that_is_a_command_is_refused(tmp_path):
    manifest = write_dataset(tmp_path, (4,))
    canary = tmp_path / "canary"
    text = manifest.read_text()
    command = f"pipe:touch {canary}; cat {tmp_path}/train-000000.tar"
    manifest.write_text(text.replace('"file": "train-000000.tar"', f'"file": "{command}"'))
    index = load_index(manifest)
    with pytest.raises(DataError, match=r"would run a shell command"):
        index.check_files("train")
    with pytest.raises(DataError, match=r"would run a shell command"):
        Reader(index.split("train"), window_bytes=2**20).one(0)
    assert not canary.exists()


@pytest.mark.promise(13)
@pytest.mark.parametrize("suffix", ["pkl", "pyd", "pickle", "pth"])
def test_pickles_in_a_shard_are_never_opened(tmp_path, suffix):
    canary = tmp_path / "canary"
    bomb = b"cos\nsystem\n(S'touch " + str(canary).encode() + b"'\ntR."
    raw = members([f"a.{suffix}", "a.png"], tarfile.USTAR_FORMAT, [bomb, png(picture(0))])
    assert _alone(raw).image == png(picture(0))
    assert not canary.exists()


def members(names, form, contents=None):
    """A sample's tar members, as an index would give them: without the end of the archive."""
    file = io.BytesIO()
    contents = contents or [bytes([n + 1]) * (700 * n + 1) for n in range(len(names))]
    with tarfile.open(fileobj=file, mode="w", format=form) as tar:
        for name, content in zip(names, contents, strict=True):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        return file.getvalue()[: tar.offset]


NAMES = {
    "one image": ["a.png"],
    "image, label, text": ["a.jpg", "a.cls", "a.txt"],
    "folders and dots": ["x.y/z/a.b.JPEG", "x.y/z/a.b.cls"],
    "capitals": ["A.PNG", "A.Cls"],
    "long": ["f" * 90 + "/" + "g" * 60 + ".webp"],
    "not ascii": ["été.png", "été.cls"],
    "two images": ["a.png", "a.jpg"],
    "two keys": ["a.png", "b.png"],
    "twice": ["a.png", "a.png"],
    "no image": ["a.cls"],
    "no suffix": ["a"],
    "hidden": [".png"],
}


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_cut_out_directly_are_those_of_webdataset(names, form):
    raw = members(names, form)
    expected, actual = _alone(raw), _plain(memoryview(raw), 0, len(raw))
    assert actual is None or actual == expected
    if names in (NAMES["one image"], NAMES["image, label, text"], NAMES["capitals"]):
        assert actual is not None  # what the shard builder writes takes the fast path


def test_a_damaged_header_is_never_cut_out_otherwise_than_by_webdataset():
    whole = members(["ab.png", "ab.cls"], tarfile.USTAR_FORMAT)
    for place in (*range(512), *range(1024, 1536)):
        for value in (0, 32, 49, 255):
            raw = bytearray(whole)
            raw[place] = value
            actual = _plain(memoryview(raw), 0, len(raw))
            assert actual is None or actual == _alone(bytes(raw)), place
    assert _plain(memoryview(whole), 0, len(whole) - 512) is None  # a block is missing
