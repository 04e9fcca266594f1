"""Tars of others built anew: their formats, labels in texts or JSON, several images of a key."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sslpipe.data.index import load_index
from sslpipe.data.reader import Reader
from sslpipe.sharding import members
from tests.helpers.shards import error_of, grey_png, jpeg, report_of, run, write_tar

BIRDS = ["wren", "rook", "wren", "kite"]


def tiff(level: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((20, 30), level, np.uint8)).save(file, "TIFF")
    return file.getvalue()


def classes_of(folder: Path) -> list[str | None]:
    split = load_index(folder).split("train")
    return sorted(split.class_name(label) or "" for label in split.labels.tolist())


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    """Two tars of two samples each, with everything that may name a class."""
    for number in (0, 1):
        parts: list[tuple[str, bytes]] = []
        for place in (2 * number, 2 * number + 1):
            described = {"bird": BIRDS[place], "label": place, "seen": f"2024-05-0{place + 1}"}
            parts += [
                (f"{place}.tif", tiff(place)),
                (f"{place}.txt", f"{BIRDS[place]}\n".encode()),
                (f"{place}.json", json.dumps(described).encode()),
            ]
        write_tar(tmp_path / "in" / f"{number:05d}.tar", *parts)
    return tmp_path / "in"


@pytest.mark.parametrize(
    ("options", "classes"),
    [
        (["--label-column", "txt"], sorted(BIRDS)),
        (["--label-column", "bird"], sorted(BIRDS)),
        ([], ["0", "1", "2", "3"]),
        (["--no-labels"], [""] * 4),
    ],
)
def test_a_build_of_tars_takes_formats_and_labels_that_an_index_does_not(
    tars, tmp_path, options, classes
):
    build = ["build", tmp_path / "out", "--source", "tars", "--root", tars, *options]
    assert run(*build, "--columns", "seen") == 0
    split = load_index(tmp_path / "out").split("train")
    assert classes_of(tmp_path / "out") == classes
    levels = {Image.open(io.BytesIO(Reader(split).one(i).image)).getpixel((0, 0)) for i in range(4)}
    assert levels == {0, 1, 2, 3}
    assert split.column("seen").kind == "time"
    counts = {group.kind: group.count for group in report_of(tmp_path / "out").left_out}
    names_txt = "txt" in options
    # KEY.txt, and of bird and label in KEY.json those that are not the class
    assert counts == ({"": 2} if names_txt else {".txt": 4, "": 1})


def test_tars_whose_names_can_name_no_split_are_to_be_renamed(tmp_path, capsys):
    for name in ("red cars", "blue birds"):
        write_tar(tmp_path / "in" / f"{name}.tar", (f"{name[:3]}.jpg", jpeg(1)))
    words = ["build", tmp_path / "out", "--source", "tars", "--root", tmp_path / "in"]
    error = error_of(capsys, *words)
    assert "'blue birds'" in error
    assert "rename the tars" in error


def test_tars_with_numbers_of_classes_are_cut_and_split_as_folders_are(tmp_path):
    images = [(f"{k}.jpg", jpeg(k)) for k in range(10)]
    labelled = [
        each for k, image in enumerate(images) for each in (image, (f"{k}.cls", b"%d" % (k // 5)))
    ]
    write_tar(tmp_path / "in" / "all.tar", *labelled)
    words = ["--source", "tars", "--root", tmp_path / "in", "--test-fraction", "0.4"]
    assert run("build", tmp_path / "out", *words) == 0
    index = load_index(tmp_path / "out")
    assert {name: len(index.split(name)) for name in index.manifest.splits} == {
        "train": 6,
        "test": 4,
    }
    assert np.bincount(index.split("test").labels).tolist() == [2, 2]


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        (["--label-column", "brd"], "did you mean 'bird'"),
        (["--columns", "sean"], "did you mean 'seen'"),
        (["--label-column", "many"], "--no-labels"),
    ],
)
def test_what_no_sample_has_is_refused_with_what_there_is(tars, tmp_path, capsys, options, remedy):
    write_tar(tars / "00002.tar", ("9.jpg", jpeg(9)), ("9.json", b'{"many": [1, 2]}'))
    build = ["build", tmp_path / "out", "--source", "tars", "--root", tars]
    assert remedy in error_of(capsys, *build, *options)


@pytest.mark.skipif(members.READS_HEIC, reason="it is read")
@pytest.mark.parametrize("command", ["index", "build"])
def test_heic_in_tars_is_named_with_what_reads_it(tmp_path, capsys, command):
    write_tar(tmp_path / "in" / "train-0.tar", ("1.jpg", jpeg(1)), ("2.heic", b"ftypheic"))
    words = ["index", tmp_path / "in"]
    if command == "build":
        words = ["build", tmp_path / "out", "--source", "tars", "--root", tmp_path / "in"]
    assert run(*words) == 0
    assert "1 .heic; pip install pillow-heif" in capsys.readouterr().out


def test_an_index_names_the_build_for_what_it_does_not_read(tars, tmp_path, capsys):
    write_tar(tars / "00002.tar", ("9.jpg", jpeg(9)), ("9.txt", b"kite"))
    for number in (0, 1):
        (tars / f"{number:05d}.tar").rename(tmp_path / f"{number}.tar")
    assert run("index", tars) == 0
    said = capsys.readouterr().out
    assert f"--source tars --root {tars} --label-column txt" in said
    file = tars / "00002.tar"
    assert f"give {tars}" in error_of(capsys, "index", file, "--out", tmp_path / "out")
    message = error_of(capsys, "index", tmp_path, "--split", "train")
    assert f"2 .tif; `sslpipe shards build OUT --source tars --root {tmp_path}`" in message


@pytest.mark.promise(17)
@pytest.mark.parametrize("command", ["index", "build"])
def test_several_images_of_a_key_are_samples_that_share_its_label_and_columns(
    tmp_path, command, capsys
):
    parts: list[tuple[str, bytes]] = []
    for key in range(3):
        parts += [
            (f"{key}.front.png", grey_png(10 * key)),
            (f"{key}.back.png", grey_png(10 * key + 1)),
            (f"{key}.cls", b"%d" % key),
            (f"{key}.json", json.dumps({"sku": f"s{key}"}).encode()),
        ]
    write_tar(tmp_path / "in" / "train-0.tar", *parts)
    words = ["--columns", "sku", "--name-pattern", r".+[.](?P<side>front|back)[.]png"]
    if command == "index":
        out = tmp_path / "in"
        assert run("index", out, *words) == 0
    else:
        out = tmp_path / "out"
        assert run("build", out, "--source", "tars", "--root", tmp_path / "in", *words) == 0
    assert "6" in next(x for x in capsys.readouterr().out.splitlines() if "of one key" in x)
    split = load_index(out).split("train")
    levels = [Image.open(io.BytesIO(Reader(split).one(i).image)).getpixel((0, 0)) for i in range(6)]
    assert sorted(levels) == [0, 1, 10, 11, 20, 21]
    assert [level // 10 for level in levels] == split.labels.tolist()
    assert [f"s{level // 10}" for level in levels] == split.column("sku").cells.to_pylist()
    sides = ["back" if level % 10 else "front" for level in levels]
    assert sides == split.column("side").cells.to_pylist()
    assert run("verify", out) == 0


def test_a_label_may_be_in_a_member_with_dots_in_its_suffix(tmp_path):
    """As those who write "input.jpg" and "output.txt" into a ShardWriter have it."""
    parts: list[tuple[str, bytes]] = []
    for key, name in enumerate(("cat", "dog", "cat")):
        parts += [(f"s{key}.input.png", grey_png(key)), (f"s{key}.Output.txt", name.encode())]
    write_tar(tmp_path / "in" / "train-0.tar", *parts)
    words = ["--source", "tars", "--root", tmp_path / "in", "--label-column", "output.txt"]
    assert run("build", tmp_path / "out", *words) == 0
    split = load_index(tmp_path / "out").split("train")
    levels = [Image.open(io.BytesIO(Reader(split).one(i).image)).getpixel((0, 0)) for i in range(3)]
    assert [split.class_name(label) for label in split.labels] == [
        ("cat", "dog", "cat")[level] for level in levels
    ]


@pytest.mark.promise(17)
@pytest.mark.parametrize(("suffix", "remedy"), [("txt", "KEY.txt"), ("json", "kind, seen")])
def test_classes_that_nobody_named_are_not_lost_without_a_word(tmp_path, suffix, remedy):
    members = []
    for key in range(4):
        text = "kite" if suffix == "txt" else json.dumps({"kind": "kite", "seen": 1900})
        members += [(f"{key}.jpg", jpeg(key)), (f"{key}.{suffix}", text.encode())]
    write_tar(tmp_path / "in" / "0.tar", *members)
    build = ["build", tmp_path / "out", "--source", "tars", "--root", tmp_path / "in"]
    assert run(*build) == 0
    (doubt,) = report_of(tmp_path / "out").doubts
    assert remedy in doubt
    assert "--label-column" in doubt
    assert run(*build, "--no-labels", "--overwrite") == 0
    assert report_of(tmp_path / "out").doubts == []


@pytest.mark.promise(17)
def test_images_that_share_a_label_of_their_key_are_cut_together(tmp_path):
    parts: list[tuple[str, bytes]] = []
    for key in range(20):
        parts += [(f"{key}.{side}.png", grey_png(10 * key + k)) for k, side in enumerate("fb")]
        parts.append((f"{key}.json", json.dumps({"label": key % 2}).encode()))
    parts += [(f"v1.{k}.png", grey_png(k)) for k in range(10)]  # of one key, and that is all
    write_tar(tmp_path / "in" / "0.tar", *parts)
    out = tmp_path / "out"
    build = ["build", out, "--source", "tars", "--root", tmp_path / "in", "--test-fraction", "0.3"]
    assert run(*build, "--name-pattern", "(?P<key>[^.]+)[.].*") == 0
    index = load_index(out)
    keys = {name: index.split(name).column("key").cells.to_pylist() for name in ("train", "test")}
    assert {*keys["train"]} & {*keys["test"]} <= {"v1"}
    assert 9 <= len(keys["test"]) <= 21
