"""A pretrained backbone and labelled shards -> a model for retrieval, recognition, verification."""

from pathlib import Path
from typing import Annotated

import typer

from tools.embed import run

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


@app.command(
    epilog="Examples: python -m tools.finetune recipes/metric/proxy_anchor.toml --backbone "
    "out/backbone --data DIR/dataset.json --run-dir runs/birds | accelerate launch --config_file "
    "launch/cpu2.yaml -m tools.finetune ... (the same program on two processes)"
)
def main(
    recipe: Annotated[Path, typer.Argument(help="A TOML recipe with a [sampler].")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Settings instead of the recipe's."),
    ] = None,
    data: Annotated[str, typer.Option("--data", help="The data set's dataset.json.")] = ...,  # type: ignore[assignment]
    run_dir: Annotated[Path, typer.Option(help="Where the run lives; the same one resumes.")] = ...,  # type: ignore[assignment]
    backbone: Annotated[
        Path | None,
        typer.Option(
            help="An export's folder or a run directory to start from; without it, "
            "random weights of the recipe's [backbone]."
        ),
    ] = None,
) -> None:
    """Fine-tune with labels, or go on where this run directory's last checkpoint ends."""
    from sslpipe.data.index import load_index
    from sslpipe.finetune import finetune
    from sslpipe.finetune_recipe import load_finetune_recipe
    from sslpipe.frozen import load_backbone
    from sslpipe.start import end_processes

    loaded = load_finetune_recipe(recipe, overrides or [])
    finetune(
        loaded, load_index(data), run_dir, None if backbone is None else load_backbone(backbone)
    )
    end_processes()


if __name__ == "__main__":
    run(app)
