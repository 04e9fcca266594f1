"""`sslpipe check`, `train`, `preview`, `status`, `runs` and `slurm`."""

import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sslpipe.cli import inputs
from sslpipe.cli.next_step import (
    after_labels,
    after_train,
    new_run_dir,
    plugin_words,
    say_next,
)
from sslpipe.cli.options import (
    Data,
    Ids,
    Training,
    argument,
    command,
    option,
)
from sslpipe.cli.terminal import (
    new_app,
    percent_interval,
    print_named,
    say,
    show,
    show_json,
    working,
)
from sslpipe.errors import UserError, counted, one_line
from sslpipe.run import recorded
from sslpipe.run.console import SafeConsole

if TYPE_CHECKING:
    from sslpipe.recipe.sections import RunRecipe

app = new_app()


def _explain(key: str | None) -> None:
    """Print what a setting means, and end: no recipe is needed for it."""
    if key is not None:
        from sslpipe.cli.explain import explain

        show(explain(key))
        raise typer.Exit


@command(
    app,
    examples=[
        "sslpipe check recipe.toml --data out/photos/dataset.json data.batch_size=512",
        "sslpipe check finetune.toml --data out/photos/dataset.json --init runs/photos",
        "sslpipe check --explain data.micro_batch",
        "sslpipe check --explain loss.temperature",
    ],
)
def check(
    training: Training,
    data: Annotated[str | None, option("The data set's dataset.json: a path or a URL.")] = None,
    explain: Annotated[
        str | None,
        option(
            "Print what a setting means, such as data.micro_batch, and exit.",
            is_eager=True,
            callback=_explain,
            metavar="KEY",
        ),
    ] = None,
) -> None:
    """Validate a recipe; estimate time and memory of its training.

    Nothing is trained, but a step is timed. Where settings do not fit the data set, the overrides
    that fit together are named. Without --data, only the settings are checked.
    """
    loaded = recorded.load_recipe_or_run(training.recipe, training.overrides or [])
    inputs.check_model(training.init)
    if data is None:
        for name, value in training.start.items():
            raise UserError(
                f"--{name} {value} is fitted to a data set; name one with --data, or leave "
                f"--{name} out"
            )
        _check_settings(loaded)
        return
    index = inputs.open_data(data)

    from sslpipe.api import plan_from
    from sslpipe.kinds import run_kind
    from sslpipe.plan import Pretraining

    source = recorded.start_of(training.recipe, training.init)
    plan = plan_from(loaded, index, source, checkpoint=training.checkpoint)
    with working("check: a step is timed"):
        result = run_kind(plan.recipe).check(plan)
    SafeConsole().print(result.render())
    say_next(["preview", *training.words(data), "--out", "views.png"])
    if isinstance(plan, Pretraining):
        after_labels(data)
        pairs = plan.recipe.pairs
        # values within a time of each other, or of several columns, are no classes
        if pairs is not None and len(pairs.positive) == 1 and pairs.within is None:
            after_labels(data, pairs.positive[0])


def _check_settings(recipe: "RunRecipe") -> None:
    """Print a valid recipe's settings, and what cannot be said without a data set."""
    from sslpipe.check.outcome import settings_table

    SafeConsole().print(settings_table(recipe))
    show(
        "The settings are valid; nothing was built. Parts, sizes, memory, time, steps and digest "
        "need a data set: --data DATA/dataset.json"
    )
    say_next(["shards", "build", "--help"])


@command(
    app,
    examples=[
        "sslpipe train recipe.toml --data out/photos/dataset.json --run-dir runs/photos",
        "accelerate launch --multi_gpu --num_processes 2 --mixed_precision no -m sslpipe train "
        "recipe.toml --data out/photos/dataset.json --run-dir runs/photos",
        "sslpipe train finetune.toml --init runs/photos --data out/photos/dataset.json --run-dir "
        "runs/tuned",
    ],
)
def train(
    training: Training,
    data: Data,
    run_dir: Annotated[
        Path, option("The run's folder; if it holds an unfinished run, that run resumes.")
    ],
) -> None:
    """Pretrain or fine-tune, as the recipe says; or resume.

    If the run directory holds an unfinished run of this recipe, training resumes from its last
    checkpoint, with any number of processes, which in a pretraining divides data.num_streams.

    Ctrl-C, SIGTERM, SIGUSR1 and similar signals save a checkpoint and stop. The exit status is 0
    only when the run is complete; else 128 + the signal (130 after Ctrl-C), or 143 after a stop
    file.
    """
    from sslpipe.recipe.reading import load_recipe
    from sslpipe.registry.plugins import made_with
    from sslpipe.run.description import plugins_of

    with made_with(plugins_of(run_dir)):
        loaded = load_recipe(training.recipe, training.overrides or [])
    index = inputs.open_data(data, [loaded.data.split])
    inputs.check_folder(run_dir, "--run-dir")
    if not (run_dir / "init").is_dir():  # else the run keeps its own
        inputs.check_model(training.init)

    from sslpipe.api import train as train_run
    from sslpipe.distributed import end_processes
    from sslpipe.run.stop import stopped_status

    train_run(
        loaded,
        index,
        run_dir,
        init=training.init,
        checkpoint=training.checkpoint,
    )
    end_processes()
    if status := stopped_status():
        raise typer.Exit(status)
    after_train(run_dir, data, index)


@command(
    app,
    examples=[
        "sslpipe preview recipe.toml --data out/photos/dataset.json --out views.png",
        "sslpipe preview finetune.toml --data out/photos/dataset.json --init runs/photos",
    ],
)
def preview(
    training: Training,
    data: Data,
    out: Annotated[Path, option("The PNG to write.")] = Path("views.png"),
    ids: Ids = None,
    epoch: Annotated[
        int | None, option("Show this epoch's views. Default: epochs 0 and 1.", min=0)
    ] = None,
) -> None:
    """Draw images beside the views that training makes of them.

    Given a run, the views are the ones it was trained on. The parameters stand beside each view;
    the id, key and class of each image are printed.
    """
    chosen = inputs.parse_ids(ids)
    loaded = recorded.load_recipe_or_run(training.recipe, training.overrides or [])
    index = inputs.open_data(data, [loaded.data.split])
    inputs.check_picture(out)
    inputs.check_model(training.init)

    from sslpipe.api import plan_from
    from sslpipe.planning.pictures import preview
    from sslpipe.sharding.show import sample_lines, save_sheet

    source = recorded.start_of(training.recipe, training.init)
    plan = plan_from(loaded, index, source, checkpoint=training.checkpoint)
    grid, drawn = preview(plan, ids=chosen, epoch=epoch)
    save_sheet(grid, out)
    for line in sample_lines(index, loaded.data.split, drawn):
        print(line)
    show(f"{counted(len(drawn), 'image')} and their views: {out}")
    if run_dir := recorded.recorded_in(training.recipe):
        say_next(["status", run_dir])
    else:
        say_next(["train", *training.words(data), "--run-dir", new_run_dir(loaded.name)])


@command(
    app,
    examples=[
        "sslpipe status runs/photos",
        "sslpipe status runs/photos --follow",
    ],
)
def status(
    run_dir: Annotated[Path, argument("A run directory, of pretraining or fine-tuning.")],
    as_json: Annotated[bool, option("Print JSON, for programs.", "--json")] = False,
    follow: Annotated[
        bool, option("Draw learning curves, until the run has ended or Ctrl-C.", "--follow")
    ] = False,
) -> None:
    """Show the state of a run, from its directory alone.

    Progress, speed, time left, health, bad samples, last checkpoint, and each process.
    """
    if follow and as_json:
        raise UserError("--follow draws for people, and --json is for programs; leave one out")

    from sslpipe.run.status import follow as follow_run
    from sslpipe.run.status import picture, render
    from sslpipe.run.status import status as read_status

    if follow:
        from rich.live import Live

        screen = Live(console=SafeConsole(), auto_refresh=False)
        with suppress(KeyboardInterrupt), screen:  # without a terminal it draws once, at the end
            follow_run(run_dir, lambda summary: screen.update(picture(summary), refresh=True))
        return
    summary = read_status(run_dir)
    if as_json:
        show_json(summary)
    else:
        show(render(summary))


@command(
    app,
    examples=[
        "sslpipe runs runs",
        "sslpipe runs runs --json",
    ],
)
def runs(
    folder: Annotated[Path, argument("A folder with runs in it, at any depth.")],
    as_json: Annotated[bool, option("Print JSON, for programs.", "--json")] = False,
) -> None:
    """List the runs under a folder: recipe, steps, numbers, disk."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; name one with runs in it")

    from sslpipe.run.status import list_runs

    runs = list_runs(folder)
    if as_json:
        show_json(runs)
        return
    rows = []
    for each in runs:
        step = "-" if each["steps"] is None else f"{each['step']} of {each['steps']}"
        best = "-" if each["best"] is None else f"{each['best_of']} {each['best']:.4g}"
        test = each["measure"] or "-"
        if each["value"] is not None:
            test += f" {percent_interval(each['value'], each['interval95'])} %"
        size = f"{each['bytes'] / 1e6:.1f} MB"
        recipe = str(each["recipe"] or "-")
        rows.append((each["run"], recipe, each["state"], step, best, test, size))
    print_named(("run", "recipe", "state", "steps", "best", "test", "disk"), rows, left=3)
    for each in runs:
        if each["state"] == "damaged":
            show(one_line(each["detail"]))


@command(
    app,
    examples=[
        "sslpipe slurm recipe.toml --data /data/dataset.json --run-dir runs/photos --nodes 4 "
        "--gpus-per-node 8 --time 24:00:00 --submit",
        "sslpipe slurm finetune.toml --data /data/dataset.json --run-dir runs/tuned --init "
        "runs/photos --option partition=gpu",
    ],
)
def slurm(
    training: Training,
    data: Data,
    run_dir: Annotated[Path, option("Where the run lives.")],
    nodes: Annotated[int, option("Number of nodes.", min=1)] = 1,
    gpus_per_node: Annotated[int, option("0: train on CPUs.", min=0)] = 0,
    time: Annotated[str | None, option("Time limit of one start, such as 24:00:00.")] = None,
    options: Annotated[
        list[str] | None,
        option(
            "Another option of sbatch, such as partition=gpu, cpus-per-task=16 (all cores of a "
            "node; with GPUs by default one of each process and decoding thread) or "
            "signal=B:USR1@300 (save so many seconds before the limit); repeatable.",
            "--option",
            metavar="NAME=VALUE",
        ),
    ] = None,
    site: Annotated[
        Path | None, option("A shell file to include, for modules, network or containers.")
    ] = None,
    submit: Annotated[
        bool, option("Submit the script instead of printing it.", "--submit")
    ] = False,
) -> None:
    """Print the SLURM batch script of a training, or submit it.

    The script needs this Python environment and no other file. At the time limit and on preemption
    the job saves a checkpoint and requeues itself.
    """
    from sslpipe.recipe.reading import load_recipe
    from sslpipe.run.batch_script import batch_script

    loaded = load_recipe(training.recipe, training.overrides or [])
    loaded.data.check_processes(nodes * (gpus_per_node or 1))
    more = {name: value for name, _, value in (each.partition("=") for each in options or ())}
    sbatch = {"job-name": loaded.name, "nodes": str(nodes)}
    cores = ""
    if gpus_per_node:
        threads = 1 + loaded.run.num_workers
        sbatch["gpus-per-node"] = str(gpus_per_node)
        if "cpus-per-task" not in more:  # SLURM's default is one core a node
            sbatch["cpus-per-task"] = str(gpus_per_node * threads)
            cores = (
                f"it asks for {gpus_per_node * threads} cores a node, {threads} a GPU (1 + "
                "run.num_workers); where nodes have fewer give --option cpus-per-task=CORES, and "
                "run.num_workers = CORES / GPUs - 1"
            )
    if time:
        sbatch["time"] = time
    sbatch |= more
    words = [*training.words(data), "--run-dir", str(run_dir), *plugin_words()]
    text = batch_script(sbatch, words, site)
    if not submit:
        sys.stdout.write(text)
        if cores:
            say(cores)
        return
    try:
        done = subprocess.run(["sbatch"], input=text, text=True, capture_output=True)
    except FileNotFoundError:
        raise UserError("no sbatch on this machine; run this on a login node") from None
    if done.returncode:
        remedy = f"; {cores}" if cores else ""
        raise UserError(f"sbatch refused the job: {done.stderr.strip()}{remedy}")
    show(done.stdout.strip())
    say_next(["status", run_dir], when=" when the job runs")
