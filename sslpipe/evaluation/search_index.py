"""An index that grows: a small file that names features files, and the images that are removed.

Adding and removing rewrite only this file, whole or not at all, one process at a time.
`build_index` writes beside it, in INDEX.rows/, the rows as they are searched, memory-mapped from
then on: a file for each features file, under a name that no other content has, then this file, then
what it no longer names is removed. So there is always the index before or the one after.
"""

import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save

from sslpipe.data.storage import is_remote
from sslpipe.errors import DataError, UserError
from sslpipe.evaluation.approximate import LEAST_ROWS, Approximate, write_approximate
from sslpipe.evaluation.embed import (
    Embeddings,
    check_embeddings,
    load_embeddings,
    read_embeddings,
    save_embeddings,
    stored_sha256,
)
from sslpipe.evaluation.search import ImageSearch, Prepared
from sslpipe.evaluation.whiten import Whitening
from sslpipe.portable import (
    make_folder,
    one_at_a_time,
    read_regular,
    remove_abandoned,
    replacing,
    sha256_of,
    write_atomically,
)

FORMAT = 1
MOST_BYTES = 2**28
_TEXTS = ("features", "data", "split", "data_sha256")
_BUILD = "make its rows anew with `sslpipe index build`"
_NAME = re.compile(r"[0-9a-f]{64}\.(rows\.safetensors|flattening|faiss)")  # in INDEX.rows/
_DAMAGED = "restore a copy, or add its features files to a new one"


def read_index(index: Path) -> list[dict[str, Any]]:
    """Read the parts: features and data, paths or URLs, data_sha256, split, and removed ids.

    One that is built has `rows`, the name of a file, and where it is approximate `near`: its
    "file", "sha256", "lists" to look into and measured "recall".

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
            for key in ("rows", "flattening"):
                whole &= key not in part or bool(_NAME.fullmatch(part[key]))
            if near := part.get("near"):
                whole &= bool(_NAME.fullmatch(near["file"])) and type(near["lists"]) is int
                whole &= near["lists"] > 0 and 0 <= near["recall"] <= 1
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
    index: Path, augment: int = 0, *, flatten: bool | None = None, exact: bool = False
) -> tuple[ImageSearch, list[dict[str, Any]]]:
    """Open what an index names, without the removed images, and its parts.

    Args:
        index: Its file.
        augment: As `ImageSearch` takes it.
        flatten: None: as it was built, else flattened. What was built is used where it is in this
            form, and without `augment`.
        exact: Compare all rows where the index is approximate.

    Raises:
        DataError: See `read_index` and `ImageSearch`; or a features file was replaced, so that the
            removed ids would be other images.
    """
    while True:
        parts = read_index(index)
        try:
            return _open(index, parts, augment, flatten, exact), parts
        except DataError:
            if read_index(index) == parts:
                raise  # else it was built again meanwhile, and its files are others


def _open(
    index: Path, parts: list[dict[str, Any]], augment: int, flatten: bool | None, exact: bool
) -> ImageSearch:
    prepared = _prepared(index, parts, exact or augment > 0)
    if prepared is not None:
        is_flat = prepared.flattening is not None
        flatten = is_flat if flatten is None else flatten
        prepared = prepared if flatten == is_flat and not augment else None
    search = ImageSearch(
        *((part["features"], part["data"]) for part in parts),
        flatten=flatten is not False,
        augment=augment,
        removed=[part["removed"] for part in parts],
        prepared=prepared,
    )
    for part, split, facts in zip(parts, search.splits, search.all_facts, strict=True):
        own = {"split": split.name, "data_sha256": facts.get("data_sha256")}
        if own | {key: part[key] for key in own if key in part} != own:  # none yet: it is added
            raise DataError(
                f"{index}: {part['features']} was replaced by features of other images; make the "
                "index anew"
            )
    return search


def _form(parts: list[dict[str, Any]]) -> bool | None:
    """How to open an index that is changed: as it was built, or else as features are."""
    return None if any("rows" in part for part in parts) else False


def _folder(index: Path) -> Path:
    return index.with_name(f"{index.name}.rows")


def _prepared(index: Path, parts: list[dict[str, Any]], exact: bool) -> Prepared | None:
    """Map the rows that were built; None where there are none.

    Headers, sizes and shapes are checked, and that they are of these features files, by the sha256
    that these say they have. No number is read.
    """
    rows: list[tuple[Embeddings, dict[str, Any]] | None] = [None] * len(parts)
    near: list[Approximate | None] = [None] * len(parts)
    form = ""
    flattening: Whitening | None = None
    for number, part in enumerate(parts):
        if "rows" not in part:
            continue
        path = _folder(index) / part["rows"]
        mapped, facts = read_embeddings(path, hashed=False, again=_BUILD)
        own = facts.pop("index", None)
        if not isinstance(own, dict) or not isinstance(own.get("form"), str):
            raise DataError(f"{path} is none of an index's files; {_BUILD}")
        check_embeddings(mapped, str(path), labelled=False, finite=False)
        if own.get("features") != stored_sha256(Path(part["features"])):
            raise DataError(f"{index}: {part['features']} is another file now; {_BUILD}")
        if not form:
            form = own["form"]
            if own.get("flattening") is not None:
                flattening = _read_flattening(index, part.get("flattening"), mapped)
        rows[number] = mapped, facts
        if (made := part.get("near")) and not exact:
            own = str(made["sha256"]), made["lists"], mapped.features.shape
            near[number] = Approximate.read(_folder(index) / made["file"], *own)
            form += f"; approximate, recall {made['recall']:.1%} (--exact: all compared)"
    return Prepared(rows, flattening, form, near) if form else None


def _read_flattening(index: Path, name: Any, rows: Embeddings) -> Whitening:
    """Read what rows were flattened by. Raises: DataError where it is not what its name says."""
    path = _folder(index) / str(name)
    try:
        raw = read_regular(path)
        if f"{hashlib.sha256(raw).hexdigest()}.flattening" != name:
            raise ValueError("its sha256 is another one")
        fitted = Whitening(**load(raw))
        shapes = fitted.mean.shape, fitted.projection.shape
        if shapes != ((shapes[1][0],), (shapes[1][0], rows.features.shape[1])):
            raise ValueError(f"its tensors are {shapes}")
    except (OSError, ValueError, TypeError, IndexError, SafetensorError) as error:
        raise DataError(f"{path} is missing or damaged ({error}); {_BUILD}") from error
    return fitted


def build_index(
    index: Path,
    *,
    flatten: bool = True,
    approximate: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> ImageSearch:
    """Write the rows of an index as they are searched, to be memory-mapped, and open it.

    Args:
        index: Its file, which then names them.
        flatten: As `ImageSearch` takes it. The spectrum is learned here and kept; files that are
            added later are flattened alike.
        approximate: For features files of LEAST_ROWS or more, also write what finds neighbours
            approximately.
        say: Told where another process changes an index in this folder, and this one waits.

    Raises:
        DataError: See `open_index`; an approximate index finds too few neighbours; or a features
            file has no sha256, as earlier versions wrote it.
    """
    with one_at_a_time(index.parent, say):
        parts = read_index(index)
        bare = [{key: part[key] for key in (*_TEXTS, "removed")} for part in parts]
        search = _open(index, bare, 0, flatten, exact=True)
        counts = [len(search.ids(number)) for number in range(len(bare))]
        if approximate and max(counts) < LEAST_ROWS:
            raise UserError(
                f"--approximate is for {LEAST_ROWS:,} images of a features file or more, and "
                f"{max(counts):,} are the most; leave it out"
            )
        for number, part in enumerate(bare):
            _build_part(index, part, search, number, approximate and counts[number] >= LEAST_ROWS)
        _write(index, bare, parts)
    return open_index(index)[0]


def _build_part(
    index: Path, part: dict[str, Any], search: ImageSearch, number: int, approximate: bool
) -> None:
    """Write the rows of one features file, and name them in its part."""
    sha256 = _sha256_of_features(part)
    folder = make_folder(index.parent, _folder(index).name)
    rows, flattening, name = search.rows(number), search.flattening, None
    if flattening is not None:
        raw = save({key: tensor.contiguous() for key, tensor in flattening._asdict().items()})
        part["flattening"] = name = f"{hashlib.sha256(raw).hexdigest()}.flattening"
        write_atomically(folder / name, raw)
    own = {"features": sha256, "flattening": name, "form": search.form}
    content = hashlib.sha256(json.dumps([own, part["removed"]]).encode()).hexdigest()
    part["rows"] = f"{content}.rows.safetensors"
    save_embeddings(folder / part["rows"], rows, {**search.all_facts[number], "index": own})
    if approximate:
        # made anew it may have other bytes: a name of its own, as the one before is still named
        file = folder / f"{secrets.token_hex(32)}.faiss"
        with replacing(file) as temporary:
            lists, recall = write_approximate(rows.features, temporary)
            sha256 = sha256_of(temporary)
        part["near"] = {"file": file.name, "sha256": sha256, "lists": lists, "recall": recall}


def _sha256_of_features(part: dict[str, Any]) -> str:
    if (sha256 := stored_sha256(Path(part["features"]))) is None:
        raise DataError(
            f"{part['features']} is of an earlier version, without a sha256; embed again"
        )
    return sha256


def check_index(index: Path) -> int:
    """Read all that an index names, with every sha256; returns how many images there are.

    Raises:
        DataError: A file is damaged; it is named.
    """
    search, parts = open_index(index)
    for part in parts:
        load_embeddings(part["features"])
        _sha256_of_features(part)
        if "rows" in part:
            load_embeddings(_folder(index) / part["rows"])
    return len(search)


def add_to_index(
    index: Path, features: Path, data: str, say: Callable[[str], None] = lambda text: None
) -> int:
    """Add a features file, or begin an index with it; returns how many images there are now.

    Raises:
        DataError: It is in the index, does not fit the others, or is damaged.
    """
    index.parent.mkdir(parents=True, exist_ok=True)
    with one_at_a_time(index.parent, say):
        parts = read_index(index) if index.exists() else []
        if any(os.path.realpath(part["features"]) == os.path.realpath(features) for part in parts):
            raise DataError(f"{features} is in {index} already; name another file")
        new = {"features": str(features), "data": data, "removed": []}
        search = _open(index, [*parts, new], 0, _form(parts), exact=True)
        new |= {key: search.all_facts[-1][key] for key in ("split", "data_sha256")}
        if _form(parts) is None:
            _build_part(index, new, search, len(parts), approximate=False)
        _write(index, [*parts, new], parts)
        return len(search)


def remove_from_index(
    index: Path, features: Path, ids: list[int], say: Callable[[str], None] = lambda text: None
) -> int:
    """Remove images of one features file by their ids; returns how many images are left.

    Raises:
        DataError: The file is not in the index, or has no such id.
    """
    with one_at_a_time(index.parent, say):
        parts = read_index(index)
        search = _open(index, parts, 0, _form(parts), exact=True)
        names = [os.path.realpath(part["features"]) for part in parts]
        if os.path.realpath(features) not in names:
            known = ", ".join(part["features"] for part in parts)
            raise DataError(f"{features} is not in {index}; known: {known}")
        number = names.index(os.path.realpath(features))
        missing = sorted({*ids} - {*search.ids(number).tolist()})
        if missing:
            raise DataError(f"{features} has no image {missing[0]}, or it was removed before")
        left = len(search) - len({*ids})
        if left == 0:
            raise UserError(f"no image would be left in {index}; delete the file instead")
        fewer = [dict(part) for part in parts]
        fewer[number]["removed"] = sorted([*parts[number]["removed"], *{*ids}])
        _write(index, fewer, parts)
        return left


def _write(index: Path, parts: list[dict[str, Any]], before: list[dict[str, Any]]) -> None:
    """Write an index; local paths are relative to its folder, so that both can be moved.

    Raises:
        DataError: It is not what it was `before`; some file systems let several write at once.
    """
    if (read_index(index) if index.exists() else []) != before:
        raise DataError(f"{index} was changed by another process meanwhile; run the command again")
    stored = [dict(part) for part in parts]
    for part in stored:
        for key in ("features", "data"):
            if not is_remote(part[key]):
                part[key] = os.path.relpath(part[key], index.parent)
    write_atomically(
        index, json.dumps({"sslpipe_index": FORMAT, "parts": stored}) + "\n", fsync=True
    )
    # what is no longer named
    if (folder := _folder(index)).is_dir():
        remove_abandoned(folder)
        named = {part.get(key) for part in parts for key in ("rows", "flattening")}
        named |= {part["near"]["file"] for part in parts if "near" in part}
        for path in folder.iterdir():
            if _NAME.fullmatch(path.name) and path.name not in named:
                path.unlink(missing_ok=True)
