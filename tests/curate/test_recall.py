"""What a copy lost by being saved, resized, lit, framed or hidden by others is made up for."""

import io
from contextlib import closing

import numpy as np
import pytest
from PIL import Image, ImageDraw

from sslpipe.curate.duplicates import compare_all, find_duplicates
from sslpipe.curate.losses import _may_be_framed
from sslpipe.curate.scan import scan_pictures
from sslpipe.curate.thumbnails import thumbnail
from sslpipe.curate.verify import compare

NEAR, SURE = 0.0125, 0.003  # limits: a pair may be one picture, or is one


def forms(rng, cells, px):
    """(px, px) of about [-1, 1]: so many random hills and hollows along a side."""
    small = Image.fromarray(rng.uniform(-1, 1, (cells, cells)).astype(np.float32))
    return np.asarray(small.resize((px, px), Image.Resampling.BICUBIC))


def garments(count, own=0.06, level=60, hills=20):
    """As many pictures of 28 px, alike but for their `own` share of 255 levels, on black."""
    rng = np.random.default_rng(0)
    place = np.linspace(-0.5, 0.5, 28)
    body = (np.abs(place)[:, None] < 0.42) & (np.abs(place) < 0.3)
    common = level + hills * forms(rng, 7, 28)
    greys = [body * (common + 255 * own * forms(rng, 14, 28)) for _ in range(count)]
    return [np.uint8(np.clip(grey, 0, 255))[..., None].repeat(3, 2) for grey in greys]


def outline(px, seed, lines=9, width=3):
    """A drawing of black lines on white, (px[1], px[0], 3)."""
    rng = np.random.default_rng(seed)
    image = Image.new("RGB", px, "white")
    low, high = (np.array([px]) * share for share in (0.1, [[0.9, 0.75]]))
    points = [tuple(point) for point in rng.integers(low, high, (lines, 2)).tolist()]
    ImageDraw.Draw(image).line([*points, points[0]], fill=(0, 0, 0), width=width)
    return np.asarray(image)


def saved(pixels, quality):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=quality)
    return np.asarray(Image.open(file))


def lit(pixels, gain):
    return np.uint8(np.minimum(np.rint(pixels * gain), 255))


def rest_of(one, other):
    """What is unexplained of a picture by another."""
    samples = scan_pictures([one, other])
    with closing(samples.pictures.thumbs):
        verdicts = compare_all(samples, np.array([[0, 1]]), num_workers=0)
    return 1 - float(verdicts.best()[0])


def test_a_small_picture_saved_at_low_quality_is_known_from_its_like():
    shown = garments(6)
    for quality in (30, 40):
        copies = [saved(each, quality) for each in shown]
        assert max(map(rest_of, shown, copies)) < SURE
        assert min(map(rest_of, shown, copies[1:])) > 2 * NEAR


@pytest.mark.parametrize("px", [80, 96])
def test_what_jpeg_took_of_a_dull_picture_larger_than_a_thumbnail_is_made_up_for(px):
    rng = np.random.default_rng(0)
    greys = [60 + 15 * forms(rng, 6, px) + 20 * forms(rng, px // 4, px) for _ in range(4)]
    shown = [np.uint8(np.rint(grey))[..., None].repeat(3, 2) for grey in greys]
    copies = [saved(each, quality) for each, quality in zip(shown, (30, 31, 36, 40), strict=True)]
    assert max(map(rest_of, shown, copies)) < SURE
    assert min(map(rest_of, shown, copies[1:])) > 4 * NEAR


@pytest.mark.parametrize("how", ["BILINEAR", "BICUBIC", "LANCZOS"])
def test_a_small_picture_that_was_halved_is_known_from_its_like(how):
    shown = garments(4)
    filters = Image.Resampling[how]
    copies = [np.asarray(Image.fromarray(each).resize((14, 14), filters)) for each in shown]
    assert max(map(rest_of, shown, copies)) < SURE
    assert min(map(rest_of, shown, copies[1:])) > 2 * SURE
    assert max(rest_of(c, s[:, ::-1]) for c, s in zip(copies, shown, strict=True)) < SURE


def of_four(pixels, px):
    """Resize without a filter: each pixel is made of the four that are nearest to it."""
    step = len(pixels) / px
    image, matrix = Image.fromarray(pixels), (step, 0, 0, 0, step, 0)
    how = Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR
    return np.asarray(image.transform((px, px), *how))


FEWER = {
    "the first of two": lambda p: p[::2, ::2],
    "the second of two": lambda p: p[1::2, 1::2],
    "the nearest": lambda p: np.asarray(Image.fromarray(p).resize((17, 17), 0)),
    "of the nearest four": lambda p: of_four(p, 16),
}


@pytest.mark.parametrize("how", FEWER)
def test_pixels_that_a_small_picture_has_lost_without_a_filter_are_made_up_for(how):
    shown = garments(4)
    copies = [np.ascontiguousarray(FEWER[how](each)) for each in shown]
    assert max(map(rest_of, shown, copies)) < SURE
    assert min(map(rest_of, shown, copies[1:])) > 2 * SURE


def test_what_lost_pixels_is_compared_once_more_whichever_way_seemed_better(monkeypatch):
    """Of trousers at half their size the mirror image is often the more like one."""

    def other_way(pairs, pictures):
        verdicts = compare(pairs, pictures)
        return verdicts._replace(mirrored=~verdicts.mirrored)

    monkeypatch.setattr("sslpipe.curate.duplicates.compare", other_way)
    shown = garments(4)
    assert max(rest_of(each, np.ascontiguousarray(each[::2, ::2])) for each in shown) < SURE / 3


@pytest.mark.parametrize("how", ["BILINEAR", "BICUBIC", "LANCZOS", "BOX"])
@pytest.mark.parametrize("share", [0.2, 0.5])
def test_dots_that_a_halved_picture_has_lost_are_made_up_for(how, share):
    rng = np.random.default_rng(0)
    dots = np.zeros((4, 28, 28), np.uint8)
    dots[:, 2:26, 6:22] = 255 * (rng.random((4, 24, 16)) < share)
    shown = [each[..., None].repeat(3, 2) for each in dots]
    filters = Image.Resampling[how]
    copies = [np.asarray(Image.fromarray(each).resize((14, 14), filters)) for each in shown]
    assert max(map(rest_of, shown, copies)) < NEAR
    assert min(map(rest_of, shown, copies[1:])) > 4 * NEAR


def test_colours_that_jpeg_drops_make_no_other_picture_and_a_tint_does():
    rng = np.random.default_rng(0)
    tints = np.stack([forms(rng, 9, 256) for _ in range(3)], 2)
    dull = 128 + 22 * forms(rng, 9, 256)[..., None] + 6 * tints
    stripes = 25 * (np.arange(256)[:, None] // 64 % 2)
    tinted = dull + stripes[..., None] * np.array([0, 0, 1])
    dull, tinted = (np.uint8(np.rint(each)) for each in (dull, tinted))
    assert rest_of(dull, saved(dull, 30)) < SURE
    assert rest_of(dull, tinted) > 4 * NEAR


def test_a_light_drawing_whose_whites_are_cut_off_is_found():
    rng = np.random.default_rng(3)
    image = Image.new("RGB", (64, 64), "white")
    pen = ImageDraw.Draw(image)
    for _ in range(40):
        x, y = rng.integers(0, 56, 2).tolist()
        wide, high = rng.integers(2, 12, 2).tolist()
        pen.rectangle((x, y, x + wide, y + high), fill=tuple(rng.integers(170, 250, 3).tolist()))
    for _ in range(6):
        x, y = rng.integers(0, 56, 2).tolist()
        pen.line((x, y, x + 9, y + 5), fill=(120, 60, 60))
    drawing = np.asarray(image)
    assert rest_of(drawing, lit(drawing, 1.1)) < SURE
    assert rest_of(lit(drawing, 1.1), drawing[:, ::-1]) < SURE


def test_a_dark_picture_whose_blacks_are_cut_off_is_found():
    shown = garments(4)
    copies = [np.uint8(np.maximum(each - 25.5, 0)) for each in shown]
    assert max(map(rest_of, shown, copies)) < NEAR
    assert max(rest_of(c, s[:, ::-1]) for c, s in zip(copies, shown, strict=True)) < NEAR
    assert min(map(rest_of, shown, copies[1:])) > 4 * NEAR


@pytest.mark.parametrize("seed", range(4))
def test_a_border_of_the_grounds_own_colour_is_found(seed):
    drawing = outline((256, 256), seed)
    for px in (5, 8, 14):
        framed = np.pad(drawing, ((px, px), (px, px), (0, 0)), constant_values=255)
        assert rest_of(drawing, framed) < SURE
        assert rest_of(framed, drawing) < SURE


@pytest.mark.parametrize("how", ["BILINEAR", "BICUBIC", "LANCZOS", "BOX"])
@pytest.mark.parametrize("level", [0, 128, 255])
def test_a_small_picture_reduced_with_its_border_is_known_from_its_like(how, level):
    shown, copies = garments(4), []
    for each in shown:
        framed = np.pad(each, ((1, 1), (1, 1), (0, 0)), constant_values=level)
        reduced = Image.fromarray(framed).resize((28, 28), Image.Resampling[how])
        copies.append(np.asarray(reduced))
    assert max(map(rest_of, shown, copies)) < SURE
    if how != "BOX":  # which is not the same in a mirror
        assert max(rest_of(c, s[:, ::-1]) for c, s in zip(copies, shown, strict=True)) < SURE
    assert min(map(rest_of, shown, copies[1:])) > 2 * SURE


@pytest.mark.parametrize("px", [5, 8, 12])
def test_a_border_is_seen_that_is_wide_beside_an_icon(px):
    rng = np.random.default_rng(0)
    icon = np.uint8(130 + 120 * forms(rng, 4, px))[..., None].repeat(3, 2)
    framed = Image.fromarray(np.pad(icon, ((1, 1), (1, 1), (0, 0))))
    reduced = np.asarray(framed.resize((px, px), Image.Resampling.BILINEAR))
    pair = np.stack([thumbnail(icon), thumbnail(reduced)])[None]
    found = _may_be_framed(pair, np.full((1, 2, 2), px), np.ones(1, bool))
    assert found.tolist() == [[0, 0, 1]]  # of the first picture, a px


@pytest.mark.parametrize("seed", range(4))
def test_a_text_across_a_narrow_picture_is_a_small_one(seed):
    drawing = outline((100, 256), seed)
    image = Image.fromarray(drawing)
    ImageDraw.Draw(image).text((2, 226), "photo", fill=(0, 0, 0), font_size=26)
    assert rest_of(drawing, np.asarray(image)) < SURE / 2


@pytest.mark.parametrize("word", ["abc", "proof", "sample"])
def test_a_white_text_on_a_dark_picture_hides_no_more_than_its_place(word):
    rng = np.random.default_rng(0)
    for seed in range(4):
        dark = np.uint8(np.rint(30 + 20 * forms(rng, 6, 256)))[..., None].repeat(3, 2)
        image = Image.fromarray(dark)
        ImageDraw.Draw(image).text((20, 30 + 45 * seed), word, "white", font_size=26)
        assert rest_of(dark, np.asarray(image)) < SURE / 2
        other = np.uint8(np.rint(30 + 20 * forms(rng, 6, 256)))[..., None].repeat(3, 2)
        assert rest_of(other, np.asarray(image)) > 4 * NEAR


def test_copies_do_not_hide_a_further_one_among_pictures_that_are_alike():
    shown = garments(60, own=0.1, level=120, hills=60)
    one = shown[0]
    copies = [np.ascontiguousarray(one[:, ::-1]), lit(one, 0.9), lit(one, 0.95)]
    pictures = [*shown, *copies, one[3:, :25]]
    samples = scan_pictures(pictures)
    with closing(samples.pictures.thumbs):
        pairs = find_duplicates(samples, num_workers=0).pairs
    found = set(zip(pairs.first.tolist(), pairs.second.tolist(), strict=True))
    assert {(0, 60 + k) for k in range(4)} <= found
    assert all(first in {0, *range(60, 64)} for first, _ in found), "no other one is"
