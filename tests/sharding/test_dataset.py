"""`sslpipe.build_dataset` against what `sslpipe shards build` writes, and what it refuses."""

from pathlib import Path

import pytest
from PIL import Image

import sslpipe
from sslpipe.errors import DataError
from tests.helpers.shards import run, tree, write_photos

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
        ({"background": "whit"}, "background 'whit'.*white"),
        ({"columns": "kind:txet"}, "columns 'kind:txet'.*text"),
        ({"name_pattern": "("}, "name-pattern"),
        ({"source": "floder"}, "source 'floder'.*folder"),
        ({"split_by": "path"}, "split-by path"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path, given, named):
    photos = write_photos(tmp_path / "photos")
    with pytest.raises(DataError, match=named):
        sslpipe.build_dataset(tmp_path / "set", root=photos, **given)
    assert not (tmp_path / "set").exists()
