"""`sslpipe choose`: which weights, sizes, joins and flattening suit these images."""

from pathlib import Path
from typing import Annotated

import typer

from sslpipe.cli.inputs import check_folder
from sslpipe.cli.next_step import check_words, say_next
from sslpipe.cli.options import SOURCES, Device, NumWorkers, argument, command, option
from sslpipe.cli.terminal import (
    new_app,
    print_table,
    progress,
    report_bad,
    say,
    show,
    text_table,
)
from sslpipe.recipe.reading import labelled_recipes

app = new_app()


@command(
    app,
    examples=[
        "sslpipe choose timm:resnet50 timm:vit_small_patch14_dinov2 --data out/photos/dataset.json "
        "--out out/choice",
        "sslpipe choose timm/resnet50@weights.pth --px 128 --px 224 --data MY_PHOTOS --out "
        "out/choice  # a folder of images, classes by folder",
        "sslpipe choose out/choice runs/tuned --data out/photos/dataset.json --out out/trained  # "
        "the run that was trained from out/choice, and joined anew",
    ],
)
def choose_weights(
    sources: Annotated[
        list[str],
        argument(f"Candidates: a run, {SOURCES}, or those of an earlier choice.", metavar="SOURCE"),
    ],
    data: Annotated[str, option("The data set's dataset.json, or a folder of images.")],
    out: Annotated[Path, option("Folder for the page, the numbers and the kept features.")],
    split: Annotated[str, option("The split to choose on; keep test for the end.")] = "train",
    px: Annotated[
        list[int] | None,
        option(
            "Side of the images, where SOURCE names none; repeatable. Default: the weights'.",
            metavar="N",
        ),
    ] = None,
    most: Annotated[int, option("Images to use at most, of each class alike.", min=20)] = 5000,
    num_workers: NumWorkers = 2,
    device: Device = "auto",
) -> None:
    """Rank pretrained weights on your images, and joins of them.

    Sizes and flattening are tried, too; nothing is trained.

    With labels of two images or more in each of four classes, half the classes choose and the
    others say what it is worth; without, candidates are ranked by how well they recognise an
    image's other corner. Classes by which a candidate was trained rank nothing. A candidate that
    fails is reported and skipped (exit status 2).
    """
    check_folder(out)

    from sslpipe.cli.inputs import start
    from sslpipe.search.choice import choose

    start(device, "choose", small=True)
    choice = choose(
        sources,
        data,
        out,
        split,
        px=px or (),
        most=most,
        num_workers=num_workers,
        device=device,
        say=say,
        progress=progress,
        on_bad=report_bad,
    )
    shown = len(choice.heads) - 2  # the page has the last two, too: megabytes and numbers
    table = text_table(choice.heads[:shown], [row[:shown] for row in choice.rows])
    print_table(table)
    if any("*" in cell for row in choice.rows for cell in row[1:]):
        typer.echo("* clearly different, all rows taken together (Holm)")
    show("\n".join(choice.answer))
    say(f"{choice.page}: what each costs, and the same queries under each")
    say(f"{choice.backbone}: {choice.best.name}, for load_backbone, search, export and evaluate")
    features = f"{choice.backbone}.safetensors"
    say_next(["embed", out, "--data", choice.data, "--split", split, "--out", features])
    say_next(
        ["search", features, "QUERY.jpg", "--model", out, "--data", choice.data],
        when=", then",
    )
    for recipe, _ in labelled_recipes() if choice.by_labels else ():
        say_next(check_words(recipe, choice.data, init=out), when=", to train it with these labels")
    if choice.skipped:
        raise typer.Exit(2)
