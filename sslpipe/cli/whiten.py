"""`sslpipe whiten`: PCA whitening and test-time crops into an export, for all who use it."""

from pathlib import Path
from typing import Annotated

from sslpipe.cli.inputs import check_export, check_features
from sslpipe.cli.next_step import say_next
from sslpipe.cli.options import argument, option
from sslpipe.cli.terminal import new_app, say
from sslpipe.errors import UserError

FLOOR = 0.1  # sslpipe.evaluation.whiten.FLOOR, without its imports

app = new_app()


@app.command(epilog="Example: sslpipe whiten out/backbone train.safetensors --dims 64")
def main(
    export: Annotated[Path, argument("An export's folder.")],
    train: Annotated[Path, argument("Features of the train split (`sslpipe embed`).")],
    floor: Annotated[
        float | None,
        option(f"Add this share of the mean variance to each variance. Default: {FLOOR}.", min=0),
    ] = None,
    power: Annotated[
        float | None,
        option(
            "Divide each axis by its spread to this power: 1 whitens (default), 0.25 to 0.75 "
            "flatten in part, 0 only centres and rotates.",
            min=0,
            max=1,
        ),
    ] = None,
    dims: Annotated[int | None, option("Axes to keep. Default: all.", min=1)] = None,
    pca: Annotated[
        bool, option("Rotate to the principal axes without whitening.", "--pca")
    ] = False,
    erase: Annotated[
        list[str] | None,
        option(
            "First change the features, as little as possible, so that no linear probe can read "
            "this column of the data set. Needs --data; repeatable.",
            metavar="COLUMN",
        ),
    ] = None,
    data: Annotated[
        str | None, option("For --erase: the dataset.json that TRAIN was embedded from.")
    ] = None,
) -> None:
    """Store a PCA whitening, and the crops of TRAIN, in an export.

    The whitening is fitted on TRAIN. From then on `encode` and `sslpipe embed` apply both.
    """
    check_export(export)
    check_features([train])
    if data is not None and not erase:
        raise UserError("--data is where --erase looks up a column; name one, or leave --data out")

    from sslpipe.export.whiten import whiten_export

    width, kept = whiten_export(
        export, train, floor, dims, power=power, pca=pca, erase=erase or (), data=data
    )
    whitened = "whitened" if power in (None, 1) else f"spectrum flattened by power {power:g}"
    done = "principal axes, largest first" if pca else whitened
    erased = f"{', '.join(erase)} erased, " if erase else ""
    say(f"{export}: {width} -> {kept} features, {erased}{done}")
    say_next("gallery", "enrol", "--help")
