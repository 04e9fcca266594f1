"""Data sets: what is written, byte for byte; resuming; foreign tars; faults by name."""

import dataclasses
import gzip
import hashlib
import io
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import unicodedata
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from sslpipe.data import lettering
from sslpipe.data.decode import decode
from sslpipe.data.index import load_index
from sslpipe.data.reader import Reader
from sslpipe.data.storage import read_range
from sslpipe.errors import DataError
from sslpipe.portable import one_at_a_time
from sslpipe.sharding import listed_files, show
from sslpipe.sharding.build import read_samples, write_shards
from sslpipe.sharding.idx import parse_idx
from sslpipe.sharding.members import encode_png
from sslpipe.sharding.readers import OPTIONS, SOURCES
from sslpipe.sharding.scan import scan_tar
from sslpipe.sharding.sources import Images, SourceOptions
from sslpipe.sharding.writer import Layout
from tests.helpers.dataset import picture, write_dataset
from tests.helpers.shards import (
    BUILD,
    add,
    error_of,
    jpeg,
    read_all,
    run,
    tree,
    write_photos,
    write_tar,
)
from tools.datasets.scattered_idx import first_of_each, write_idx

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "assets" / "fashion-mnist-10k"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The photos' data set, and beside it the photos; to read only."""
    folder = tmp_path_factory.mktemp("built")
    write_photos(folder / "photos")
    assert run("build", folder / "set", "--root", folder / "photos", *BUILD) == 0
    return folder / "set"


@pytest.fixture(scope="module")
def fashion(tmp_path_factory):
    """The build of 50 of the shipped images per class."""
    folder = tmp_path_factory.mktemp("fashion")
    kept = first_of_each(parse_idx(ASSETS / "train-labels-idx1-ubyte.gz", 1), 50)
    for name, dimensions in (("images-idx3", 3), ("labels-idx1", 1)):
        file = f"train-{name}-ubyte.gz"
        write_idx(folder / file, parse_idx(ASSETS / file, dimensions)[kept])
    shutil.copy(ASSETS / "classes.txt", folder)
    return ("--source", "idx", "--root", folder)


def test_a_folder_gives_the_samples_of_torchvisions_image_folder(built):
    from torchvision.datasets import ImageFolder

    hidden = built.parent / "photos" / "ape" / "._a.jpg"
    hidden.unlink()  # which ImageFolder would try to read
    reference = ImageFolder(str(built.parent / "photos"))
    hidden.write_text("no image either")
    index, written = load_index(built), read_all(built, "train")
    assert list(index.manifest.classes) == reference.classes
    assert len({key for key, _, _ in written}) == len(written) == len(reference) == 37
    # original bytes are kept, but of the BMP
    originals = {Path(path).read_bytes(): label for path, label in reference.samples}
    ((bmp, label),) = [(raw, y) for _, raw, y in written if originals.get(raw) != y]
    assert label == 0
    np.testing.assert_array_equal(decode(bmp, 64), np.full((3, 5, 6), 77))
    assert index.split("train").labels.tolist() == [label for _, _, label in written]


def test_the_files_of_a_build_are_these_on_every_machine(tmp_path):
    """Another digest needs another WRITER_VERSION."""
    for k in range(24):
        folder = tmp_path / "photos" / f"class {k % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        values = np.arange((9 + k % 4) * 12 * 3, dtype=np.uint32) * (k + 3) % 251
        pixels = values.astype(np.uint8).reshape(-1, 12, 3)
        if k % 2:
            header = b"P6 12 %d 255\n" % len(pixels)
            (folder / f"{k}.ppm").write_bytes(header + pixels.tobytes())
        else:
            (folder / f"{k}.png").write_bytes(encode_png(pixels))
    out = tmp_path / "plain"
    words = ["--root", tmp_path / "photos", "--test-fraction", 0.25, "--samples-per-shard", 8]
    assert run("build", out, *words) == 0
    files = {name: sha256 for name, sha256 in tree(out).items() if ".metadata-" not in name}
    files["dataset.json"] = load_index(out).sha256  # without the paths
    digest = hashlib.sha256(json.dumps(files).encode())
    assert digest.hexdigest() == (
        "10957a7b3810bd84e578c999be151c798dc062b3dcee1cd6af50d07a260be7cb"
    )


def test_offsets_sizes_and_hashes_describe_the_tars(built):
    out, index = built, load_index(built)
    index.check_files("train")
    split = index.split("train")
    assert [s.samples for s in split.shards] == [8, 8, 8, 8, 5]
    assert [s.file for s in split.shards] == [f"train-{k:06d}.tar" for k in range(5)]
    for k, entry in enumerate(split.shards):
        raw = (out / entry.file).read_bytes()
        assert (len(raw), hashlib.sha256(raw).hexdigest()) == (entry.bytes, entry.sha256)
        with tarfile.open(out / entry.file) as tar:
            members = tar.getmembers()
        assert {m.name.rpartition(".")[2] for m in members[1::3]} == {"cls"}
        images, columns = members[::3], members[2::3]
        ends = [m.offset_data + 512 for m in columns]
        places = [(image.offset, end) for image, end in zip(images, ends, strict=True)]
        assert places == list(map(tuple, split.offsets(k)[:, :2].tolist()))
        for m in members:
            assert (m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode) == (0, 0, 0, "", "", 0o444)
            assert m.name.isascii()


def test_mean_and_std_are_those_of_all_decoded_pixels(built):
    pixels = [decode(image, 256).reshape(3, -1) / 255 for _, image, _ in read_all(built, "train")]
    everything, manifest = np.concatenate(pixels, axis=1), load_index(built).manifest
    np.testing.assert_allclose(manifest.mean, everything.mean(axis=1), atol=1e-6)
    np.testing.assert_allclose(manifest.std, everything.std(axis=1), atol=1e-6)


def test_bytes_do_not_depend_on_workers_or_on_where_things_lie(photos, tmp_path):
    trees = []
    for k, workers in enumerate((1, 2, 5)):
        root = tmp_path / f"elsewhere{k}" / "photos"
        root.parent.mkdir()
        photos = photos.rename(root)
        out = tmp_path / f"out{k}" / "same"
        assert run("build", out, "--root", root, "--num-workers", workers, *BUILD) == 0
        trees.append(tree(out))
        assert not list(out.rglob("*.tmp"))
    assert trees[0] == trees[1] == trees[2]


def test_shards_are_cut_by_bytes_too(photos, tmp_path):
    out = tmp_path / "out"
    layout = Layout(samples_per_shard=1000, max_shard_bytes=8000)
    write_shards(out, read_samples("folder", SourceOptions(root=photos)), layout)
    split = load_index(out).split("train")
    assert len(split) == 37
    for k in range(len(split.shards)):
        assert split.offsets(k)[-1, 1] <= 8000
    assert len(split.shards) < 20


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_build_keeps_what_the_one_wrote_that_it_waited_for(photos, tmp_path, monkeypatch, split):
    out = tmp_path / "out"
    other = tmp_path / "other"
    shutil.copytree(photos, other)
    next(other.rglob("*.jpg")).unlink()
    layout = Layout(samples_per_shard=8)

    def wait(folder):
        monkeypatch.undo()
        write_shards(out, read_samples("folder", SourceOptions(root=photos, split="train")), layout)
        return one_at_a_time(folder)

    monkeypatch.setattr("sslpipe.sharding.build.one_at_a_time", wait)
    if split == "train":
        with pytest.raises(DataError, match="already holds train shards of other images"):
            write_shards(
                out, read_samples("folder", SourceOptions(root=other, split=split)), layout
            )
    else:
        write_shards(out, read_samples("folder", SourceOptions(root=other, split=split)), layout)
        assert len(load_index(out).split("val")) == 36
    load_index(out).check_files("train")
    assert len(load_index(out).split("train")) == 37


class Interrupted(BaseException):
    """Like a kill, as far as the program can see."""


@pytest.mark.parametrize("sample", [0, 17, 36])
def test_a_build_stopped_at_any_sample_resumes_to_the_same_bytes(
    built, tmp_path, monkeypatch, sample
):
    out, reads, read_encoded = tmp_path / "set", itertools.count(), listed_files.read_encoded
    build = ("build", out, "--root", built.parent / "photos", *BUILD)

    def read(file):
        if next(reads) == sample:
            raise Interrupted
        return read_encoded(file)

    with monkeypatch.context() as patch:
        patch.setattr(listed_files, "read_encoded", read)
        with pytest.raises(Interrupted):
            run(*build, "--num-workers", "1")
    assert not (out / "dataset.json").exists()
    before = {p.name: p.stat().st_mtime_ns for p in out.glob("[!.]*.tar")}
    assert len(before) >= sample // 8  # another may have begun
    assert run(*build) == 0
    assert tree(out) == tree(built)
    # finished shards were not written again
    assert before.items() <= {p.name: p.stat().st_mtime_ns for p in out.glob("*.tar")}.items()


def test_a_killed_build_resumes_to_the_same_bytes(fashion, tmp_path):
    whole, out = tmp_path / "a" / "set", tmp_path / "b" / "set"
    words = [*map(str, fashion), "--samples-per-shard", "25"]
    command = [sys.executable, "-m", "sslpipe", "shards", "build", str(out), *words]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        while not list(out.glob("train-*.tar")):
            assert process.poll() is None
            time.sleep(0.005)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert not (out / "dataset.json").exists()
    assert run("build", out, *words) == run("build", whole, *words) == 0
    assert tree(out) == tree(whole)


def test_split_folders_are_built_at_once_and_share_their_classes(photos, tmp_path):
    for split, names in (("train", ("ape", "cat")), ("test", ("bee", "cat"))):
        for name in names:
            (tmp_path / "set" / split / name).mkdir(parents=True)
            for path in sorted((photos / name).glob("a*"))[:4]:
                shutil.copy(path, tmp_path / "set" / split / name)
    assert run("build", tmp_path / "out", "--root", tmp_path / "set") == 0
    index = load_index(tmp_path / "out")
    assert index.manifest.classes == ("ape", "bee", "cat")
    assert Counter(index.split("train").labels.tolist()) == {0: 4, 2: 4}
    assert Counter(index.split("test").labels.tolist()) == {1: 4, 2: 4}


def test_a_split_added_later_gets_the_labels_of_the_first(photos, tmp_path, capsys):
    out, later = tmp_path / "out", tmp_path / "later"
    assert run("build", out, "--root", photos) == 0
    before = load_index(out).manifest
    (later / "cat").mkdir(parents=True)
    shutil.copy(next((photos / "cat").glob("*.png")), later / "cat")
    assert run("build", out, "--root", later, "--split", "test") == 0
    index = load_index(out)
    assert index.split("test").labels.tolist() == [2]
    assert index.manifest.mean == before.mean
    assert index.manifest.splits["train"] == before.splits["train"]
    (later / "cat").rename(later / "dog")
    assert "dog" in error_of(capsys, "build", out, "--root", later, "--split", "val")


def test_a_flat_folder_and_no_labels_give_unlabelled_samples(built, tmp_path):
    photos = built.parent / "photos"
    for count, words in ((12, (photos / "bee",)), (37, (photos, "--no-labels"))):
        assert run("build", tmp_path / str(count), "--root", *words) == 0
        index = load_index(tmp_path / str(count))
        assert index.manifest.classes == ()
        assert index.split("train").labels.tolist() == [-1] * count
        assert {label for _, _, label in read_all(tmp_path / str(count), "train")} == {-1}


def test_unseen_classes_go_to_splits_of_their_own_and_nothing_is_lost(fashion, tmp_path, capsys):
    words = (*fashion, "--test-fraction", "0.2", "--unseen-classes")
    out = tmp_path / "unseen"
    assert run("build", out, *words, "Shirt,Sneaker, Bag,Ankle boot") == 0
    said = capsys.readouterr()
    assert "look at this" not in said.out + said.err  # what was asked for is no slip
    index = load_index(out)
    counts = {name: Counter(index.split(name).labels.tolist()) for name in index.manifest.splits}
    assert counts == {
        "train": dict.fromkeys(range(6), 40),
        "train_unseen": dict.fromkeys(range(6, 10), 40),
        "test": dict.fromkeys(range(6), 10),
        "test_unseen": dict.fromkeys(range(6, 10), 10),
    }
    assert len({key for split in counts for key, *_ in read_all(out, split)}) == 500
    pixels = [decode(image, 28)[0] for _, image, _ in read_all(out, "train")]
    assert index.manifest.mean[0] == pytest.approx(np.mean(pixels) / 255, abs=1e-6)  # of train
    for wrong, reason in (
        ("Sandals", "no class; did you mean 'Sandal'"),
        (",".join(index.manifest.classes), "leaves train or train_unseen without an image"),
    ):
        assert reason in error_of(capsys, "build", tmp_path / "x", *words, wrong)


def test_a_corrupt_image_is_refused_by_name_or_skipped_and_listed(photos, tmp_path, capsys):
    (photos / "bee" / "broken.jpg").write_text("<html>404</html>")
    (photos / "cat" / "empty.png").write_bytes(b"")
    out = tmp_path / "out"
    message = error_of(capsys, "build", out, "--root", photos, *BUILD)
    assert "bee/broken.jpg" in message or "cat/empty.png" in message
    assert "--skip-bad" in message
    assert run("build", out, "--root", photos, "--skip-bad", *BUILD) == 0
    listed = capsys.readouterr().err
    assert "skipped: bee/broken.jpg: not a readable image: it looks like HTML or XML" in listed
    assert "skipped: cat/empty.png: not a readable image: it is empty" in listed
    assert len(load_index(out).split("train")) == 37
    assert run("verify", out) == 0


def test_a_source_that_is_added_may_read_any_option(tmp_path, monkeypatch):
    def read(options):
        kinds = (options.label_column, options.split_column)
        images = Images(
            names=["one", "two"],
            labels=np.arange(2),
            sizes=np.full(2, 500),
            classes=kinds,
            read=lambda number: encode_png(picture(number)),
        )
        return {"train": images}

    monkeypatch.setitem(SOURCES, "lab", read)
    words = ["--source", "lab", "--label-column", "dye", "--split-column", "plate"]
    assert run("build", tmp_path, *words) == 0
    assert load_index(tmp_path).manifest.classes == ("dye", "plate")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--csv", "a.csv"], "--csv is for the source csv"),
        (["--source", "idx", "--skip-missing"], "--skip-missing is for the source folder or csv"),
        (["--label-column", "species"], "--name-pattern with a group (?P<species>...)"),
        (["--image-column", "file"], "--image-column is for the source csv or parquet"),
        (["--split-column", "fold"], "--split-column is for the source csv"),
        (["--source", "foldr"], "did you mean 'folder'"),
        (["--source", "webdataset"], "sslpipe shards index"),
        (["--source", "tar"], "sslpipe shards index"),
        (["--split-by", "theme"], "needs --test-fraction"),
        (["--group-by", "theme"], "columns: none; name it with --columns"),
        (["--columns", "them:txt"], "'txt' is no kind; did you mean 'text'"),
        (["--name-pattern", "("], "is no regular expression"),
        (["--background", "whiet"], "is no colour"),
    ],
)
def test_options_that_do_not_fit_are_one_line(built, tmp_path, capsys, options, message):
    words = ["build", tmp_path / "out", "--root", built.parent / "photos", *options]
    assert message in error_of(capsys, *words)
    assert not (tmp_path / "out").exists()


def test_the_help_names_every_source_and_options_are_of_sources(capsys):
    assert run("build", "--help") == 0
    listed = re.search(r"--source <str>\s+(.*?)\.\s", capsys.readouterr().out, re.DOTALL)[1]
    assert sorted(re.split(r",\s+", listed)) == sorted(SOURCES)
    fields = {field.name for field in dataclasses.fields(SourceOptions)}
    assert fields >= OPTIONS.keys()
    assert SOURCES.keys() >= {source for owners in OPTIONS.values() for source in owners}


def test_a_bomb_of_another_format_is_refused_without_a_warning(tmp_path, capsys):
    (root := tmp_path / "in").mkdir()
    for name, side in (("a", 8500), ("b", 10000), ("c", 30000)):  # past our limit, and Pillow's two
        (root / f"{name}.ppm").write_bytes(b"P6 %d %d 255\n" % (side, side))
    (root / "good.ppm").write_bytes(b"P6 1 1 255\nabc")
    assert run("build", tmp_path / "out", "--root", root, "--skip-bad") == 0
    listed = [x for x in capsys.readouterr().err.splitlines() if x.startswith("skipped: ")]
    assert sorted(x[9:14] for x in listed) == ["a.ppm", "b.ppm", "c.ppm"]


def test_splits_without_class_names_may_lack_the_last_classes(tmp_path):
    pixels = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    for name, labels in (("train", [0, 1, 1]), ("t10k", [2, 0, 1])):
        write_idx(tmp_path / f"{name}-images-idx3-ubyte.gz", pixels)
        write_idx(tmp_path / f"{name}-labels-idx1-ubyte.gz", np.array(labels, np.uint8))
    assert run("build", tmp_path / "out", "--source", "idx", "--root", tmp_path) == 0
    index = load_index(tmp_path / "out")
    assert index.manifest.classes == ("0", "1", "2")
    assert sorted(index.split("test").labels.tolist()) == [0, 1, 2]


# --- tars made by others


@pytest.fixture
def foreign(tmp_path):
    """Two tars as img2dataset writes them, in pax format, with long and hostile names."""
    folder = tmp_path / "foreign"
    folder.mkdir()
    for shard in range(2):
        with tarfile.open(folder / f"{shard:05d}.tar", "w", format=tarfile.PAX_FORMAT) as tar:
            add(tar, "some/folder", b"", tarfile.DIRTYPE)
            for i in range(5):
                key = f"{shard:05d}{i:04d}" if i else f"../../tmp/{'ü' * 90}"
                add(tar, f"{key}.cls", b" %d\n" % (i % 3))
                add(tar, f"{key}.jpg", jpeg(i))
                add(tar, f"{key}.json", json.dumps({"caption": "x", "pad": "p" * 600 * i}).encode())
            add(tar, "link.jpg", b"", tarfile.SYMTYPE)
            add(tar, "alone.txt", b"no image")
    return folder


def test_foreign_tars_are_indexed_without_being_touched(foreign):
    before = tree(foreign)
    assert run("index", foreign) == 0
    assert before.items() <= tree(foreign).items()
    index = load_index(foreign)
    split = index.split("train")
    assert split.labels.tolist() == [0, 1, 2, 0, 1] * 2
    for k in range(2):
        for i, (start, end, _) in enumerate(split.offsets(k).tolist()):
            raw = read_range(split.url(k), start, end) + bytes(1024)
            with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
                names = tar.getnames()
                assert [name.rpartition(".")[2] for name in names] == ["cls", "jpg", "json"]
                assert tar.extractfile(names[1]).read() == jpeg(i)
    keys = [s.key for k in range(2) for s in scan_tar(foreign / f"{k:05d}.tar").samples]
    assert [s[0] for s in read_all(foreign, "train")] == keys
    assert run("verify", foreign) == 0


def test_splits_come_from_file_names_or_from_the_option(tmp_path):
    for name in ("train-000000", "train-000001", "val_0", "imagenet-test-12"):
        write_tar(tmp_path / f"{name}.tar", ("a.png", b""))
    for words, counts in (
        ((), {"train": 2, "val": 1, "imagenet-test": 1}),
        (("--split", "all"), {"all": 4}),
    ):
        assert run("index", tmp_path, *words) == 0
        splits = load_index(tmp_path).manifest.splits
        assert {name: len(shards) for name, shards in splits.items()} == counts
        (tmp_path / "dataset.json").unlink()


HUGE = tarfile.TarInfo("x")
HUGE.type, HUGE.size = tarfile.XHDTYPE, 2**31
# what a tar becomes, its bytes and members given, or what it holds instead; what is said
FAULTS = {
    "cut in data": (lambda raw, m: raw[: m[5].offset_data + 3], "truncated"),
    "cut in the last data": (lambda raw, m: raw[: m[-1].offset_data + 3], "truncated"),
    "cut in a header": (lambda raw, m: raw[: m[5].offset + 100], "truncated"),
    "cut between members": (lambda raw, m: raw[: m[6].offset], "truncated"),
    "cut before the end mark": (lambda raw, m: raw[: m[-1].offset_data + 512], "truncated"),
    "empty": (lambda raw, m: b"", "truncated or no tar"),
    "compressed": (lambda raw, m: gzip.compress(raw), "compressed"),
    "flipped": (lambda raw, m: raw[: m[5].offset] + b"?" + raw[m[5].offset + 1 :], "damaged"),
    "two tars in one": (lambda raw, m: raw * 2, "several tars"),
    "huge": (lambda raw, m: HUGE.tobuf(), "a header of"),
    "not adjacent": (("a.jpg", "b.jpg", "a.cls", "b.cls"), "do not lie together"),
    "two images": (("a.jpg", "a.png"), "has 2 images"),
    "same name twice": (("a.jpg", "a.JPG"), "same suffix"),
    "no integer": (("a.jpg", "a.cls"), "not an integer"),
    "no images": (("a.txt",), "has no member"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_foreign_tar_that_cannot_be_trusted_is_refused_by_name(foreign, capsys, fault):
    (change, reason), path = FAULTS[fault], foreign / "00001.tar"
    if isinstance(change, tuple):
        write_tar(path, *((name, b"cat") for name in change))
    else:
        with tarfile.open(path) as tar:
            members = tar.getmembers()
        path.write_bytes(change(path.read_bytes(), members))
    if fault == "huge":
        os.truncate(path, 2**31 + 4096)  # a hole, which takes no room
    message = error_of(capsys, "index", foreign)
    assert "00001.tar" in message
    assert reason in message
    assert not (foreign / "dataset.json").exists()


def test_nothing_is_unpickled_or_extracted(tmp_path):
    folder, canary = tmp_path / "in", tmp_path / "canary"
    bomb = b"cos\nsystem\n(S'touch " + str(canary).encode() + b"'\ntR."
    bombs = ((f"../evil.{suffix}", bomb) for suffix in ("pyd", "pickle", "pth"))
    write_tar(folder / "train-0.tar", ("../evil.jpg", jpeg(0)), *bombs)
    assert run("index", folder) == 0
    assert run("verify", folder) == 0
    assert not canary.exists()
    assert not list(tmp_path.glob("evil*"))


# --- verify


def test_verify_names_shard_and_key_of_every_bad_sample(photos, tmp_path, capsys):
    out = tmp_path / "out"
    assert run("build", out, "--root", photos, *BUILD) == 0
    sample = scan_tar(out / "train-000002.tar").samples[3]
    raw = bytearray((out / "train-000002.tar").read_bytes())
    start, size = sample.image
    raw[start + 4 : start + size] = bytes(size - 4)
    (out / "train-000002.tar").write_bytes(raw)
    os.truncate(out / "train-000000.tar", 3000)
    (out / "train-000004.tar").unlink()
    (out / "train-000003.offsets.npy").write_bytes(b"")
    capsys.readouterr()
    assert run("verify", out) == 1
    said = capsys.readouterr().out
    assert f"\ntrain-000002.tar {sample.key}: " in said
    assert "train-000002.tar: its sha256" in said
    assert "train-000000.tar: has 3000 bytes" in said
    assert "train-000004.tar: is missing" in said
    assert re.search("train-000003.*sha256", said)
    assert "train-000001" not in said


# --- show, stats, --resize-px


def test_resized_images_have_the_shorter_side_asked_for_and_small_ones_their_bytes(tmp_path):
    rng = np.random.default_rng(0)
    smooth = Image.fromarray(rng.integers(0, 256, (6, 9, 3), dtype=np.uint8)).resize((90, 60))
    (tmp_path / "photos").mkdir()
    smooth.save(tmp_path / "photos" / "big.jpg", quality=95)
    smooth.save(tmp_path / "photos" / "big.png")
    smooth.resize((40, 30)).save(tmp_path / "photos" / "small.jpg")
    run("build", tmp_path / "out", "--root", tmp_path / "photos", "--resize-px", 30)
    split = load_index(tmp_path / "out").split("train")
    reader = Reader(split, window_bytes=2**20)
    members = [bytes(raw.image) for raw in reader.rows(0, np.arange(3))]
    members.sort(key=lambda raw: (decode(raw, 4096).shape, raw[:1] == b"\x89"))
    assert members[0] == (tmp_path / "photos" / "small.jpg").read_bytes()
    assert [raw[:2] for raw in members[1:]] == [b"\xff\xd8", b"\x89P"]
    exact = np.asarray(smooth.resize((45, 30), Image.Resampling.LANCZOS)).transpose(2, 0, 1)
    np.testing.assert_array_equal(decode(members[2], 4096), exact)
    assert np.abs(decode(members[1], 4096).astype(int) - exact).mean() < 3  # JPEG, twice


def test_stats_counts_what_is_there(tmp_path, capsys):
    write_dataset(tmp_path, (10, 3), broken={4: b"junk"})
    run("stats", tmp_path)
    text = " ".join(capsys.readouterr().out.split())
    assert "samples 13 in 2 shards" in text
    assert "samples per class 3 / 3 / 4" in text
    assert "width px 16 / 16 / 16" in text
    assert "headers not read 1 of 13" in text


def test_show_draws_samples_enlarged_by_a_whole_factor_and_names_those_of_a_list(tmp_path, capsys):
    names = load_index(write_dataset(tmp_path, (3, 3), broken={2: b"junk"})).manifest.classes
    sheet = tmp_path / "sheet.png"

    def cell_of(column: int) -> np.ndarray:
        left = show.MARGIN_PX + column * (show.CELL_PX + show.GAP_PX)
        return np.asarray(Image.open(sheet))[show.MARGIN_PX :, left:][:128, :128]

    for words, chosen in (
        ((), range(6)),
        (("--ids", "[4, 1,", "--ids", "3]"), (1, 3, 4)),
    ):
        run("show", tmp_path, "--out", sheet, *words)
        for column, number in enumerate(chosen):
            if number == 2:
                assert tuple(cell_of(column)[0, 5]) == show.BAD  # framed, nothing else
            else:
                np.testing.assert_array_equal(cell_of(column)[4::8, 4::8], picture(number))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("id ")]
    assert lines == [f"id {i}: train{i:06d}, {names[i % 4]}" for i in (1, 3, 4)]
    assert "--ids=6 is not in the split's 0 to 5" in error_of(
        capsys, "show", tmp_path, "--ids", "6"
    )
    assert "--ids 'x' is no" in error_of(capsys, "show", tmp_path, "--ids=1,x")


@pytest.fixture
def pillows_font_alone(monkeypatch):
    """The machine has no other font: that of Pillow has Latin letters alone."""
    monkeypatch.setattr(lettering, "FONTS", ())
    lettering.fonts.cache_clear()
    yield
    lettering.fonts.cache_clear()


@pytest.mark.usefixtures("pillows_font_alone")
def test_a_letter_that_the_font_lacks_is_drawn_without_its_accent():
    def sheet(words):
        cell = show.Cell([Image.new("RGB", (8, 8))], words, show.INK, words)
        return show.draw_sheet([cell], 1).tobytes()

    for composed in ("Café", "Zoë", "Łódź", "Ёж"):
        decomposed = unicodedata.normalize("NFD", composed)
        plain = composed
        for letter, without in {"é": "e", "ë": "e", "ó": "o", "ź": "z"}.items():
            plain = plain.replace(letter, without)
        plain = "".join(letter if letter.isascii() else "?" for letter in plain)
        assert sheet(composed) == sheet(decomposed) == sheet(plain), composed
    assert not lettering.is_drawable("Café", 12)  # it stands in the terminal as it is


def test_a_name_is_drawn_in_an_installed_font_that_has_its_letters():
    name = next((each for each in lettering.FONTS if installed(each)), None)
    if name is None:
        pytest.skip("none of the fonts is installed")
    font = ImageFont.truetype(name, 12)
    for text in ("Птицы/süß.png", "Ωμέγα"):
        assert lettering.lettering(text, 12)[0] == text
        assert lettering.is_drawable(text, 12)
        sheet = Image.new("L", (200, 20))
        lettering.draw_text(ImageDraw.Draw(sheet), (0, 0), text, fill=255, size_px=12)
        own = Image.new("L", (200, 20))
        ImageDraw.Draw(own).text((0, 0), text, fill=255, font=font)
        assert sheet.tobytes() == own.tobytes()
    latin = lettering.lettering("cat, 12 px", 12)[1]
    assert latin is lettering.fonts(12)[0], "Latin names keep Pillow's own font"


def installed(name):
    """Whether this machine has a font."""
    try:
        ImageFont.truetype(name, 12)
    except OSError:
        return False
    return True


@pytest.mark.usefixtures("pillows_font_alone")
def test_show_prints_names_that_its_font_cannot_draw(tmp_path, capsys):
    for name in ("猫/ライオン.v1.png", "cat/lion.v1.png"):
        path = tmp_path / "img" / name
        path.parent.mkdir(parents=True)
        Image.new("RGB", (20, 20)).save(path)
    run("build", tmp_path / "out", "--root", tmp_path / "img")
    assert "2 images (1 shard" in capsys.readouterr().out
    run("show", tmp_path / "out", "--out", tmp_path / "sheet.png")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("id ")]
    assert "猫/ライオン.v1.png, 猫" in line
    shutil.rmtree(tmp_path / "img" / "猫")
    run("build", tmp_path / "one", "--root", tmp_path / "img")
    assert "1 image (1 shard" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "drawn"),
    [
        ("a/b.png", "id 1  a/b.png"),
        ("a folder of some length/cats/b.png", "id 1  …/cats/b.png"),
    ],
)
def test_a_long_path_under_a_picture_keeps_its_end(tmp_path, monkeypatch, path, drawn):
    image = tmp_path / "img" / path
    image.parent.mkdir(parents=True)
    Image.new("RGB", (20, 20)).save(image)
    run("build", tmp_path / "out", "--root", tmp_path / "img", "--no-labels")
    seen = []
    monkeypatch.setattr(show, "draw_sheet", lambda cells, columns: seen.extend(cells))
    show.sample_sheet(load_index(tmp_path / "out"), "train")
    assert [cell.name.replace("id 0", "id 1") for cell in seen] == [drawn]
