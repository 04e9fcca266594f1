"""`sslpipe evaluate`: a subcommand for each entry of EVALS, and `suite` for all."""

from pathlib import Path
from typing import Annotated, Any, ClassVar

from sslpipe.cli.inputs import check_file, check_model, open_data
from sslpipe.cli.next_step import say_next
from sslpipe.cli.options import (
    Checkpoint,
    Data,
    Embedding,
    argument,
    command,
    option,
)
from sslpipe.cli.terminal import LazyGroup, new_app, progress, report_bad, say
from sslpipe.errors import UserError
from sslpipe.registry import added


class Evaluations(LazyGroup):
    """The sub-commands, and those of installed packages; each is imported when it is used."""

    SUMMARIES: ClassVar = {
        "clusters": "NMI and AMI of k-means clusters of TEST.",
        "few-shot": "kNN from a few labels per class, averaged over draws.",
        "knn": "kNN classification of TEST by TRAIN.",
        "linear": "Logistic regression fitted on TRAIN.",
        "retrieval": "Recall@k, mAP and other retrieval metrics of TEST in TRAIN.",
        "verification": "Same label or not, for pairs of TEST.",
    }

    def load(self, name: str) -> Any:
        """Import an evaluation; `suite` imports what it needs itself."""
        command = self.commands.get(name)
        if command is None or name in self.SUMMARIES:
            from sslpipe.cli.app import complete_help
            from sslpipe.cli.evaluations import make_command
            from sslpipe.evaluation.evals import EVALS

            self.commands[name] = command = make_command(name, EVALS[name])
            complete_help(f"evaluate {name}", command)
        return command

    def list_commands(self, ctx: Any) -> list[str]:
        """List the built-in ones, then those of packages that can be imported."""
        plugged = [name for name in added("sslpipe.evaluations") if name not in self.commands]
        return [*self.commands, *(name for name in plugged if self._can_load(name))]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a sub-command; one of a package is imported."""
        if cmd_name not in self.commands and cmd_name in added("sslpipe.evaluations"):
            self.load(cmd_name)
        return super().get_command(ctx, cmd_name)

    def _can_load(self, name: str) -> bool:
        """Import an evaluation of a package; one that cannot be is a line on stderr."""
        try:
            self.load(name)
        except UserError as error:
            say(f"warning: {error}", "yellow")
            return False
        return True


app = new_app(
    cls=Evaluations,
    no_args_is_help=True,
    help="Measure frozen features: kNN, linear probes, retrieval and more. TRAIN and TEST are "
    "files of `sslpipe embed`.",
    examples=[
        "sslpipe evaluate knn train.safetensors test.safetensors --k 20",
        "accelerate launch --multi_gpu --num_processes 2 -m sslpipe evaluate retrieval "
        "train.safetensors test.safetensors  # or few-shot, knn, verification",
        "sslpipe evaluate suite out/backbone --data out/photos/dataset.json --out eval.json",
    ],
)


@app.callback()
def _group() -> None:
    """Make typer see a group, though one command alone is listed here; the app has the help."""


@command(
    app,
    examples=[
        "sslpipe evaluate suite out/backbone --data out/photos/dataset.json --out eval.json",
        "sslpipe evaluate suite runs/photos --data out/photos/dataset.json --against timm:resnet50 "
        "--out runs/photos/eval.json",
    ],
)
def suite(
    model: Annotated[str, argument("A run directory, an export's folder, or other weights.")],
    data: Data,
    out: Annotated[Path, option("The JSON file to write.")] = Path("eval.json"),
    split: Annotated[
        str, option("The split to score; the labels to learn from are those of the split train.")
    ] = "test",
    against: Annotated[
        list[str] | None,
        option(
            "Compare with these weights: an export, a run, or anything that `sslpipe embed` takes, "
            "with its own view, on the same samples and protocols; repeatable. A run is always "
            "compared with the weights it started from, if they can be found.",
            metavar="SOURCE",
        ),
    ] = None,
    baselines: Annotated[bool, option("Also measure pixels and random weights.")] = True,
    leakage: Annotated[
        bool, option("Find test samples that are also in train, and score without them too.")
    ] = True,
    *,
    embedding: Embedding,
    checkpoint: Checkpoint = None,
) -> None:
    """Measure a backbone beside pixels, random weights and others.

    One table: kNN with all, 100 and 10 labels per class, plain and flattened, and a linear probe;
    Recall@1 and MAP@R if train lacks the classes of test. Every row has the same protocols, samples
    and draws. Ctrl-C or SIGTERM writes what is measured.
    """
    for source in [model, *(against or [])]:
        check_model(source)
    check_file(out, (".json",))
    from sslpipe.evaluation.suite_file import check_split

    check_split(split)
    index = open_data(data)

    from sslpipe.cli import suite_output
    from sslpipe.cli.inputs import start
    from sslpipe.report.suite import suite as measure

    start(embedding.device, "suite")
    with suite_output.stoppable(out):
        report = measure(
            model,
            index,
            split,
            out=out,
            against=against or [],
            baselines=baselines,
            leakage=leakage,
            checkpoint=checkpoint,
            batch_size=embedding.batch_size,
            num_workers=embedding.num_workers,
            device=embedding.device,
            say=say,
            progress=progress,
            on_bad=report_bad,
        )
        suite_output.print_report(report, out)
    if (Path(model) / "recipe.json").is_file():
        run_file = Path(model) / "eval.json"
        if out.resolve() != run_file.resolve():
            say(f"the report and the export read {run_file}: copy {out} there")
        say_next(["report", model, "--data", data])
