"""A gallery's file for the commands: opened with its model, changed by one process at a time."""

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from sslpipe.cli.terminal import encode_readable, say
from sslpipe.errors import DataError, UserError, counted, one_line
from sslpipe.portable import one_at_a_time

if TYPE_CHECKING:
    from torch import Tensor

    from sslpipe.export.load import FrozenBackbone
    from sslpipe.search.gallery import Gallery

FLATTENED = "flattened"  # in a gallery's metadata: how, in words


def check_there(gallery: Path) -> None:
    """Raise DataError where a gallery's file is not there."""
    if not gallery.is_file():
        raise DataError(f"{gallery} holds no gallery: there is no such file; enrol one first")


def read_gallery(gallery: Path) -> "Gallery":
    """Read a gallery. Raises: DataError."""
    check_there(gallery)

    from sslpipe.search.gallery import Gallery

    return Gallery.load(gallery)


def alone(gallery: Path) -> AbstractContextManager[None]:
    """Let one process at a time change a gallery, whichever links lead to it."""
    folder = Path(os.path.realpath(gallery)).parent
    return one_at_a_time(folder, say)


def _new(
    backbone: "FrozenBackbone", embeddings: "Tensor", names: list[str], flatten: bool | None
) -> "Gallery":
    """Make an empty gallery for embeddings; its flattening is fitted on these, its first ones."""
    import torch

    from sslpipe.evaluation.embed import Embeddings
    from sslpipe.search.flattening import fit_flattening
    from sslpipe.search.gallery import Gallery
    from sslpipe.sharding.sources import numbered

    flattening = None
    form = "as they are"
    if backbone.whitening is not None:
        form = "as their export flattened them"
    elif flatten is not False:
        labels = torch.from_numpy(numbered(names))
        rows = Embeddings(embeddings, labels, torch.arange(len(names)))
        flattening, form = fit_flattening(rows, by_labels=True, say=say)
    say(f"features {form}" + "; --no-flatten: as they are" * (flattening is not None))
    metadata = backbone.network_facts
    if flattening is not None:
        metadata[FLATTENED] = form
    return Gallery(embeddings.shape[1], metadata=metadata, flattening=flattening)


def open_gallery(path: Path, backbone: "FrozenBackbone", flatten: bool | None = None) -> "Gallery":
    """Read a gallery that was made with this backbone."""
    from sslpipe.evaluation.feature_files import COMPARED

    book = read_gallery(path)
    if "backbone_sha256" not in book.metadata:
        raise UserError(
            f"{path} does not say which model made it; enrol into a new file, or in Python begin "
            "with Gallery(backbone.num_features, metadata=backbone.network_facts)"
        )
    ours = backbone.network_facts
    deciding = (*COMPARED, "image")
    others = [key for key in deciding if book.metadata.get(key) != ours.get(key)]
    if others:
        raise UserError(
            f"{path} was made with another model, size of images, flattening or background "
            f"({', '.join(others)}); its embeddings mean nothing to this one: give that --model, "
            "or enrol into a new file"
        )
    if flatten not in (None, book.flattening is not None):
        raise UserError(
            f"{path} keeps the form that it was made in: leave --{'no-' * (not flatten)}flatten "
            "out, or enrol into a new file"
        )
    return book


def enrol_images(
    gallery: Path,
    backbone: "FrozenBackbone",
    named: list[tuple[str, Path]],
    flatten: bool | None,
) -> tuple["Gallery", list[str]]:
    """Add images to a gallery, or begin one with them; also the names of those that are new."""
    if gallery.exists():  # before images are read: it may be of another model
        open_gallery(gallery, backbone, flatten)
    kept, embeddings = encode_readable(backbone, [path for _, path in named])
    names = [named[k][0] for k in kept]
    with alone(gallery):  # what others add meanwhile stays
        if gallery.exists():
            book = open_gallery(gallery, backbone, flatten)
        else:
            book = _new(backbone, embeddings, names, flatten)
        held = book.holds(names, embeddings)
        added = [name for name, is_held in zip(names, held.tolist(), strict=True) if not is_held]
        if added:
            book.enrol(added, embeddings[~held])
            book.save(gallery)
    if len(added) < len(names):
        again = counted(len(names) - len(added), "image")
        say(f"skipped: {again} enrolled already under the same name")
    _doubt_two_names(book, names, embeddings)
    _doubt_threshold(book)
    return book, added


def _doubt_threshold(book: "Gallery") -> None:
    """Report a threshold that fewer names set: each name more lets more strangers pass."""
    before = book.metadata.get("calibration", {}).get("names", len(book))
    if book.calibrated and before < len(book):
        say(
            f"the threshold was set with {counted(before, 'name')}, and there are {len(book)}: "
            "more strangers pass; `sslpipe gallery calibrate` sets it anew",
            "yellow",
        )


def _doubt_two_names(book: "Gallery", names: list[str], embeddings: "Tensor") -> None:
    """Report images that are enrolled under another name, too: only one of the two is found."""
    if len(book) < 2:
        return
    from sslpipe.search.gallery import SAME

    nearest = book.nearest_others(names, embeddings)
    others = [
        (name, match.name)
        for name, match in zip(names, nearest, strict=True)
        if match.score >= SAME
    ]
    if others:
        first, second = map(one_line, others[0])
        say(
            f"{counted(len(others), 'image')} enrolled under two names, such as {first} and "
            f"{second}: only one is ever found; remove the other",
            "yellow",
        )
