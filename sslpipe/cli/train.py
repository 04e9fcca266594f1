"""`sslpipe check`, `train` and `preview`; heavy imports are inside the commands."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from sslpipe.cli.recipes import Data, Overrides, RecipePath, check_backbone, read_recipe

if TYPE_CHECKING:
    from sslpipe.export.load import FrozenBackbone
    from sslpipe.recipe.finetune import FinetuneRecipe
    from sslpipe.recipe.pretrain import Recipe

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")

BackbonePath = Annotated[
    Path | None,
    typer.Option(
        "--backbone",
        help="Of a fine-tuning: the export or run it starts from; without it, random weights of "
        "the recipe's own.",
    ),
]


@app.command(
    epilog="Examples: sslpipe check recipe.toml --data out/photos/dataset.json data.batch_size=512 "
    "| sslpipe check finetune.toml --data out/photos/dataset.json --backbone runs/photos"
)
def check(
    recipe: RecipePath,
    overrides: Overrides = None,
    data: Annotated[
        str | None, typer.Option(help="The data set's dataset.json: a path or a URL.")
    ] = None,
    backbone: BackbonePath = None,
) -> None:
    """Validate a recipe without training; print its settings and sizes.

    Of pretraining also estimates: memory, time and disk.
    """
    from sslpipe.check.finetuning import check_finetune, render_finetune
    from sslpipe.check.pretraining import check as check_recipe
    from sslpipe.check.pretraining import render
    from sslpipe.data.index import load_index
    from sslpipe.recipe.finetune import FinetuneRecipe

    loaded = read_recipe(recipe, overrides)
    init_from = _load_start(loaded, backbone)
    index = load_index(data) if data else None
    if isinstance(loaded, FinetuneRecipe):
        Console().print(render_finetune(check_finetune(loaded, index, init_from)))
    else:
        Console().print(render(check_recipe(loaded, index)))


@app.command(
    epilog="Examples: sslpipe train recipe.toml --data out/photos/dataset.json --run-dir "
    "runs/photos | accelerate launch --multi_gpu --num_processes 2 -m sslpipe train recipe.toml "
    "--data out/photos/dataset.json --run-dir runs/photos optim.peak_lr=0.1 | sslpipe train "
    "finetune.toml --backbone runs/photos --data out/photos/dataset.json --run-dir runs/tuned"
)
def train(
    recipe: RecipePath,
    overrides: Overrides = None,
    data: Data = ...,  # type: ignore[assignment]
    run_dir: Annotated[Path, typer.Option(help="Where the run lives; the same one resumes.")] = ...,  # type: ignore[assignment]
    backbone: BackbonePath = None,
) -> None:
    """Pretrain or, with a recipe of fine-tuning, fine-tune; or resume.

    A run directory that holds an unfinished run of this recipe is resumed from its last
    checkpoint, with any number of processes that divides the recipe's streams.
    """
    from sslpipe.data.index import load_index
    from sslpipe.recipe.finetune import FinetuneRecipe
    from sslpipe.run.launch import end_processes

    loaded = read_recipe(recipe, overrides)
    init_from = _load_start(loaded, backbone)
    if isinstance(loaded, FinetuneRecipe):
        from sslpipe.metric_learning.finetune import finetune

        finetune(loaded, load_index(data), run_dir, init_from)
    else:
        from sslpipe.train import train as pretrain

        pretrain(loaded, load_index(data), run_dir)
    end_processes()


@app.command(
    epilog="Example: sslpipe preview recipe.toml --data out/photos/dataset.json --out views.png"
)
def preview(
    recipe: RecipePath,
    overrides: Overrides = None,
    data: Data = ...,  # type: ignore[assignment]
    out: Annotated[Path, typer.Option(help="The PNG to write.")] = Path("views.png"),
    images: Annotated[int, typer.Option(min=1, help="How many images.")] = 8,
    ids: Annotated[list[int] | None, typer.Option(help="These samples instead.")] = None,
    epoch: Annotated[int, typer.Option(min=0, help="The first epoch whose views are shown.")] = 0,
) -> None:
    """Draw images beside the views that training makes of them.

    The parameters of each view stand beside it.
    """
    from sslpipe.data.index import load_index
    from sslpipe.run.preview import preview_recipe

    loaded, index = read_recipe(recipe, overrides), load_index(data)
    index.check_files(loaded.data.split, allow_pipe=loaded.run.allow_pipe)
    grid, shown = preview_recipe(loaded, index, images=images, ids=ids, epoch=epoch)
    out.parent.mkdir(parents=True, exist_ok=True)
    grid.save(out)
    Console().print(f"{shown} images and their views: {out}", highlight=False)


def _load_start(
    recipe: "Recipe | FinetuneRecipe", backbone: Path | None
) -> "FrozenBackbone | None":
    """Return the weights that a fine-tuning starts from, if it starts from any."""
    check_backbone(recipe, backbone)
    if backbone is None:
        return None
    from sslpipe.export.load import load_backbone

    return load_backbone(backbone)
