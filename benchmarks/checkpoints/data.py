"""The three data sets of the table: clothes, drawings and letters, at about 40 px.

    apt-get download openclipart-png fonts-averia-sans-gwf fonts-averia-serif-gwf fonts-cabin \
        fonts-cantarell fonts-comfortaa fonts-crosextra-carlito fonts-dejavu-extra fonts-dosis \
        fonts-dustin fonts-ebgaramond fonts-freefont-ttf fonts-jura fonts-lato fonts-liberation \
        fonts-linuxlibertine fonts-lmodern fonts-oldstandard fonts-opendyslexic fonts-open-sans \
        fonts-paratype fonts-quattrocento fonts-roboto-unhinted fonts-sil-gentium-basic \
        fonts-stix fonts-urw-base35 fonts-vollkorn
    for deb in *.deb; do dpkg -x $deb debian; done
    python -m benchmarks.checkpoints.data debian/usr/share out/checkpoints

clothes: the 10,000 images of Fashion-MNIST that this project ships, scattered in their frame; a
quarter is the test split.
drawings: openclipart; a class is a folder of the second level with at least LEAST_DRAWINGS
drawings, MOST_DRAWINGS of which, chosen by the hash of their bytes, have the label: half of them,
chosen likewise, are the test split. All others are in train, without a label. Links and files of
the same bytes are dropped.
letters: A to Z of each font, of any size, anywhere in its frame. Fonts whose names begin alike are
in one split.
"""

import argparse
import hashlib
import string
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from benchmarks.common import sslpipe
from benchmarks.graded.data import build, different_files

ROOT = Path(__file__).parents[2]
DRAWINGS_LEVELS, LEAST_DRAWINGS, MOST_DRAWINGS = 2, 40, 400
# of fonts that have no letters, letters in one case alone, or those of another font
NO_LETTERS = ("symbol", "dingbat", "math", "d050", "size", "variants", "integrals", "nonuni")
NAME_LETTERS = 6  # of a font's file: alike in one family
LETTER_PX, LEAST_LETTER_PX = 72, 8
SHORTER_PX = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("share", type=Path, help="usr/share of the unpacked packages")
    parser.add_argument("out", type=Path, help="folder of the three data sets")
    args = parser.parse_args()
    words = ["--source", "idx", "--root", ROOT / "assets" / "fashion-mnist-10k"]
    words += ["--test-fraction", 0.25, "--scatter"]
    sslpipe("shards", "build", args.out / "clothes", *words)
    folders = different_files(args.share / "openclipart" / "png", DRAWINGS_LEVELS)
    rows = drawing_rows(folders)
    options = ("--resize-shorter", str(SHORTER_PX))
    build(args.out / "drawings", rows, "Debian openclipart-png", "PD", options=options)
    rows = letter_rows([args.share / "fonts", args.share / "texmf"], args.out / "letter-images")
    build(args.out / "letters", rows, "Debian's fonts", "OFL, GPL, others")


def drawing_rows(folders: dict[str, list[Path]]) -> list[tuple[Path, str, str]]:
    """Give each drawing its label, "" for none, and its split."""
    rows = []
    for folder, paths in folders.items():
        is_class = "/" in folder and len(paths) >= LEAST_DRAWINGS  # else of the first level
        for place, path in enumerate(paths):  # in the order of their hashes
            labelled = is_class and place < MOST_DRAWINGS
            split = "test" if labelled and place % 2 else "train"
            rows.append((path, folder if labelled else "", split))
    return rows


def letter_rows(roots: list[Path], out: Path) -> list[tuple[Path, str, str]]:
    """Draw the letters of all fonts; a third of the families is the test split."""
    out.mkdir(parents=True, exist_ok=True)
    rows = []
    fonts = (path for root in roots for path in root.rglob("*.[ot]tf") if not path.is_symlink())
    for path in sorted(fonts, key=lambda path: path.name):
        name = path.name.lower()
        if any(word in name for word in NO_LETTERS):
            continue
        in_test = hashlib.sha256(name[:NAME_LETTERS].encode()).digest()[0] % 3 == 0
        font = ImageFont.truetype(str(path), LETTER_PX)
        if font.getbbox("A")[3] - font.getbbox("A")[1] < LEAST_LETTER_PX:
            continue  # the font has no letters
        for letter in string.ascii_uppercase:
            file = out / f"{path.stem}-{letter}.png"
            drawn(letter, font, file.name).save(file)
            rows.append((file, letter, "test" if in_test else "train"))
    return rows


def drawn(letter: str, font: ImageFont.FreeTypeFont, name: str) -> Image.Image:
    """Draw a letter in half to all of the frame, somewhere in it, black on white.

    Args:
        letter: The letter.
        font: Its font.
        name: Of the image; size and place are functions of it.
    """
    rng = np.random.default_rng(list(hashlib.sha256(name.encode()).digest()))
    left, top, right, bottom = font.getbbox(letter)
    side = round(max(right - left, bottom - top) * rng.uniform(1, 2))
    x, y = rng.uniform(0, 1, 2) * (side - (right - left), side - (bottom - top))
    image = Image.new("RGB", (side, side), "white")
    ImageDraw.Draw(image).text((x - left, y - top), letter, font=font, fill="black")
    return image.resize((SHORTER_PX, SHORTER_PX), Image.Resampling.LANCZOS)


if __name__ == "__main__":
    main()
