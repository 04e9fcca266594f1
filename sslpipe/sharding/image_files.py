"""Files of a folder by their names: which are images, which are not, and how those are read."""

import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".png", ".webp", ".ppm", ".pgm", ".bmp", ".tif", ".tiff", ".gif")
)


def images_under(folder: Path, ignored: Counter[str] | None = None) -> list[Path]:
    """List the image files of a folder and its folders, sorted; hidden ones are skipped.

    Args:
        folder: Where they are.
        ignored: Other files are counted here, by suffix.
    """
    paths = []
    for parent, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        here = [path for name in files if is_image(path := Path(parent) / name)]
        if ignored is not None and len(here) < len(files):
            count_others(ignored, {Path(parent) / name for name in files}.difference(here))
        paths += here
    return sorted(paths)


def count_others(ignored: Counter[str], paths: Iterable[Path]) -> None:
    """Count the files among some paths by suffix; hidden ones are nobody's data."""
    files = (path for path in paths if path.is_file() and not path.name.startswith("."))
    ignored.update(path.suffix.lower() for path in files)


def is_image(path: Path) -> bool:
    """Say whether a file is named as an image, and not hidden."""
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()


def folders_in(folder: Path) -> list[Path]:
    """List the folders in a folder, sorted, but the hidden ones."""
    return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def suffixes() -> str:
    """Name SUFFIXES in a message."""
    return " ".join(sorted(SUFFIXES))


def use_of(path: Path) -> str:
    """Say how a file that is no image is read; '' for all others."""
    name = path.name.lower()
    if name.endswith((".csv", ".tsv")):
        return f"for a table of files give --source csv --csv {path}"
    if name.endswith(".parquet"):
        return f"for parquet files give --source parquet --root {path.parent}"
    if re.search(r"idx[13]-ubyte(\.gz)?$", name):
        return f"for MNIST's files give --source idx --root {path.parent}"
    if re.search(r"\.(tar|tgz|tbz2|txz)$|\.tar\.", name):
        return (
            f"tars of webdataset are ready: sslpipe shards index {path.parent}; others, and "
            f"compressed ones: sslpipe shards repack {path} OUT"
        )
    return "unpack it first" if name.endswith((".zip", ".7z", ".rar")) else ""
