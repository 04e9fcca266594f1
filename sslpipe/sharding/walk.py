"""List the files below a folder: images, and why each other file is none."""

import os
from collections import deque
from pathlib import Path
from typing import NamedTuple

from sslpipe.sharding.sources import SUFFIXES, is_image, read_file

POINTER_BYTES = 1024  # at most, of what git-lfs and git-annex keep in place of a file
_POINTERS = (b"version https://git-lfs", b"/annex/objects/", b"version https://hawser")
# folders and files that systems and programs make, in lower case
_SYSTEM = frozenset(
    (
        *("@eadir", "#recycle", "#snapshot", "@recycle", "@recently-snapshot", "@tmp"),
        *("$recycle.bin", "system volume information", "lost+found", "__macosx", "__pycache__"),
        *("thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r"),
    )
)
_SYSTEM_BEGINS = ("._", ".@", ".DS_Store", ".thumbnails")
OWN = "folders of data sets that sslpipe writes"
OTHERS = "files of other kinds"
NOWHERE = "links that lead nowhere"
_OF_SYSTEM = "files and folders of a system or NAS"


class Entry(NamedTuple):
    """A file or folder below the root: an image, or why it is skipped."""

    path: Path
    reason: str = ""  # why it is skipped
    kind: str = ""  # of what is skipped, such as a suffix
    is_absent: bool = False  # an image, or a folder, that should be there and cannot be read
    is_link: bool = False


class Walked(NamedTuple):
    """What lies below a folder, sorted."""

    entries: list[Entry]
    folders: list[Path]  # all that were opened, but the root

    def images(self, suffixes: tuple[str, ...]) -> list[Entry]:
        """Return what is named as an image, also where it cannot be read."""
        return [
            entry
            for entry in self.entries
            if (entry.is_absent or not entry.reason) and is_image(entry.path, suffixes)
        ]


def walk(
    root: Path, *, suffixes: tuple[str, ...] = SUFFIXES, without: Path | None = None
) -> Walked:
    """List the files below a folder, each real folder once: links may lead anywhere, also up.

    Args:
        root: The folder.
        suffixes: How names of images end.
        without: A folder that is skipped.
    """
    # never read: the folders above the root, to which links may lead, and the one that is skipped
    seen = {_identity(parent) for parent in root.resolve().parents}
    if without is not None and without.is_dir() and not without.samefile(root):
        seen.add(_identity(without))
    entries = list[Entry]()
    folders = list[Path]()
    # folders to open, the linked ones last
    real = deque([root])
    links = deque[Path]()
    while real or links:
        is_link = not real
        folder = (links if is_link else real).popleft()
        try:
            identity = _identity(folder)
            with os.scandir(folder) as entries_of_folder:
                children = sorted(entries_of_folder, key=lambda child: child.name)
        except OSError as error:
            reason = f"folders that cannot be opened ({error.strerror})"
            entries.append(Entry(folder, reason, is_absent=True))
            continue
        if identity in seen:
            reason = "links to folders that are read already, or hold this one"
            entries.append(Entry(folder, reason if is_link else OWN))
            continue
        seen.add(identity)
        names = {child.name for child in children}
        if folder != root and _is_data_set(names):
            entries.append(Entry(folder, OWN))
            continue
        folders.append(folder)
        for child in children:
            path = folder / child.name
            if child.name.lower() in _SYSTEM or child.name.startswith(_SYSTEM_BEGINS):
                entries.append(Entry(path, _OF_SYSTEM, child.name))
            elif child.name.startswith("."):
                entries.append(Entry(path, "hidden files and folders"))
            elif _is_folder(child):
                (links if child.is_symlink() else real).append(path)
            else:
                entries.append(_look_at(path, child, names, suffixes))
    return Walked(sorted(entries, key=lambda entry: entry.path), sorted(folders[1:]))


def _is_data_set(names: set[str]) -> bool:
    """Return whether files of these names are a data set that a build has written, or begun."""
    is_finished = "dataset.json" in names and any(n.endswith(".offsets.npy") for n in names)
    is_begun = ".build" in names and not any(is_image(Path(name)) for name in names)
    return is_finished or is_begun


def _is_folder(child: "os.DirEntry[str]") -> bool:
    try:
        return child.is_dir()
    except OSError:  # links in a circle
        return False


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _look_at(
    path: Path, child: "os.DirEntry[str]", names: set[str], suffixes: tuple[str, ...]
) -> Entry:
    """Judge a file by its name, and where that is an image's by what lies there."""
    is_link = child.is_symlink()
    suffix = path.suffix.lower()
    if suffix == ".dvc":  # stands for an image, or a folder, that may not be beside it
        stem = path.with_suffix("")
        if stem.name not in names and (not stem.suffix or is_image(stem, suffixes)):
            reason = "files and folders whose content DVC has not fetched"
            return Entry(stem, reason, is_absent=True)
    if not is_image(path, suffixes):
        if is_link and not path.exists():
            return Entry(path, NOWHERE, suffix)
        suffix = ".nii.gz" if path.name.lower().endswith(".nii.gz") else suffix
        return Entry(path, OTHERS, suffix or "no extension")
    try:
        status = child.stat()
    except OSError as error:
        reason = "links without content" if is_link else f"files that fail ({error.strerror})"
        return Entry(path, reason, is_absent=True)
    if not child.is_file():
        return Entry(path, "devices and pipes")
    if not os.access(path, os.R_OK):
        return Entry(path, "files without permission", is_absent=True)
    if is_pointer(path, status.st_size):
        reason = "pointers of git-lfs or git-annex without content"
        return Entry(path, reason, is_absent=True)
    return Entry(path, is_link=is_link)


def is_pointer(path: Path, size: int) -> bool:
    """Return whether a file of a size is what git-lfs or git-annex keep in place of it."""
    return size <= POINTER_BYTES and read_file(path).startswith(_POINTERS)


def fetch_hint(path: Path) -> str:
    """Return what fetches a file in whose place a pointer lies, for a message; "" for others."""
    if path.is_file() and is_pointer(path, path.stat().st_size):
        return "; only a pointer to it is there: fetch it by git lfs pull, or git annex get"
    return ""


def links_to_same(images: list[Entry]) -> set[Path]:
    """Return the links to a file that is read under another name."""
    present = [entry for entry in images if not entry.is_absent]
    links = [entry.path for entry in present if entry.is_link]
    if not links:
        return set()
    seen = {_identity(entry.path) for entry in present if not entry.is_link}
    doubled = set()
    for path in links:
        identity = _identity(path)
        if identity in seen:
            doubled.add(path)
        seen.add(identity)
    return doubled
