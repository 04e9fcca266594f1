"""What a build keeps, writes anew and says; parts of several machines give one machine's files."""

import numpy as np
import pyarrow as pa
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
    shards = {name: sha256 for name, sha256 in tree(tmp_path / "new").items() if "-0" in name}
    assert shards.items() <= tree(out).items()


def test_classes_are_those_of_the_images_once_all_splits_are_written_anew(tmp_path, capsys):
    photos, out = tmp_path / "in", tmp_path / "out"
    words = ["build", out, "--root", photos, "--test-fraction", "0.5", *BUILD]
    for name in ("Cat", "dog"):
        for number in range(4):
            grey(photos / name / f"{number}.png", 10 * number)
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
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("split test")]
    assert len(said) == 1  # each split is described once
    assert report_of(tmp_path / "set").splits["test"].samples == 4
    message = error_of(capsys, "build", tmp_path / "none", *words[:3], "0.001")
    assert "leaves a split empty" in message
    assert "a fraction from 0.025" in message
