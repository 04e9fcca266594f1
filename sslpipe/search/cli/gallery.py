"""`sslpipe gallery`: enrol, identify and verify; a gallery in one file, images in folders."""

from pathlib import Path
from typing import Annotated

import typer

from sslpipe.cli.inputs import check_model, find_images, find_named_images, images_of
from sslpipe.cli.next_step import say_next
from sslpipe.cli.options import Model, argument, command, option
from sslpipe.cli.terminal import encode_readable, new_app, say, show
from sslpipe.errors import UserError, counted, listed, one_line
from sslpipe.search.cli.gallery_files import (
    FLATTENED,
    alone,
    check_there,
    enrol_images,
    open_gallery,
    read_gallery,
)

app = new_app(
    no_args_is_help=True,
    help="Enrol, identify and verify: who is in this picture? Adding or removing identities needs "
    "no training.",
    examples=[
        "sslpipe gallery enrol team.safetensors PHOTOS --model out/backbone  # PHOTOS/NAME/*.jpg",
        "sslpipe gallery calibrate team.safetensors STRANGERS --model out/backbone --far 0.01",
        "sslpipe gallery identify team.safetensors new.jpg --model out/backbone",
    ],
)

MOST_NAMED = 3  # names in a line

GalleryFile = Annotated[Path, argument("The gallery's file.", show_default=False)]
Flatten = Annotated[
    bool | None,
    option(
        "Of a new gallery: flatten the features' spectrum, fitted on the images enrolled first. "
        "Default: do, where these are enough; see docs/search.md.",
        "--flatten/--no-flatten",
        show_default=False,
    ),
]
Far = Annotated[float, option("Share of impostors that may pass.", min=0, max=1)]


@command(
    app,
    examples=["sslpipe gallery enrol team.safetensors PHOTOS --model out/backbone"],
)
def enrol(
    gallery: GalleryFile,
    folder: Annotated[Path, argument("One folder per name: FOLDER/NAME/*.jpg.")],
    model: Model,
    flatten: Flatten = None,
) -> None:
    """Add every name in a folder of folders.

    Names that are enrolled already get more images, but none twice.
    """
    check_model(model.model)
    find_named_images(folder)
    backbone = model.load()
    named = find_named_images(folder, backbone.image_type, say)
    book, names = enrol_images(gallery, backbone, named, flatten)
    added = f"{counted(len(names), 'image')} of {_describe(names)}" if names else "nothing new"
    show(f"{gallery}: {added}; {counted(len(book), 'name')} in all")
    if book.calibrated:
        say_next(["gallery", "identify", gallery, folder, "--model", model.model])
    else:
        say_next(["gallery", "calibrate", gallery, "STRANGERS", "--model", model.model])


def _describe(names: list[str]) -> str:
    """Count the different names, and list some: what became an identity."""
    different = [*dict.fromkeys(names)]
    some = listed([one_line(name) for name in different], MOST_NAMED)
    return f"{counted(len(different), 'name')} ({some})"


@command(
    app,
    examples=[
        'sslpipe gallery add team.safetensors "Ada" ada/*.jpg --model out/backbone',
    ],
)
def add(
    gallery: GalleryFile,
    name: Annotated[str, argument("The person or product.")],
    images: Annotated[list[Path], argument("Its images.")],
    model: Model,
) -> None:
    """Add one name, or more images to one."""
    check_model(model.model)
    _check_images(images)

    from sslpipe.sharding.sources import class_of

    name = class_of(name) or name
    backbone = model.load()
    book, _ = enrol_images(gallery, backbone, [(name, path) for path in images], None)
    show(f"{gallery}: {one_line(name)} has {counted(len(book.embeddings(name)), 'image')}")


@command(
    app,
    examples=[
        'sslpipe gallery remove team.safetensors "Ada"',
    ],
)
def remove(
    gallery: GalleryFile,
    name: Annotated[str, argument("The name to remove.")],
) -> None:
    """Remove a name and its images."""
    check_there(gallery)
    with alone(gallery):
        book = read_gallery(gallery)
        book.remove(name)
        book.save(gallery)
    show(f"{gallery}: {one_line(name)} is gone; {len(book)} names are left")


@command(
    app,
    name="list",
    examples=["sslpipe gallery list team.safetensors"],
)
def list_names(
    gallery: GalleryFile,
) -> None:
    """Print the names, their numbers of images, and the threshold."""
    book = read_gallery(gallery)
    for name in book.names:
        show(f"{len(book.embeddings(name)):6d}  {one_line(name)}")
    show(f"features {book.metadata.get(FLATTENED, 'as the model gives them')}")
    threshold = f"{book.threshold:.4f}" if book.calibrated else "not set; `calibrate` sets it"
    if calibration := book.metadata.get("calibration"):
        threshold += ", set by {strangers:,} strangers at FAR {far:g} among {names:,} names".format(
            **calibration
        )
    show(f"threshold {threshold}")


@command(
    app,
    examples=[
        "sslpipe gallery calibrate team.safetensors STRANGERS --model out/backbone --far 0.01"
    ],
)
def calibrate(
    gallery: GalleryFile,
    folder: Annotated[Path, argument("A folder of images of strangers.", metavar="STRANGERS")],
    model: Model,
    far: Far = 0.01,
) -> None:
    """Set the threshold by images of strangers.

    At most a share FAR of them reaches it.
    """
    check_model(model.model)
    check_there(gallery)
    find_images(folder)

    backbone = model.load()
    paths = find_images(folder, backbone.image_type)
    open_gallery(gallery, backbone)
    kept, embeddings = encode_readable(backbone, paths)
    with alone(gallery):
        book = open_gallery(gallery, backbone)
        threshold = book.calibrate(embeddings, far, names=[str(paths[place]) for place in kept])
        book.save(gallery)
    show(f"{gallery}: threshold {threshold:.4f} from {len(embeddings)} strangers at FAR {far:g}")
    if len(embeddings) * far < 1:
        few = "no number of strangers shows a FAR of 0"
        if far > 0:
            few = f"fewer than {1 / far:.0f} strangers say little about FAR {far:g}"
        say(f"{few}: the threshold lies just above the highest of them", "yellow")
    say_next(["gallery", "identify", gallery, folder, "--model", model.model])


@command(
    app,
    examples=["sslpipe gallery identify team.safetensors new.jpg --model out/backbone"],
)
def identify(
    gallery: GalleryFile,
    images: Annotated[list[Path], argument("Images or folders of images.")],
    model: Model,
) -> None:
    """Print path, name or -, and score of each image.

    Names below the threshold stand in brackets. Until `calibrate` sets a threshold, every image
    gets the nearest name, and its line says so.
    """
    check_model(model.model)
    check_there(gallery)
    _check_images(images_of(images))

    from sslpipe.search.gallery import NO_THRESHOLD

    backbone = model.load()
    paths = images_of(images, backbone.image_type)
    book = open_gallery(gallery, backbone)
    kept, embeddings = encode_readable(backbone, paths)
    for k, (match, *_) in zip(kept, book.rank(embeddings), strict=True):
        path = one_line(str(paths[k]))
        name = one_line(match.name)
        if book.calibrated and match.score < book.threshold:
            print(f"{path}\t-\t{match.score:.4f} ({name})")
        else:
            unsure = "" if book.calibrated else " (nearest name, no threshold set)"
            print(f"{path}\t{name}\t{match.score:.4f}{unsure}")
    if not book.calibrated:
        say(NO_THRESHOLD, "yellow")
        say_next(["gallery", "calibrate", gallery, "STRANGERS", "--model", model.model])


@command(
    app,
    name="verify",
    examples=["sslpipe gallery verify a.jpg b.jpg --model out/backbone --pairs PHOTOS"],
)
def verify_command(
    images: Annotated[tuple[Path, Path], argument("Two images.", metavar="IMAGE")],
    model: Model,
    threshold: Annotated[float | None, option("Accept scores from here on.")] = None,
    pairs: Annotated[
        Path | None, option("Or set it from --far and this folder, with one folder per name.")
    ] = None,
    far: Far = 0.001,
) -> None:
    """Decide whether two images show one identity. Exit status 0: yes, 1: no."""
    if (threshold is None) == (pairs is None):
        raise UserError("give --threshold, or --pairs FOLDER to set one by")
    check_model(model.model)
    _check_images([*images])
    if pairs is not None:
        find_named_images(pairs)

    import torch

    from sslpipe.search.gallery import different_pairs, similarity, threshold_at
    from sslpipe.sharding.sources import numbered

    backbone = model.load()
    if threshold is None:
        assert pairs is not None
        named = find_named_images(pairs, backbone.image_type, say)
        kept, embeddings = encode_readable(backbone, [path for _, path in named])
        labels = torch.from_numpy(numbered([named[k][0] for k in kept]))
        threshold = threshold_at(different_pairs(embeddings, labels), far)
    kept, two = encode_readable(backbone, [*images])
    if len(kept) < 2:
        raise UserError("both images must be readable")
    score = similarity(two[0], two[1])
    same = score >= threshold
    print(f"{'same' if same else 'different'}\t{score:.4f}\tthreshold {threshold:.4f}")
    if not same:
        raise typer.Exit(1)


def _check_images(paths: list[Path]) -> None:
    for path in paths:
        if not path.is_file():
            raise UserError(f"cannot read the image {path}: No such file")
