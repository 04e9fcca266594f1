"""`sslpipe.build_dataset` against what `sslpipe shards build` writes, and what it refuses."""

from pathlib import Path

import pyarrow
import pyarrow.csv
import pytest
from PIL import Image

import sslpipe
from sslpipe.errors import DataError
from tests.helpers.shards import grey, jpeg, run, tree, write_photos, write_tar

ALL = (
    *("--test-fraction", 0.25, "--samples-per-shard", 5, "--resize-px", 9),
    *("--background", "white", "--unseen-classes", "bee", "--license", "CC0", "--origin", "here"),
    *("--name-pattern", "(?P<kind>[^/]+)/.*", "--columns", "kind:text", "--group-by", "kind"),
)


@pytest.mark.parametrize("words", [(), ALL])
def test_python_and_the_command_write_the_same_bytes(tmp_path, words):
    photos = write_photos(tmp_path / "photos")
    assert run("build", tmp_path / "theirs" / "set", "--root", photos, *words) == 0
    given = {
        "test_fraction": 0.25,
        "samples_per_shard": 5,
        "resize_px": 9,
        "background": "white",
        "unseen_classes": ["bee"],
        "license": "CC0",
        "origin": "here",
        "name_pattern": "(?P<kind>[^/]+)/.*",
        "columns": "kind:text",
        "group_by": "kind",
    }
    ours = str(tmp_path / "ours" / "set")
    built = sslpipe.build_dataset(ours, root=str(photos), **(given if words else {}))
    assert tree(Path(ours)) == tree(tmp_path / "theirs" / "set")
    assert built.manifest == sslpipe.load_index(ours).manifest
    assert built.skipped == []


def test_an_image_too_large_is_a_bad_one_from_python_too(tmp_path):
    photos = write_photos(tmp_path / "photos")
    Image.new("1", (9500, 9500)).save(photos / "ape" / "vast.png")
    with pytest.raises(DataError, match=r"vast\.png"):
        sslpipe.build_dataset(tmp_path / "set", root=photos)
    built = sslpipe.build_dataset(tmp_path / "set", root=photos, skip_bad=True)
    assert [line.partition(":")[0] for line in built.skipped] == ["ape/vast.png"]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"test_fraction": 1.5}, "test_fraction = 1.5"),
        ({"test_fraction": float("nan")}, "test_fraction = nan"),
        ({"samples_per_shard": 0}, "samples_per_shard = 0"),
        ({"num_workers": 0}, "num_workers = 0"),
        ({"resize_px": -3}, "resize_px = -3"),
        ({"background": "whit"}, "background='whit'.*white"),
        ({"columns": "kind:txet"}, "columns='kind:txet'.*text"),
        ({"name_pattern": "("}, "name_pattern"),
        ({"source": "floder"}, "source='floder'.*folder"),
        ({"split_by": "path"}, "split_by=.path"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path, given, named):
    photos = write_photos(tmp_path / "photos")
    with pytest.raises(DataError, match=named):
        sslpipe.build_dataset(tmp_path / "set", root=photos, **given)
    assert not (tmp_path / "set").exists()


def test_tars_of_others_are_indexed_as_by_the_command(tmp_path):
    for side in ("ours", "theirs"):
        for k in range(2):
            pairs = [(f"{k}{n}.jpg", jpeg(10 * n)) for n in range(3)]
            extras = [(f"{k}{n}.cls", b"%d" % (n % 2)) for n in range(3)]
            texts = [(f"{k}{n}.json", b'{"sku": "s%d"}' % n) for n in range(3)]
            members = [each for rows in zip(pairs, extras, texts, strict=True) for each in rows]
            write_tar(tmp_path / side / "set" / f"train-{k}.tar", *members)
        (tmp_path / side / "set" / "names.txt").write_text("ant\nbee\n")
    theirs = tmp_path / "theirs" / "set"
    assert run("index", theirs, "--classes", theirs / "names.txt", "--columns", "sku:text") == 0
    ours = tmp_path / "ours" / "set"
    for classes in (["ant", "bee"], str(ours / "names.txt")):
        found = sslpipe.index_tars(str(ours), classes=classes, columns=["sku:text"])
        assert tree(ours) == tree(theirs)
        assert found.manifest == sslpipe.load_index(ours).manifest
        assert "6 images" in repr(found)
    joined = sslpipe.index_tars([ours, theirs], tmp_path / "both")
    assert joined.manifest.classes == ("ant", "bee")
    with pytest.raises(DataError, match="a folder that out names"):
        sslpipe.index_tars([ours, theirs])
    with pytest.raises(DataError, match=r"columns='colour'.*no sample has it"):
        sslpipe.index_tars(ours, columns="colour")


def test_a_data_set_is_looked_at_and_verified_as_by_the_commands(tmp_path, capsys):
    out = tmp_path / "set"
    sslpipe.build_dataset(out, root=write_photos(tmp_path / "photos"), test_fraction=0.25)
    capsys.readouterr()
    assert run("show", out, "--split", "test", "--ids", "0,1", "--out", tmp_path / "a.png") == 0
    capsys.readouterr()
    drawn = sslpipe.show_samples(str(out), "test", ids=[0, 1])
    with Image.open(tmp_path / "a.png") as same:
        assert drawn.tobytes() == same.tobytes()
    assert sslpipe.show_samples(out).size[1] > drawn.size[1]
    assert run("stats", out) == 0
    shown = " ".join(capsys.readouterr().out.split())
    described = sslpipe.describe_dataset(out)
    assert list(described) == ["train", "test"]
    for rows in described.values():
        for name, text in rows.items():
            assert " ".join(f"{name} {text}".split()) in shown
    assert sslpipe.verify_dataset(out) == []
    (shard,) = (out / entry.file for entry in sslpipe.load_index(out).manifest.splits["test"])
    raw = bytearray(shard.read_bytes())
    raw[600] ^= 1
    shard.write_bytes(raw)
    faults = sslpipe.verify_dataset(out)
    assert {fault.shard for fault in faults} == {shard.name}
    assert run("verify", out) == 1
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        f"{fault.shard} {fault.key}".rstrip() for fault in faults
    ]


def test_stats_on_a_narrow_terminal_cut_no_name(tmp_path, capsys, monkeypatch):
    name = "a-class-of-a-long-name-" * 6
    grey(tmp_path / "photos" / name / "a.png", 9)
    sslpipe.build_dataset(tmp_path / "set", root=tmp_path / "photos")
    capsys.readouterr()
    monkeypatch.setenv("COLUMNS", "80")
    assert run("stats", tmp_path / "set") == 0
    assert name in "".join(capsys.readouterr().out.split())


def test_a_table_in_memory_is_read_as_its_file(tmp_path, monkeypatch):
    photos = write_photos(tmp_path / "photos")
    paths = sorted(path.relative_to(tmp_path) for path in photos.rglob("[a-z]*.jpg"))
    frame = pyarrow.table(
        {
            "file": [str(path) for path in paths],
            "species": [path.parent.name for path in paths],
            "who": [place % 3 for place in range(len(paths))],
        }
    )
    monkeypatch.chdir(tmp_path)
    pyarrow.csv.write_csv(frame, tmp_path / "frame.csv")
    settings = {"image_column": "file", "label_column": "species", "columns": "who:integer"}
    sslpipe.build_dataset("theirs/set", "csv", csv="frame.csv", **settings)
    sslpipe.build_dataset("ours/set", frame, origin="csv", **settings)
    assert tree(tmp_path / "ours" / "set") == tree(tmp_path / "theirs" / "set")
    with pytest.raises(DataError, match=r"^the DataFrame has no column 'kind'.*label_column"):
        sslpipe.build_dataset("x", frame, image_column="file", label_column="kind")
    with pytest.raises(DataError, match=r"csv = 'frame\.csv' has no effect"):
        sslpipe.build_dataset("x", frame, csv="frame.csv")
