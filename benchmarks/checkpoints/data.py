"""The three data sets of the table: clothes, drawings and icons, at about 40 px.

    apt-get download openclipart-png oxygen-icon-theme gnome-icon-theme mate-icon-theme \
        moka-icon-theme faenza-icon-theme paper-icon-theme
    for deb in *.deb; do dpkg -x $deb debian; done
    python -m benchmarks.checkpoints.data debian/usr/share out/checkpoints

clothes: the 10,000 images of Fashion-MNIST that this project ships, scattered in their frame.
drawings: openclipart; a class is a folder of the first level with at least LEAST_DRAWINGS drawings.
icons: the 48 px icons of six themes; a class is one of CATEGORIES.
Of drawings and icons, links and files of the same bytes are dropped, and a quarter, chosen by the
hash of the bytes, is the test split.
"""

import argparse
import hashlib
import subprocess
import sys
from pathlib import Path

from benchmarks.adapting.data import build, different_files

ROOT = Path(__file__).parents[2]
DRAWINGS_LEVELS, LEAST_DRAWINGS = 1, 100
CATEGORIES = ("actions", "apps", "devices", "mimetypes", "places", "status", "categories")
THEMES = ("oxygen", "gnome", "mate", "Moka", "Faenza", "Paper")
ICON_PX = "48x48"
SHORTER_PX = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("share", type=Path, help="usr/share of the unpacked packages")
    parser.add_argument("out", type=Path, help="folder of the three data sets")
    args = parser.parse_args()
    command = [sys.executable, "-m", "sslpipe", "shards", "build", str(args.out / "clothes")]
    command += ["--source", "idx", "--root", str(ROOT / "assets" / "fashion-mnist-10k")]
    command += ["--test-fraction", "0.25", "--scatter"]
    subprocess.run(command, check=True)
    drawings = different_files(args.share / "openclipart" / "png", DRAWINGS_LEVELS)
    named = {
        name if len(files) >= LEAST_DRAWINGS and name != "unsorted" else "": []
        for name, files in drawings.items()
    }
    for name, files in drawings.items():
        named[name if name in named else ""] += files
    make(args.out / "drawings", named, "Debian openclipart-png", "PD")
    make(
        args.out / "icons", icons(args.share / "icons"), "Debian icon themes", "GPL, LGPL, CC-BY-SA"
    )


def icons(root: Path) -> dict[str, list[Path]]:
    """List the icons of each category, of all themes; no two of the same bytes."""
    found: dict[str, list[Path]] = {name: [] for name in CATEGORIES}
    seen: set[str] = set()
    for theme in THEMES:
        for path in sorted((root / theme).rglob("*.png")):
            category = path.parent.name
            if ICON_PX not in path.parts or category not in found or path.is_symlink():
                continue
            sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
            if sha256 not in seen:
                seen.add(sha256)
                found[category].append(path)
    return found


def make(out: Path, classes: dict[str, list[Path]], origin: str, license: str) -> None:
    """Build the shards of train and test; class "" has no label, and is in train alone."""
    rows = []
    for label, paths in classes.items():
        for path in paths:
            in_test = bool(label) and hashlib.sha256(path.read_bytes()).digest()[0] < 64
            rows.append((path, label, "test" if in_test else "train"))
    build(out, rows, origin, license, options=("--resize-shorter", str(SHORTER_PX)))


if __name__ == "__main__":
    main()
