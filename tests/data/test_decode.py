"""sslpipe.data.decode: equal to Pillow's pixels, upright, bounded, and every fault a BadSample."""

import io
import subprocess
import sys
import time
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from sslpipe.data.decode import MAX_BYTES, BadSample, decode, rgb_pixels
from tests.helpers.runs import ROOT

CANVAS_PX = 256


def photo(width=64, height=48, seed=0):
    coarse = np.random.default_rng(seed).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image, form, **options):
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def by_pillow(raw):
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(raw)))
    if image.mode == "P":
        image = image.convert("RGBA")
    return np.asarray(image.convert("RGB")).transpose(2, 0, 1)


@pytest.mark.parametrize(
    ("mode", "form"),
    [
        *((mode, "PNG") for mode in ("1", "L", "LA", "P", "RGB", "RGBA")),
        *((mode, "JPEG") for mode in ("L", "RGB", "CMYK")),
        *((mode, "WEBP") for mode in ("RGB", "RGBA")),
    ],
)
def test_every_mode_gives_the_rgb_pixels_of_pillow(mode, form):
    raw = encoded(photo().convert(mode), form)
    pixels = decode(raw, CANVAS_PX)
    assert pixels.dtype == np.uint8
    assert pixels.shape == (3, 48, 64)
    assert pixels.transpose(1, 2, 0).flags.c_contiguous  # channels last
    np.testing.assert_array_equal(pixels, by_pillow(raw))
    within = memoryview(b"before" + raw + b"after")[6:-5]  # as it lies in a shard
    np.testing.assert_array_equal(decode(within, CANVAS_PX), pixels)


def chunk(kind, content):
    checksum = zlib.crc32(kind + content).to_bytes(4, "big")
    return len(content).to_bytes(4, "big") + kind + content + checksum


def png_parts(width, height, bits, colours, data):
    """Signature, header, pixels and end of a PNG."""
    header = np.array([width, height], ">u4").tobytes() + bytes([bits, colours, 0, 0, 0])
    chunks = ((b"IHDR", header), (b"IDAT", data), (b"IEND", b""))
    return [b"\x89PNG\r\n\x1a\n", *(chunk(*each) for each in chunks)]


def png16(values):
    """A 16-bit PNG, which Pillow does not write. values: (h, w, C) big-endian uint16."""
    height, width, channels = values.shape
    rows = b"".join(b"\0" + row.tobytes() for row in values)
    return b"".join(png_parts(width, height, 16, {1: 0, 3: 2}[channels], zlib.compress(rows)))


def test_levels_of_16_bits_keep_their_high_byte_and_those_of_no_known_range_are_refused():
    """Of Pillow's modes: I;16, I of a PPM, which is scaled to 16 bits, I and F of anything else."""
    levels = np.array([[0, 255, 256], [1000, 40000, 65535]], np.uint16)
    grey = Image.fromarray(levels)
    ppm = Image.open(io.BytesIO(b"P5 3 2 65535 " + levels.astype(">u2").tobytes()))
    assert (grey.mode, ppm.mode) == ("I;16", "I")
    for image in (grey, ppm):
        np.testing.assert_array_equal(rgb_pixels(image), np.stack([levels >> 8] * 3, axis=2))
    for dtype in (np.int32, np.float32):
        with pytest.raises(BadSample, match="no known range"):
            rgb_pixels(Image.fromarray(levels.astype(dtype)))


@pytest.mark.parametrize("scale", [1, 2, 4, 8])
def test_a_large_jpeg_is_decoded_at_the_least_of_the_fast_scales_that_fills_the_canvas(scale):
    raw = encoded(photo().resize((250, 171)), "JPEG")
    pillow = Image.open(io.BytesIO(raw))
    pillow.draft("RGB", (250 // scale, 171 // scale))
    expected = np.asarray(pillow).transpose(2, 0, 1)  # libjpeg's own scaled decode
    canvas_px = expected.shape[2]
    np.testing.assert_array_equal(decode(raw, canvas_px), expected)
    reduced = decode(raw, canvas_px - 20)  # between two scales: decoded at the larger, then resized
    assert reduced.shape[2] == canvas_px - 20
    fine = decode(raw, 250)
    assert np.abs(reduced.mean((1, 2)) - fine.mean((1, 2))).max() < 1


def test_a_jpeg_that_the_fast_decoder_refuses_is_left_to_pillow():
    raw = encoded(photo(), "JPEG")
    damaged = raw[:-2] + b"\x00\x00" + raw[-2:]  # stray bytes before the end: a warning, no more
    np.testing.assert_array_equal(decode(damaged, CANVAS_PX), by_pillow(damaged))


def test_alpha_is_dropped_and_hidden_colour_kept():
    rgba = np.zeros((4, 5, 4), np.uint8)
    rgba[..., 0] = 200  # alpha 0: invisible red
    expected = np.broadcast_to(np.array([200, 0, 0], np.uint8)[:, None, None], (3, 4, 5))
    raw = encoded(Image.fromarray(rgba), "PNG")
    np.testing.assert_array_equal(decode(raw, CANVAS_PX), expected)
    # a palette with transparency decodes without a warning
    raw = encoded(photo().convert("P"), "PNG", transparency=bytes(range(256)))
    np.testing.assert_array_equal(decode(raw, CANVAS_PX), by_pillow(raw))


@pytest.mark.parametrize("channels", [1, 3])
def test_sixteen_bit_png_keeps_the_high_byte(channels):
    values = np.random.default_rng(1).integers(0, 65536, (6, 7, channels)).astype(">u2")
    eight = decode(png16(values), CANVAS_PX).transpose(1, 2, 0)[..., :channels]
    np.testing.assert_array_equal(eight, values >> 8)
    assert np.abs(eight - values / 257).max() < 1
    stretched = (np.arange(42).reshape(6, 7, 1) * 6 * 257).astype(">u2").repeat(channels, axis=2)
    exact = decode(png16(stretched), CANVAS_PX).transpose(1, 2, 0)[..., :channels]
    np.testing.assert_array_equal(exact, stretched // 257)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_exif_orientation_is_applied_as_by_pillow(form, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    raw = encoded(photo(31, 20), form, exif=exif)
    np.testing.assert_array_equal(decode(raw, CANVAS_PX), by_pillow(raw))


def test_a_large_jpeg_is_exif_oriented_too():
    exif = Image.Exif()
    exif[0x0112] = 6
    raw = encoded(photo(640, 320), "JPEG", exif=exif)
    small, full = decode(raw, 64), decode(raw, 640)
    assert small.shape == (3, 64, 32)
    mean = full.reshape(3, 64, 10, 32, 10).mean(axis=(2, 4))
    assert np.abs(small - mean).mean() < 6


@pytest.mark.parametrize(
    ("width", "height", "expected"),
    [
        (256, 100, (100, 256)),
        (257, 257, (256, 256)),
        (1000, 500, (128, 256)),
        (300, 1, (1, 256)),
        (3, 2000, (256, 1)),
        (1, 1, (1, 1)),
    ],
)
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_the_longer_side_fits_the_canvas_and_the_aspect_is_kept(form, width, height, expected):
    assert decode(encoded(photo(width, height), form), CANVAS_PX).shape == (3, *expected)


@pytest.mark.parametrize("form", ["JPEG", "PNG"])
@pytest.mark.parametrize("side", [90, 300])  # JPEG: below and above twice the canvas
def test_reduction_is_antialiased(form, side):
    """Lines of one pixel become an even grey, where a plain bilinear sample would alias."""
    stripes = np.zeros((side, side), np.uint8)
    stripes[:, ::2] = 255
    small = decode(encoded(Image.fromarray(stripes), form, quality=100), 48).astype(int)
    assert np.abs(small[:, :, 2:-2] - 127.5).max() < 40


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "empty"),
        (b"<!DOCTYPE html><p>404", "HTML"),
        (b"\x80\x04\x95pickle", "not a JPEG, PNG or WebP"),
        (b"GIF89a" + bytes(100), "not a JPEG, PNG or WebP"),
        (b"\xff\xd8\xff", "truncated"),
        (b"\x89PNG\r\n\x1a\n", "truncated"),
        (b"RIFF\0\0\0\0WEBPVP8X", "truncated"),
        (b"RIFF\0\0\0\0WEBPJUNK" + bytes(20), "first chunk"),
    ],
)
def test_what_is_no_image_says_why(raw, reason):
    with pytest.raises(BadSample, match=reason):
        decode(raw, CANVAS_PX)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("canvas_px", [16, 256])
def test_a_truncated_image_is_bad_wherever_it_is_cut(form, canvas_px):
    raw = encoded(photo(), form)
    for share in (0.05, 0.3, 0.6, 0.9):
        with pytest.raises(BadSample):
            decode(raw[: int(share * len(raw))], canvas_px)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_random_damage_gives_an_image_or_bad_sample_and_no_crash(form):
    """800 damaged files a format, of which some crash other decoders."""
    whole = [encoded(photo(), form), encoded(photo(), form, exif=b"Exif\0\0II*\0\x08\0\0\0\x01\0")]
    bad = 0
    for seed in range(800):
        random = np.random.default_rng(seed)
        raw = bytearray(whole[seed % 2])
        for at in random.integers(2, len(raw), 3):
            raw[at] = random.integers(256)
        try:
            assert decode(bytes(raw), (16, 256)[seed % 4 // 2]).shape[0] == 3
        except BadSample:
            bad += 1
    assert bad > 50


@pytest.mark.parametrize("header", ["png", "jpg", "webp"])
def test_a_decompression_bomb_is_refused_by_its_header(header):
    if header == "png":
        raw = b"".join(png_parts(14000, 14000, 8, 0, b""))
    elif header == "jpg":
        whole = bytearray(encoded(photo(), "JPEG"))
        at = whole.index(b"\xff\xc0")
        whole[at + 5 : at + 9] = (60000).to_bytes(2, "big") * 2
        raw = bytes(whole)
    else:
        raw = b"RIFF\0\0\0\0WEBPVP8X" + bytes(8) + b"\xff\x3f\0\xff\x3f\0" + bytes(50)
    start = time.perf_counter()
    with pytest.raises(BadSample, match="limit"):
        decode(raw, CANVAS_PX)
    assert time.perf_counter() - start < 0.1


def test_too_many_bytes_are_refused():
    with pytest.raises(BadSample, match="bytes"):
        decode(encoded(photo(), "PNG") + bytes(MAX_BYTES), CANVAS_PX)


def test_a_second_png_header_cannot_hide_a_bomb():
    start, header, *rest = png_parts(4, 4, 8, 0, zlib.compress(bytes(20)))
    second = png_parts(60000, 60000, 8, 0, b"")[1]
    with pytest.raises(BadSample):
        decode(b"".join([start, header, second, *rest]), CANVAS_PX)


def peak_of(code, *arguments):
    """What a process adds to its peak memory by running code, in bytes."""
    text = (
        "import re, sys, torch\n"
        "from sslpipe.data.decode import decode\n"
        "from sslpipe.data.image_type import RGB8\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from pathlib import Path\n"
        "status = Path('/proc/self/status')\n"
        "peak = lambda: int(re.search(r'VmHWM:\\s*(\\d+)', status.read_text())[1])\n"
        "torch.set_num_threads(1)\n"
        "raw = open(sys.argv[1], 'rb').read()\n"
        "decode(open(sys.argv[2], 'rb').read(), 64)\n"
        f"before = peak()\n{code}\nprint((peak() - before) * 1024)"
    )
    done = subprocess.run(
        [sys.executable, "-c", text, *map(str, arguments)],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_large_pngs_are_decoded_within_one_budget_by_any_number_of_threads(tmp_path):
    """5,800 px squares, half of the limit: two at once, whatever the number of threads."""
    Image.new("RGB", (5800, 5800), (9, 8, 7)).save(tmp_path / "large.png", compress_level=1)
    Image.new("RGB", (70, 70), (9, 8, 7)).save(tmp_path / "small.png")
    files = (tmp_path / "large.png", tmp_path / "small.png")
    one = peak_of("decode(raw, 64)", *files)
    four = "with ThreadPoolExecutor(4) as pool: list(pool.map(lambda _: decode(raw, 64), range(4)))"
    assert peak_of(four, *files) < 3 * one


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_transparent_images_are_mixed_in_little_memory(tmp_path):
    Image.new("RGBA", (4000, 4000), (9, 8, 7, 99)).save(tmp_path / "a.png", compress_level=1)
    dropped = peak_of("decode(raw, 64)", tmp_path / "a.png", tmp_path / "a.png")
    mixed = peak_of(
        "decode(raw, 64, image_type=RGB8.on((255, 0, 0)))", tmp_path / "a.png", tmp_path / "a.png"
    )
    assert mixed < dropped + 4000 * 4000 * 8
