"""The graded sets: ten kinds of images that anyone can fetch offline from Debian.

    apt-get download openclipart-png tuxpaint-stamps-default gnome-icon-theme mate-icon-theme \
        oxygen-icon-theme adwaita-icon-theme wesnoth-1.16-data nexuiz-textures ufoai-textures \
        dataset-fashion-mnist fonts-dejavu-core fonts-liberation fonts-freefont-ttf mricron-data
    for deb in *.deb; do dpkg -x $deb debian; done
    python -m benchmarks.graded.data debian out/graded [--picture out/graded.jpg]

drawings: openclipart by folder. stamps: Tux Paint's by folder. icons: one icon name in several
themes. sprites, terrain: Wesnoth's units (every frame) and fields by folder and first word. walls:
Nexuiz's colour maps by folder. surfaces: UFO AI's colour maps by folder and first word. fashion:
Fashion-MNIST. glyphs: a letter or digit in every font of the packages. mri: slices of a head
(Colin 27, T1), 48 mm each way, in three planes; a class is the region of the atlas AAL in the
middle, left and right alike, and middles of one side are 24 mm apart.

Beside the ten, three of many classes of few images. characters: some 2,000 letters, digits and
signs, each in 4 drawings by the fonts. names: some 1,400 icon names, each drawn by 4 of THEMES
(whose packages it names). parts: the quarters of 2,000 colour maps of walls and surfaces, a class a
map. mri needs nibabel, names resvg-py. A set whose packages are not unpacked is named and left out.

Images of the same pixels count once in a set; of a class at most MOST are taken, and classes of
fewer than LEAST are left out. Classes are cut in the order of a hash of their names: half are
"train", on which spectra are learned without labels, half "test", which nothing saw. Settings are
chosen on the two sets that TUNING names. Transparent parts become white; larger images are reduced
to 224 px on the shorter side. With --jpeg-px they are reduced to that and written as JPEG of
quality 90, in a tenth of the bytes, for a machine to which little can be sent: the same images, but
scores differ a little from those of the whole sets.

Licences: as each package's copyright file says (PD, GPL, CC-BY-SA, MIT, BSD, OFL); nothing but
features and scores is kept, and the picture of the docs, of three sets that may be shown without
conditions: `--sets drawings fashion glyphs --picture docs/pictures/graded.jpg`.
"""

import argparse
import csv
import gzip
import hashlib
import itertools
import string
import unicodedata
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

from benchmarks.common import sslpipe

TUNING = ("drawings", "stamps")  # settings are chosen on these, and nowhere else
MOST, LEAST, MOST_CLASSES = 20, 4, 100
CHARACTERS, NAMES, PARTS = MANY = ("characters", "names", "parts")  # many classes of LEAST images
THEMES = {  # folder of an icon theme, and its package
    "gnome": "gnome-icon-theme",
    "oxygen": "oxygen-icon-theme",
    "Adwaita": "adwaita-icon-theme",
    "Tango": "tango-icon-theme",
    "elementary-xfce": "elementary-xfce-icon-theme",
    "Faenza": "faenza-icon-theme",
    "Moka": "moka-icon-theme",
    "Paper": "paper-icon-theme",
    "nuoveXT2": "lxde-icon-theme",
    "Papirus": "papirus-icon-theme",
    "breeze": "breeze-icon-theme",
    "Numix": "numix-icon-theme",
    "Numix-Circle": "numix-icon-theme-circle",
    "bloom": "deepin-icon-theme",
    "elementary": "elementary-icon-theme",
    "suru": "suru-icon-theme",
}
TEXTURES = {
    "games/nexuiz/data/textures.pk3": "nexuiz-textures",
    "games/ufoai/base/0textures.pk3": "ufoai-textures",
}
FONTS = {
    "fonts/truetype/dejavu": "fonts-dejavu-core",
    "fonts/truetype/liberation": "fonts-liberation",
    "fonts/truetype/freefont": "fonts-freefont-ttf",
}
UNITS = {"games/wesnoth/1.16/data/core/images": "wesnoth-1.16-data"}
NEEDS = {  # set -> what it is made of, below usr/share, and the package that has it
    "drawings": {"openclipart/png": "openclipart-png"},
    "stamps": {"tuxpaint/stamps": "tuxpaint-stamps-default"},
    "icons": {
        "icons/gnome": "gnome-icon-theme",
        "icons/mate": "mate-icon-theme",
        "icons/oxygen": "oxygen-icon-theme",
        "icons/Adwaita": "adwaita-icon-theme",
    },
    "sprites": UNITS,
    "terrain": UNITS,
    "walls": {"games/nexuiz/data/textures.pk3": "nexuiz-textures"},
    "surfaces": {"games/ufoai/base/0textures.pk3": "ufoai-textures"},
    "fashion": {"datasets/fashion-mnist": "dataset-fashion-mnist"},
    "glyphs": FONTS,
    "mri": {"mricron/templates": "mricron-data"},
    CHARACTERS: FONTS,
    NAMES: {f"icons/{theme}": package for theme, package in THEMES.items()},
    PARTS: TEXTURES,
}
SHORTER_PX = 224
MAPS = ("_norm", "_gloss", "_glow", "_bump", "_nm", "_sm", "_gm", "_luma", "_shirt", "_pants")
Classes = dict[str, list[Path]]
Rows = list[tuple[Path, str, str]]  # an image, its class and its split


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("debian", type=Path, help="where the packages are unpacked")
    parser.add_argument("out", type=Path, help="folder of the data sets")
    parser.add_argument("--jpeg-px", type=int, help="shorter side of small images, as JPEG")
    parser.add_argument("--sets", nargs="+", metavar="SET", help="only these")
    parser.add_argument("--picture", type=Path, help="show images of each set there, a row each")
    args = parser.parse_args()
    share, made = args.debian / "usr" / "share", args.out / "images"
    units = share / "games" / "wesnoth" / "1.16" / "data" / "core" / "images"
    themes = [share / "icons" / name for name in ("gnome", "mate", "oxygen", "Adwaita")]
    sets: dict[str, Callable[[], Classes]] = {
        "drawings": lambda: different_files(share / "openclipart" / "png", 2),
        "stamps": lambda: different_files(share / "tuxpaint" / "stamps"),
        "icons": lambda: same_names(themes),
        "sprites": lambda: by_first_word(different_files(units / "units")),
        "terrain": lambda: by_first_word(different_files(units / "terrain")),
        "walls": lambda: colour_maps(share / "games/nexuiz/data/textures.pk3", made / "walls"),
        "surfaces": lambda: by_first_word(
            colour_maps(share / "games/ufoai/base/0textures.pk3", made / "surfaces")
        ),
        "fashion": lambda: fashion_mnist(share / "datasets" / "fashion-mnist", made / "fashion"),
        "glyphs": lambda: glyphs(share / "fonts", made / "glyphs"),
        "mri": lambda: brain_regions(share / "mricron" / "templates", made / "mri"),
        CHARACTERS: lambda: characters(share / "fonts", made / CHARACTERS),
        NAMES: lambda: named([share / "icons" / theme for theme in THEMES], made / NAMES),
        PARTS: lambda: quarters(
            [
                *colour_maps(share / "games/nexuiz/data/textures.pk3", made / "walls").values(),
                *colour_maps(share / "games/ufoai/base/0textures.pk3", made / "surfaces").values(),
            ],
            made / PARTS,
        ),
    }
    wanted = [*(args.sets or sets)]
    left_out = []
    for name in wanted:
        if not (args.out / name / "dataset.json").is_file():
            if packages := missing_packages(name, share):
                print(f"{name} is left out: unpack {', '.join(packages)} into {args.debian}")
                left_out.append(name)
                continue
            if name in MANY:
                rows = rows_of(sets[name](), most=LEAST, most_classes=10 * MOST_CLASSES)
            else:
                rows = rows_of(sets[name]())
            if args.jpeg_px:
                rows = as_jpeg(rows, made / f"small-{name}", args.jpeg_px)
            options = ("--resize-px", str(SHORTER_PX))
            build(args.out / name, rows, "Debian", "see the packages", options=options)
    built = [name for name in wanted if name not in left_out]
    if args.picture and built:
        picture([args.out / f"{name}.csv" for name in built]).save(args.picture)
    if left_out and (args.sets or not built):
        raise SystemExit(1)


def missing_packages(name: str, share: Path) -> list[str]:
    """Return the packages of a set that are not unpacked below a folder, its usr/share."""
    return [package for inside, package in NEEDS[name].items() if not (share / inside).exists()]


# --- what other data sets of Debian's packages are made by, too


def different_files(root: Path, levels: int | None = None) -> Classes:
    """List the PNG files of each folder: no links, no second file of the same bytes.

    Folders more than `levels` down count as the one above them.
    """
    if not root.is_dir():
        raise SystemExit(f"{root} is no folder; unpack the package as `--help` says")
    seen: set[str] = set()
    folders: dict[str, list[tuple[str, Path]]] = {}
    for path in filter(Path.is_file, sorted(root.rglob("*.png"))):  # no link to another package
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        if not path.is_symlink() and sha256 not in seen:
            seen.add(sha256)
            folder = "/".join(path.parent.relative_to(root).parts[:levels])
            folders.setdefault(folder, []).append((sha256, path))
    return {folder: [path for _, path in sorted(files)] for folder, files in folders.items()}


def build(
    out: Path,
    rows: Sequence[tuple[Path | str, ...]],
    origin: str,
    license: str,
    columns: Sequence[str] = (),
    options: Sequence[str] = (),
) -> None:
    """List the images in a CSV file and build shards from it, with the command a user would use.

    rows: path, label and split of each image, then a value of each of `columns`.
    """
    out.mkdir(parents=True, exist_ok=True)
    listing = out.with_suffix(".csv")
    with open(listing, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("path", "label", "split", *columns))
        writer.writerows((Path(path).resolve(), *cells) for path, *cells in rows)
    words = ["--source", "csv", "--csv", listing, "--split-column", "split"]
    words += ["--background", "white", "--skip-bad", "--origin", origin, "--license", license]
    words += ["--columns", ",".join(columns)] if columns else []
    sslpipe("shards", "build", out, *words, *options)


# --- the sets


def picture(listings: list[Path], px: int = 84, count: int = 8) -> Image.Image:
    """Show the first image of each of the last classes of data sets, a row a listing."""
    sheet = Image.new("RGB", (px * (count + 1), px * len(listings)), "white")
    for row, listing in enumerate(listings):
        with open(listing, newline="", encoding="utf-8") as file:
            of_class = {line["label"]: line["path"] for line in reversed([*csv.DictReader(file)])}
        ImageDraw.Draw(sheet).text(
            (4, px * row + px // 2), listing.stem, fill="black", font_size=14
        )
        for place, path in enumerate([*of_class.values()][:count], start=1):
            with Image.open(path) as image:
                small = ImageOps.contain(image.convert("RGBA"), (px - 6, px - 6))
            left, top = (px - side for side in small.size)
            sheet.paste(small, (px * place + left // 2, px * row + top // 2), small)
    return sheet


def rows_of(classes: Classes, most: int = MOST, most_classes: int = MOST_CLASSES) -> Rows:
    """Give each image that is taken its class and its split, half of the classes each.

    Of a class at most `most` images are taken, and of classes at most `most_classes` a split.
    """
    large = {name: files for name, files in classes.items() if len(files) >= LEAST}
    seen: set[bytes] = set()
    rows: Rows = []
    taken = 0
    for name in sorted(large, key=lambda name: hashlib.sha256(name.encode()).digest()):
        different: dict[bytes, Path] = {}
        files = sorted(large[name], key=lambda path: hashlib.sha256(path.read_bytes()).digest())
        for path in files:
            if len(different) < most and (pixels := pixels_sha256(path)) not in seen:
                different.setdefault(pixels, path)
        if len(different) >= LEAST:
            seen |= different.keys()
            rows += [(path, name, ("train", "test")[taken % 2]) for path in different.values()]
            taken += 1
        if taken == 2 * most_classes:
            break
    return rows


def as_jpeg(rows: Rows, out: Path, shorter_px: int) -> Rows:
    """Write each image on white, its shorter side at most so long; too large ones are left out."""
    out.mkdir(parents=True, exist_ok=True)
    written: Rows = []
    for number, (path, name, split) in enumerate(rows):
        try:
            with Image.open(path) as image:
                rgba = image.convert("RGBA")
        except Image.DecompressionBombError:
            continue
        white = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
        factor = shorter_px / min(white.size)
        if factor < 1:
            white = white.resize([max(1, round(factor * side)) for side in white.size])
        white.save(out / f"{number:05}.jpg", quality=90)
        written.append((out / f"{number:05}.jpg", name, split))
    return written


def pixels_sha256(path: Path) -> bytes:
    """Hash an image's size and pixels; the bytes of one that is too large to decode."""
    try:
        with Image.open(path) as image:
            content = f"{image.size}".encode() + image.convert("RGBA").tobytes()
    except Image.DecompressionBombError:
        content = path.read_bytes()
    return hashlib.sha256(content).digest()


def by_first_word(folders: Classes) -> Classes:
    """Split folders by the first word of a file's name: elf-attack-2.png is an elf."""
    found: Classes = {}
    for folder, files in folders.items():
        for path in files:
            word = path.stem.replace("_", "-").split("-")[0].rstrip(string.digits)
            found.setdefault(f"{folder}/{word}", []).append(path)
    return found


def same_names(themes: Iterable[Path]) -> Classes:
    """Find each theme's largest file of an icon name."""
    found: Classes = {}
    for theme in themes:
        best: dict[str, Path] = {}
        for files in different_files(theme).values():
            for path in files:
                with Image.open(path) as image:
                    side = image.width if image.width == image.height else 0
                if 32 <= side <= 256 and "symbolic" not in path.stem:
                    known = best.get(path.stem)
                    if known is None or path.stat().st_size > known.stat().st_size:
                        best[path.stem] = path
        for name, path in best.items():
            found.setdefault(name, []).append(path)
    return {name: files for name, files in found.items() if len(files) >= LEAST}


def named(themes: Iterable[Path], out: Path, side: int = 112) -> Classes:
    """Find each theme's largest drawing of an icon name: its largest PNG, else its SVG, drawn."""
    import resvg_py

    found: Classes = {}
    for theme in themes:
        drawings: Classes = {}
        for path in sorted([*theme.rglob("*.png"), *theme.rglob("*.svg")]):
            if path.is_file() and not path.is_symlink() and "symbolic" not in path.stem:
                drawings.setdefault(path.stem, []).append(path)
        for name, files in drawings.items():
            found.setdefault(name, []).append(
                max(files, key=lambda path: (path.suffix == ".png", path.stat().st_size))
            )
    classes: Classes = {}
    for name, files in found.items():
        for place, path in enumerate(files if len(files) >= LEAST else []):
            image = path
            if path.suffix == ".svg":
                image = out / name / f"{place}.png"
                image.parent.mkdir(parents=True, exist_ok=True)
                try:
                    drawn = resvg_py.svg_to_bytes(
                        svg_path=str(path), width=side, height=side, skip_system_fonts=True
                    )
                except ValueError:  # no valid SVG
                    continue
                image.write_bytes(drawn)
            classes.setdefault(name, []).append(image)
    return classes


def colour_maps(pack: Path, out: Path) -> Classes:
    """Unpack the colour maps of a game's textures as PNG, by folder."""
    found: Classes = {}
    with zipfile.ZipFile(pack) as archive:
        for name in sorted(archive.namelist()):
            inside = Path(name)
            if inside.suffix not in (".jpg", ".tga", ".png") or inside.stem.endswith(MAPS):
                continue
            path = out / inside.with_suffix(".png")
            path.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(name) as file, Image.open(file) as image:
                image.convert("RGB").save(path)
            found.setdefault(str(inside.parent), []).append(path)
    return found


def quarters(folders: Iterable[list[Path]], out: Path, least_px: int = 256) -> Classes:
    """Cut each picture of at least `least_px` a side into its four quarters, a class a picture."""
    found: Classes = {}
    for number, path in enumerate(path for files in folders for path in files):
        with Image.open(path) as image:
            if min(image.size) < least_px:
                continue
            half = (image.width // 2, image.height // 2)
            for place, corner in enumerate(itertools.product((0, half[0]), (0, half[1]))):
                part = out / f"{number:05}-{place}.png"
                part.parent.mkdir(parents=True, exist_ok=True)
                left, top = corner
                image.crop((left, top, left + half[0], top + half[1])).save(part)
                found.setdefault(str(path.relative_to(out.parent).with_suffix("")), []).append(part)
    return found


def fashion_mnist(folder: Path, out: Path) -> Classes:
    """Write images of Fashion-MNIST's test split as PNG, 100 a class."""
    raw = [gzip.decompress(next(folder.glob(f"t10k-{k}*")).read_bytes()) for k in ("im", "la")]
    images = np.frombuffer(raw[0], np.uint8, offset=16).reshape(-1, 28, 28)
    labels = np.frombuffer(raw[1], np.uint8, offset=8)
    found: Classes = {}
    for label in range(10):
        for at in np.flatnonzero(labels == label)[:100]:
            path = out / f"{label}" / f"{at}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(images[at]).save(path)
            found.setdefault(f"class {label}", []).append(path)
    return found


def glyphs(fonts: Path, out: Path) -> Classes:
    """Draw letters and digits with every font, black on white, 64 px."""
    found: Classes = {}
    for number, font in enumerate(sorted(fonts.rglob("*.ttf"))):
        face = ImageFont.truetype(str(font), 48)
        for letter in string.ascii_letters + string.digits:
            image = Image.new("L", (64, 64), 255)
            ImageDraw.Draw(image).text((32, 32), letter, font=face, fill=0, anchor="mm")
            path = out / f"{ord(letter)}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path)
            found.setdefault(f"glyph {ord(letter)}", []).append(path)
    return found


def characters(fonts: Path, out: Path) -> Classes:
    """Draw the letters, numbers and signs below U+2C00 with every font that has them, 64 px."""
    found: Classes = {}
    for number, font in enumerate(sorted(fonts.rglob("*.ttf"))):
        face = ImageFont.truetype(str(font), 48)
        missing = draw_character(face, chr(0xFFFE)).tobytes()  # no font has this one
        for code in range(0x21, 0x2C00):
            if unicodedata.category(chr(code))[0] not in "LNS":
                continue
            image = draw_character(face, chr(code))
            if image.tobytes() == missing or image.getextrema() == (255, 255):
                continue
            path = out / f"{code:05}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path)
            found.setdefault(f"character {code:05}", []).append(path)
    return found


def draw_character(face: ImageFont.FreeTypeFont, character: str) -> Image.Image:
    """Draw one character, black on white, 64 px."""
    image = Image.new("L", (64, 64), 255)
    ImageDraw.Draw(image).text((32, 32), character, font=face, fill=0, anchor="mm")
    return image


def brain_regions(templates: Path, out: Path, side: int = 48, apart: int = 24) -> Classes:
    """Cut slices around points of each region of the atlas as PNG; sizes in mm, a voxel each."""
    import nibabel

    files: list[Any] = [nibabel.load(templates / f"{name}.nii.gz") for name in ("ch2", "aal")]
    head, atlas = (np.asanyarray(file.dataobj) for file in files)
    head, half, found = np.pad(head, side // 2), side // 2, Classes()
    for line in (templates / "aal.nii.txt").read_text().strip().splitlines():
        label, region, _ = line.split()
        name = f"region {region.removesuffix('_L').removesuffix('_R')}"
        voxels = np.argwhere(atlas == int(label))
        # the most central voxel, then the next one that is far enough from all before
        distances = ((voxels - voxels.mean(axis=0)) ** 2).sum(axis=1)
        voxels = voxels[np.argsort(distances, kind="stable")]
        while len(voxels):
            middle = voxels[0]
            voxels = voxels[((voxels - middle) ** 2).sum(axis=1) >= apart**2]
            for axis in range(3):
                box = [slice(at, at + 2 * half) for at in middle]  # of the padded head
                box[axis] = slice(middle[axis] + half, middle[axis] + half + 1)
                path = out / region / f"{'-'.join(map(str, middle))}-{'xyz'[axis]}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(np.rot90(head[tuple(box)].squeeze(axis))).save(path)
                found.setdefault(name, []).append(path)
    return found


if __name__ == "__main__":
    main()
