"""What a build keeps, writes anew and says; parts of several machines give one machine's files."""

import csv
import json
import shutil

import numpy as np
import pytest

from sslpipe.data.index import load_index
from sslpipe.sharding.sources import Images
from sslpipe.sharding.writer import SplitImages, cut_test
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
    shards = {name: sha256 for name, sha256 in tree(tmp_path / "new").items() if "-" in name}
    assert shards.items() <= tree(out).items()


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


@pytest.mark.parametrize("options", [(), ("--no-labels",), ("--part", "1/1")])
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
    if "--part" in options:
        assert run("merge", tmp_path / "out") == 0
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
        assert ("left out" in capsys.readouterr().out) == bool(groups)
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
    whole = SplitImages(images, np.arange(len(labels)))
    cut = cut_test({"train": whole}, fraction, seed=3)
    assert len(cut["test"].numbers) == wanted
    both = np.concatenate([cut["train"].numbers, cut["test"].numbers])
    assert sorted(both.tolist()) == list(range(len(labels)))
    again = cut_test({"train": whole}, fraction, seed=3)
    assert again["test"].numbers.tolist() == cut["test"].numbers.tolist()
    per_class = np.bincount(labels[cut["test"].numbers], minlength=len(sizes))
    assert per_class.max() <= -(-max(sizes) * fraction // 1) + 1  # spread, not a few whole classes


def test_a_fraction_of_small_classes_is_met_and_said(tmp_path, capsys):
    for number in range(40):
        grey(tmp_path / "photos" / f"c{number // 4}" / f"{number}.png", number)
    words = ["--root", tmp_path / "photos", "--test-fraction", "0.1"]
    assert run("build", tmp_path / "set", *words) == 0
    assert "split test: 4 samples (10.0%), " in capsys.readouterr().out
    message = error_of(capsys, "build", tmp_path / "none", *words[:3], "0.001")
    assert "leaves a split empty" in message
    assert "a fraction from 0.025" in message


# --- parts

PARTS = 3


@pytest.fixture
def whole(photos, tmp_path):
    """Of one machine, 37 images in 4 + 1 shards."""
    assert run("build", tmp_path / "one" / "set", *options(photos)) == 0
    return tmp_path / "one" / "set"


def options(photos):
    return ["--root", photos, "--test-fraction", "0.2", *BUILD]


def build_part(out, photos, number, *more):
    return run("build", out, *options(photos), "--part", f"{number}/{PARTS}", *more)


def test_parts_in_one_folder_merge_to_the_files_of_one_machine(photos, whole, tmp_path):
    out = tmp_path / "many" / "set"
    for number in (2, 3, 1):
        assert not (out / "dataset.json").exists()
        assert build_part(out, photos, number) == 0
    written = {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    assert run("merge", out) == 0
    assert tree(out) == tree(whole)
    assert written == {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    # it is a build like any other: run again, it has nothing to write; nor has a part
    assert run("build", out, *options(photos)) == 0
    assert build_part(out, photos, 2) == 0
    assert tree(out) == tree(whole)
    assert written == {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")}


def test_parts_in_folders_of_their_own_merge_in_any_order(photos, whole, tmp_path):
    for number in (1, 2, 3):
        assert build_part(tmp_path / f"p{number}", photos, number, "--workers", "1") == 0
    before = {number: tree(tmp_path / f"p{number}") for number in (1, 2, 3)}
    for order in ((1, 2, 3), (3, 1, 2)):
        out = tmp_path / f"order{order[0]}" / "set"
        assert run("merge", out, *(tmp_path / f"p{number}" for number in order)) == 0
        assert tree(out) == tree(whole)
    assert before == {number: tree(tmp_path / f"p{number}") for number in (1, 2, 3)}
    assert run("verify", out) == 0


def test_a_part_resumes_and_more_parts_than_shards_do_no_harm(photos, whole, tmp_path):
    out = tmp_path / "many" / "set"
    for number in range(1, 10):
        assert run("build", out, *options(photos), "--part", f"{number}/9") == 0
    record = out / ".build" / "part-2-of-9" / "train.jsonl"
    record.write_bytes(record.read_bytes()[:-30])  # as a kill leaves it
    (out / "train-000001.tar").write_bytes(b"torn")
    assert run("build", out, *options(photos), "--part", "2/9") == 0
    assert run("merge", out) == 0
    assert tree(out) == tree(whole)


def test_a_csv_with_missing_and_bad_images_merges_to_the_same_lists(photos, tmp_path, capsys):
    paths = sorted(p for p in photos.rglob("*") if p.suffix in (".jpg", ".png", ".webp"))
    paths = [p for p in paths if not p.name.startswith(".")]
    (photos / "bad.png").write_text("no image")
    rows = [[p.relative_to(photos), p.parent.name, "ab"[i % 2]] for i, p in enumerate(paths)]
    rows[5:5] = [["gone.jpg", "ape", "a"], ["bad.png", "ape", "b"]]
    with open(photos / "list.csv", "w", newline="") as file:
        csv.writer(file).writerows([["path", "label", "fold"], *rows])
    words = ["--source", "csv", "--csv", photos / "list.csv", "--split-column", "fold", *BUILD[:2]]
    words += ["--skip-bad", "--skip-missing"]
    assert run("build", tmp_path / "one" / "set", *words) == 0
    for number in (1, 2):
        assert run("build", tmp_path / f"p{number}", *words, "--part", f"{number}/2") == 0
    capsys.readouterr()
    assert run("merge", tmp_path / "two" / "set", tmp_path / "p2", tmp_path / "p1") == 0
    said = capsys.readouterr().err
    assert "skipped: bad.png" in said
    assert "1 missing files" in said
    assert tree(tmp_path / "two" / "set") == tree(tmp_path / "one" / "set")
    assert (tmp_path / "two" / "set" / "missing.txt").read_text() == "a\tgone.jpg\n"


def test_a_split_is_added_by_parts_beside_the_first(photos, tmp_path):
    later = tmp_path / "later" / "cat"
    later.mkdir(parents=True)
    for path in sorted((photos / "cat").glob("*.png")):
        shutil.copy(path, later)
    more = ["--root", later.parent, "--split", "val", "--samples-per-shard", "2"]
    for name in ("one", "two"):
        assert run("build", tmp_path / name / "set", "--root", photos, *BUILD) == 0
    assert run("build", tmp_path / "one" / "set", *more) == 0
    for number in (1, 2):
        assert run("build", tmp_path / "two" / "set", *more, "--part", f"{number}/2") == 0
    assert run("merge", tmp_path / "two" / "set") == 0
    assert tree(tmp_path / "two" / "set") == tree(tmp_path / "one" / "set")


def test_parts_that_are_missing_twice_there_or_of_another_build_are_named(photos, tmp_path, capsys):
    out, p1, p2 = tmp_path / "set", tmp_path / "p1", tmp_path / "p2"
    assert "has no finished part" in error_of(capsys, "merge", out, p1)
    assert build_part(p1, photos, 1) == 0
    assert build_part(p2, photos, 2) == 0
    assert "of 3 parts are 3/3 missing" in error_of(capsys, "merge", out, p1, p2)
    shutil.copytree(p1, tmp_path / "again")
    message = error_of(capsys, "merge", out, p1, p2, tmp_path / "again")
    assert "of 3 parts are 1/3 twice, 3/3 missing" in message
    # other images, other options, another number of parts
    assert run("build", tmp_path / "4", *options(photos), "--part", "3/4") == 0
    assert run("build", tmp_path / "s", *options(photos), "--seed", "5", "--part", "3/3") == 0
    for folder, what in (("4", "number of parts"), ("s", "splits")):
        message = error_of(capsys, "merge", out, p1, p2, tmp_path / folder)
        assert f"in {tmp_path / folder} is not of the build of part 1/3 in {p1}: {what}" in message
    # a part that has begun is not finished
    (tmp_path / "begun" / ".build" / "part-3-of-3").mkdir(parents=True)
    assert "no finished part" in error_of(capsys, "merge", out, tmp_path / "begun")
    assert not (out / "dataset.json").exists()


def test_a_shard_that_has_changed_since_is_named_and_nothing_is_written(photos, tmp_path, capsys):
    out = tmp_path / "set"
    for number in (1, 2, 3):
        assert build_part(out, photos, number) == 0
    raw = bytearray((out / "train-000001.tar").read_bytes())
    raw[700] ^= 1
    (out / "train-000001.tar").write_bytes(raw)
    message = error_of(capsys, "merge", out)
    assert "train-000001.tar is missing, or not as part 2/3 wrote it" in message
    assert not (out / "dataset.json").exists()
    part = out / ".build" / "part-1-of-3" / "part.json"
    part.write_text(json.dumps({"part": [1, 3]}))
    assert f"{part} cannot be read; build that part again" in error_of(capsys, "merge", out)


def test_parts_of_other_images_do_not_share_a_folder(photos, tmp_path, capsys):
    out = tmp_path / "set"
    assert build_part(out, photos, 1) == 0
    (photos / "bee" / "new.png").write_bytes(next((photos / "bee").glob("*.png")).read_bytes())
    words = ["build", out, *options(photos)]
    assert "already holds train and test" in error_of(capsys, *words, "--part", "2/3")
    assert "already holds train and test" in error_of(capsys, *words)
    assert "--overwrite with --part" in error_of(capsys, *words, "--part", "2/3", "--overwrite")
    for wrong in ("0/3", "4/3", "1", "a/b", "1/0", "-1/3"):
        assert "is not I/N" in error_of(capsys, *words, f"--part={wrong}")
    assert run(*words, "--overwrite") == 0  # a whole build may: nothing of the part stays
    assert not list((out / ".build").glob("part-*/*.jsonl"))
    assert len(load_index(out).split("train")) + len(load_index(out).split("test")) == 38
