"""PCA whitening and test-time crops into an export: `encode` and `sslpipe embed` apply them."""

import json
from pathlib import Path
from typing import Annotated

import typer

from sslpipe.cli.embed import console, run
from sslpipe.errors import UserError
from sslpipe.evaluation.embed import load_embeddings
from sslpipe.evaluation.whiten import FLOOR, fit_whitening, save_whitening
from sslpipe.export.load import SSLPIPE_KEY, load_backbone
from sslpipe.export.model_card import sha256_sums
from sslpipe.portable import write_atomically

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


@app.command(epilog="Example: python -m tools.whiten out/backbone train.safetensors --dims 64")
def main(
    export: Annotated[Path, typer.Argument(help="An export's folder.")],
    train: Annotated[Path, typer.Argument(help="What sslpipe.cli.embed wrote of the train split.")],
    floor: Annotated[
        float, typer.Option(min=0, help="Added to each variance, as a share of their mean.")
    ] = FLOOR,
    dims: Annotated[int | None, typer.Option(min=1, help="Keep so many axes; else all.")] = None,
) -> None:
    """Fit the whitening on TRAIN; store it in EXPORT with the crops that TRAIN was made with."""
    config_json = export / "config.json"
    if not config_json.is_file():
        raise UserError(f"{export} holds no config.json; name the folder of an export")
    backbone = load_backbone(export)
    rows, facts = load_embeddings(train)
    if facts.get("backbone_sha256") != backbone.config.weights_sha256:
        raise UserError(f"{train} is of another backbone; embed the train split with {export}")
    if "whitening_sha256" in facts:
        raise UserError(f"{train} is whitened already; embed with an export without whitening")
    width = rows.features.shape[1]
    if dims is not None and dims > width:
        raise UserError(f"--dims {dims} is more than the {width} features")
    sha256 = save_whitening(export / "whitening.safetensors", fit_whitening(rows, floor, dims))
    tree = json.loads(config_json.read_text(encoding="utf-8"))
    ours = tree.get(SSLPIPE_KEY, tree)  # inside another library's, or alone
    ours |= {"whitening_sha256": sha256, "view": facts["view"]}
    write_atomically(config_json, json.dumps(tree, indent=2) + "\n")
    sums = export / "SHA256SUMS"
    sums.unlink(missing_ok=True)  # it does not list itself
    sums.write_text(sha256_sums(export), encoding="utf-8")
    console.print(f"{export}: {width} -> {dims or width} features, whitened", highlight=False)


if __name__ == "__main__":
    run(app)
