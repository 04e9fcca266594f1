"""What a command reads and checks first, before torch is imported, and where it computes.

The library checks the same and more when it reads; here stands what needs only names and small
files.
"""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sslpipe.errors import DataError, UserError, check_local, listed, shown

if TYPE_CHECKING:
    from sslpipe.data.image_type import ImageType
    from sslpipe.data.index import DatasetIndex
    from sslpipe.distributed import Rank

FEATURE_SUFFIXES = (".safetensors", ".npz")  # that features are written to
READ_SUFFIXES = (*FEATURE_SUFFIXES, ".npy")  # that they are read from
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")


def open_data(location: str, splits: Iterable[str] = ()) -> "DatasetIndex":
    """Read the index of a data set, a path or a URL; check that the files of some splits are there.

    Raises: DataError.
    """
    from sslpipe.data.index import load_index
    from sslpipe.data.storage import is_remote

    index = load_index(location)
    for split in splits:
        index.split(split)
        if not is_remote(index.folder):  # else a request a shard: once is enough
            index.check_files(split)
    return index


def parse_ids(texts: Sequence[str] | None) -> list[int] | None:
    """Read what --ids gave, separated by commas; in brackets, too. Raises: UserError."""
    if not texts:
        return None
    ids = [word for text in texts for word in re.split(r"[\s,]+", text.strip(" \t[],"))]
    for word in ids:
        if not re.fullmatch(r"[0-9]{1,18}", word):
            raise UserError(
                f"--ids {shown(word)} is not a sample's id; write numbers, as in 469,523"
            )
    return [int(word) for word in ids]


def check_model(source: str | Path | None) -> None:
    """Raise UserError where it is no source of weights: no export, run, file or name of one."""
    from sslpipe.weights.source import parse_source

    if source is not None:
        parse_source(source)


def check_folder(folder: Path, option: str = "--out") -> None:
    """Raise UserError where no files can be written into a folder, which need not be there yet."""
    check_local(folder, option)
    places = (folder, *folder.absolute().parents)
    if lost := next((p for p in places if p.is_symlink() and not p.exists()), None):
        raise UserError(
            f"{option} {folder}: {lost} is a link to {os.readlink(lost)}, which is not there; make "
            "that folder, or name another"
        )
    taken = next((p for p in places if p.exists()), folder)
    if not taken.is_dir():
        raise UserError(f"{option} {folder}: {taken} is a file; name another folder")
    if not os.access(taken, os.W_OK | os.X_OK):
        raise UserError(f"{option} {folder}: {taken} is read-only; name another folder")


def check_file(file: Path | None, suffixes: tuple[str, ...]) -> None:
    """Raise UserError where a file cannot be written; None: none is to be written.

    Its name ends in one of these suffixes, or has none; so what is replaced is a file of its kind.
    """
    if file is None:
        return
    if file.is_dir():
        raise UserError(f"--out {file} is a folder; name a file")
    if file.suffix.lower() not in ("", *suffixes):  # such as a photograph
        raise UserError(f"--out {file}: name a file that ends in {' or '.join(suffixes)}")
    check_folder(file.parent)


def check_picture(file: Path) -> None:
    """Raise UserError where a picture cannot be written to a file, or its name has another end."""
    if file.suffix.lower() not in IMAGE_SUFFIXES:
        raise UserError(f"--out {file}: a picture is named {', '.join(IMAGE_SUFFIXES)}")
    check_file(file, IMAGE_SUFFIXES)


def check_features(paths: Iterable[Path]) -> None:
    """Raise DataError where a file of embeddings is not there."""
    for path in paths:
        if not path.is_file():
            why = "it is no regular file" if path.exists() else "there is no such file"
            raise DataError(
                f"cannot read embeddings from {path}: {why}; write it with `sslpipe embed`"
            )


def find_images(folder: Path, image_type: "ImageType | None" = None) -> list[Path]:
    """Return every image under a folder, sorted, of the formats that a build reads.

    What is hidden, or a system's, is skipped, and each file is there once, as in `shards build`.
    `image_type` None: of any format, where the network is not yet known.

    Raises: UserError where there is none.
    """
    from sslpipe.satellites import offered
    from sslpipe.sharding.sources import SUFFIXES
    from sslpipe.sharding.walk import walk

    suffixes = SUFFIXES
    if image_type is None or not image_type.is_rgb8:
        suffixes += tuple(end for reader in offered("image_files") for end in reader.SUFFIXES)
    images = walk(folder, suffixes=suffixes).images(suffixes) if folder.is_dir() else []
    if not images:
        raise UserError(f"{folder} holds no image ({', '.join(suffixes)})")
    return [entry.path for entry in images]


def images_of(places: Iterable[Path], image_type: "ImageType | None" = None) -> list[Path]:
    """Replace folders by the images in them. Raises: UserError."""
    groups = ([path] if not path.is_dir() else find_images(path, image_type) for path in places)
    return [path for paths in groups for path in paths]


def find_named_images(
    folder: Path,
    image_type: "ImageType | None" = None,
    say: Callable[[str], None] = lambda text: None,
) -> list[tuple[str, Path]]:
    """Return the name and the path of every image below FOLDER/NAME.

    `say` is called with what is skipped, or looks like a slip. Raises: UserError where there is
    none.
    """
    from sslpipe.sharding.sources import class_of
    from sslpipe.sharding.walk import walk

    below = walk(folder).folders if folder.is_dir() else []
    names = [each.name for each in below if each.parent == folder]
    if not names:
        raise UserError(f"{folder} has no folders; expected one a name, with its images inside")
    by_name: dict[str, list[Path]] = {name: [] for name in names}
    loose: list[Path] = []
    for path in find_images(folder, image_type):
        parts = path.relative_to(folder).parts
        (loose if len(parts) == 1 else by_name[parts[0]]).append(path)
    named = {name: images for name, images in by_name.items() if images}
    if not named:
        raise UserError(f"the folders of {folder} hold no image; expected one a name")
    for name in names:
        if name not in named:
            say(f"skipped: {folder / name} holds no image")
    if loose:
        some = listed(list(map(str, loose)), 1)
        say(f"skipped: {some}: not in a folder, so without a name")
    _doubt_names(folder, named, say)
    return [(class_of(name) or name, path) for name, images in named.items() for path in images]


def _doubt_names(folder: Path, named: dict[str, list[Path]], say: Callable[[str], None]) -> None:
    """Report folders that are hardly those of names; `named` are the images of each."""
    from sslpipe.sharding.folder_doubts import are_times
    from sslpipe.sharding.split_names import split_of

    if are_times(named) or all(split_of(name) for name in named):
        say(
            f"look at this: folders of years, days, a camera or splits became names, such as "
            f"{min(named)}; give the folder of those who are in the images"
        )
    of_names = [folder / name for name in named]
    deeper = {path.parent for images in named.values() for path in images}.difference(of_names)
    if deeper:
        say(
            f"look at this: folders in those of the names hold images, {len(deeper):,}, such as "
            f"{min(deeper)}: where these are the names, give {min(deeper).parent}"
        )


def start(device: str, alone: str = "", *, small: bool = False) -> tuple[str, "Rank"]:
    """Join the launcher's processes; `sslpipe.distributed.end_processes` leaves them.

    Args:
        device: As in --device.
        alone: A command that runs in one process; "": one that takes several.
        small: Keep no freed memory: slower, but the process shrinks between large stages.

    Returns:
        The torch device of this process, and its place among the others.

    Raises:
        UserError: There is no such device, or there are several processes and one is wanted.
    """
    import torch

    from sslpipe.distributed import Rank, pick_device
    from sslpipe.portable import keep_freed_memory

    target = pick_device(device, f"--device {device}")
    process = Rank()
    if any(name == "WORLD_SIZE" or name.startswith("ACCELERATE_") for name in os.environ):
        from sslpipe.run.accelerator import join_processes  # imports accelerate

        process = join_processes(cpu=target == "cpu", timeout_s=3600.0)
    elif not small:  # no launcher
        keep_freed_memory()
    if alone and process.world_size > 1:
        started = f"the launcher started {process.world_size}"
        raise UserError(f"{alone} runs in one process, and {started}")
    return f"cuda:{torch.cuda.current_device()}" if target == "cuda" else target, process
