"""Drawings that differ in one small part are not one picture."""

import numpy as np
import pytest
from PIL import Image, ImageDraw

from tests.curate.test_duplicates import found_in

LARGE = 1024  # px; drawn at this size and reduced, as drawings are


def canvas(colour="white"):
    image = Image.new("RGB", (LARGE, LARGE), colour)
    return image, ImageDraw.Draw(image)


def face(mouth, *, filled=True, colour="black", width=36):
    image, pen = canvas()
    pen.ellipse((60, 60, 964, 964), fill="gold" if filled else None, outline="black", width=24)
    for x in (330, 620):
        pen.ellipse((x, 320, x + 80, 430), fill="black")
    box, angles = {
        "smile": ((300, 420, 724, 780), (20, 160)),
        "frown": ((300, 620, 724, 980), (200, 340)),
        "none": ((0, 0, 1, 1), (0, 0)),
    }[mouth]
    pen.arc(box, *angles, fill=colour, width=width)
    return image


def plate(digits, size=230):
    image, pen = canvas("steelblue")
    pen.rectangle((90, 330, 934, 700), fill="white", outline="black", width=20)
    pen.text((140, 380), digits, fill="black", font_size=size)
    return image


def sign(kind, size=1.0):
    """Two houses with a small sign in a corner."""
    image, pen = canvas("lightblue")
    pen.polygon([(100, 500), (350, 250), (600, 500)], fill="firebrick")
    pen.rectangle((150, 500, 550, 900), fill="tan", outline="black", width=14)
    pen.rectangle((650, 550, 930, 900), fill="olive", outline="black", width=14)
    box = (760, 120, 760 + 130 * size, 120 + 130 * size)
    if kind == "circle":
        pen.ellipse(box, fill="red")
    elif kind == "triangle":
        pen.polygon([(box[0], box[3]), (box[2], box[3]), ((box[0] + box[2]) / 2, 120)], fill="red")
    return image


def person(skirt):
    """Signs of a man and a woman, without the skirt of one."""
    image, pen = canvas("navy")
    pen.ellipse((432, 90, 592, 250), fill="white")
    pen.rectangle((400, 280, 624, 640), fill="white")
    for x in (410, 530):
        pen.rectangle((x, 640, x + 84, 940), fill="white")
    if skirt:
        pen.polygon([(400, 520), (624, 520), (740, 740), (284, 740)], fill="white")
    return image


def marked(level):
    """A picture with a small mark at its edge, as a page number is."""
    image = sign("none")
    ImageDraw.Draw(image).rectangle((0, 940, 90, 1023), fill=(level, level, level))
    return image


PAIRS = {
    "smile and frown": (face("smile"), face("frown")),
    "smile and frown in outline": (face("smile", filled=False), face("frown", filled=False)),
    "smile and no mouth": (face("smile"), face("none")),
    "thin smile and frown": (face("smile", width=22), face("frown", width=22)),
    "brown smile and frown": (face("smile", colour="sienna"), face("frown", colour="sienna")),
    "a digit": (plate("1283"), plate("1288")),
    "a small sign and none": (sign("circle"), sign("none")),
    "two small signs": (sign("circle", 1.4), sign("triangle", 1.4)),
    "a mark at the edge": (marked(0), marked(230)),
    "a smaller sign": (sign("circle", 0.7), sign("none")),
    "man and woman": (person(skirt=False), person(skirt=True)),
}


def shown(image, px):
    return np.asarray(image.resize((px, px), Image.Resampling.LANCZOS))


SLOW = [pytest.param(px, marks=pytest.mark.slow) for px in (48, 96, 256)]


@pytest.mark.parametrize("px", [28, 64, 128, *SLOW])
@pytest.mark.parametrize("name", PAIRS)
def test_drawings_that_differ_in_a_small_part_are_two(name, px):
    one, other = (shown(image, px) for image in PAIRS[name])
    rng = np.random.default_rng(0)
    others = [shown(Image.fromarray(rng.integers(0, 256, (6, 6, 3), np.uint8)), px) for _ in "1234"]
    # a copy of one of them does not join both
    _, groups = found_in([one, other, *others, shown(PAIRS[name][0], px // 2)])
    assert groups[0] != groups[1] or groups[0] < 0
    assert groups[6] < 0 or groups[6] != groups[1]
    if px >= 64:  # else half of its pixels are too few
        assert groups[6] == groups[0] >= 0
