"""`sslpipe check`, `train`, `preview`, `status` and `runs`."""

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from sslpipe.cli.inputs import (
    check_folder,
    check_model,
    check_picture,
    check_run,
    load_recipe_or_run,
    open_data,
    parse_ids,
    recorded_in,
)
from sslpipe.cli.next_step import after_train, new_run_dir, say_next, training
from sslpipe.cli.options import (
    Checkpoint,
    Data,
    Ids,
    Init,
    Overrides,
    RecipeOrRun,
    RecipePath,
    Weights,
    argument,
    documented,
    option,
)
from sslpipe.cli.terminal import console, new_app, say_once, show, text_table, working
from sslpipe.errors import UserError, one_line

app = new_app()


def _explain(key: str | None) -> None:
    """Print what a setting means, and end: no recipe is needed for it."""
    if key is not None:
        from sslpipe.cli.explain import explain

        show(explain(key))
        raise typer.Exit


@documented(
    app,
    epilog="Examples: sslpipe check recipe.toml --data out/photos/dataset.json data.batch_size=512 "
    "| sslpipe check finetune.toml --data out/photos/dataset.json --init runs/photos | "
    "sslpipe check --explain data.micro_batch | sslpipe check --explain loss.temperature | "
    "sslpipe check recipe.toml --data out/photos/dataset.json --within 3600",
)
def check(
    recipe: RecipeOrRun,
    overrides: Overrides = None,
    data: str | None = None,
    init: Init = None,
    checkpoint: Checkpoint = None,
    weights: Weights = None,
    explain: Annotated[str | None, option(is_eager=True, callback=_explain, metavar="KEY")] = None,
    within: Annotated[float | None, option(min=1, metavar="SECONDS")] = None,
    whole_within: Annotated[float | None, option(min=1, metavar="SECONDS")] = None,
    timed_by: Annotated[Path | None, option(metavar="RUN")] = None,
) -> None:
    """Validate a recipe without training; print its settings and sizes.

    For pretraining, also estimate memory and time.

    Args:
        data: The data set's dataset.json: a path or a URL.
        explain: Print what a setting means, such as data.micro_batch, and exit.
        within: Print settings that shorten the training to this time on this machine; nothing if
            the whole recipe takes no longer. All else goes to stderr.
        whole_within: For --within: the time that the whole recipe may take. Default: 1.25 times it.
        timed_by: For --within: a run of a few steps on this machine, to time a step by its log.
            Default: a rough estimate.
    """
    loaded = load_recipe_or_run(recipe, overrides or [])
    run_dir = recorded_in(recipe)
    if run_dir is not None and init is None and (run_dir / "init").is_dir():
        init = str(run_dir / "init")  # what it started from
    index = open_data(data) if data else None
    if index is not None:
        index.split(loaded.data.split)  # an unknown one is refused
    check_model(init)
    for name, value in (("--timed-by", timed_by), ("--whole-within", whole_within)):
        if value is not None and within is None:
            raise UserError(f"{name} is for --within; give both")
    if timed_by is not None:
        check_run(timed_by)

    from sslpipe.check import check_recipe, check_within
    from sslpipe.export.initial import open_init
    from sslpipe.recipe import Recipe

    init_from = open_init(loaded, init, checkpoint=checkpoint, weights=weights)
    with working("check: a step is timed"):
        if within is None:
            said = check_recipe(loaded, index, init_from)
        else:
            shorter, said = check_within(loaded, index, init_from, within, timed_by, whole_within)
    (Console() if within is None else console).print(said)
    if init_from is not None and index is not None:
        from sslpipe.check.estimate import start_concentration

        with working("check: a few images are embedded"):
            spread = start_concentration(loaded, index, init_from)
        say_once(spread)
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
        start = {"init": init, "checkpoint": checkpoint, "weights": weights}
        words = training(recipe, overrides, data, **start)
        say_next("train", *words, "--run-dir", new_run_dir(loaded.name))


@documented(
    app,
    epilog="Examples: sslpipe train recipe.toml --data out/photos/dataset.json --run-dir "
    "runs/photos | accelerate launch --multi_gpu --num_processes 2 --mixed_precision no -m sslpipe "
    "train recipe.toml --data out/photos/dataset.json --run-dir runs/photos | sslpipe train "
    "finetune.toml --init runs/photos --data out/photos/dataset.json --run-dir runs/tuned",
)
def train(
    recipe: RecipePath,
    overrides: Overrides = None,
    data: Data = ...,  # type: ignore[assignment]
    run_dir: Annotated[
        Path, option("The run's folder; if it holds an unfinished run, that run resumes.")
    ] = ...,  # type: ignore[assignment]
    init: Init = None,
    checkpoint: Checkpoint = None,
    weights: Weights = None,
    allow_pipe: Annotated[
        bool,
        option(
            "Run the shell commands of shards named `pipe:COMMAND`. Only for data that you trust; "
            "a recipe cannot allow it.",
            "--allow-pipe",
        ),
    ] = False,
) -> None:
    """Pretrain or fine-tune, as the recipe says; or resume.

    If the run directory holds an unfinished run of this recipe, training resumes from its last
    checkpoint, with any number of processes that divides data.num_streams.

    Ctrl-C, SIGTERM, SIGUSR1 and similar signals save a checkpoint and stop. The exit status is 0
    only when the run is complete; else 128 + the signal (130 after Ctrl-C), or 143 after a stop
    file.
    """
    from sslpipe.recipe import load_recipe
    from sslpipe.recipe.shortened import shortened_note
    from sslpipe.registry.plugins import made_with
    from sslpipe.run.records import plugins_of

    with made_with(plugins_of(run_dir)):
        loaded = load_recipe(recipe, overrides or [])
    index = open_data(data, loaded.data.split, allow_pipe=allow_pipe)
    check_folder(run_dir, "--run-dir")
    if not (run_dir / "init").is_dir():  # else the run keeps its own
        check_model(init)
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


@documented(
    app,
    epilog="Example: sslpipe preview recipe.toml --data out/photos/dataset.json --out views.png",
)
def preview(
    recipe: RecipeOrRun,
    overrides: Overrides = None,
    data: Data = ...,  # type: ignore[assignment]
    out: Annotated[Path, option("The PNG to write.")] = Path("views.png"),
    images: Annotated[int, option("Number of images.", min=1)] = 8,
    ids: Ids = None,
    epoch: Annotated[
        int | None, option("Show this epoch's views. Default: epochs 0 and 1.", min=0)
    ] = None,
) -> None:
    """Draw images beside the views that training makes of them.

    Given a run, the views are the ones it was trained on. The parameters stand beside each view;
    the id, key and class of each image are printed.
    """
    chosen = parse_ids(ids)
    loaded = load_recipe_or_run(recipe, overrides or [])
    index = open_data(data, loaded.data.split)
    check_picture(out)

    from sslpipe.run.preview import preview_recipe
    from sslpipe.sharding.show import sample_lines, save_sheet

    grid, drawn = preview_recipe(loaded, index, images=images, ids=chosen, epoch=epoch)
    save_sheet(grid, out)
    for line in sample_lines(index, loaded.data.split, drawn):
        print(line)
    show(f"{len(drawn)} images and their views: {out}")
    if run_dir := recorded_in(recipe):
        say_next("status", run_dir)
    else:
        say_next("train", *training(recipe, overrides, data), "--run-dir", new_run_dir(loaded.name))


@app.command(epilog="Examples: sslpipe status runs/photos | sslpipe status runs/photos --follow")
def status(
    run: Annotated[Path, argument("A run directory, of pretraining or fine-tuning.")],
    as_json: Annotated[bool, option("Print JSON, for programs.", "--json")] = False,
    follow: Annotated[
        bool, option("Draw learning curves, until the run has ended or Ctrl-C.", "--follow")
    ] = False,
) -> None:
    """Show the state of a run, from its directory alone.

    Progress, speed, time left, health, bad samples, last checkpoint, and each process.
    """
    check_run(run)
    if follow and as_json:
        raise UserError("--follow draws for people, and --json is for programs; leave one out")

    from sslpipe.run.status import render
    from sslpipe.run.status import status as read_status

    if follow:
        with suppress(KeyboardInterrupt):
            _follow(run)
        return
    summary = read_status(run)
    if as_json:
        sys.stdout.write(json.dumps(summary, indent=1) + "\n")
    else:
        show(render(summary))


def _follow(run: Path) -> None:
    """Draw a run's curves again and again on a terminal; elsewhere a line a log line, then once."""
    from rich.live import Live

    from sslpipe.run import watch

    if not sys.stdout.isatty():
        last = -1

        def tell(summary: dict[str, Any]) -> None:
            nonlocal last
            if summary["step"] != last:
                last = summary["step"]
                values = {name: each[-1] for name, each in watch.curves(run).items()}
                cells = [f"step {last} of {summary['steps']}"]
                show(
                    ", ".join([*cells, *(f"{name} {value:.4g}" for name, value in values.items())])
                )

        show(watch.picture(watch.follow(run, tell)))
        return
    with Live(console=Console(), auto_refresh=False) as live:
        watch.follow(run, lambda summary: live.update(watch.picture(summary), refresh=True))


@app.command(epilog="Examples: sslpipe runs runs | sslpipe runs runs --json")
def runs(
    folder: Annotated[Path, argument("A folder with runs in it, at any depth.")],
    as_json: Annotated[bool, option("Print JSON, for programs.", "--json")] = False,
) -> None:
    """List the runs under a folder: recipe, steps, best number, disk.

    Below stands what may be deleted: checkpoints that neither a resume nor --checkpoint best reads.
    Nothing is deleted.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder; name one with runs in it")

    from sslpipe.run.watch import list_runs

    found = list_runs(folder)
    if as_json:
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
        return
    rows = [
        (
            each["run"],
            str(each["recipe"] or "-"),
            each["state"],
            "-" if each["steps"] is None else f"{each['step']} of {each['steps']}",
            "-" if each["best"] is None else f"{each['best_of']} {each['best']:.4g}",
            f"{each['bytes'] / 1e6:.1f} MB",
        )
        for each in found
    ]
    show(text_table(("run", "recipe", "state", "steps", "best", "disk"), rows, left=3))
    for each in found:
        if each["state"] == "damaged":
            show(one_line(each["detail"]))
        for path, size in each["deletable"].items():
            show(f"may be deleted: {one_line(path)} ({size / 1e6:.1f} MB)")
