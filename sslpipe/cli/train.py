"""`sslpipe check`, `train` and `preview`; what needs torch is imported after the checks."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sslpipe.cli.inputs import check_folder, check_init, check_picture, check_run, open_split
from sslpipe.cli.next_step import after_train, new_run_dir, say_next, training
from sslpipe.cli.progress import working
from sslpipe.cli.recipes import (
    Checkpoint,
    Data,
    Ids,
    Init,
    Overrides,
    RecipeOrRun,
    RecipePath,
    Weights,
    load_recipe_or_run,
    parse_ids,
    recorded_in,
)
from sslpipe.cli.terminal import console, say_once
from sslpipe.data.index import load_index
from sslpipe.errors import UserError
from sslpipe.recipe import Recipe, load_recipe
from sslpipe.recipe.shortened import shortened_note
from sslpipe.registry.plugins import made_with
from sslpipe.run.records import plugins_of

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


def _explain(key: str | None) -> None:
    """Print what a setting means, and end: no recipe is needed for it."""
    if key is None:
        return
    from sslpipe.cli.explain import explain

    Console().print(explain(key), highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit


@app.command(
    epilog="Examples: sslpipe check recipe.toml --data out/photos/dataset.json data.batch_size=512 "
    "| sslpipe check finetune.toml --data out/photos/dataset.json --init runs/photos | "
    "sslpipe check --explain data.micro_batch | sslpipe check --explain loss.temperature | "
    "sslpipe check recipe.toml --data out/photos/dataset.json --within 3600"
)
def check(
    recipe: RecipeOrRun,
    overrides: Overrides = None,
    data: Annotated[
        str | None, typer.Option(help="The data set's dataset.json: a path or a URL.")
    ] = None,
    init: Init = None,
    checkpoint: Checkpoint = None,
    weights: Weights = None,
    explain: Annotated[
        str | None,
        typer.Option(
            is_eager=True,
            callback=_explain,
            metavar="KEY",
            help="Print what a setting such as data.micro_batch means, and nothing else.",
        ),
    ] = None,
    within: Annotated[
        float | None,
        typer.Option(
            min=1,
            metavar="SECONDS",
            help="Print the settings with which the steps take so long on this machine, nothing "
            "where the whole recipe does; all else goes to stderr.",
        ),
    ] = None,
    whole_within: Annotated[
        float | None,
        typer.Option(
            min=1,
            metavar="SECONDS",
            help="For --within: the whole recipe may take so long; else 1.25 times as long.",
        ),
    ] = None,
    timed_by: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="For --within: a run of a few steps on this machine, whose log times a step; else "
            "the estimate counts, which is rough.",
        ),
    ] = None,
) -> None:
    """Validate a recipe without training; print its settings and sizes.

    Of pretraining also estimates of memory and time.
    """
    loaded = load_recipe_or_run(recipe, overrides or [])
    run_dir = recorded_in(recipe)
    if run_dir is not None and init is None and (run_dir / "init").is_dir():
        init = str(run_dir / "init")  # what it started from
    index = load_index(data) if data else None
    if index is not None:
        index.split(loaded.data.split)  # an unknown one is refused
    check_init(init)
    for name, value in (("--timed-by", timed_by), ("--whole-within", whole_within)):
        if value is not None and within is None:
            raise UserError(f"{name} is for --within; give both")
    if timed_by is not None:
        check_run(timed_by)

    from sslpipe.check import check_recipe, check_within
    from sslpipe.export.initial import open_init

    init_from = open_init(loaded, init, checkpoint=checkpoint, weights=weights)
    with working("check: a step is timed"):
        if within is None:
            said = check_recipe(loaded, index, init_from)
        else:
            shorter, said = check_within(loaded, index, init_from, within, timed_by, whole_within)
    (Console() if within is None else console).print(said)
    if within is not None:
        say = "settings for `train`, on stdout" if shorter else "the whole recipe takes no longer"
        say_once(f"--within {within:g}: {say}")
        print(" ".join(shorter))
        return
    if data is None:
        say_next("shards", "build", "--help")
    # of --init, `preview` knows nothing; a run has recorded what it needs, and is no recipe
    elif run_dir is not None or (isinstance(loaded, Recipe) and init is None):
        say_next("preview", *training(recipe, overrides, data), "--out", "views.png")
    else:
        words = training(recipe, overrides, data, init, checkpoint, weights)
        say_next("train", *words, "--run-dir", new_run_dir(loaded.name))


@app.command(
    epilog="Examples: sslpipe train recipe.toml --data out/photos/dataset.json --run-dir "
    "runs/photos | accelerate launch --multi_gpu --num_processes 2 --mixed_precision no -m sslpipe "
    "train recipe.toml --data out/photos/dataset.json --run-dir runs/photos | sslpipe train "
    "finetune.toml --init runs/photos --data out/photos/dataset.json --run-dir runs/tuned"
)
def train(
    recipe: RecipePath,
    overrides: Overrides = None,
    data: Data = ...,  # type: ignore[assignment]
    run_dir: Annotated[Path, typer.Option(help="Where the run lives; the same one resumes.")] = ...,  # type: ignore[assignment]
    init: Init = None,
    checkpoint: Checkpoint = None,
    weights: Weights = None,
    allow_pipe: Annotated[
        bool,
        typer.Option(
            "--allow-pipe",
            help="Let shards `pipe:COMMAND` of the data set run their shell commands; only for "
            "data that you trust. A recipe cannot allow it.",
        ),
    ] = False,
) -> None:
    """Pretrain or, with a recipe of fine-tuning, fine-tune; or resume.

    A run directory that holds an unfinished run of this recipe is resumed from its last
    checkpoint, with any number of processes that divides the recipe's streams.

    Ctrl-C, SIGTERM, SIGUSR1 and others save a checkpoint and end it. The exit status is 0 only for
    a run that is done; 130 after Ctrl-C, in general 128 + the signal, 143 after a stop file.
    """
    with made_with(plugins_of(run_dir)):
        loaded = load_recipe(recipe, overrides or [])
    index = open_split(data, loaded.data.split, allow_pipe=allow_pipe)
    check_folder(run_dir, "--run-dir")
    check_init(init, run_dir)
    if note := shortened_note(loaded.model_dump()):
        say_once(note)

    from sslpipe.api import train as train_run
    from sslpipe.distributed import end_processes
    from sslpipe.run.stop import stopped_status

    train_run(loaded, index, run_dir, init=init, checkpoint=checkpoint, weights=weights)
    end_processes()
    if status := stopped_status():
        raise typer.Exit(status)
    after_train(run_dir, data, index)


@app.command(
    epilog="Example: sslpipe preview recipe.toml --data out/photos/dataset.json --out views.png"
)
def preview(
    recipe: RecipeOrRun,
    overrides: Overrides = None,
    data: Data = ...,  # type: ignore[assignment]
    out: Annotated[Path, typer.Option(help="The PNG to write.")] = Path("views.png"),
    images: Annotated[int, typer.Option(min=1, help="How many images.")] = 8,
    ids: Ids = None,
    epoch: Annotated[
        int | None,
        typer.Option(min=0, help="Views of this epoch alone; else of the first two, 0 and 1."),
    ] = None,
) -> None:
    """Draw images beside the views that training makes of them.

    Of a run, the views are those that it saw: its recorded recipe has the seed, too.
    The parameters of each view stand beside it; id, key and class of each image are printed.
    """
    chosen = parse_ids(ids)
    loaded = load_recipe_or_run(recipe, overrides or [])
    index = open_split(data, loaded.data.split)
    check_picture(out)

    from sslpipe.run.preview import preview_recipe
    from sslpipe.sharding.show import sample_lines, save_sheet

    grid, drawn = preview_recipe(loaded, index, images=images, ids=chosen, epoch=epoch)
    save_sheet(grid, out)
    for line in sample_lines(index, loaded.data.split, drawn):
        print(line)
    Console().print(f"{len(drawn)} images and their views: {out}", highlight=False)
    if run_dir := recorded_in(recipe):
        say_next("status", run_dir)
    else:
        say_next("train", *training(recipe, overrides, data), "--run-dir", new_run_dir(loaded.name))
