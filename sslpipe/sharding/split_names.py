"""Names of splits as people write them: Train, TRAIN, train_set, images_train, train2017, Testing.

One table of words serves folders, columns of CSV files, tars and parquet files, so that the same
name means the same split everywhere.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from sslpipe.errors import DataError, shown

_WORDS = {
    "train": "train",
    "training": "train",
    "trn": "train",
    "trainval": "train",
    "val": "val",
    "vali": "val",
    "valid": "val",
    "validation": "val",
    "validate": "val",
    "eval": "val",
    "dev": "val",
    "test": "test",
    "testing": "test",
    "tst": "test",
    "unlabeled": "unlabeled",
    "unlabelled": "unlabeled",
    "query": "query",
    "queries": "query",
    "gallery": "gallery",
}
# beside other names these are surely splits; the rest may be classes, such as gallery
_SURE = ("train", "val", "test")
_FILLERS = frozenset(
    (
        *("set", "sets", "data", "dataset", "split", "folder", "files", "samples"),
        *("image", "images", "img", "imgs", "picture", "pictures", "pics", "photo", "photos"),
        *("frames", "crops", "jpg", "jpeg", "png"),
    )
)
GENERIC = _FILLERS | {"archive", "raw", "all"}  # folders that say nothing of their images


# train-000000, train_0, train-00000-of-00002, train-00000-of-00002-HASH
_NUMBERED = re.compile(r"(.*?)[-_.]*(\d*|\d+[-_]of[-_]\d+([-_][0-9a-zA-Z]+)?)")
SHARD = re.compile(r"(?P<name>.*?)(?P<number>\d+)([-_]of[-_](?P<total>\d+)([-_]\w+)?)?")


def without_number(stem: str) -> str:
    """Return a file's name without the number of the shard at its end; "" for 00000."""
    match = _NUMBERED.fullmatch(stem)
    return match[1] if match else stem


def missing_shards(files: Iterable[Path]) -> list[str]:
    """Return a doubt for each name whose numbers have gaps, or are fewer than their -of-00003.

    Numbers of years or dates, which begin neither at 0 nor at 1, number no shards.
    """
    numbers: dict[tuple[Path, str, str], set[int]] = defaultdict(set)
    for file in files:
        if match := SHARD.fullmatch(file.stem):
            numbers[file.parent, match["name"], match["total"] or ""].add(int(match["number"]))
    doubts = []
    for (folder, name, total), present in numbers.items():
        expected = int(total) if total else max(present) - min(present) + 1
        are_shards = total or (min(present) <= 1 and expected < 2 * len(present))
        if are_shards and len(present) < expected:
            doubts.append(
                f"{len(present):,} of {expected:,} files {folder}/{name}NUMBER are there: the "
                "images of the others are missing, unless they are left out on purpose"
            )
    return doubts


class SplitName(NamedTuple):
    """A split, and the words of the name beside it: ("train", ("seg",)) of seg_train."""

    split: str
    rest: tuple[str, ...]


def split_of(name: str) -> str | None:
    """Return the split that a name means; None where it has other words, too, or no such word."""
    parsed = _parse(name)
    return parsed.split if parsed is not None and not parsed.rest else None


def read_splits(names: Iterable[str], where: str, only: str | None = None) -> dict[str, str]:
    """Map the names at one place, as of all folders in a folder, to splits; {} where none is one.

    Names with a common word beside it are splits together: seg_train and seg_test.

    Args:
        names: Each once.
        where: What holds them, for messages.
        only: The one split that is asked for; other names beside it do no harm then.

    Raises: DataError for splits among other names, and for two names of one split.
    """
    names = sorted(names)
    parsed = {name: _parse(name) for name in names}
    known = {name: parts for name, parts in parsed.items() if parts is not None}
    by_rest: dict[tuple[str, ...], dict[str, str]] = defaultdict(dict)
    for name, parts in known.items():
        by_rest[parts.rest][name] = parts.split
    # names that surely are splits: by themselves, or several that share their other words
    sure = {name: parts.split for name, parts in known.items() if not parts.rest}
    for rest, splits in by_rest.items():
        if rest and len(set(splits.values())) > 1:
            sure |= splits
    if not sure:
        return {}
    if only in sure.values():
        sure = {name: split for name, split in sure.items() if split == only}
        _check_once(sure, where)
        return sure
    others = [name for name in names if name not in sure]
    if others:
        if not set(sure.values()) & set(_SURE):
            return {}
        first = next(name for name, split in sure.items() if split in _SURE)
        raise DataError(
            f"{where} holds both splits and {shown(others[0])}: {shown(first)} means the split "
            f"{sure[first]}; move one of them elsewhere, rename it, read one split alone with "
            f"--split={sure[first]!r}, or where {shown(first)} is a class put all classes into one "
            "folder named train"
        )
    _check_once(sure, where)
    return sure


def name_splits(names: Iterable[str], where: str) -> dict[str, str]:
    """Map names that are said to be splits, as the cells of a column, to splits; any may be one.

    Raises: DataError for two names of one split.
    """
    splits = {name: split_of(name) or name.strip() for name in names}
    _check_once({name.strip().casefold(): split for name, split in splits.items()}, where)
    return splits


def _check_once(splits: Mapping[str, str], where: str) -> None:
    """Raise DataError where two names mean one split."""
    first: dict[str, str] = {}
    for name, split in splits.items():
        other = first.setdefault(split, name)
        if other != name:
            raise DataError(
                f"{where} holds {shown(other)} and {shown(name)}, which both mean the split "
                f"{split}; put them together, rename one, or move one elsewhere"
            )


def names_like_splits(names: Iterable[str]) -> list[str]:
    """Return the names of a split, or that tell two splits apart: train_cats, val_cats.

    One that only holds the word is a class: test_tube, bullet train.
    """
    parsed = {name: _parse(name) for name in names}
    known = {name: parts for name, parts in parsed.items() if parts and parts.split in _SURE}
    splits = defaultdict[tuple[str, ...], set[str]](set)  # by the other words
    for parts in known.values():
        splits[parts.rest].add(parts.split)
    return [name for name, parts in known.items() if not parts.rest or len(splits[parts.rest]) > 1]


def _parse(name: str) -> SplitName | None:
    """Find the one word of a split in a name."""
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name)
    splits = list[str]()
    rest = list[str]()
    for word in re.findall(r"[^\W\d_]+", spaced.lower()):
        split = _of_word(word)
        if split is not None:
            splits.append(split)
        elif word not in _FILLERS:
            rest.append(word)
    return SplitName(splits[0], tuple(rest)) if len(splits) == 1 else None


def _of_word(word: str) -> str | None:
    """Return the split of a word, also where one that says nothing is joined to it: trainset."""
    if word in _WORDS:
        return _WORDS[word]
    for filler in _FILLERS:
        for shorter in (word.removesuffix(filler), word.removeprefix(filler)):
            if shorter != word and shorter in _WORDS:
                return _WORDS[shorter]
    return None
