"""Read a list of pairs that a data set of faces, signatures or products is verified by."""

import csv
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sslpipe.errors import DataError, naming, shown
from sslpipe.evaluation.verification import LabelledPairs
from sslpipe.portable import open_regular

_IS_SAME = {"1": True, "0": False, "true": True, "false": False}
_SIGNS = re.compile(r"[,;\t]")  # between the cells of a line; else blanks


class _Line(NamedTuple):
    """Two images as a list names them, and whether they are of one label."""

    first: str
    second: str
    same: bool


def read_pairs(path: Path, names: Sequence[str]) -> LabelledPairs:
    """Read pairs as LFW's pairs.txt has them, or a table of two paths and 1 or 0 a line.

    A line of LFW is "NAME 1 4", two images NAME/NAME_0001 of one person, or "NAME 1 OTHER 2"; its
    first line, how many there are, is skipped. In a table the 1 (one label; or true) or 0 stands
    first or last, and a first line without them names the columns. A path may lack, or have more
    than, the folders in front of a name, and lack the suffix.

    Args:
        path: The list.
        names: Of the images that have features, by row, as "lfw/NAME/NAME_0001.jpg".

    Raises:
        DataError: It cannot be read, or an image of it is none of the names, or of several.
    """
    try:
        with open_regular(path) as file:
            text = file.read().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    images = _Images(names)
    pairs = []
    is_same = []
    for number, line in enumerate(text.splitlines(), 1):
        cells = _cells(line)
        pair = _pair(cells)
        if pair is not None:
            with naming(f"{path}, line {number}"):
                pairs.append((images.row(pair.first), images.row(pair.second)))
            is_same.append(pair.same)
        elif (number > 1 and cells) or any(images.has(cell) for cell in cells):  # else a header
            raise DataError(
                f"{path}, line {number}: {shown(line)} is no pair; write two paths and 1 (one "
                "label) or 0 in each line, or lines as LFW's pairs.txt has them"
            )
    if len({*is_same}) < 2:
        raise DataError(f"{path} needs pairs of one label and of two, and has none of one kind")
    same = np.array(is_same)
    order = np.argsort(~same, kind="stable")
    first, second = np.array(pairs, np.int64)[order].T
    return LabelledPairs(first, second, same[order])


def _cells(line: str) -> list[str]:
    sign = _SIGNS.search(line)
    cells = next(csv.reader([line], delimiter=sign[0]), []) if sign else line.split()
    return [cell.strip() for cell in cells if cell.strip()]


def _pair(cells: Sequence[str]) -> _Line | None:
    """Return the pair of a line; None for another line."""
    match cells:
        case [first, second, same] if same.lower() in _IS_SAME and not second.isdigit():
            return _Line(first, second, _IS_SAME[same.lower()])
        case [same, first, second] if same.lower() in _IS_SAME and not second.isdigit():
            return _Line(first, second, _IS_SAME[same.lower()])
        case [name, first, second] if first.isdigit() and second.isdigit():
            return _Line(_of_lfw(name, first), _of_lfw(name, second), True)
        case [name, first, other, second] if first.isdigit() and second.isdigit():
            return _Line(_of_lfw(name, first), _of_lfw(other, second), False)
    return None


def _of_lfw(name: str, number: str) -> str:
    return f"{name}/{name}_{int(number):04d}"


def _tails(name: str) -> list[str]:
    """Return a path without the folders in front, one after another: a/b/c, b/c, c."""
    parts = [part for part in name.replace("\\", "/").split("/") if part not in ("", ".")]
    return ["/".join(parts[place:]) for place in range(len(parts))]


def _stem(name: str) -> str:
    """Return a path without its suffix, which is letters: not the end of "1.5"."""
    return re.sub(r"[.][A-Za-z]\w*$", "", name)


class _Images:
    """Rows by the names of their images."""

    def __init__(self, names: Sequence[str]) -> None:
        self._count = len(names)
        self._whole = defaultdict[str, set[int]](set)
        self._ends = defaultdict[str, set[int]](set)  # of names that have folders in front
        for row, name in enumerate(names):
            for place, tail in enumerate(_tails(name)):
                for key in (tail, _stem(tail)):
                    (self._ends if place else self._whole)[key].add(row)

    def has(self, name: str) -> bool:
        """Return whether a name, or the end of one, is that of an image."""
        whole = next(iter(_tails(name)), "")
        return whole in self._whole or whole in self._ends

    def row(self, name: str) -> int:
        """Find the row of an image. Raises: DataError: There is none, or there are several."""
        tails = _tails(name)
        tried = [(tails[0], self._whole), (tails[0], self._ends)]
        tried += [(tail, self._whole) for tail in tails[1:]]
        for tail, rows in tried:
            found = rows.get(tail) or rows.get(_stem(tail), set())
            if len(found) > 1:
                raise DataError(
                    f"{shown(name)} is the end of the names of {len(found)} images; write more of "
                    "their paths"
                )
            if found:
                return next(iter(found))
        raise DataError(
            f"none of the {self._count:,} images with features is named "
            f"{shown(name)}; embed the split that has all images of the list"
        )
