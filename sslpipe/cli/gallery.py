"""`sslpipe gallery`: enrol, identify and verify; a gallery in one file, images in folders."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import numpy as np
import typer
from rich.console import Console

from sslpipe.cli.inputs import OTHERS, check_model, find_images, find_named_images
from sslpipe.cli.next_step import say_next
from sslpipe.cli.progress import progress
from sslpipe.cli.recipes import Checkpoint, Device, Weights
from sslpipe.cli.terminal import console as err
from sslpipe.cli.terminal import say_weights
from sslpipe.errors import DataError, UserError, one_line

if TYPE_CHECKING:
    from torch import Tensor

    from sslpipe.evaluation.neighbours import Search
    from sslpipe.export.load import FrozenBackbone
    from sslpipe.metric_learning.gallery import Gallery, Match

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Enrol, identify and verify: who is in this picture? Identities are added and removed "
    "without training anything.",
    epilog="Examples: sslpipe gallery enrol team.safetensors PHOTOS --model out/backbone "
    "(PHOTOS/NAME/*.jpg) | sslpipe gallery calibrate team.safetensors STRANGERS --model "
    "out/backbone --far 0.01 | sslpipe gallery identify team.safetensors new.jpg --model "
    "out/backbone",
)
out = Console()

GalleryFile = Annotated[Path, typer.Argument(help="The gallery's file.", show_default=False)]
Model = Annotated[Path, typer.Option(help=f"A run directory, {OTHERS}, or model.onnx.")]
SearchBy = Annotated[str | None, typer.Option(help="torch or faiss: the same answers.")]
Far = Annotated[float, typer.Option(min=0, max=1, help="Share of impostors that may pass.")]


@app.command()
def enrol(
    gallery: GalleryFile,
    folder: Annotated[Path, typer.Argument(help="One folder a name: FOLDER/NAME/*.jpg.")],
    model: Model,
    checkpoint: Checkpoint = None,
    weights: Weights = None,
    search: SearchBy = None,
    device: Device = "auto",
) -> None:
    """Add every name of a folder of folders; names that are there get more images."""
    check_model(model)
    names, paths = find_named_images(folder)
    backbone = _load(model, checkpoint, weights, device)
    book = _open(gallery, backbone, search, must_exist=False)
    kept, embeddings = _embed(backbone, paths)
    book.enrol([names[k] for k in kept], embeddings)
    book.save(gallery)
    summary = (
        f"{len(kept)} images of {len({names[k] for k in kept})} names; {len(book)} names in all"
    )
    out.print(f"{gallery}: {summary}", highlight=False)
    _say_next(book, gallery, "--model", model, images=folder)


@app.command()
def add(
    gallery: GalleryFile,
    name: Annotated[str, typer.Argument(help="Of the person or product.")],
    images: Annotated[list[Path], typer.Argument(help="Its images.")],
    model: Model,
    checkpoint: Checkpoint = None,
    weights: Weights = None,
    device: Device = "auto",
) -> None:
    """Add one name, or more images of one."""
    check_model(model)
    _check_images(images)
    backbone = _load(model, checkpoint, weights, device)
    book = _open(gallery, backbone, None, must_exist=False)
    _, embeddings = _embed(backbone, images)
    book.add(name, embeddings)
    book.save(gallery)
    count = len(book.embeddings(name))
    out.print(f"{gallery}: {one_line(name)} has {count} images", highlight=False, markup=False)
    _say_next(book, gallery, "--model", model, images=images[0])


@app.command()
def remove(
    gallery: GalleryFile,
    name: Annotated[str, typer.Argument(help="The name to forget.")],
) -> None:
    """Forget a name."""
    book = _read(gallery)
    book.remove(name)
    book.save(gallery)
    summary = f"{one_line(name)} is gone; {len(book)} names are left"
    out.print(f"{gallery}: {summary}", highlight=False, markup=False)
    say_next("gallery", "list", gallery)


@app.command("list")
def list_names(gallery: GalleryFile) -> None:
    """Names, their numbers of images, and the threshold."""
    book = _read(gallery)
    for name in book.names:
        count = len(book.embeddings(name))
        out.print(f"{count:6d}  {one_line(name)}", highlight=False, markup=False)
    threshold = f"{book.threshold:.4f}" if book.calibrated else "not set; `calibrate` sets it"
    out.print(f"threshold {threshold}", highlight=False)


@app.command()
def calibrate(
    gallery: GalleryFile,
    strangers: Annotated[Path, typer.Argument(help="A folder of images of nobody in it.")],
    model: Model,
    checkpoint: Checkpoint = None,
    weights: Weights = None,
    far: Far = 0.01,
    search: SearchBy = None,
    device: Device = "auto",
) -> None:
    """Set the threshold that at most a share FAR of the strangers' images reaches."""
    check_model(model)
    _check_there(gallery)
    paths = find_images(strangers)
    backbone = _load(model, checkpoint, weights, device)
    book = _open(gallery, backbone, search)
    _, embeddings = _embed(backbone, paths)
    threshold = book.calibrate(embeddings, far)
    book.save(gallery)
    summary = f"{threshold:.4f} from {len(embeddings)} strangers at FAR {far:g}"
    out.print(f"{gallery}: threshold {summary}", highlight=False)
    if len(embeddings) * far < 1:
        err.print(
            f"fewer than {1 / far:.0f} strangers say little about FAR {far:g}: the threshold lies "
            "just above the highest of them",
            style="yellow",
        )
    say_next("gallery", "identify", gallery, strangers, "--model", model)


@app.command()
def identify(
    gallery: GalleryFile,
    images: Annotated[list[Path], typer.Argument(help="Images or folders of images.")],
    model: Model,
    checkpoint: Checkpoint = None,
    weights: Weights = None,
    top: Annotated[int, typer.Option(min=1, help="Names to show of each.")] = 1,
    search: SearchBy = None,
    device: Device = "auto",
) -> None:
    """One line an image: path, name or -, score; the names below the threshold in brackets.

    Before `calibrate` no threshold is set: the nearest name, whoever it is, and each line says so.
    """
    check_model(model)
    _check_there(gallery)
    paths = [path for name in images for path in (find_images(name) if name.is_dir() else [name])]
    _check_images(paths)

    from sslpipe.metric_learning.gallery import NO_THRESHOLD

    backbone = _load(model, checkpoint, weights, device)
    book = _open(gallery, backbone, search)
    kept, embeddings = _embed(backbone, paths)
    for k, matches in zip(kept, book.rank(embeddings, min(top, len(book))), strict=True):
        print("\t".join([one_line(str(paths[k])), *(_answer(book, match) for match in matches)]))
    if not book.calibrated:
        err.print(NO_THRESHOLD, style="yellow", highlight=False)
        _say_next(book, gallery, "--model", model)


def _answer(book: "Gallery", match: "Match") -> str:
    name, score = one_line(match.name), f"{match.score:.4f}"
    if not book.calibrated:
        return f"{name}\t{score} (nearest name, no threshold set)"
    return f"{name}\t{score}" if match.score >= book.threshold else f"-\t{score} ({name})"


@app.command("verify")
def verify_command(
    first: Annotated[Path, typer.Argument(help="An image.")],
    second: Annotated[Path, typer.Argument(help="Another one.")],
    model: Model,
    checkpoint: Checkpoint = None,
    weights: Weights = None,
    threshold: Annotated[float | None, typer.Option(help="Accept from here on.")] = None,
    pairs: Annotated[
        Path | None, typer.Option(help="Or set it by a folder of folders, one a name, and --far.")
    ] = None,
    far: Far = 0.001,
    device: Device = "auto",
) -> None:
    """Do two images show one identity? Exit status 0: yes, 1: no."""
    if (threshold is None) == (pairs is None):
        raise UserError("give --threshold, or --pairs FOLDER to set one by")
    check_model(model)
    _check_images([first, second])
    names, paths = ([], []) if pairs is None else find_named_images(pairs)

    import torch

    from sslpipe.metric_learning.gallery import different_pairs, threshold_at, verify

    backbone = _load(model, checkpoint, weights, device)
    if threshold is None:
        kept, embeddings = _embed(backbone, paths)
        labels = np.unique([names[k] for k in kept], return_inverse=True)[1]
        threshold = threshold_at(different_pairs(embeddings, torch.from_numpy(labels)), far)
    kept, two = _embed(backbone, [first, second])
    if len(kept) < 2:
        raise UserError("both images must be readable")
    same, score = verify(two[0], two[1], threshold)
    print(f"{'same' if same else 'different'}\t{score:.4f}\tthreshold {threshold:.4f}")
    if not same:
        raise typer.Exit(1)


def _say_next(
    book: "Gallery", gallery: Path, *model: str | Path, images: Path | None = None
) -> None:
    """Name `calibrate`, without which a stranger gets a name, and after it `identify`."""
    if not book.calibrated:
        say_next("gallery", "calibrate", gallery, "STRANGERS", *model)
    elif images is not None:
        say_next("gallery", "identify", gallery, images, *model)


def _check_there(gallery: Path) -> None:
    if not gallery.is_file():
        raise DataError(f"{gallery} holds no gallery: there is no such file; enrol one first")


def _check_images(paths: list[Path]) -> None:
    for path in paths:
        if not path.is_file():
            raise UserError(f"cannot read the image {path}: No such file")


def _read(gallery: Path, search: "Search | None" = None) -> "Gallery":
    _check_there(gallery)

    from sslpipe.metric_learning.gallery import Gallery

    return Gallery.load(gallery, search=search)


def _load(model: Path, checkpoint: str | None, weights: Weights, device: str) -> "FrozenBackbone":
    from sslpipe.distributed import pick_device
    from sslpipe.export.load import load_backbone

    backbone = load_backbone(model, checkpoint=checkpoint, weights=weights)
    say_weights(backbone)
    return backbone.to(pick_device(device, f"--device {device}"))


def _open(
    path: Path, backbone: "FrozenBackbone", search: SearchBy, *, must_exist: bool = True
) -> "Gallery":
    """The gallery, if it was made with this backbone; a new one where none needs to be there."""
    from sslpipe.metric_learning.gallery import Gallery

    made_with = {"backbone_sha256": backbone.config.weights_sha256}
    engine = cast("Search | None", search)  # Gallery refuses any other
    if not path.exists() and not must_exist:
        return Gallery(backbone.num_features, search=engine, metadata=made_with)
    book = _read(path, engine)
    if book.metadata != made_with:
        raise UserError(
            f"{path} was made with another model; its embeddings mean nothing to this one: "
            "give that --model, or enrol into a new file"
        )
    return book


def _embed(backbone: "FrozenBackbone", paths: list[Path]) -> tuple[list[int], "Tensor"]:
    """`embed_images`; what cannot be read is named on stderr."""
    from sslpipe.metric_learning.gallery_images import embed_images

    def report(path: Path, reason: str) -> None:
        err.print(f"skipped: {path}: {reason}", style="yellow", highlight=False, markup=False)

    with progress("embed", len(paths)) as advance:
        return embed_images(backbone, paths, on_bad=report, advance=advance)
