"""sharding.build: what is kept and what is written anew; where to look instead of --root."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sslpipe.data.decode import BadSample, decode
from sslpipe.data.index import load_index
from sslpipe.sharding.members import flatten, lost_in, to_member
from sslpipe.sharding.sources import Images
from sslpipe.sharding.splits import cut_test
from sslpipe.sharding.writer import SplitImages
from tests.data.test_decode import png16
from tests.sharding.test_shards import BUILD, add, error_of, jpeg, photos, read_all, run, tree
from tests.sharding.test_sources import png

__all__ = ["photos"]


def test_a_test_fraction_after_the_first_build_says_what_is_kept_and_what_is_written_anew(
    photos, tmp_path, capsys
):
    out, later = tmp_path / "set", tmp_path / "later"
    assert run("build", out, "--root", photos, *BUILD) == 0
    png(later / "cat" / "x.png", 3)
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
    out.mkdir()
    with tarfile.open(out / name, "w") as tar:
        add(tar, "a.jpg", jpeg(0))
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


# --- --root


def test_a_root_without_images_says_what_to_use(tmp_path, capsys):
    (tmp_path / "a.csv").write_bytes(b"")
    for root, reason in ((tmp_path / "a.csv", "is not a folder"), (tmp_path, "has no images")):
        message = error_of(capsys, "build", tmp_path / "out", "--root", root)
        assert f"{root} {reason}" in message
        assert "--source" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [(), ("--no-labels",), ("--part", "1/1")])
def test_files_that_are_no_images_are_counted_by_extension(tmp_path, capsys, options, monkeypatch):
    root = tmp_path / "in"
    others = ("list.txt", "cat/a.OGG", "cat/deep/b.ogg", "dog/c.ogg", "dog/c.txt", "dog/LICENSE")
    others = (*others, "a.x1", "a.x2", "a.x3", "cat/.hidden.ogg", ".git/d.ogg")
    for name in ("cat/deep/1.png", "dog/2.png"):
        png(root / name, 9)
    for name in others:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(b"")
    monkeypatch.chdir(root)
    assert run("build", tmp_path / "out", "--root", ".", *options) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("ignored")]
    assert said == ["ignored 9 files: .ogg 3, .txt 2, no extension 1, .x1 1, .x2 1, ..."]


def test_files_beside_the_splits_are_counted_and_without_any_nothing_is_said(tmp_path, capsys):
    root = tmp_path / "in"
    for split in ("train", "test"):
        png(root / split / "cat" / "1.png", 9)
    assert run("build", tmp_path / "plain", "--root", root) == 0
    assert "ignored" not in capsys.readouterr().out
    png(root / "loose.png", 9)  # in no split
    (root / "train" / "cat" / "1.wav").write_bytes(b"")
    assert run("build", tmp_path / "out", "--root", root) == 0
    assert "ignored 2 files: .png 1, .wav 1\n" in capsys.readouterr().out
    assert run("build", tmp_path / "test", "--root", root, "--split", "test") == 0
    assert "ignored 1 files: .png 1\n" in capsys.readouterr().out


# --- --background


def test_transparent_parts_are_counted_once_and_get_the_colour_asked_for(tmp_path, capsys):
    root = tmp_path / "in"
    root.mkdir()
    rgba = np.random.default_rng(0).integers(0, 256, (5, 7, 4), dtype=np.uint8)
    rgba[:, :, 3] = 255
    palette = Image.fromarray(np.array([[0, 1, 0], [1, 1, 0]], np.uint8))
    palette.putpalette([10, 20, 30, 200, 100, 50])
    Image.fromarray(rgba).save(root / "opaque.png")
    Image.fromarray(rgba[:, :, :3]).save(root / "rgb.png")
    Image.fromarray(rgba[:, :, :3]).save(root / "jpeg.jpg")
    palette.save(root / "palette.png")
    words = ["build", "--root", root, "--samples-per-shard", "3"]

    def said(name: str, *options: object) -> list[str]:
        assert run(*words, tmp_path / name, *options) == 0
        lines = capsys.readouterr().out.splitlines()
        return [line.partition(",")[0] for line in lines if "transparent parts" in line]

    def written(name: str) -> dict[str, bytes]:
        return {key[9:]: raw for key, raw, _ in read_all(tmp_path / name, "train")}

    assert said("solid") == []
    rgba[:2, :, 3], rgba[2, :, 3] = 0, 99
    clear = Image.fromarray(rgba)
    for name in ("rgba.png", "webp.webp", "tiff.tiff"):
        clear.save(root / name, lossless=True)
    clear.convert("LA").save(root / "la.png")
    palette.save(root / "clear.png", transparency=0)
    palette.save(root / "gif.gif", transparency=0)
    wanted = ["6 of 10 images have transparent parts"]
    assert said("out") == wanted
    assert said("out") == wanted  # nothing is left to write
    # parts say their own, merging says all
    parts = [said("parts", "--part", part) for part in ("1/2", "2/2")]
    assert sum(int(line.split()[0]) for lines in parts for line in lines) == 6
    assert run("merge", tmp_path / "parts") == 0
    assert f"{wanted[0]}, which show" in capsys.readouterr().out
    # on a colour nothing is transparent; without it the bytes are as they were
    assert said("orange", "--background", "#ff8000") == []
    orange = written("orange")
    share = rgba[:, :, 3:] / 255
    mixed = rgba[:, :, :3] * share + np.array([255, 128, 0]) * (1 - share)
    for name in ("rgba", "webp", "tiff"):
        assert np.abs(decode(orange[name], 64).transpose(1, 2, 0) - mixed).max() <= 0.5
    expected = np.array([[255, 128, 0], [200, 100, 50]])[[[0, 1, 0], [1, 1, 0]]]
    np.testing.assert_array_equal(decode(orange["clear"], 64).transpose(1, 2, 0), expected)
    for name in ("opaque.png", "rgb.png", "jpeg.jpg", "palette.png"):
        assert orange[name.partition(".")[0]] == (root / name).read_bytes()
    assert written("out")["rgba"] == (root / "rgba.png").read_bytes()
    # the page says how to read a file as the shards have it
    line = "decode(flatten(Path(name).read_bytes(), (255, 255, 255)), 4096)"
    assert f"`{line}`" in (Path(__file__).parents[2] / "docs" / "export.md").read_text()
    again = decode(flatten((root / "rgba.png").read_bytes(), (255, 128, 0)), 4096)
    np.testing.assert_array_equal(again, decode(orange["rgba"], 64))


@pytest.mark.parametrize(
    ("sizes", "fraction", "wanted"),
    [([4] * 25, 0.1, 10), ([4] * 25, 0.9, 90), ([1] * 7, 0.2, 1), ([1] * 7, 0.9, 6)],
)
def test_small_classes_share_a_test_split_drawn_over_all_images(sizes, fraction, wanted):
    labels = np.repeat(np.arange(len(sizes)), sizes)
    images = Images([""] * len(labels), labels, labels, (), lambda _: b"")
    whole = SplitImages(images, np.arange(len(labels)), "train")
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
        png(tmp_path / "photos" / f"c{number // 4}" / f"{number}.png", number)
    words = ["--root", tmp_path / "photos", "--test-fraction", "0.1"]
    assert run("build", tmp_path / "set", *words) == 0
    assert "split test: 4 samples (10.0%), " in capsys.readouterr().out
    message = error_of(capsys, "build", tmp_path / "none", *words[:3], "0.001")
    assert "leaves a split empty" in message
    assert "a fraction from 0.025" in message


TWELVE_BITS = np.arange(24, dtype=np.uint16).reshape(4, 6) * 178  # to 4,094
INK = Image.new("CMYK", (6, 4), (9, 80, 7, 0))
PAGES = [Image.new("L", (4, 4), level) for level in (1, 2)]
LOST = {
    "grey.png": (Image.fromarray(TWELVE_BITS), {}, "have 16-bit values"),
    "grey.tif": (Image.fromarray(TWELVE_BITS), {}, "have 16-bit values"),
    "ink.jpg": (INK, {}, "are CMYK"),
    "ink.tif": (INK, {}, "are CMYK"),
    "pages.tif": (PAGES[0], {"save_all": True, "append_images": PAGES[1:]}, "have several pages"),
}


@pytest.mark.parametrize("name", LOST)
def test_what_is_lost_of_images_that_are_not_8_bit_rgb_is_said(name, tmp_path, capsys):
    image, options, words = LOST[name]
    (tmp_path / "photos").mkdir()
    image.save(tmp_path / "photos" / name, **options)
    png(tmp_path / "photos" / "plain.png", 3)
    for _ in range(2):  # a finished build says it again
        assert run("build", tmp_path / "set", "--root", tmp_path / "photos") == 0
        (line,) = [each for each in capsys.readouterr().out.splitlines() if " of 2 images" in each]
        assert line.startswith(f"1 of 2 images {words}")


def test_colour_of_16_bits_is_found() -> None:
    (line,) = lost_in(png16(np.full((4, 6, 3), 4094, ">u2")), on_background=False)
    assert line.startswith("have 16-bit values")


@pytest.mark.parametrize("kind", [np.int32, np.float32])
def test_values_without_a_range_are_refused(kind: type) -> None:
    file = io.BytesIO()
    Image.fromarray(TWELVE_BITS.astype(kind)).save(file, "TIFF")
    with pytest.raises(BadSample, match=r"no known range; scale"):
        to_member(file.getvalue())
