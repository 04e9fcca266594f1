"""`sslpipe slurm`: the batch script of a training, printed or submitted."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sslpipe.cli.recipes import Data, Init, Overrides, RecipePath
from sslpipe.errors import UserError
from sslpipe.recipe import Recipe, load_recipe
from sslpipe.registry import requested
from sslpipe.run.batch_script import batch_script
from sslpipe.run.launcher import check_streams

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


@app.command(
    epilog="Examples: sslpipe slurm recipe.toml --data /data/dataset.json --run-dir runs/photos "
    "--nodes 4 --gpus-per-node 8 --time 24:00:00 --submit | sslpipe slurm finetune.toml --data "
    "/data/dataset.json --run-dir runs/tuned --init runs/photos --option partition=gpu"
)
def main(
    recipe: RecipePath,
    overrides: Overrides = None,
    data: Data = ...,  # type: ignore[assignment]
    run_dir: Annotated[Path, typer.Option(help="Where the run lives.")] = ...,  # type: ignore[assignment]
    init: Init = None,
    nodes: Annotated[int, typer.Option(min=1)] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=0, help="0: on the CPU.")] = 0,
    cpu_processes: Annotated[int, typer.Option(min=1, help="A node, without GPUs.")] = 1,
    time: Annotated[str | None, typer.Option(help="The limit of one start.")] = None,
    warn_s: Annotated[int, typer.Option(min=1, help="Saved this long before the limit.")] = 120,
    job_name: Annotated[str | None, typer.Option(show_default="the recipe's name")] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="Another of sbatch's: partition=gpu; repeatable.")
    ] = None,
    site: Annotated[
        Path | None, typer.Option(help="A shell file to include: modules, network, containers.")
    ] = None,
    submit: Annotated[bool, typer.Option(help="Hand it to sbatch instead of printing.")] = False,
) -> None:
    """Print the batch script of a training for SLURM, or submit it.

    The script is complete: it needs this Python environment, and no other file. The job saves and
    requeues itself at the time limit and on preemption.
    """
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
    words = [str(recipe), "--data", data, "--run-dir", str(run_dir)]
    words += [word for name in requested() for word in ("--plugin", name)]
    words += [] if init is None else ["--init", init]
    text = batch_script(
        options, [*words, *(overrides or [])], {"SSLPIPE_CPU_PROCESSES": str(cpu_processes)}, site
    )
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
