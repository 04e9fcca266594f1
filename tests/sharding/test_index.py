"""Tars of others: which members are samples, what is left out, folders joined, files elsewhere."""

import hashlib
import json
import re
import shlex
import subprocess
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from sslpipe.data.decode import decode
from sslpipe.data.index import load_index
from sslpipe.data.reader import Reader
from sslpipe.portable import one_at_a_time
from sslpipe.sharding import scan
from sslpipe.sharding.build_report import FILE, Report
from sslpipe.sharding.index_tars import index_tars
from tests.helpers.shards import (
    add,
    error_of,
    grey,
    grey_png,
    jpeg,
    report_of,
    run,
    tree,
    write_tar,
)

# names of members (an image's content is its place among them), and the samples: key -> (place of
# the image, label)
LAYOUTS = {
    "one version each": (
        ["a1.jpg", "a2.v2.jpg", "a3.jpg", "a4.v2.jpg"],
        {"a1": (0, -1), "a2.v2": (1, -1), "a3": (2, -1), "a4.v2": (3, -1)},
    ),
    "a version before the number": (
        ["v1.0.jpg", "v1.0.cls=4", "b.jpg", "v1.1.jpg", "v1.1.cls=5"],
        {"v1.0": (0, 4), "b": (2, -1), "v1.1": (3, 5)},
    ),
    "dates": (
        ["in/2024.01.05.PNG", "in/2024.01.06.png", "in/2023.12.06.png"],
        {"in/2024.01.05": (0, -1), "in/2024.01.06": (1, -1), "in/2023.12.06": (2, -1)},
    ),
    "an image with a name of its own": (
        ["0.image.jpg", "0.cls=3", "1.image.jpg", "1.cls=2", "1.caption.txt"],
        {"0.image": (0, 3), "1.image": (2, 2)},
    ),
    "a mask beside the image": (
        ["0.jpg", "0.seg.png", "0.cls=1", "1.seg.png", "1.jpg"],
        {"0": (0, 1), "1": (4, -1)},
    ),
    "a tar of a Mac": (
        ["a/1.jpg", "a/._1.jpg", "a/1.cls=1", "a/._1.cls", "a/2.jpg", "a/._2.jpg", "a/.DS_Store"],
        {"a/1": (0, 1), "a/2": (4, -1)},
    ),
    "formats that are not read": (
        ["0.jpg", "0.txt", "1.tif", "1.cls=1", "2.bmp", "3.jpg", "._3.jpg", "README"],
        {"0": (0, -1), "3": (5, -1)},
    ),
}


PRODUCTS = [b"1000000000007"] * 3 + [b"1000000000"] * 2 + [b"3"]


def content(place: int, name: str) -> tuple[str, bytes]:
    name, _, label = name.partition("=")
    image = name.lower().endswith(("jpg", "png", "tif", "bmp"))
    return name, label.encode() if label else grey_png(place) if image else b"text"


@pytest.mark.promise(17)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_member_of_a_tar_is_in_a_sample_or_is_counted(layout, tmp_path, capsys):
    names, samples = LAYOUTS[layout]
    write_tar(tmp_path / "t.tar", *(content(place, name) for place, name in enumerate(names)))
    assert run("index", tmp_path, "--split", "train") == 0
    split = load_index(tmp_path).split("train")
    raws = [Reader(split).one(i) for i in range(len(split))]
    assert {raw.key: bytes(raw.image) for raw in raws} == {
        key: grey_png(place) for key, (place, _) in samples.items()
    }
    assert split.labels.tolist() == [label for _, label in samples.values()]
    assert run("verify", tmp_path) == 0
    # images and labels of samples, and what the report counts, are all there is
    report = json.loads((tmp_path / FILE).read_text())
    left_out = sum(group["count"] for group in report["left_out"])
    labelled = sum(label >= 0 for _, label in samples.values())
    assert len(samples) + labelled + left_out == len(names)
    printed = capsys.readouterr().out
    for group in report["left_out"]:
        assert group["what"] in printed
        assert group["kind"] in printed
        assert group["example"].partition(" in ")[0] in [name.partition("=")[0] for name in names]
    dotted = sum("." in key for key in samples)
    assert sum(group["count"] for group in report["images"]) == dotted


@pytest.mark.parametrize(
    ("names", "remedy"),
    [
        (["0.jpg", "1.jpg", "0.left.jpg"], "first dot"),
        (["0.jpg", "0.png"], "a sample has one"),
        (["0.tif", "1.bmp"], "--source tars"),
    ],
)
def test_a_tar_that_cannot_be_read_as_meant_is_named_with_its_key(names, remedy, tmp_path, capsys):
    write_tar(tmp_path / "t.tar", *(content(place, name) for place, name in enumerate(names)))
    error = error_of(capsys, "index", tmp_path)
    assert "t.tar" in error
    assert remedy in error


@pytest.mark.promise(17)
def test_a_tar_without_a_member_is_counted_unless_all_are(tmp_path, capsys):
    for number, names in enumerate([(), ("a.png",), (), ("b.png", "c.png")]):
        members = [(name, grey_png(place)) for place, name in enumerate(names)]
        write_tar(tmp_path / f"train-{number:06d}.tar", *members)
    assert run("index", tmp_path) == 0
    split = load_index(tmp_path).split("train")
    assert [shard.file for shard in split.shards] == ["train-000001.tar", "train-000003.tar"]
    assert len(split) == 3
    (group,) = json.loads((tmp_path / FILE).read_text())["left_out"]
    assert (group["count"], group["example"]) == (2, "train-000000.tar")
    write_tar(tmp_path / "none" / "test-000000.tar")
    assert run("index", tmp_path / "none") != 0
    assert "test-000000.tar has no member" in capsys.readouterr().err


def test_a_link_that_leads_nowhere_is_one_error(tmp_path, capsys):
    write_tar(tmp_path / "train-000000.tar", ("a.png", grey_png(0)))
    (tmp_path / "train-000001.tar").symlink_to("nowhere.tar")
    assert "train-000001.tar" in error_of(capsys, "index", tmp_path)


def test_a_large_member_costs_its_sample_or_nothing(tmp_path, monkeypatch, capsys):
    members = [("0.jpg", jpeg(0)), ("0.mp4", bytes(9000)), ("1.jpg", bytes(5000))]
    write_tar(tmp_path / "t.tar", *members, ("2.jpg", jpeg(2)), ("2.txt", b""))
    monkeypatch.setattr(scan, "MAX_BYTES", 4000)
    monkeypatch.setattr(scan, "MOST_SAMPLE_BYTES", 8000)
    assert run("index", tmp_path) == 0
    assert "1.jpg" in capsys.readouterr().out
    split = load_index(tmp_path).split("t")
    assert [bytes(Reader(split).one(i).image) for i in (0, 1)] == [jpeg(0), jpeg(2)]
    starts, ends, _ = split.offsets(0).T.tolist()
    assert max(np.subtract(ends, starts)) < 8000  # the film is not read with its image
    assert run("verify", tmp_path) == 0


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_in_another_encoding_are_read_and_shown(form, tmp_path, capsys):
    path = tmp_path / "train-0.tar"
    with tarfile.open(path, "w", format=form, encoding="utf-8", errors="surrogateescape") as tar:
        for name in ("ä\udcff.jpg", "b.x\udcfe.jpg", "c\udcfd.tif"):
            add(tar, name, jpeg(1))
    for command in ("index", "stats", "verify"):
        assert run(command, tmp_path) == 0
    assert run("show", tmp_path, "--ids", "0,1", "--out", tmp_path / "s.png") == 0
    assert r"\udcfd.tif" in capsys.readouterr().out
    report = Report.model_validate_json((tmp_path / FILE).read_bytes())  # which is strict UTF-8
    assert [group.count for group in report.left_out] == [1]


@pytest.mark.parametrize(
    "text", ['{"a": "\\ud800"}', '{"\\ud800": 1}', "[" * 10**5, '{"a": ' * 10**4]
)
def test_a_strange_json_is_read_or_one_line_that_names_the_member(text, tmp_path, capsys):
    write_tar(tmp_path / "train-0.tar", ("k.jpg", jpeg(1)), ("k.json", text.encode()))
    assert run("index", tmp_path) == 0
    capsys.readouterr()
    status = run("index", tmp_path, "--columns", "a")
    error = capsys.readouterr().err
    assert status == 0 or "k.json" in error or "--columns" in error
    assert "Traceback" not in error
    assert run("verify", tmp_path) == 0


# --- splits


@pytest.mark.promise(17)
@pytest.mark.parametrize(
    ("files", "splits"),
    [
        (["train-00000-of-00002", "train-00001-of-00002", "test_0_of_1"], {"train": 2, "test": 1}),
        (["Train-0", "Validation-0", "TEST"], {"train": 1, "val": 1, "test": 1}),
        (["val/00000", "val/00001-of-00002"], {"val": 2}),
        (["shards/00000-of-00001"], {"train": 1}),
        (["00000-train", "00001-train", "00000-test"], {"train": 2, "test": 1}),
        (["train-00000-of-00002-4bd1f6", "train-00001-of-00002-9e2c0a"], {"train": 2}),
        (["cc3m-train-0000", "cc3m-val-0000"], {"cc3m-train": 1, "cc3m-val": 1}),
    ],
)
def test_tars_are_of_the_split_that_their_names_mean(files, splits, tmp_path):
    for name in files:
        write_tar(tmp_path / f"{name}.tar", ("a.png", grey_png(1)))
    folder = (tmp_path / files[0]).parent
    assert run("index", folder) == 0
    there = load_index(folder).manifest.splits
    assert {name: len(shards) for name, shards in there.items()} == splits


@pytest.mark.parametrize("by", ["index", "build"])
@pytest.mark.parametrize(
    ("names", "doubted"),
    [
        (("cat", "a-dog"), True),
        (("n01440764", "n01443537", "n01484850"), True),  # of ImageNet
        (("laion-000000", "laion-000001"), False),
        (("00000", "00002"), False),
        (("00012", "00500", "01000"), False),  # some of many
        (("20240101", "20240302"), False),
        (("train", "val"), False),
        (("train-0", "test-0"), False),
    ],
)
def test_a_tar_a_class_is_doubted_with_commands_that_label_the_images(
    names, doubted, by, tmp_path, capsys
):
    tars = tmp_path / "my tars"
    for k, name in enumerate(names):
        write_tar(tars / f"{name}.tar", (f"{name}_7.png", grey_png(9 * k)))
    words = ["index", tars] if by == "index" else ["build", tmp_path / "out", "--source", "tars"]
    assert run(*words, *(["--root", tars] if by == "build" else [])) == 0
    report = report_of(tars if by == "index" else tmp_path / "out")
    said = [doubt for doubt in report.doubts if "each tar is a class" in doubt]
    assert len(said) == doubted
    for doubt in said:
        unpack, build = re.findall("`([^`]+)`", doubt)
        # one shell: what follows begins where the first command did
        there = subprocess.run(
            ["bash", "-c", f"{unpack} && pwd"], check=True, cwd=tmp_path, stdout=subprocess.PIPE
        )
        assert Path(there.stdout.decode().strip()) == tmp_path
        program, group, *rest = shlex.split(build.replace("OUT", str(tmp_path / "labelled")))
        assert (program, group) == ("sslpipe", "shards")
        assert run(*rest) == 0
        assert load_index(tmp_path / "labelled").manifest.classes == tuple(sorted(names))


PETS = ("cat", "dog")


@pytest.mark.parametrize("by", ["index", "build"])
@pytest.mark.parametrize(
    ("tars", "splits"),
    [
        ({"pets": [f"train/{pet}/{k}.png" for k in "01" for pet in PETS]}, {"train": 4}),
        (
            {"a": [f"x/{s}/{p}/{k}.png" for s in ("train", "val") for p in PETS for k in "0"]}
            | {"pets": [f"x/train/{pet}/{k}.png" for k in "23" for pet in PETS]},
            {"train": 6, "val": 2},
        ),
        (
            {f"train-{n}": [f"{pet}/{n}{k}.png" for pet in PETS for k in "01"] for n in "01"}
            | {"val-0": ["./cat/5.png", "./cat/6.png", "7.png"]},
            {"train": 8, "val": 3},
        ),
        ({"train": [f"0/{k}.png" for k in "012"]}, None),  # one folder is no class
        ({"train": [f"{k}/image.png" for k in "012"]}, None),  # a folder an image
        ({"pets": [f"{split}/{k}.png" for split in ("train", "val") for k in "012"]}, None),
        ({"train": [f"{two}/{two}{k}.png" for two in ("0a", "f3") for k in "012"]}, None),  # hashes
    ],
)
def test_folders_of_classes_in_tars_are_doubted_with_a_command_that_labels_the_images(
    tars, splits, by, tmp_path, capsys
):
    root = tmp_path / "my tars"
    for place, (tar, names) in enumerate(tars.items()):
        write_tar(
            root / f"{tar}.tar",
            *((name, grey_png(30 * place + k)) for k, name in enumerate(names)),
        )
    out = tmp_path / "out"
    words = ["index", root] if by == "index" else ["build", out, "--source", "tars", "--root", root]
    assert run(*words) == 0
    report = report_of(root if by == "index" else out)
    said = [doubt for doubt in report.doubts if "folders in the tars are classes" in doubt]
    assert len(said) == (splits is not None)
    for doubt in said:
        *unpack, build = re.findall("`([^`]+)`", doubt)
        for command in unpack:
            subprocess.run(["bash", "-c", command], check=True)
        program, group, *rest = shlex.split(build.replace("OUT", str(tmp_path / "labelled")))
        assert (program, group) == ("sslpipe", "shards")
        assert run(*rest) == 0
        index = load_index(tmp_path / "labelled")
        assert index.manifest.classes == PETS
        assert {name: len(index.split(name)) for name in index.manifest.splits} == splits
        for shard in (tmp_path / "labelled").glob("*.tar"):
            with tarfile.open(shard) as tar:
                members = {each: tar.extractfile(each).read() for each in tar.getnames()}
            for png in (name for name in members if name.endswith(".png")):
                label = members.get(f"{png.removesuffix('.png')}.cls")
                pets = [pet for pet in PETS if pet in png]
                assert pets == ([] if label is None else [PETS[int(label)]])


def test_two_names_of_one_split_and_tars_in_folders_are_refused_with_a_remedy(tmp_path, capsys):
    for name in ("a/train2014-0", "a/train2017-0", "b/val/0"):
        write_tar(tmp_path / f"{name}.tar", ("a.png", grey_png(1)))
    assert "--split='train'" in error_of(capsys, "index", tmp_path / "a")
    error = error_of(capsys, "index", tmp_path / "b")
    assert "val" in error
    assert "--out" in error


@pytest.mark.parametrize(
    ("name", "options", "remedy"),
    [
        ("tr\x1b[31m-0.tar", (), "--split"),
        ("train-0.tar", ("--split", "a/b"), "'a/b'"),
        ("tr\udcff-0.tar", (), "UTF-8"),
        ("a\udcff/train-0.tar", (), "UTF-8"),
    ],
)
def test_a_name_that_dataset_json_cannot_hold_is_refused_before_anything_is_written(
    name, options, remedy, tmp_path, capsys
):
    path = write_tar(tmp_path / "tars" / name, ("a.png", grey_png(1)))
    assert remedy in error_of(capsys, "index", path.parent, "--out", tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


@pytest.mark.promise(17)
def test_a_tar_is_in_one_split_only(tmp_path, capsys):
    write_tar(tmp_path / "train-0.tar", ("a.png", grey_png(1)))
    assert run("index", tmp_path) == 0
    before = tree(tmp_path)
    error = error_of(capsys, "index", tmp_path, "--split", "all")
    assert "train-0.tar" in error
    assert "--split train" in error
    twice = error_of(capsys, "index", tmp_path, tmp_path, "--out", tmp_path / "out")
    assert "twice" in twice
    assert tree(tmp_path) == before
    assert run("index", tmp_path, "--split", "train") == 0


def test_numbers_of_products_are_classes_that_are_counted(tmp_path, capsys):
    members = [
        (f"{k}.{s}", c) for k in range(6) for s, c in (("jpg", jpeg(k)), ("cls", PRODUCTS[k]))
    ]
    write_tar(tmp_path / "train-0.tar", *members)
    assert run("index", tmp_path) == 0
    assert f"{int(PRODUCTS[0])}" in capsys.readouterr().out
    assert run("stats", tmp_path) == 0
    printed = capsys.readouterr().out
    assert "3 with samples, of 3" in printed
    assert f"{int(PRODUCTS[0])} 3, {int(PRODUCTS[5])} 1" in printed


# --- elsewhere, and several folders


def images_of(folder: Path, split: str) -> list[tuple[bytes, str | None]]:
    """Each sample's image and the name of its class."""
    own = load_index(folder).split(split)
    names = [own.class_name(label) for label in own.labels.tolist()]
    return [(bytes(Reader(own).one(i).image), name) for i, name in enumerate(names)]


def test_an_index_keeps_the_split_of_one_that_it_waited_for(tmp_path, monkeypatch):
    for split in ("train", "val"):
        write_tar(tmp_path / split / "0.tar", ("1.png", grey_png(1)))
    out = tmp_path / "out"

    def wait(folder):
        monkeypatch.undo()
        index_tars(tmp_path / "train", out, split="train")
        return one_at_a_time(folder)

    monkeypatch.setattr("sslpipe.sharding.index_tars.one_at_a_time", wait)
    index_tars(tmp_path / "val", out, split="val")
    assert {*load_index(out).manifest.splits} == {"train", "val"}


def test_an_index_elsewhere_leaves_the_tars_folder_as_it_is(tmp_path, capsys):
    tars, out = tmp_path / "tars", tmp_path / "out"
    for k in range(2):
        write_tar(tars / f"train-{k}.tar", ("a.jpg", jpeg(k)), ("a.cls", b"%d" % k))
    before = tree(tars)
    for _ in range(2):  # again, too
        assert run("index", tars, "--out", out) == 0
        assert tree(tars) == before
        assert images_of(out, "train") == [(jpeg(0), "0"), (jpeg(1), "1")]
        assert run("verify", out) == 0
    # beside them it is the same
    assert run("index", tars) == 0
    assert images_of(tars, "train") == images_of(out, "train")
    (shard,) = [s for s in load_index(out).manifest.splits["train"] if s.file.endswith("-0.tar")]
    with tarfile.open(tars / "train-0.tar") as tar:
        assert Path(shard.file).samefile(tars / "train-0.tar")
        assert tar.getnames() == ["a.jpg", "a.cls"]


def write_folders(root: Path) -> list[Path]:
    """Two builds of other classes, one with a test split; shards and keys have equal names."""
    folders = []
    for k, classes in enumerate((("cat", "dog"), ("ape", "dog", "owl"))):
        photos = root / f"photos{k}"
        for j, name in enumerate(classes):
            for i in range(4):
                path = photos / "train" / name / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(grey_png(10 + 100 * k + 10 * j + i))
        if k == 0:
            path = photos / "test" / "cat" / "9.png"
            path.parent.mkdir(parents=True)
            path.write_bytes(grey_png(9))
        folders.append(root / "set" / str(k))
        pattern = r"\w+/(?P<animal>\w+)/(?P<number>\w+)\.png"
        words = ("--root", photos, "--name-pattern", pattern, "--samples-per-shard", 5)
        assert run("build", folders[-1], *words) == 0
    return folders


def test_folders_built_apart_are_one_data_set(tmp_path):
    folders = write_folders(tmp_path)
    before = [tree(folder) for folder in folders]
    out = tmp_path / "set"
    assert run("index", *folders, "--out", out) == 0
    assert [tree(folder) for folder in folders] == before
    index = load_index(out)
    assert index.manifest.classes == ("ape", "cat", "dog", "owl")
    # each sample is there once, in order, with the class that its own folder names
    whole = images_of(out, "train")
    assert whole == [row for folder in folders for row in images_of(folder, "train")]
    assert images_of(out, "test") == images_of(folders[0], "test")
    column = index.split("train").column("animal")
    assert column.show(np.arange(len(whole))) == [name for _, name in whole]
    # mean and std are those of all images, which have 6 px of one level each
    levels = _levels(out)
    np.testing.assert_allclose(index.manifest.mean, levels.mean() / 255, atol=2e-6)
    np.testing.assert_allclose(index.manifest.std, levels.std() / 255, atol=2e-6)
    assert run("verify", out) == 0
    # the folder may be moved as a whole
    (tmp_path / "set").rename(tmp_path / "moved")
    assert images_of(tmp_path / "moved", "train") == whole


def _levels(folder: Path) -> np.ndarray:
    own = load_index(folder).split("train")
    return np.array([decode(Reader(own).one(i).image, 8).mean() for i in range(len(own))])


def test_folders_that_do_not_fit_together_are_refused(tmp_path, capsys):
    folders = write_folders(tmp_path)
    plain = tmp_path / "plain"
    write_tar(plain / "train-0.tar", ("a.png", grey_png(1)), ("a.cls", b"0"))
    out = tmp_path / "out"
    assert "--out" in error_of(capsys, "index", *folders)
    tars = sorted(plain.glob("*.tar")) * 2  # as `index TARS/*.tar` gives them
    assert f"give {plain}, which holds it" in error_of(capsys, "index", *tars)
    pattern = plain / "train-{0..9}.tar"  # as webdataset takes it
    assert f"give {plain}, which holds it" in error_of(capsys, "index", pattern)
    assert "--classes" in error_of(capsys, "index", folders[0], plain, "--out", out)
    assert not (out / "dataset.json").exists()
    write_tar(tmp_path / "more" / "train-0.tar", ("a.png", grey_png(1)))  # without a label
    assert run("index", folders[0], tmp_path / "more", "--out", tmp_path / "some") == 0
    assert Counter(name for _, name in images_of(tmp_path / "some", "train")) == {
        "cat": 4,
        "dog": 4,
        None: 1,
    }
    names = tmp_path / "names.txt"
    names.write_text("x\ny\nz\n")
    assert run("index", plain, folders[0], "--out", out, "--classes", names) == 0
    assert Counter(name for _, name in images_of(out, "train")) == {"x": 5, "y": 4}


def test_columns_and_images_of_joined_folders_are_of_one_type(tmp_path, capsys):
    folders = []
    for k, number in enumerate(("7", "x")):
        grey(tmp_path / f"photos{k}" / f"{number}.png", 10 * k)
        folders.append(tmp_path / str(k))
        words = ("--root", tmp_path / f"photos{k}", "--name-pattern", r"(?P<number>\w+)\.png")
        assert run("build", folders[-1], *words) == 0
    words = ("index", *folders, "--out", tmp_path / "out")
    assert "--columns='number:text'" in error_of(capsys, *words)
    assert run(*words, "--columns", "number:text") == 0
    column = load_index(tmp_path / "out").split("train").column("number")
    assert column.show([0, 1]) == ["7", "x"]
    assert run(*words, "--columns", "") == 0
    assert [*load_index(tmp_path / "out").manifest.columns] == ["path"]
    white = ("--root", tmp_path / "photos1", "--background", "white")
    assert run("build", tmp_path / "white", *white) == 0
    words = ("index", folders[0], tmp_path / "white", "--out", tmp_path / "both")
    assert "--background" in error_of(capsys, *words)


def test_labels_of_joined_folders_are_still_verified(tmp_path, capsys):
    folders = write_folders(tmp_path)
    out = tmp_path / "out"
    assert run("index", *folders, "--out", out) == 0
    entry = load_index(out).manifest.splits["train"][0]
    rows = np.load(out / entry.offsets)
    rows[0, 2] = next(label for label in rows[:, 2].tolist() if label != rows[0, 2])
    np.save(out / entry.offsets, rows)
    text = (out / "dataset.json").read_text()
    changed = hashlib.sha256((out / entry.offsets).read_bytes()).hexdigest()
    (out / "dataset.json").write_text(text.replace(entry.offsets_sha256, changed))
    assert run("verify", out) == 1
    assert "does not describe" in capsys.readouterr().out


def test_classes_without_names_are_no_lack_of_classes(tmp_path, capsys):
    tars = tmp_path / "tars"
    tars.mkdir()
    members = [
        (f"{k}.{end}", jpeg(k) if end == "jpg" else b"%d" % (k % 2))
        for k in range(4)
        for end in ("jpg", "cls")
    ]
    write_tar(tars / "train-0.tar", *members)
    assert run("index", tars) == 0
    said = capsys.readouterr().out
    assert "no classes" not in said
    assert "--classes FILE" in said
    (tmp_path / "names.txt").write_text("ape\nbee\n")
    assert run("index", tars, "--classes", tmp_path / "names.txt") == 0
    assert "dataset.json: 2 classes;" in capsys.readouterr().out
    # of labels that begin at 1 the names would be those of others
    members = [
        (name, b"%d" % (int(raw) + 1) if name.endswith("cls") else raw) for name, raw in members
    ]
    write_tar(tmp_path / "one" / "train-0.tar", *members)
    message = error_of(capsys, "index", tmp_path / "one", "--classes", tmp_path / "names.txt")
    assert "label 2, but names are given for the labels 0 to 1" in message
    assert not (tmp_path / "one" / "dataset.json").exists()
