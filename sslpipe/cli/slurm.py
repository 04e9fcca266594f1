"""`sslpipe slurm`: the batch script of a training or of shards, printed or submitted."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from sslpipe.cli.next_step import plugin_words, say_next, say_same
from sslpipe.cli.options import Data, Init, Overrides, RecipePath, argument, option
from sslpipe.cli.terminal import new_app, show
from sslpipe.errors import UserError


class RecipeFirst(TyperGroup):
    """A group in which `sslpipe slurm RECIPE` is `sslpipe slurm train RECIPE`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the name in front of the arguments of a training."""
        return super().parse_args(ctx, self._named(args))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command of words as a user writes them."""
        return super().resolve_command(ctx, self._named(args))

    def _named(self, args: list[str]) -> list[str]:
        known = not args or args[0] in self.commands or "--help".startswith(args[0])
        return args if known else ["train", *args]


app = new_app(
    cls=RecipeFirst,
    no_args_is_help=True,
    help="Print the SLURM batch script of a training, or submit it. `sslpipe slurm RECIPE` is "
    "short for `sslpipe slurm train RECIPE`; `sslpipe slurm shards` builds a data set.",
    epilog="Examples: sslpipe slurm recipe.toml --data /data/dataset.json --run-dir runs/photos "
    "--submit | sslpipe slurm shards /data/photos --root /images --test-fraction 0.1 --parts 16",
)
Option = Annotated[
    list[str] | None, option("Another option of sbatch, such as partition=gpu; repeatable.")
]
Site = Annotated[
    Path | None, option("A shell file to include, for modules, network or containers.")
]
Submit = Annotated[bool, option("Submit the script instead of printing it.")]
Time = Annotated[str | None, option("Time limit of one start, such as 24:00:00.")]


@app.command(
    epilog="Examples: sslpipe slurm recipe.toml --data /data/dataset.json --run-dir runs/photos "
    "--nodes 4 --gpus-per-node 8 --time 24:00:00 --submit | sslpipe slurm finetune.toml --data "
    "/data/dataset.json --run-dir runs/tuned --init runs/photos --option partition=gpu"
)
def train(
    recipe: RecipePath,
    overrides: Overrides = None,
    data: Data = ...,  # type: ignore[assignment]
    run_dir: Annotated[Path, option("Where the run lives.")] = ...,  # type: ignore[assignment]
    init: Init = None,
    nodes: Annotated[int, option("Number of nodes.", min=1)] = 1,
    gpus_per_node: Annotated[int, option("0: train on CPUs.", min=0)] = 0,
    cpu_processes: Annotated[int, option("Per node, without GPUs.", min=1)] = 1,
    time: Time = None,
    warn_s: Annotated[int, option("Save this many seconds before the limit.", min=1)] = 120,
    job_name: Annotated[str | None, typer.Option(show_default="the recipe's name")] = None,
    option: Option = None,
    site: Site = None,
    submit: Submit = False,
) -> None:
    """Print the SLURM batch script of a training, or submit it.

    The script needs this Python environment and no other file. At the time limit and on preemption
    the job saves a checkpoint and requeues itself.
    """
    from sslpipe.recipe import Recipe, load_recipe
    from sslpipe.run.batch_script import batch_script
    from sslpipe.run.launcher import check_streams

    loaded = load_recipe(recipe, overrides or [])
    if isinstance(loaded, Recipe):
        check_streams(loaded.data.num_streams, nodes * (gpus_per_node or cpu_processes))
    options = {
        "job-name": job_name or loaded.name,
        "nodes": str(nodes),
        "signal": f"B:USR1@{warn_s}",
        **({"gpus-per-node": str(gpus_per_node)} if gpus_per_node else {}),
        **({"time": time} if time else {}),
        **_pairs(option),
    }
    words = [str(recipe), "--data", data, "--run-dir", str(run_dir), *plugin_words()]
    words += [*([] if init is None else ["--init", init]), *(overrides or [])]
    text = batch_script(options, words, {"SSLPIPE_CPU_PROCESSES": str(cpu_processes)}, site)
    if submit:
        _sbatch(text)
        say_next("status", run_dir, when=" when the job runs")
    else:
        sys.stdout.write(text)
        say_same("--submit")


@app.command(
    epilog="Example: sslpipe slurm shards /data/photos --root /images --test-fraction 0.1 "
    "--parts 16 --submit",
    context_settings={"ignore_unknown_options": True},
)
def shards(
    out: Annotated[str, argument("The data set's folder, on shared storage.")],
    build: Annotated[
        list[str] | None, argument("Options of `sslpipe shards build`, except --part.")
    ] = None,
    parts: Annotated[int, option("Number of tasks; each builds one part.", min=1)] = ...,  # type: ignore[assignment]
    time: Time = None,
    job_name: Annotated[str, typer.Option()] = "sslpipe-shards",
    option: Option = None,
    site: Site = None,
    submit: Submit = False,
) -> None:
    """Print the SLURM batch script that builds a data set in parts and merges them, or submit it.

    With `sbatch --array=1-N` each task builds one part; without an array, the script merges them.
    --submit does both.
    """
    from sslpipe.cli.shards import app as shard_commands
    from sslpipe.run.batch_script import batch_script

    # a wrong word ends here, before a job waits for its turn
    words = [out, *(build or []), *plugin_words()]
    command: Any = typer.main.get_command(shard_commands)
    command.commands["build"].make_context("sslpipe shards build", [out, *(build or [])])

    options = {"job-name": job_name, **({"time": time} if time else {}), **_pairs(option)}
    text = batch_script(options, words, {"SSLPIPE_PARTS": str(parts)}, site, kind="shards")
    if not submit:
        sys.stdout.write(text)
        say_same("--submit")
        return
    job = _sbatch(text, f"--array=1-{parts}")
    _sbatch(text, f"--dependency=afterok:{job}", "--kill-on-invalid-dep=yes")
    say_next("shards", "stats", out, when=" when the jobs have ended")


def _pairs(options: list[str] | None) -> dict[str, str]:
    """Split NAME=VALUE of --option."""
    return {name: value for name, _, value in (text.partition("=") for text in options or [])}


def _sbatch(text: str, *words: str) -> str:
    """Submit a script, print what sbatch says, and return the job's number."""
    try:
        done = subprocess.run(["sbatch", *words], input=text, text=True, capture_output=True)
    except FileNotFoundError:
        raise UserError("no sbatch on this machine; run this on a login node") from None
    if done.returncode:
        raise UserError(f"sbatch refused the job: {done.stderr.strip()}")
    show(done.stdout.strip())
    return "".join(re.findall(r"batch job (\d+)", done.stdout))
