"""What of tars looks like a slip: images without a label where names may be classes."""

import re
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path

from sslpipe.errors import shown
from sslpipe.sharding.split_names import SHARD, split_of, without_number

SPARSEST = 30  # numbers of shards for one that is there


def classes_in_names(tars: Sequence[Path], folders: Collection[str], images: int) -> list[str]:
    """Return doubts of images without a label: each tar, or each folder in them, may be a class.

    Args:
        tars: All that were read; of several folders nothing is said.
        folders: Of the images, as the tars name them: "train/cat".
        images: In all of them.
    """
    if len({tar.parent for tar in tars}) > 1:
        return []
    return [*_folders_of_classes(tars, folders, images), *_tars_of_classes(tars)]


def _tars_of_classes(tars: Sequence[Path]) -> list[str]:
    """Return a doubt where tars are named as classes and not as shards.

    Each has a name of its own, cat and dog, or one and numbers far apart, as n01440764 has.
    """
    stems = sorted({tar.stem for tar in tars})
    begins = {without_number(stem) for stem in stems}
    numbers = [int(match["number"]) for stem in stems if (match := SHARD.fullmatch(stem))]
    if len(stems) < 2 or any(map(split_of, begins)):
        return []
    are_names = len(begins) == len(stems) and "" not in begins
    is_numbered = len(numbers) == len(stems) and "" not in begins  # dates and places have no name
    are_ids = is_numbered and max(numbers) - min(numbers) > SPARSEST * len(stems)
    if not are_names and not are_ids:
        return []
    root = tars[0].parent
    name = '"${tar%.tar}"'
    into = f'mkdir -p classes/{name} && tar -xf "$tar" -C classes/{name}'
    unpack = f"(cd {shlex.quote(str(root))} && for tar in *.tar; do {into}; done)"
    build = f"sslpipe shards build OUT --root {shlex.quote(str(root / 'classes'))}"
    return [
        f"no image has a label; where each tar is a class, such as {shown(stems[0])}, unpack each "
        f"into a folder of its name, `{unpack}`, and build from these: `{build}`"
    ]


def _folders_of_classes(tars: Sequence[Path], folders: Collection[str], images: int) -> list[str]:
    """Return a doubt where folders in the tars are named as classes."""
    parts = [folder.split("/") for folder in folders]
    names = sorted({each[-1] for each in parts if split_of(each[-1]) is None} - {"", "."})
    if len(names) < 2 or 2 * len(folders) > images:
        return []
    if {*names} == {tar.stem for tar in tars}:
        return []  # each tar is a class
    if all(re.fullmatch("[0-9a-f]{2,3}", name) for name in names) and not "".join(names).isdigit():
        return []  # beginnings of hashes
    root = tars[0].parent
    said = f"no image has a label; where folders in the tars are classes, such as {shown(names[0])}"
    if any(split_of(part) for each in parts for part in each[:-1]):
        unpack = 'mkdir -p classes && for tar in *.tar; do tar -xkf "$tar" -C classes; done'
        build = f"sslpipe shards build OUT --root {shlex.quote(str(root / 'classes'))}"
        return [
            f"{said}, and others splits, unpack all, `(cd {shlex.quote(str(root))} && {unpack})`, "
            f"and build from these: `{build}`"
        ]
    pattern = shlex.quote("(.*/)?(?P<label>[^/]+)/[^/]+|.*")
    read = f"--source tars --root {shlex.quote(str(root))} --name-pattern {pattern}"
    return [f"{said}: `sslpipe shards build OUT {read}`"]
