"""What a build keeps, writes anew and says; parts of several machines give one machine's files."""

import hashlib
import re
import tarfile

import numpy as np
import pyarrow as pa
import pytest

from sslpipe.data.index import load_index
from sslpipe.sharding.record import recorded_digests
from sslpipe.sharding.samples import SplitImages, cut_test
from sslpipe.sharding.sources import Images
from tests.helpers.shards import BUILD, error_of, grey, jpeg, report_of, run, tree, write_tar


def test_a_test_fraction_after_the_first_build_says_what_is_kept_and_what_is_written_anew(
    photos, tmp_path, capsys
):
    out, later = tmp_path / "set", tmp_path / "later"
    assert run("build", out, "--root", photos, *BUILD) == 0
    grey(later / "cat" / "x.png", 3)
    assert run("build", out, "--root", later, "--split", "val") == 0
    before = tree(out)
    words = ["build", out, "--root", photos, "--test-fraction", "0.2", *BUILD]
    message = error_of(capsys, *words)
    assert f"{out} already holds train shards of other images or options" in message
    assert "give --overwrite: train and test are written anew, val are kept" in message
    assert tree(out) == before  # nothing was touched
    assert run(*words, "--overwrite") == 0
    assert set(load_index(out).manifest.splits) == {"train", "test", "val"}
    assert tree(out)["val-000000.tar"] == before["val-000000.tar"]
    assert run("build", tmp_path / "new", *words[2:]) == 0
    shards = {name: sha256 for name, sha256 in tree(tmp_path / "new").items() if "-0" in name}
    assert shards.items() <= tree(out).items()


def test_a_build_that_is_there_says_that_files_of_the_same_sizes_are_not_read_again(
    tmp_path, capsys
):
    words = ["build", tmp_path / "out", "--root", tmp_path / "in"]
    grey(tmp_path / "in" / "1.png", 7)
    assert run(*words) == 0
    assert "--overwrite" not in capsys.readouterr().out
    before = tree(tmp_path / "out")
    size = (tmp_path / "in" / "1.png").stat().st_size
    assert grey(tmp_path / "in" / "1.png", 9).stat().st_size == size
    assert run(*words) == 0
    assert tree(tmp_path / "out") == before
    assert "train was built already" in (said := capsys.readouterr().out)
    assert "--overwrite reads them again" in said
    assert run(*words, "--overwrite") == 0
    assert "built already" not in capsys.readouterr().out
    assert tree(tmp_path / "out") != before


def test_classes_are_those_of_the_images_once_all_splits_are_written_anew(tmp_path, capsys):
    photos, out = tmp_path / "in", tmp_path / "out"
    words = ["build", out, "--root", photos, "--test-fraction", "0.5", *BUILD]
    for name in ("Cat", "dog"):
        for number in range(4):
            grey(photos / name / f"{number}.png", 10 * number + (name == "dog"))
    assert run(*words) == 0
    (photos / "Cat").rename(photos / "cat")
    assert "give --overwrite" in error_of(capsys, *words)
    assert run(*words, "--overwrite") == 0
    assert load_index(out).manifest.classes == ("cat", "dog")
    assert not report_of(out).doubts
    # where a split stays, its list of classes does
    grey(tmp_path / "later" / "owl" / "x.png", 3)
    later = ["build", out, "--root", tmp_path / "later", "--split", "val"]
    assert "classes owl are not among the 2" in error_of(capsys, *later)


def test_images_of_two_splits_are_counted_with_one_of_them_and_what_to_do(tmp_path, capsys):
    out = tmp_path / "out"
    levels = {"train": (1, 2, 3, 4, 5), "test": (9, 5, 8, 4, 5), "val": (6, 7, 9)}
    for split, own in levels.items():
        for number, level in enumerate(own):
            grey(tmp_path / "in" / split / "cat" / f"{number}.png", level)
    assert run("build", out, "--root", tmp_path / "in") == 0
    said = capsys.readouterr().out
    between = [line for line in report_of(out).doubts if "byte for byte" in line]
    assert all(f"look at this: {line}" in said for line in between)
    with_train, with_val = sorted(between, key=lambda line: "in train" not in line)
    assert with_train.startswith("3 of 5 images of test are in train, too")
    copies = {"test/cat/1.png": "4", "test/cat/3.png": "3", "test/cat/4.png": "4"}  # of train
    named = re.search(r"such as '(.+)' \('train/cat/(.)[.]png' in train\)", with_train)
    assert copies[named[1]] == named[2]
    assert "keep one of each and build again (`sslpipe curate duplicates" in with_train
    assert re.match("1 of [35] images of (test|val) are in (test|val), too", with_val)
    assert run("index", out) == 0  # as of tars of others
    assert set(between) <= set(report_of(out).doubts)


def test_images_of_two_classes_are_counted_with_one_of_them(tmp_path, capsys):
    out = tmp_path / "out"
    levels = {"train/cat": (1, 2, 3, 3), "train/dog": (2, 4, 3), "val/owl": (3, 7), "val/dog": (9,)}
    for place, own in levels.items():
        for number, level in enumerate(own):
            grey(tmp_path / "in" / place / f"{number}.png", level)
    assert run("build", out, "--root", tmp_path / "in" / "train") == 0
    assert "look at this: 2 images in two classes, byte for byte" in capsys.readouterr().out
    assert run("build", out, "--root", tmp_path / "in", "--overwrite") == 0
    (line,) = (each for each in report_of(out).doubts if "in two classes" in each)
    assert line.startswith("2 images in two classes, byte for byte, such as ")
    named = re.findall(r"'(\w+)/(\w+)/(\d)[.]png' of '(\w+)'", line)
    assert all(own == name for _, own, _, name in named)
    first, second = (levels[f"{split}/{own}"][int(number)] for split, own, number, _ in named)
    assert first == second
    assert named[0][3] != named[1][3]
    assert run("build", out, "--root", tmp_path / "in", "--no-labels", "--overwrite") == 0
    assert not any("in two classes" in each for each in report_of(out).doubts)


def test_an_image_that_is_twice_in_one_split_or_in_none_is_in_no_two(tmp_path):
    for split, levels in {"train": (1, 1, 2), "test": (3, 4)}.items():
        for number, level in enumerate(levels):
            grey(tmp_path / "in" / split / f"{number}.png", level)
    assert run("build", tmp_path / "out", "--root", tmp_path / "in") == 0
    assert not report_of(tmp_path / "out").doubts


def test_a_split_that_stays_is_compared_by_its_record_or_said_not_to_be(tmp_path):
    """Where its shards are gone, and then its record, too."""
    out = tmp_path / "out"
    for split in ("train", "val"):
        grey(tmp_path / split / "cat" / "x.png", 5)
    grey(tmp_path / "val" / "cat" / "y.png", 6)  # another tar, which no record of train's knows
    assert run("build", out, "--root", tmp_path / "train") == 0
    (out / "train-000000.tar").rename(tmp_path / "moved.tar")
    val = ["build", out, "--root", tmp_path / "val", "--split", "val"]
    assert run(*val) == 0
    (line,) = (line for line in report_of(out).doubts if "byte for byte" in line)
    assert line.startswith("1 of 2 images of val are in train, too")
    (out / ".build" / "train.jsonl").unlink()
    assert run(*val) == 0
    (line,) = (line for line in report_of(out).doubts if "two splits" in line)
    assert "is not known: " in line
    assert "train-000000.tar" in line


def test_the_record_of_a_build_has_the_digest_of_each_image(photos, tmp_path):
    """As hashlib has it of the members that tarfile reads; images that are skipped have none."""
    (photos / "cat" / "bad.png").write_bytes(b"none")
    out = tmp_path / "out"
    words = ["--root", photos, "--samples-per-shard", "2", "--skip-bad"]
    assert run("build", out, *words) == 0
    shards = load_index(out).manifest.splits["train"]
    assert len(shards) > 2
    expected = {}
    for shard in shards:
        with tarfile.open(out / shard.file) as tar:
            images = [
                tar.extractfile(each).read() for each in tar if not each.name.endswith(".cls")
            ]
        digests = [hashlib.blake2b(raw, digest_size=16).digest() for raw in images]
        expected[shard.sha256] = b"".join(digests)
    assert recorded_digests(out) == expected


def test_splits_without_a_common_class_are_no_news_to_who_asked_for_them(tmp_path):
    for name in ("cat", "dog", "owl"):
        for number in range(4):
            grey(
                tmp_path / "in" / name / f"{number}.png",
                10 * number + len(list(tmp_path.rglob("*.png"))),
            )
    words = ["--root", tmp_path / "in", "--test-fraction", "0.4", "--name-pattern", "(?P<kind>.).*"]
    for column, count in (("class", 0), ("kind", 1)):
        out = tmp_path / column
        assert run("build", out, *words, "--split-by", column) == 0
        assert len(report_of(out).doubts) == count
        for _ in range(2):  # nor when they are indexed again
            assert run("index", out, "--columns", "kind") == 0
            assert len(report_of(out).doubts) == count


@pytest.mark.parametrize("name", ["train-000000.tar", "00000.tar"])
def test_tars_of_others_are_not_overwritten_by_a_build(photos, tmp_path, capsys, name):
    out = tmp_path / "out"
    write_tar(out / name, ("a.jpg", jpeg(0)))
    assert run("index", out) == 0
    before = tree(out)
    assert "already holds train" in error_of(capsys, "build", out, "--root", photos)
    assert tree(out) == before


def test_a_damaged_record_is_another_build(photos, tmp_path, capsys):
    words = ["build", tmp_path / "set", "--root", photos, *BUILD]
    assert run(*words) == 0
    for text in ('{"plan": ', '["plan"]\n', "null\n"):
        (tmp_path / "set" / ".build" / "train.jsonl").write_text(text)
        assert "--overwrite" in error_of(capsys, *words)


@pytest.mark.parametrize("options", [(), ("--no-labels",)])
def test_files_that_are_no_images_are_counted_by_extension(tmp_path, capsys, options, monkeypatch):
    root = tmp_path / "in"
    others = ("list.txt", "cat/a.OGG", "cat/deep/b.ogg", "dog/c.ogg", "dog/c.txt", "dog/LICENSE")
    others = (*others, "a.x1", "a.x2", "a.x3", "cat/.hidden.ogg", ".git/d.ogg")
    for name in ("cat/deep/1.png", "dog/2.png"):
        grey(root / name, 9)
    for name in others:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(b"")
    monkeypatch.chdir(root)
    assert run("build", tmp_path / "out", "--root", ".", *options) == 0
    counts = {group.kind: group.count for group in report_of(tmp_path / "out").left_out}
    others = {".ogg": 3, ".txt": 2, "no extension": 1, ".x1": 1, ".x2": 1, ".x3": 1}
    assert counts == {**others, "": 2}  # hidden: a file and a folder
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "other kinds" in line]
    assert ".ogg 3, .txt 2" in line


def test_files_beside_the_splits_are_counted_and_without_any_nothing_is_said(tmp_path, capsys):
    root = tmp_path / "in"
    for split in ("train", "test"):
        grey(root / split / "cat" / "1.png", 9)

    def left_out(name: str, *options: str) -> dict[tuple[str, str], int]:
        assert run("build", tmp_path / name, "--root", root, *options) == 0
        groups = report_of(tmp_path / name).left_out
        assert ("skipped" in capsys.readouterr().out) == bool(groups)
        return {(group.kind, group.example): group.count for group in groups}

    assert left_out("plain") == {}
    grey(root / "loose.png", 9)  # in no split
    (root / "train" / "cat" / "1.wav").write_bytes(b"")
    loose = {("", "loose.png"): 1}
    assert left_out("out") == {**loose, (".wav", "train/cat/1.wav"): 1}
    assert left_out("test", "--split", "test") == loose


@pytest.mark.parametrize(
    ("sizes", "fraction", "wanted"),
    [([4] * 25, 0.1, 10), ([4] * 25, 0.9, 90), ([1] * 7, 0.2, 1), ([1] * 7, 0.9, 6)],
)
def test_small_classes_share_a_test_split_drawn_over_all_images(sizes, fraction, wanted):
    labels = np.repeat(np.arange(len(sizes)), sizes)
    images = Images([""] * len(labels), labels, labels, (), lambda _: b"")
    whole = SplitImages(images, np.arange(len(labels)), pa.table({}), [b""] * len(labels))
    cut = cut_test({"train": whole}, fraction)
    assert len(cut["test"].numbers) == wanted
    both = np.concatenate([cut["train"].numbers, cut["test"].numbers])
    assert sorted(both.tolist()) == list(range(len(labels)))
    again = cut_test({"train": whole}, fraction)
    assert again["test"].numbers.tolist() == cut["test"].numbers.tolist()
    per_class = np.bincount(labels[cut["test"].numbers], minlength=len(sizes))
    assert per_class.max() <= -(-max(sizes) * fraction // 1) + 1  # spread, not a few whole classes


def test_a_fraction_of_small_classes_is_met_and_said(tmp_path, capsys):
    for number in range(40):
        grey(tmp_path / "photos" / f"c{number // 4}" / f"{number}.png", number)
    words = ["--root", tmp_path / "photos", "--test-fraction", "0.1"]
    assert run("build", tmp_path / "set", *words) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("split test")]
    assert len(said) == 1  # each split is described once
    assert report_of(tmp_path / "set").splits["test"].samples == 4
    message = error_of(capsys, "build", tmp_path / "none", *words[:3], "0.001")
    assert "leaves a split empty" in message
    assert "a fraction from 0.025" in message


LETTERS = "abcdefghij"
BREEDS = [f"{a}{b}-hound" for a in LETTERS[:5] for b in LETTERS]


@pytest.mark.parametrize("breeds", [50, 49])
def test_a_flat_folder_of_many_named_series_is_asked_for_its_classes(tmp_path, breeds):
    """Oxford's pets have 37 breeds, Stanford's dogs 120: Abyssinian_1.jpg is no frame of a film."""
    for number, breed in enumerate(BREEDS[:breeds]):
        for k in range(5):
            grey(tmp_path / "in" / f"{breed}_{k + 1}.png", (5 * number + k) % 256)
    cut = ["--root", tmp_path / "in", "--test-fraction", "0.2"]
    assert run("build", tmp_path / "out", *cut) == 0
    said = [doubt for doubt in report_of(tmp_path / "out").doubts if "series" in doubt]
    assert len(said) == (breeds == 50)
    for doubt in said:
        assert doubt.index("a class") < doubt.index("a film")
        assert SERIES in doubt
        (pattern,) = re.findall("--name-pattern='([^']*<label>[^']*)'", doubt)
        assert run("build", tmp_path / "classes", *cut, "--name-pattern", pattern) == 0
        assert load_index(tmp_path / "classes").manifest.classes == tuple(BREEDS)


SERIES = r"(?P<series>.*\D)\d+[.]\w+|.*"


@pytest.mark.promise(17)
@pytest.mark.parametrize(
    ("names", "doubted"),
    [
        ([f"film{f}-{k}" for f in range(50) for k in range(5)], True),
        ([f"breed{f}_{k}" for f in range(37) for k in range(5)], False),  # Oxford's pets
        ([f"v_{'ab'[f % 2]}_g{f:02d}_{k:04d}" for f in range(50) for k in range(5)], True),  # UCF's
        ([f"owl/film{f}_{10 * k:04d}" for f in range(10) for k in range(5)], True),
        ([f"{c}/0000{t}_{k:05d}" for c in "ab" for t in range(5) for k in range(6)], True),
        ([f"{c}/scan{c}{t}/{k}" for c in "ab" for t in range(5) for k in range(6)], True),
        ([f"{c}/{c}_{k}" for c in "ab" for k in range(6)], False),  # numbered by their class
        ([f"{c}/{s}_{k}" for c in "ab" for s in ("art", "photo") for k in range(6)], False),
        ([f"{c}/{c}{t}/{k}" for c in "ab" for t in range(4) for k in range(3)], False),  # few
        ([f"owl/{t}_{k * k * 1000}" for t in range(3) for k in range(6)], False),  # ids
    ],
)
def test_a_cut_at_random_through_series_of_images_is_doubted(tmp_path, names, doubted):
    """Frames of films and slices of scans are like their neighbours, of which train has some."""
    for number, name in enumerate(names):
        grey(tmp_path / "in" / f"{name}.png", number)
    cut = ["--root", tmp_path / "in", "--test-fraction", "0.5"]
    assert run("build", tmp_path / "out", *cut) == 0
    said = [doubt for doubt in report_of(tmp_path / "out").doubts if "series" in doubt]
    assert [SERIES in doubt for doubt in said] == [True] * doubted
    if doubted:  # and what is advised cuts no series
        whole = [*cut, "--name-pattern", SERIES, "--split-by", "series"]
        assert run("build", tmp_path / "whole", *whole) == 0
        assert not any("series" in doubt for doubt in report_of(tmp_path / "whole").doubts)
        index = load_index(tmp_path / "whole")
        train, test = (
            {*index.split(name).column("series").cells.to_pylist()} for name in ("train", "test")
        )
        assert train
        assert test
        assert not train & test
