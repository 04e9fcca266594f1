"""What a shard holds of an image: pixels, bytes, what is lost."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from sslpipe.data.decode import BadSample, decode
from sslpipe.data.index import load_index
from sslpipe.sharding.members import (
    SMALL_PX,
    encode_png,
    png_bytes,
    to_member,
)
from tests.data.test_decode import png16
from tests.helpers.shards import grey, read_all, run


@pytest.mark.parametrize("form", ["BMP", "PPM", "TIFF", "GIF"])
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_other_formats_become_the_same_pixels_in_png(form, mode):
    image = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3) * 5).convert(mode)
    image.save(buffer := io.BytesIO(), form)
    kind, raw = to_member(buffer.getvalue())
    assert kind == "png"
    expected = np.asarray(Image.open(buffer).convert("RGB")).transpose(2, 0, 1)
    np.testing.assert_array_equal(decode(raw, 64), expected)


@pytest.mark.parametrize("kind", ["zTXt", "tEXt", "iTXt", "many", "profile"])
@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_long_texts_in_a_png_do_not_matter(tmp_path, kind, mode, capsys):
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, len(mode)), dtype=np.uint8)
    info = PngInfo()
    for number in range(80 if kind == "many" else 1):
        if kind == "iTXt":
            info.add_itxt("XML:com.adobe.xmp", "x y" * 10**6, zip=True)
        elif kind != "profile":
            info.add_text(f"t{number}", "x y" * 3 * 10**5, zip=kind != "tEXt")
    profile = {"icc_profile": bytes(4 * 10**6)} if kind == "profile" else {}
    (root := tmp_path / "in").mkdir()
    Image.fromarray(pixels).save(root / "a.png", pnginfo=info, **profile)
    raw = (root / "a.png").read_bytes()
    np.testing.assert_array_equal(decode(raw, 64), pixels[:, :, :3].transpose(2, 0, 1))
    for name, options in (("plain", ()), ("white", ("--background", "white"))):
        assert run("build", tmp_path / name, "--root", root, *options) == 0
        assert ("transparent" in capsys.readouterr().out) == (mode == "RGBA" and name == "plain")
    names = ",".join(mode.lower())
    words = ("build", tmp_path / "all", "--root", root, "--channels", names)
    assert run(*words, group="sensors") == 0


def test_a_sixteen_bit_tiff_keeps_its_high_byte():
    values = np.random.default_rng(0).integers(0, 65536, (4, 5)).astype(np.uint16)
    Image.fromarray(values).save(buffer := io.BytesIO(), "TIFF")
    np.testing.assert_array_equal(decode(to_member(buffer.getvalue())[1], 64)[0], values >> 8)


def test_transparent_parts_are_counted_once_and_get_the_colour_asked_for(tmp_path, capsys):
    (root := tmp_path / "in").mkdir()
    rgba = np.random.default_rng(0).integers(0, 256, (5, 7, 4), dtype=np.uint8)
    rgba[:, :, 3] = 255
    palette = Image.fromarray(np.array([[0, 1, 0], [1, 1, 0]], np.uint8))
    palette.putpalette([10, 20, 30, 200, 100, 50])
    Image.fromarray(rgba).save(root / "opaque.png")
    Image.fromarray(rgba[:, :, :3]).save(root / "rgb.png")
    Image.fromarray(rgba[:, :, :3]).save(root / "jpeg.jpg")
    palette.save(root / "palette.png")

    def built(name: str, *options: object) -> tuple[dict[str, bytes], list[str]]:
        assert run("build", "--root", root, tmp_path / name, *options) == 0
        lines = capsys.readouterr().out.splitlines()
        images = {key[9:]: raw for key, raw, _ in read_all(tmp_path / name, "train")}
        return images, [line for line in lines if "transparent parts" in line]

    assert built("solid")[1] == []
    rgba[:2, :, 3], rgba[2, :, 3] = 0, 99
    clear = Image.fromarray(rgba)
    for name in ("rgba.png", "webp.webp", "tiff.tiff"):
        clear.save(root / name, lossless=True)
    clear.convert("LA").save(root / "la.png")
    palette.save(root / "clear.png", transparency=0)
    palette.save(root / "gif.gif", transparency=0)
    images, (said,) = built("out")
    assert "transparent parts" in said
    assert ": 6 of 10, such as" in said
    assert images["rgba"] == (root / "rgba.png").read_bytes()
    # on a colour nothing is transparent
    orange, said = built("orange", "--background", "#ff8000")
    assert said == []
    share = rgba[:, :, 3:] / 255
    mixed = rgba[:, :, :3] * share + np.array([255, 128, 0]) * (1 - share)
    for name in ("rgba", "webp", "tiff"):
        assert np.abs(decode(orange[name], 64).transpose(1, 2, 0) - mixed).max() <= 0.5
    expected = np.array([[255, 128, 0], [200, 100, 50]])[[[0, 1, 0], [1, 1, 0]]]
    np.testing.assert_array_equal(decode(orange["clear"], 64).transpose(1, 2, 0), expected)
    for name in ("opaque.png", "rgb.png", "jpeg.jpg", "palette.png"):
        assert orange[name.partition(".")[0]] == (root / name).read_bytes()
    # the page says how to read a file as the shards have it
    line = "decode(raw, 4096, image_type=backbone.image_type)"
    assert f"`{line}`" in (Path(__file__).parents[2] / "docs" / "export.md").read_text()
    kind = load_index(tmp_path / "orange").image_type
    for path in sorted(root.glob("*.png")):
        again = decode(path.read_bytes(), 4096, image_type=kind)
        np.testing.assert_array_equal(again, decode(orange[path.stem], 64))


TWELVE_BITS = np.arange(24, dtype=np.uint16).reshape(4, 6) * 178  # to 4,094
INK = Image.new("CMYK", (6, 4), (9, 80, 7, 0))
PAGES = [Image.new("L", (4, 4), level) for level in (1, 2)]
DEEP = png16(np.full((4, 6, 3), 4094, ">u2"))
LOST = {
    "colour.png": (DEEP, {}, "16-bit values"),
    "grey.png": (Image.fromarray(TWELVE_BITS), {}, "16-bit values"),
    "grey.tif": (Image.fromarray(TWELVE_BITS), {}, "16-bit values"),
    "ink.jpg": (INK, {}, "CMYK"),
    "ink.tif": (INK, {}, "CMYK"),
    "pages.tif": (PAGES[0], {"save_all": True, "append_images": PAGES[1:]}, "several pages"),
}


@pytest.mark.promise(16)
@pytest.mark.parametrize("name", LOST)
def test_what_is_lost_of_images_that_are_not_8_bit_rgb_is_said(name, tmp_path, capsys):
    image, options, words = LOST[name]
    (tmp_path / "photos").mkdir()
    if isinstance(image, bytes):
        (tmp_path / "photos" / name).write_bytes(image)
    else:
        image.save(tmp_path / "photos" / name, **options)
    grey(tmp_path / "photos" / "plain.png", 3)
    for _ in range(2):  # a finished build says it again
        assert run("build", tmp_path / "set", "--root", tmp_path / "photos") == 0
        lines = [
            each for each in capsys.readouterr().out.splitlines() if ": 1 of 2, such as" in each
        ]
        (line,) = [each for each in lines if f"below {SMALL_PX} px" not in each]
        assert line.startswith(f"images: {words}")


@pytest.mark.parametrize("kind", [np.int32, np.float32])
def test_values_without_a_range_are_refused(kind):
    Image.fromarray(TWELVE_BITS.astype(kind)).save(file := io.BytesIO(), "TIFF")
    with pytest.raises(BadSample, match=r"no known range; scale"):
        to_member(file.getvalue())


@pytest.mark.parametrize("shape", [(1, 1), (28, 28, 1), (5, 7, 3), (300, 400, 3)])
def test_png_is_lossless_and_of_the_stated_length(shape):
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    raw = encode_png(pixels)
    image, channels = Image.open(io.BytesIO(raw)), 3 if shape[2:] == (3,) else 1
    image.load()
    assert image.mode == {3: "RGB", 1: "L"}[channels]
    np.testing.assert_array_equal(np.asarray(image).reshape(shape), pixels)
    assert len(raw) == png_bytes(shape[0], shape[1], channels)
