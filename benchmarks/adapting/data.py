"""The two data sets of the table: drawings of Debian's openclipart-png, stamps of Tux Paint.

    apt-get download openclipart-png tuxpaint-stamps-default
    for deb in *.deb; do dpkg -x $deb debian; done
    python -m benchmarks.adapting.data debian/usr/share out/adapting

openclipart: a class is a folder, with what lies below it from the second level on (the folders of
cards in four styles, or of flags by continent, hold the same drawings), that has at least 20
different drawings: links and files of the same bytes are dropped; "unsorted" is no class. They are
cut in the order of a hash of their names: the first 13 are "val", on which settings are chosen, the
next 20 "test", the others "train", together with all smaller folders. Of a class in val and test at
most 100 drawings are taken, by a hash of their bytes, and the rest is not used at all. Pretraining
uses no label of "train".
stamps: a class is a folder with at least 5 different stamps; one split, "test".
Transparent parts become white; images longer than 128 px on the shorter side are reduced to it.

Licences: openclipart-png is dedicated to the public domain (Creative Commons Public Domain
Dedication, its copyright file); tuxpaint-stamps-default is GPL-2, of which nothing but features
is kept.
"""

import argparse
import csv
import hashlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

Classes = dict[str, list[Path]]  # the files of each folder, in the order of their hashes

VAL_CLASSES, TEST_CLASSES = 13, 20
LEVELS = 2  # of folders that make a class of drawings
LEAST_DRAWINGS, MOST_DRAWINGS, LEAST_STAMPS = 20, 100, 5
SHORTER_PX = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("share", type=Path, help="usr/share of the unpacked packages")
    parser.add_argument("out", type=Path, help="folder of the two data sets")
    args = parser.parse_args()
    drawings = different_files(args.share / "openclipart" / "png", LEVELS)
    options = ("--resize-shorter", str(SHORTER_PX))
    rows = openclipart_rows(drawings)
    build(args.out / "openclipart", rows, "Debian openclipart-png", "PD", options=options)
    stamps = different_files(args.share / "tuxpaint" / "stamps")
    rows = [
        (path, folder, "test")
        for folder, paths in stamps.items()
        if len(paths) >= LEAST_STAMPS
        for path in paths
    ]
    build(args.out / "stamps", rows, "Debian tuxpaint-stamps-default", "GPL-2", options=options)


def different_files(root: Path, levels: int | None = None) -> Classes:
    """List the PNG files of each folder: no links, no second file of the same bytes.

    Args:
        root: Folder of the folders.
        levels: Folders further down count as the one above them; None: all count for themselves.
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


def openclipart_rows(folders: Classes) -> list[tuple[Path, str, str]]:
    """Give each drawing that is used its class ("" for small folders) and its split."""
    classes = sorted(
        (
            name
            for name, files in folders.items()
            if len(files) >= LEAST_DRAWINGS and name != "unsorted"
        ),
        key=lambda name: hashlib.sha256(name.encode()).digest(),
    )
    held_out = dict.fromkeys(classes[:VAL_CLASSES], "val")
    held_out |= dict.fromkeys(classes[VAL_CLASSES : VAL_CLASSES + TEST_CLASSES], "test")
    rows = []
    for folder, files in folders.items():
        split = held_out.get(folder, "train")
        used = files if split == "train" else files[:MOST_DRAWINGS]
        label = folder if folder in classes else ""
        rows += [(path, label, split) for path in used]
    return rows


def build(
    out: Path,
    rows: Sequence[tuple[Path | str, ...]],
    origin: str,
    license: str,
    columns: Sequence[str] = (),
    options: Sequence[str] = (),
) -> None:
    """List the images in a CSV file and build shards from it, with the command a user would use.

    Args:
        out: Folder of the data set.
        rows: Path, label and split of each image, then a value of each column.
        origin: Where the images are from.
        license: Theirs.
        columns: What else is known of an image.
        options: More of the command.
    """
    out.mkdir(parents=True, exist_ok=True)
    listing = out.with_suffix(".csv")
    with open(listing, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("path", "label", "split", *columns))
        writer.writerows((Path(path).resolve(), *cells) for path, *cells in rows)
    words = ["--source", "csv", "--csv", str(listing), "--split-column", "split"]
    words += ["--background", "white", "--skip-bad", "--origin", origin, "--license", license]
    words += ["--columns", ",".join(columns)] if columns else []
    command = [sys.executable, "-m", "sslpipe", "shards", "build", str(out), *words, *options]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
