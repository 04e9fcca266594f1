"""Measurements of a suite that was stopped: the same command reads them instead of measuring."""

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sslpipe import __version__
from sslpipe.evaluation.embed import UNREADABLE, Embeddings, content_sha256
from sslpipe.evaluation.result import Result
from sslpipe.portable import make_folder, open_regular, replacing

Columns = list[tuple[str | None, Result]]  # a number, and its column of the table if it has one
ARRAYS = ("scores", "draw_hits")  # of a result, not in its JSON


class KeptResults:
    """One file a measurement, named by a hash of the features and of the settings.

    Args:
        folder: Where they are; made when the first one is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.read = folder, 0

    def identity(self, pair: tuple[Embeddings, Embeddings], settings: dict[str, Any]) -> str:
        """Hash the features of train and test, and all else that decides what is measured."""
        text = json.dumps({**settings, "version": __version__}, sort_keys=True)
        hashed = (content_sha256(rows._asdict(), text).hex() for rows in pair)
        return "-".join(hashed)

    def measured(self, identity: str, part: str, measure: Callable[[], Columns]) -> Columns:
        """Return what was measured before, or measure it and keep it."""
        name = hashlib.sha256(f"{identity} {part}".encode()).hexdigest()
        file = self.folder / f"{name}.npz"
        try:
            columns = _read(file)
        except UNREADABLE:  # absent, or damaged
            columns = measure()
            with suppress(OSError):  # a full disk or a planted link: measured, not kept
                _write(file, columns)
        else:
            self.read += 1
        return columns


def _write(file: Path, columns: Columns) -> None:
    make_folder(file.parent.parent, file.parent.name)
    arrays = {
        f"{name} {at}": array
        for at, (_, result) in enumerate(columns)
        for name in ARRAYS
        if (array := getattr(result, name)) is not None
    }
    text = json.dumps([(column, result.to_json()) for column, result in columns])
    with replacing(file) as temporary, temporary.open("wb") as opened:
        np.savez(opened, allow_pickle=False, columns=np.array(text), **arrays)


def _read(file: Path) -> Columns:
    with open_regular(file) as raw, np.load(raw, allow_pickle=False) as arrays:
        columns = []
        for at, (column, tree) in enumerate(json.loads(str(arrays["columns"]))):
            own = {name: arrays[f"{name} {at}"] for name in ARRAYS if f"{name} {at}" in arrays}
            result = replace(Result(**tree), interval95=tuple(tree["interval95"]), **own)
            columns.append((column, result))
    return columns
