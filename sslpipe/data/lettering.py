"""Names below the images of a picture: in a font that has their letters, else as near as can be."""

import unicodedata
from contextlib import suppress
from functools import cache

from PIL import ImageDraw, ImageFont

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont
# of many scripts; those that a machine has are tried after Pillow's own, which is Latin
FONTS = (
    "DejaVuSans.ttf",
    "NotoSans-Regular.ttf",
    "NotoSansCJK-Regular.ttc",
    "Arial Unicode.ttf",
)
NOT_A_LETTER = "\U0010ffff"


@cache
def fonts(size_px: int) -> list[Font]:
    """Return Pillow's own font, and those of FONTS that are installed."""
    known: list[Font] = [ImageFont.load_default(size_px)]
    for name in FONTS:
        with suppress(OSError):
            known.append(ImageFont.truetype(name, size_px))
    return known


def lettering(text: str, size_px: int) -> tuple[str, Font]:
    """Return what a picture shows of a text, and the font that has the most of its letters.

    A letter that the font lacks loses its accent; another one becomes "?".
    """
    letters = unicodedata.normalize("NFC", text)
    font = max(fonts(size_px), key=lambda each: sum(_has_glyph(each, one) for one in letters))
    return "".join(_nearest_glyph(font, letter) for letter in letters), font


def is_drawable(text: str, size_px: int) -> bool:
    """Return whether a picture shows a text as it is."""
    return lettering(text, size_px)[0] == unicodedata.normalize("NFC", text)


def draw_text(
    pen: ImageDraw.ImageDraw,
    place: tuple[int, int],
    text: str,
    *,
    fill: int | tuple[int, int, int],
    size_px: int,
    most_px: int | None = None,
) -> None:
    """Write a line of text; what is wider than `most_px` ends in "…"."""
    words, font = lettering(text, size_px)
    if most_px is not None and font.getlength(words) > most_px:
        while words and font.getlength(words + "…") > most_px:
            words = words[:-1]
        words += "…"
    pen.text(place, words, fill=fill, font=font)


@cache
def _has_glyph(font: Font, letter: str) -> bool:
    """Return whether a font has a letter; it draws others as it draws a noncharacter."""
    return bytes(font.getmask(letter)) != bytes(font.getmask(NOT_A_LETTER))


def _nearest_glyph(font: Font, letter: str) -> str:
    base = unicodedata.normalize("NFD", letter)[0]
    return next((each for each in (letter, base) if _has_glyph(font, each)), "?")
