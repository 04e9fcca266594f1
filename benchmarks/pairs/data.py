"""The data set of the table: what eight vendors drew for the same icon names, from Debian.

    apt-get download papirus-icon-theme numix-icon-theme-circle moka-icon-theme faenza-icon-theme \
        oxygen-icon-theme breeze-icon-theme elementary-xfce-icon-theme deepin-icon-theme
    for deb in *.deb; do dpkg -x $deb debian; done
    python -m benchmarks.pairs.data debian/usr/share/icons out/pairs

A theme is a vendor. A thing is one icon name together with the names that any vendor gives the same
drawing (links, and files of the same bytes), and theirs in turn, so that no drawing stands under
two things; a drawing under more than 3 names stands for whatever has none of its own ("any text",
"any device") and is left out, as it would chain thousands of names to one. Of each thing and theme
one drawing of each size is taken: large is the file nearest to 96 px, small the one nearest to 32
px if that is another one; with several drawings that of most names. Symbolic icons, panels, cursors
and sizes below 32 px are not. Files of the same bytes in two themes are left out, and then things
of one theme only. Things are cut by a hash of their names: 65 % are "train", 10 % "val", on which
settings are chosen, and 25 % "test". Columns: theme, icon (the thing; the label, too) and size.
SVG is rendered in 96 or 32 px by resvg (PyPI's resvg-py); transparent parts become white, larger
images are reduced to 96 px.

Licences: GPL-2+ to GPL-3+, LGPL-2+ to LGPL-3+, CC-BY-SA-2.0 and -4.0, as each package's copyright
file says; nothing but features and scores is kept.
"""

import argparse
import hashlib
import os
import re
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from benchmarks.graded.data import build

THEMES = {  # folder -> vendor
    "Papirus": "papirus",
    "Numix-Circle": "numix-circle",
    "Moka": "moka",
    "Faenza": "faenza",
    "oxygen": "oxygen",
    "breeze": "breeze",
    "elementary-xfce": "elementary",
    "bloom": "deepin",
}
SIDES_PX = {"large": 96, "small": 32}
SCALABLE_PX = 96
MOST_NAMES = 3  # of a drawing; with more it is no picture of a thing
SPLITS = (("train", 0.65), ("val", 0.75), ("test", 1.0))  # upper ends
SKIPPED = {"symbolic", "cursors", "panel", "sources", "animations", "notifications", "applets"}
Name = tuple[str, str]  # of an icon, and of a size
Files = dict[Name, Path]


class Drawing(NamedTuple):
    """One vendor's drawing of a thing, in one size."""

    thing: str
    theme: str
    size: str
    path: Path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("icons", type=Path, help="usr/share/icons of the unpacked packages")
    parser.add_argument("out", type=Path, help="folder of the data set")
    args = parser.parse_args()
    missing = [folder for folder in THEMES if not (args.icons / folder).is_dir()]
    if missing:
        raise SystemExit(f"{args.icons} has no folder {missing[0]}; unpack the packages first")
    found = drawings({theme: files_of(args.icons / name) for name, theme in THEMES.items()})
    rendered = args.out / "rendered"
    with ThreadPoolExecutor() as pool:
        paths = list(pool.map(lambda drawing: as_image(drawing, rendered), found))
    rows = [
        (path, drawing.thing, split_of(drawing.thing), *drawing[:3])
        for drawing, path in zip(found, paths, strict=True)
        if path is not None
    ]
    print(f"{paths.count(None)} files cannot be rendered")
    build(
        args.out / "icons",
        rows,
        "Debian's icon themes",
        "GPL, LGPL, CC-BY-SA",
        columns=("icon", "theme", "size"),
        options=("--group-by", "icon", "--resize-px", str(SIDES_PX["large"])),
    )


def size_of(folders: tuple[str, ...]) -> int:
    """Read the side in px from a file's folders, 48x48 or 48@2x say; 0 if none tells."""
    for name in folders:
        if name.startswith("scalable"):
            return SCALABLE_PX
        match = re.fullmatch(r"(\d+)(?:x\d+)?(?:@(\d)x)?", name)
        if match:
            return int(match[1]) * int(match[2] or 1)
    return 0


def files_of(root: Path) -> Files:
    """Find the file of each icon and size: the nearest to its px, an SVG before a PNG.

    Links are resolved; an icon whose files are one has no small size.
    """
    best: dict[Name, tuple[tuple[int, bool, str], Path]] = {}
    for path in root.rglob("*"):
        folders = path.parent.relative_to(root).parts
        px = size_of(folders)
        drawn = path.suffix in (".svg", ".png") and not path.stem.endswith("-symbolic")
        if not drawn or px < min(SIDES_PX.values()) or SKIPPED & set(folders):
            continue
        if not path.is_file():  # a broken link
            continue
        for size, side_px in SIDES_PX.items():
            key = (abs(px - side_px), path.suffix != ".svg", str(path))
            if (path.stem, size) not in best or key < best[path.stem, size][0]:
                best[path.stem, size] = (key, path)
    files = {name: Path(os.path.realpath(path)) for name, (_, path) in best.items()}
    return {
        (icon, size): path
        for (icon, size), path in files.items()
        if size == "large" or path != files[icon, "large"]
    }


def drawings(themes: Mapping[str, Files]) -> list[Drawing]:
    """Take one drawing of each thing, theme and size, of the things of two themes or more."""
    # what each name looks like, and under how many names it stands
    sha256 = {
        (theme, icon, size): hashlib.sha256(path.read_bytes()).hexdigest()
        for theme, files in themes.items()
        for (icon, size), path in files.items()
    }
    named = {(theme, icon, drawn) for (theme, icon, _), drawn in sha256.items()}
    names_of = Counter((theme, drawn) for theme, _, drawn in named)
    in_themes = Counter(drawn for _, drawn in names_of)
    usable = {
        key: drawn
        for key, drawn in sha256.items()
        if names_of[key[0], drawn] <= MOST_NAMES and in_themes[drawn] == 1
    }
    # things: names joined by their drawings; called by the name that most themes have
    parents: dict[str, str] = {}

    def root_of(node: str) -> str:
        while parents.setdefault(node, node) != node:
            parents[node] = parents[parents[node]]
            node = parents[node]
        return node

    for (_, icon, _), drawn in usable.items():
        parents[root_of(f"icon {icon}")] = root_of(drawn)
    themes_of = Counter(icon for _, icon in {key[:2] for key in usable})
    things: dict[str, str] = {}  # root -> name
    for icon in sorted(themes_of, key=lambda icon: (-themes_of[icon], icon)):
        things.setdefault(root_of(f"icon {icon}"), icon)
    # one drawing of each: that of most names, then by its name; none twice
    chosen: dict[tuple[str, str, str], Drawing] = {}
    taken: set[str] = set()
    for theme, icon, size in sorted(usable, key=lambda key: (-names_of[key[0], usable[key]], key)):
        drawn = usable[theme, icon, size]
        thing = things[root_of(f"icon {icon}")]
        if (thing, theme, size) not in chosen and drawn not in taken:
            taken.add(drawn)
            path = themes[theme][icon, size]
            chosen[thing, theme, size] = Drawing(thing, theme, size, path)
    vendors = Counter(thing for thing, _ in {key[:2] for key in chosen})
    return [chosen[key] for key in sorted(chosen) if vendors[key[0]] >= 2]


def split_of(thing: str) -> str:
    """Draw a thing's split by the hash of its name."""
    place = int.from_bytes(hashlib.sha256(thing.encode()).digest()[:8], "big") / 2**64
    return next(split for split, end in SPLITS if place < end)


def as_image(drawing: Drawing, folder: Path) -> Path | None:
    """Render a drawing's SVG into `folder`, or give its PNG; None if it cannot be rendered."""
    if drawing.path.suffix == ".png":
        return drawing.path
    import resvg_py

    path = folder / drawing.size / drawing.theme / f"{drawing.thing}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        png = resvg_py.svg_to_bytes(
            svg_path=str(drawing.path), width=SIDES_PX[drawing.size], skip_system_fonts=True
        )
    except ValueError:
        return None
    path.write_bytes(bytes(png))
    return path


if __name__ == "__main__":
    main()
