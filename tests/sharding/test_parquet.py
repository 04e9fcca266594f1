"""sharding.tables, parquet: labels that are texts, columns with gaps, images that are not there."""

import io
import json
from datetime import datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from sslpipe.data.decode import decode
from sslpipe.data.index import load_index
from sslpipe.errors import DataError
from sslpipe.sharding import SOURCES
from sslpipe.sharding.cells import parse_columns
from sslpipe.sharding.sources import Images, SourceOptions
from tests.sharding.test_shards import error_of, run

WORDS = ["cat", "dog", "ape", "dog"]
WRITES_VIEWS = pytest.mark.skipif(
    int(pa.__version__.partition(".")[0]) < 21, reason="needs pyarrow 21, which writes string_view"
)


def image(level: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((3, 2), level, np.uint8)).save(file, "PNG")
    return file.getvalue()


def write(path: Path, labels: Any, images: Any = None, names: list[str] | None = None) -> None:
    """A parquet file; `names` of the classes go into the metadata, as `datasets` writes them."""
    if images is None:
        images = [{"bytes": image(i), "path": None} for i in range(len(labels))]
    table = pa.table({"image": images, "label": labels})
    if names:
        features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
        metadata = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
        table = table.replace_schema_metadata(metadata)
    parquet.write_table(table, path)


def read(root: Path, **options: Any) -> dict[str, Images]:
    return SOURCES["parquet"](SourceOptions(root=root, **options))


@pytest.mark.parametrize(
    "labels",
    [
        pa.array(WORDS, pa.string()),
        pa.array(WORDS, pa.large_string()),
        pytest.param(pa.array(WORDS, pa.string_view()), marks=WRITES_VIEWS),
        pa.array(WORDS).dictionary_encode(),
        pa.array(WORDS, pa.large_string()).dictionary_encode(),
        pa.chunked_array([pa.array(WORDS[:1]), pa.array(WORDS[1:])]),
    ],
    ids=lambda labels: str(labels.type),
)
def test_texts_are_classes_as_a_csv_takes_them(tmp_path: Path, labels: Any) -> None:
    write(tmp_path / "train.parquet", labels)
    lines = [f"{i}.png,{word}" for i, word in enumerate(WORDS)]
    (tmp_path / "list.csv").write_text("path,label\n" + "\n".join(lines))
    for i in range(4):
        (tmp_path / f"{i}.png").write_bytes(image(i))
    (expected,) = SOURCES["csv"](SourceOptions(csv=tmp_path / "list.csv")).values()
    (images,) = read(tmp_path).values()
    assert images.classes == expected.classes == ("ape", "cat", "dog")
    assert images.labels.tolist() == expected.labels.tolist() == [1, 2, 0, 2]
    assert [images.read(i) for i in range(4)] == [expected.read(i) for i in range(4)]


@pytest.mark.parametrize(
    ("labels", "numbers", "classes"),
    [
        (pa.array(["b", None, "", "a"]), [1, -1, -1, 0], ("a", "b")),
        (pa.array(["10", "9", "9", "10"]), [1, 0, 0, 1], ("9", "10")),
        (pa.array([2, None, 0, 2], pa.int32()), [2, -1, 0, 2], ("0", "1", "2")),
        (pa.array([2.0, float("nan"), 0.0, None]), [2, -1, 0, -1], ("0", "1", "2")),
        (pa.array([1, 0, 1, 1], pa.uint8()), [1, 0, 1, 1], ("0", "1")),
        (pa.array([True, False, None, True]), [1, 0, -1, 1], ("False", "True")),
        (pa.array([5, 5, 7, 5]).dictionary_encode(), [5, 5, 7, 5], tuple("01234567")),
        (pa.nulls(4), [-1] * 4, ()),
    ],
    ids=str,
)
def test_gaps_are_no_label_and_whole_numbers_stay(tmp_path, labels, numbers, classes):
    write(tmp_path / "train.parquet", labels)
    (images,) = read(tmp_path).values()
    assert images.labels.tolist() == numbers
    assert images.classes == classes


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (pa.array([0.5, 1.0]), "holds double, neither integers nor texts; name another"),
        (pa.array([b"a", b"b"]), "holds binary"),
        (pa.array([[1], [2]]), "holds list"),
        (pa.array([3, 10**12]), "label 1000000000000 of 2 images is no number of a class"),
    ],
    ids=str,
)
def test_other_labels_are_refused_with_their_type(tmp_path, labels, message):
    write(tmp_path / "train.parquet", labels)
    with pytest.raises(DataError, match=message):
        read(tmp_path)
    assert read(tmp_path, labels=False)["train"].labels.tolist() == [-1, -1]


def test_the_splits_share_their_classes_also_when_one_is_read(tmp_path: Path) -> None:
    write(tmp_path / "train-0.parquet", pa.array(["b", "c"]))
    write(tmp_path / "train-1.parquet", pa.array(["d"], pa.large_string()))
    write(tmp_path / "test.parquet", pa.array(["a", "c"]).dictionary_encode())
    parquet.write_table(pa.table({"image": [image(0)]}), tmp_path / "unlabelled.parquet")
    for split, numbers in (("train", [1, 2, 3]), ("test", [0, 2])):
        images = read(tmp_path, split=split)[split]
        assert (images.labels.tolist(), images.classes) == (numbers, ("a", "b", "c", "d"))


def test_images_are_bytes_structs_or_paths(tmp_path):
    for i in range(2):
        (tmp_path / f"{i}.png").write_bytes(image(i))
    for cells in (
        pa.array([image(0), image(1)]),
        pa.array([image(0), image(1)], pa.large_binary()),
        pa.array(["0.png", "1.png"]),
        pa.array([{"bytes": image(0), "path": None}, {"bytes": None, "path": "1.png"}]),
    ):
        write(tmp_path / "train.parquet", ["x", "y"], cells)
        (images,) = read(tmp_path).values()
        assert [int(decode(images.read(i), 8)[0, 0, 0]) for i in range(2)] == [0, 1]


def test_images_that_are_not_there_are_counted_or_skipped_and_listed(tmp_path, capsys):
    cells = [{"bytes": image(i), "path": "x"} for i in range(4)]
    cells[1] = {"bytes": None, "path": "gone/1.png"}  # type: ignore[dict-item]
    write(tmp_path / "in.parquet", WORDS, pa.array([*cells[:3], None]))
    words = ["build", tmp_path / "out", "--source", "huggingface", "--root", tmp_path]
    words += ["--split", "in"]
    message = error_of(capsys, *words)
    assert "cannot read gone/1.png: No such file or directory; 2 of 4 listed files" in message
    assert run(*words, "--skip-missing") == 0
    assert (tmp_path / "out" / "missing.txt").read_text() == "in\tgone/1.png\nin\tin[3]\n"
    index = load_index(tmp_path / "out")
    assert sorted(index.split("in").labels.tolist()) == [0, 1]
    assert index.manifest.classes == ("ape", "cat", "dog")  # as the list says


def test_files_of_a_split_give_class_names(tmp_path):
    names = ["cat", "dog"]
    write(tmp_path / "train-00000-of-00002-ab.parquet", [1, 0], names=names)
    write(tmp_path / "train-00001-of-00002-cd.parquet", [1], names=names)
    write(tmp_path / "test.parquet", [0], names=names)
    found = {split: images.labels.tolist() for split, images in read(tmp_path).items()}
    assert found == {"test": [0], "train": [1, 0, 1]}
    assert {images.classes for images in read(tmp_path).values()} == {("cat", "dog")}


def test_a_wrong_column_split_or_file_names_what_there_is(tmp_path):
    with pytest.raises(DataError, match=r"has no \*\.parquet file"):
        read(tmp_path)
    write(tmp_path / "train-0.parquet", WORDS)
    with pytest.raises(DataError, match=r"no column 'lable'.*label"):
        read(tmp_path, label_column="lable")
    with pytest.raises(DataError, match="no split 'trian'; did you mean 'train'"):
        read(tmp_path, split="trian")
    parquet.write_table(pa.table({"label": ["a"]}), tmp_path / "train-1.parquet")
    with pytest.raises(DataError, match=r"train-1\.parquet has no column 'image'; it has: label"):
        read(tmp_path)
    (tmp_path / "train-0.parquet").write_bytes(b"PAR1 but not really")
    with pytest.raises(DataError, match=r"cannot read .*train-0\.parquet"):
        read(tmp_path)


def test_what_people_type_for_the_hub_is_accepted_and_explained(tmp_path, capsys):
    assert SOURCES["huggingface"] is SOURCES["parquet"]
    words = ["build", tmp_path / "o", "--source", "huggingface", "--name", "user/beans"]
    message = error_of(capsys, *words)
    assert "hf download USER/NAME --repo-type dataset --local-dir DIR" in message


def test_columns_keep_their_types_gaps_and_time_zones(tmp_path: Path) -> None:
    noon = datetime(2024, 5, 1, 12, tzinfo=ZoneInfo("Europe/Berlin"))
    table = {
        "image": [{"bytes": image(i), "path": None} for i in range(3)],
        "label": [0, 1, 0],
        "patient": pa.array(["p", None, "12"]).dictionary_encode(),
        "age": pa.array([2**62 + 1, None, 3], pa.int64()),
        "dose": pa.array([0.5, float("nan"), None], pa.float32()),
        "shot at": pa.array([noon, None, noon], pa.timestamp("ns", "Europe/Berlin")),
        "day": pa.array([noon.date()] * 3, pa.date32()),
        "raw": pa.array([b"a", b"", None], pa.binary()),
    }
    parquet.write_table(pa.table(table), tmp_path / "train.parquet")
    columns = "patient,age,dose,shot_at=shot at,day,raw"
    assert run("build", tmp_path / "out", "--source", "parquet", "--root", tmp_path,
               "--columns", columns) == 0  # fmt: skip
    split = load_index(tmp_path / "out").split("train")
    labelled = sorted(range(3), key=lambda i: split.column("age").show([i])[0] or "")
    shown = {name: split.column(name).show(labelled) for name in split.columns}
    assert shown == {
        "age": [None, "3", str(2**62 + 1)],
        "patient": [None, "12", "p"],
        "dose": [None, None, "0.5"],
        "shot_at": [None, "2024-05-01T10:00:00Z", "2024-05-01T10:00:00Z"],
        "day": ["2024-05-01T00:00:00Z"] * 3,
        "raw": [None, None, "a"],
    }
    assert split.column("age").kind == "integer"


def test_a_column_of_bytes_that_are_no_text_names_the_row(tmp_path: Path, capsys: Any) -> None:
    table = {"image": [{"bytes": image(0), "path": None}], "label": [0], "raw": [b"\xff"]}
    parquet.write_table(pa.table(table), tmp_path / "train.parquet")
    out = ("build", tmp_path / "out", "--source", "parquet", "--root", tmp_path)
    assert r"train[0]: raw = b'\xff' is bytes that are no text" in error_of(
        capsys, *out, "--columns", "raw"
    )
    assert "did you mean 'raw'" in error_of(capsys, *out, "--columns", "rraw")


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (2**60, pa.timestamp("ms")),
        (-(2**62), pa.timestamp("ms", "UTC")),
        (2**62, pa.timestamp("us")),
        (253_402_300_799, pa.timestamp("s", "Pacific/Kiritimati")),
        (2**31 - 1, pa.date32()),
        (-(2**62), pa.date64()),
        (2**62, pa.duration("s")),
        (1, pa.time64("ns")),
    ],
)
def test_times_beyond_pythons_are_refused_by_column(tmp_path, number, kind):
    column = pa.array([0, number, None], pa.int32() if kind.bit_width == 32 else pa.int64())
    table = {
        "image": [image(i) for i in range(3)],
        "label": [0, 1, 0],
        "shot_at": column.view(kind),
    }
    parquet.write_table(pa.table(table), tmp_path / "train.parquet")
    with pytest.raises(DataError, match=r"'shot_at': cannot read a cell of "):
        read(tmp_path, columns=parse_columns("shot_at:time", "--columns"))


def test_the_first_and_last_times_are_read(tmp_path: Path) -> None:
    times = [datetime(1, 1, 3), datetime(9999, 12, 30), None]
    for unit in ("s", "ms", "us"):
        table = {"image": [image(i) for i in range(3)], "t": pa.array(times, pa.timestamp(unit))}
        parquet.write_table(pa.table(table), tmp_path / "train.parquet")
        found = read(tmp_path, columns=parse_columns("t:time", "--columns"), labels=False)
        assert found["train"].cells["t"] == times
