"""An index that grows: a small file that names features files, and the images that are removed.

The features files stay as they are, so that adding and removing rewrite only this file, whole or
not at all, and one process at a time.
"""

import json
import os
from pathlib import Path
from typing import Any

from sslpipe.data.storage import is_remote
from sslpipe.errors import DataError, UserError
from sslpipe.evaluation.search import ImageSearch
from sslpipe.portable import one_at_a_time, read_regular, write_atomically

FORMAT = 1
MOST_BYTES = 2**28
_TEXTS = ("features", "data", "split", "data_sha256")
_DAMAGED = "restore a copy, or add its features files to a new one"


def read_index(index: Path) -> list[dict[str, Any]]:
    """Read the parts: features and data, paths or URLs, data_sha256, split, and removed ids.

    Raises:
        DataError: It is not there, or none of ours.
    """
    try:
        tree = json.loads(read_regular(index, MOST_BYTES))
        parts: list[dict[str, Any]] = tree["parts"] if tree["sslpipe_index"] == FORMAT else []
        whole = isinstance(parts, list) and bool(parts)
        for part in parts:
            whole &= all(type(number) is int for number in part["removed"])
            whole &= all(isinstance(part[key], str) for key in _TEXTS)
    except OSError as error:
        raise DataError(f"cannot read {index}: {error.strerror}; {_DAMAGED}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise DataError(f"{index} is damaged, or no index of this version; {_DAMAGED}")
    for part in parts:
        for key in ("features", "data"):
            if not is_remote(part[key]):
                part[key] = os.path.normpath(index.parent / part[key])
    return parts


def open_index(
    index: Path, augment: int = 0, *, flatten: bool = True
) -> tuple[ImageSearch, list[dict[str, Any]]]:
    """Open what an index names, without the removed images, and its parts.

    Raises:
        DataError: See `read_index` and `ImageSearch`; or a features file was replaced by one of
            another data set, so that the removed ids would be other images.
    """
    parts = read_index(index)
    removed = [part["removed"] for part in parts]
    files = [(part["features"], part["data"]) for part in parts]
    search = ImageSearch(*files, flatten=flatten, augment=augment, removed=removed)
    for part, split, facts in zip(parts, search.splits, search.all_facts, strict=True):
        if (split.name, facts.get("data_sha256")) != (part["split"], part["data_sha256"]):
            raise DataError(
                f"{index}: {part['features']} was replaced by features of other images; make the "
                "index anew"
            )
    return search, parts


def add_to_index(index: Path, features: Path, data: str) -> int:
    """Add a features file, or begin an index with it; returns how many images there are now.

    Raises:
        DataError: It is in the index, does not fit the others, or is damaged.
    """
    index.parent.mkdir(parents=True, exist_ok=True)
    with one_at_a_time(index.parent):
        parts = read_index(index) if index.exists() else []
        if any(os.path.realpath(part["features"]) == os.path.realpath(features) for part in parts):
            raise DataError(f"{features} is in {index} already; name another file")
        files = [(part["features"], part["data"]) for part in parts] + [(str(features), data)]
        search = ImageSearch(
            *files, flatten=False, removed=[*(part["removed"] for part in parts), []]
        )
        facts = search.all_facts[-1]
        new = {"features": str(features), "data": data, "removed": []}
        own = {"split": facts["split"], "data_sha256": facts["data_sha256"]}
        _write(index, [*parts, new | own])
        return len(search)


def remove_from_index(index: Path, features: Path, ids: list[int]) -> int:
    """Remove images of one features file by their ids; returns how many images are left.

    Raises:
        DataError: The file is not in the index, or has no such id.
    """
    with one_at_a_time(index.parent):
        search, parts = open_index(index, flatten=False)
        names = [os.path.realpath(part["features"]) for part in parts]
        if os.path.realpath(features) not in names:
            known = ", ".join(part["features"] for part in parts)
            raise DataError(f"{features} is not in {index}; known: {known}")
        number = names.index(os.path.realpath(features))
        missing = sorted({*ids} - search.ids(number))
        if missing:
            raise DataError(f"{features} has no image {missing[0]}, or it was removed before")
        left = len(search) - len({*ids})
        if left == 0:
            raise UserError(f"no image would be left in {index}; delete the file instead")
        parts[number]["removed"] = sorted([*parts[number]["removed"], *{*ids}])
        _write(index, parts)
        return left


def _write(index: Path, parts: list[dict[str, Any]]) -> None:
    """Write an index; local paths are relative to its folder, so that both can be moved."""
    stored = [dict(part) for part in parts]
    for part in stored:
        for key in ("features", "data"):
            if not is_remote(part[key]):
                part[key] = os.path.relpath(part[key], index.parent)
    write_atomically(
        index, json.dumps({"sslpipe_index": FORMAT, "parts": stored}) + "\n", fsync=True
    )
