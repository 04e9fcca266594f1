"""The command line: heavy imports stay inside the commands."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sslpipe.errors import UserError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Self-supervised contrastive pretraining on webdataset shards.",
    epilog="Shards are made with `python -m tools.shards`; features are measured with "
    "`python -m tools.evaluate`.",
    rich_markup_mode="rich",
)

RecipePath = Annotated[Path, typer.Argument(help="A TOML recipe, e.g. recipes/demo.toml.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Settings instead of the recipe's."),
]
DataPath = Annotated[
    str | None, typer.Option("--data", help="The data set's dataset.json: a path or a URL.")
]

NeededData = Annotated[
    str, typer.Option("--data", help="The data set's dataset.json: a path or a URL.")
]


@app.command(
    epilog="Examples: sslpipe check recipes/demo.toml --data out/demo/data/dataset.json "
    "data.batch_size=512 | sslpipe check recipes/metric/sup_con.toml --data "
    "out/photos/data/dataset.json --backbone runs/photos_ssl"
)
def check(
    recipe: RecipePath,
    overrides: Overrides = None,
    data: DataPath = None,
    backbone: Annotated[
        Path | None, typer.Option(help="Of a fine-tuning: the export or run it starts from.")
    ] = None,
) -> None:
    """Validate a recipe, of pretraining or fine-tuning, without training; print its settings and
    sizes and, of pretraining, estimates."""
    from sslpipe.check import check_recipe
    from sslpipe.data.index import load_index
    from sslpipe.export.load import load_backbone
    from sslpipe.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or [])
    init_from = None if backbone is None else load_backbone(backbone)
    Console().print(check_recipe(loaded, load_index(data) if data else None, init_from))


@app.command(
    epilog="Examples: sslpipe train recipes/demo.toml --data out/demo/data/dataset.json "
    "--run-dir runs/demo | accelerate launch --config_file launch/cpu2.yaml -m sslpipe train "
    "recipes/demo.toml --data out/demo/data/dataset.json --run-dir runs/demo optim.peak_lr=0.1 | "
    "sslpipe train recipes/metric/sup_con.toml --backbone runs/demo --data DIR/dataset.json "
    "--run-dir runs/demo_tuned"
)
def train(
    recipe: RecipePath,
    overrides: Overrides = None,
    data: NeededData = ...,  # type: ignore[assignment]
    run_dir: Annotated[Path, typer.Option(help="Where the run lives; the same one resumes.")] = ...,  # type: ignore[assignment]
    backbone: Annotated[
        Path | None,
        typer.Option(
            help="Of a fine-tuning: the export or run it starts from; without it, random weights "
            "of the recipe's [backbone]."
        ),
    ] = None,
) -> None:
    """Pretrain or, with a recipe that has a [sampler], fine-tune; or resume this run directory."""
    from sslpipe.api import train as run
    from sslpipe.run.launch import end_processes

    run(recipe, data, run_dir, backbone=backbone, overrides=overrides or [])
    end_processes()


@app.command(
    epilog="Example: sslpipe preview recipes/demo.toml --data out/demo/data/dataset.json "
    "--out views.png"
)
def preview(
    recipe: RecipePath,
    overrides: Overrides = None,
    data: NeededData = ...,  # type: ignore[assignment]
    out: Annotated[Path, typer.Option(help="The PNG to write.")] = Path("views.png"),
    images: Annotated[int, typer.Option(min=1, help="How many images.")] = 8,
    ids: Annotated[list[int] | None, typer.Option(help="These samples instead.")] = None,
    epoch: Annotated[int, typer.Option(min=0, help="The first epoch whose views are shown.")] = 0,
) -> None:
    """Draw images beside the views that training makes of them, with the parameters drawn."""
    import numpy as np

    from sslpipe.augment.build import build_augment
    from sslpipe.augment.preview import preview_grid
    from sslpipe.data.index import load_index
    from sslpipe.random import permutation
    from sslpipe.recipe import load_recipe

    loaded, index = load_recipe(recipe, overrides or []), load_index(data)
    split = index.split(loaded.data.split)
    index.check_files(loaded.data.split, allow_pipe=loaded.run.allow_pipe)
    wrong = [i for i in ids or [] if not 0 <= i < len(split)]
    if wrong:
        raise UserError(f"--ids {wrong[0]} is not in the split's 0 to {len(split) - 1}")
    chosen = np.sort(ids or permutation(len(split), loaded.seed)[:images])
    grid = preview_grid(
        index,
        split,
        build_augment(loaded, index),
        seed=loaded.seed,
        epoch=epoch,
        ids=chosen,
        canvas_px=loaded.data.canvas_px,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    grid.save(out)
    Console().print(f"{len(chosen)} images and their views: {out}", highlight=False)


@app.command(
    epilog="Example: sslpipe export runs/demo --out out/backbone --format safetensors,onnx"
)
def export(
    run: Annotated[Path, typer.Argument(help="The run directory of a training.")],
    out: Annotated[Path, typer.Option(help="The folder to write.")] = ...,  # type: ignore[assignment]
    format: Annotated[
        str,
        typer.Option(
            help="Formats, separated by commas: safetensors, torchvision, timm, onnx, pt2, hf; "
            "or all that can hold this backbone."
        ),
    ] = "safetensors",
    with_projector: Annotated[
        bool, typer.Option("--with-projector", help="Write the projector, too.")
    ] = False,
    overwrite: Annotated[bool, typer.Option(help="Replace an export that is there.")] = False,
) -> None:
    """Write the trained backbone; each format is loaded again in a clean process and compared."""
    from sslpipe.export.load import load_run
    from sslpipe.export.write import export_model, refusals

    console = Console()
    formats = tuple(name.strip() for name in format.split(","))
    model = load_run(run, with_projector=with_projector)
    with console.status("writing each format and proving it in a clean process"):
        written = export_model(model, out, formats, overwrite=overwrite)
    for name, path in written.items():
        told = f"{name}: {path}, proved equal in a clean process"
        console.print(told, highlight=False, markup=False, soft_wrap=True)
    if "all" in formats:
        for name, why in refusals(model).items():
            told = f"{name}: left out: {why}"
            console.print(told, highlight=False, markup=False, soft_wrap=True)


@app.command(epilog="Examples: sslpipe status runs/demo | sslpipe status runs/demo --json")
def status(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="For other programs.")] = False,
) -> None:
    """Where a run stands: progress, speed, time to go, health, bad samples, last checkpoint."""
    import json

    from sslpipe.run.status import render
    from sslpipe.run.status import status as status_of

    found = status_of(run)
    if as_json:
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
    else:
        Console().print(render(found), highlight=False, markup=False)


@app.command(
    epilog="Example: sslpipe slurm recipes/imagenet1k.toml --data /data/dataset.json "
    "--run-dir runs/a --nodes 4 --gpus-per-node 8 --time 24:00:00 --submit"
)
def slurm(
    recipe: RecipePath,
    overrides: Overrides = None,
    data: NeededData = ...,  # type: ignore[assignment]
    run_dir: Annotated[Path, typer.Option(help="Where the run lives.")] = ...,  # type: ignore[assignment]
    nodes: Annotated[int, typer.Option(min=1)] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=0, help="0: on the CPU.")] = 0,
    cpu_processes: Annotated[int, typer.Option(min=1, help="A node, without GPUs.")] = 1,
    time: Annotated[str | None, typer.Option(help="The limit of one start.")] = None,
    warn_s: Annotated[int, typer.Option(min=1, help="Saved this long before the limit.")] = 120,
    job_name: Annotated[str | None, typer.Option(show_default="the recipe's name")] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="Another of sbatch's: partition=gpu; repeatable.")
    ] = None,
    scripts: Annotated[Path, typer.Option(help="With pretrain.sbatch, site.sh.")] = Path("slurm"),
    submit: Annotated[bool, typer.Option(help="Hand it to sbatch instead of printing.")] = False,
) -> None:
    """Print the finished batch script of a pretraining, or submit it."""
    import subprocess

    from sslpipe.recipe import Recipe, load_recipe
    from sslpipe.run.batch_script import batch_script
    from sslpipe.run.launch import check_streams

    loaded = load_recipe(recipe, overrides or [])
    if isinstance(loaded, Recipe):
        check_streams(loaded.data.num_streams, nodes * (gpus_per_node or cpu_processes))
    options = {
        "job-name": job_name or loaded.name,
        "nodes": str(nodes),
        "signal": f"B:USR1@{warn_s}",
        **({"gpus-per-node": str(gpus_per_node)} if gpus_per_node else {}),
        **({"time": time} if time else {}),
        **{name: value for name, _, value in (text.partition("=") for text in option or [])},
    }
    words = [str(recipe), "--data", data, "--run-dir", str(run_dir), *(overrides or [])]
    settings = {"SSLPIPE_CPU_PROCESSES": str(cpu_processes)}
    text = batch_script(scripts, options, words, settings)
    if not submit:
        sys.stdout.write(text)
        return
    try:
        done = subprocess.run(["sbatch"], input=text, text=True, capture_output=True)
    except FileNotFoundError:
        raise UserError("no sbatch on this machine; run this on a login node") from None
    if done.returncode:
        raise UserError(f"sbatch refused the job: {done.stderr.strip()}")
    Console().print(done.stdout.strip(), highlight=False)


def main() -> None:
    """Run the command line; a user's mistake is one line on stderr and exit status 2."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)  # the shell's status for Ctrl-C
    except UserError as error:
        Console(stderr=True).print(
            f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True
        )
        sys.exit(2)


if __name__ == "__main__":
    main()
