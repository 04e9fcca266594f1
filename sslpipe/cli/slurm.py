"""`sslpipe slurm`: the batch script of a training, printed or submitted."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from sslpipe.cli.next_step import plugin_words, say_next
from sslpipe.cli.options import Data, Init, Overrides, RecipePath, option
from sslpipe.cli.terminal import new_app, show
from sslpipe.errors import UserError

app = new_app()
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
def main(
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


def _pairs(options: list[str] | None) -> dict[str, str]:
    """Split NAME=VALUE of --option."""
    return {name: value for name, _, value in (text.partition("=") for text in options or [])}


def _sbatch(text: str) -> None:
    """Submit a script, and print what sbatch says."""
    try:
        done = subprocess.run(["sbatch"], input=text, text=True, capture_output=True)
    except FileNotFoundError:
        raise UserError("no sbatch on this machine; run this on a login node") from None
    if done.returncode:
        raise UserError(f"sbatch refused the job: {done.stderr.strip()}")
    show(done.stdout.strip())
