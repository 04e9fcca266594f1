"""Parts of a build over several machines -> the data set that one machine would have written."""

import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sslpipe.errors import DataError
from sslpipe.portable import replacing
from sslpipe.sharding.build import Built, check_free, finish
from sslpipe.sharding.manifest import load_manifest, merge_classes, new_manifest
from sslpipe.sharding.parts import PartFile, load_parts, part_path
from sslpipe.sharding.record import (
    FOLDER,
    Done,
    Part,
    is_unharmed,
    record_path,
    write_record,
)

MOST_NAMED = 5


def merge_parts(
    out: Path,
    folders: Sequence[Path] = (),
    *,
    workers: int = 2,
    advance: Callable[[int], None] = lambda count: None,
) -> Built:
    """Make one data set of all parts of a build, in any order.

    Shards of other folders are linked where they lie on one file system, else copied; those folders
    stay as they are.

    Args:
        out: The folder of the data set; it may hold parts itself.
        folders: Where the parts are; none: in `out`.
        workers: Threads that check and copy.
        advance: Called with 1 for each shard in its place.

    Raises:
        DataError: A part is missing, there twice, of another build, or its shards have changed.
    """
    # all parts of one build, each once
    found = [(folder, part) for folder in folders or [out] for part in load_parts(folder)]
    _check_whole(found, [*folders] or [out])
    first = found[0][1]
    manifest = load_manifest(out) or new_manifest(first.name or out.resolve().name)
    if merge_classes(manifest.classes, first.classes) != first.classes:
        raise DataError(
            f"{out} has other classes than the parts; build the parts into folders that hold its "
            "dataset.json, so that they share one list of classes"
        )
    plans = {each.split: each.plan for each in first.splits}
    check_free(out, manifest, plans, part=first.part, remedy="remove them first")

    # their shards, checked and brought together
    out.mkdir(parents=True, exist_ok=True)
    jobs = [
        (folder, part, done)
        for folder, part in found
        for shards in part.done.values()
        for done in shards
    ]

    def bring(job: tuple[Path, PartFile, Done]) -> None:
        folder, part, done = job
        if not is_unharmed(folder, done):
            file = done.entry.file if done.entry else ""
            raise DataError(
                f"{folder / file} is missing, or not as part {_text(part)} wrote it; build that "
                "part again"
            )
        if done.entry is not None and folder.resolve() != out.resolve():
            for name in (done.entry.file, done.entry.offsets):
                _link_or_copy(folder / name, out / name)
        advance(1)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(bring, jobs))

    # what a whole build leaves, then the parts' own notes may go
    whole = {
        split: sorted((d for _, part in found for d in part.done[split]), key=lambda d: d.shard)
        for split in plans
    }
    for split, plan in plans.items():
        write_record(record_path(out, split), plan, whole[split])
    built = finish(
        out, manifest, first.model_copy(update={"part": None, "done": whole}), workers=workers
    )
    for folder, part in found:
        if folder.resolve() == out.resolve() and part.part is not None:
            shutil.rmtree(part_path(folder, part.part).parent)
    return built


def shards_to_merge(out: Path, folders: Sequence[Path] = ()) -> int:
    """Count the shards of all parts, for a progress bar."""
    parts = [part for folder in folders or [out] for part in load_parts(folder)]
    return sum(len(shards) for part in parts for shards in part.done.values())


def _check_whole(found: Sequence[tuple[Path, PartFile]], folders: Sequence[Path]) -> None:
    """Raise DataError unless these are all parts of one build, each once."""
    where = ", ".join(map(str, folders[:MOST_NAMED]))
    if not found:
        begun = any((folder / FOLDER).glob("part-*-of-*") for folder in folders)
        raise DataError(
            f"{where} has no finished part"
            + ("; the parts there are not finished, run them again" if begun else "")
            + ": write them with `sslpipe shards build ... --part I/N`"
        )
    # one build
    folder, first = found[0]
    shared = first.shared()
    for other_folder, other in found[1:]:
        differing = [key for key, value in other.shared().items() if value != shared[key]]
        if differing:
            raise DataError(
                f"part {_text(other)} in {other_folder} is not of the build of part "
                f"{_text(first)} in {folder}: {' and '.join(differing)} differ; build all parts "
                "with one command, of the same images"
            )
    # each part once
    seen: dict[Part, Path] = {}
    for folder, part_file in found:
        assert part_file.part is not None
        if part_file.part in seen:
            raise DataError(
                f"part {part_file.part} is in {seen[part_file.part]} and in {folder}; name one"
            )
        seen[part_file.part] = folder
    count = next(iter(seen)).total
    absent = [str(p) for p in (Part(k, count) for k in range(1, count + 1)) if p not in seen]
    if absent:
        more = f" and {len(absent) - MOST_NAMED} more" if len(absent) > MOST_NAMED else ""
        raise DataError(
            f"{where}: {len(absent)} of {count} parts are missing: "
            f"{', '.join(absent[:MOST_NAMED])}{more}; run them with --part, or name their folders"
        )


def _link_or_copy(source: Path, target: Path) -> None:
    """Put a file in its place, whole or not at all."""
    with replacing(target, fsync=True) as temporary:
        temporary.unlink(missing_ok=True)
        try:
            os.link(source, temporary)
        except OSError:  # another file system, or one without links
            shutil.copyfile(source, temporary)


def _text(part_file: PartFile) -> str:
    return str(part_file.part)
