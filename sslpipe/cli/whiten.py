"""`sslpipe whiten`: PCA whitening and test-time crops into an export, for all who use it."""

from pathlib import Path
from typing import Annotated

import typer

from sslpipe.cli.inputs import check_export, check_features
from sslpipe.cli.next_step import say_next
from sslpipe.cli.terminal import console
from sslpipe.errors import UserError

FLOOR = 0.1  # sslpipe.evaluation.whiten.FLOOR, without its imports

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


@app.command(epilog="Example: sslpipe whiten out/backbone train.safetensors --dims 64")
def main(
    export: Annotated[Path, typer.Argument(help="An export's folder.")],
    train: Annotated[Path, typer.Argument(help="What `sslpipe embed` wrote of the train split.")],
    floor: Annotated[
        float | None,
        typer.Option(
            min=0, help=f"Added to each variance, as a share of their mean; {FLOOR} by default."
        ),
    ] = None,
    dims: Annotated[int | None, typer.Option(min=1, help="Keep so many axes; else all.")] = None,
    pca: Annotated[
        bool, typer.Option("--pca", help="Rotate to the principal axes without whitening.")
    ] = False,
    erase: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN",
            help="Change the features as little as can be so that no linear probe reads this "
            "column of the data set from them, first; repeatable. Needs --data.",
        ),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="The dataset.json that TRAIN was embedded from, for --erase.")
    ] = None,
) -> None:
    """Store a PCA whitening, and the crops of TRAIN, in an export.

    The whitening is fitted on TRAIN; `encode` and `sslpipe embed` apply both from then on. With
    --erase a column of the data set (scanner, say) is taken out of the features before.
    """
    check_export(export)
    check_features([train])

    if data is not None and not erase:
        raise UserError("--data is where --erase looks up a column; name one, or leave --data out")

    from sslpipe.export.whiten import whiten_export

    width, kept = whiten_export(export, train, floor, dims, pca=pca, erase=erase or (), data=data)
    done = "principal axes, largest first" if pca else "whitened"
    erased = f"{', '.join(erase)} erased, " if erase else ""
    console.print(f"{export}: {width} -> {kept} features, {erased}{done}", highlight=False)
    say_next("gallery", "enrol", "--help")
