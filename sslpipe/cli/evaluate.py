"""`sslpipe evaluate`: a subcommand for each entry of EVALS, and `suite` for all."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from sslpipe.cli.inputs import check_file, check_model, open_data
from sslpipe.cli.next_step import say_next
from sslpipe.cli.options import (
    Data,
    Embedding,
    RunWeights,
    argument,
    command,
    option,
)
from sslpipe.cli.terminal import LazyGroup, load_model, new_app, progress, say
from sslpipe.errors import UserError
from sslpipe.files import write_json
from sslpipe.registry import added


class Evaluations(LazyGroup):
    """The sub-commands, and those of installed packages; each is imported when it is used."""

    SUMMARIES: ClassVar = {
        "clusters": "NMI and AMI of k-means clusters of TEST.",
        "few-shot": "kNN from a few labels per class, averaged over draws.",
        "knn": "kNN classification of TEST by TRAIN.",
        "linear": "Logistic regression fitted on TRAIN.",
        "retrieval": "Recall@k, mAP and other retrieval metrics of TEST in TRAIN.",
        "ridge": "Ridge regression onto one-hot labels, fitted on TRAIN.",
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


SEED = 0  # of the labels that are drawn, the hold-out and the random weights


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
    run: RunWeights,
) -> None:
    """Measure a backbone beside pixels, random weights and others.

    One table: kNN with all, 100 and 10 labels per class, plain and flattened, and a linear probe;
    Recall@1 and MAP@R if train lacks the classes of test. Every row has the same protocols, samples
    and draws. Ctrl-C or SIGTERM writes what is measured.
    """
    for source in [model, *(against or [])]:
        check_model(source)
    check_file(out)
    if split == "train":
        raise UserError(
            "--split train: every sample would find itself, the suite learns from train; name "
            "another split"
        )
    index = open_data(data)

    from sslpipe.cli import suite as work
    from sslpipe.cli.inputs import start
    from sslpipe.evaluation.suite import check_labelled, run_suite
    from sslpipe.evaluation.suite_file import own_name
    from sslpipe.evaluation.verdict import BASELINES

    target, _ = start(embedding.device, "suite")
    not_measured: list[str] = []
    with work.stoppable(out):
        # what can be refused, before anything is embedded
        rows = index.split("train")
        queries = index.split(split)
        for each in (rows, queries):
            index.check_files(each.name)
            check_labelled(each.name, each.labels)
        backbone = load_model(model, run.checkpoint, run.weights)
        others, not_compared = work.load_compared(
            against or [], model, backbone, {"ssl", *BASELINES}
        )
        starts = [other.name for other in others if other.is_start]
        backbone, (train, test) = backbone.matched(rows, queries)
        splits = (train, test)
        # features, the most wanted first: what is interrupted has these
        by_turn = sorted(others, key=lambda other: not other.is_start)
        metadata = {"seed": SEED, **work.model_metadata(backbone, splits, by_turn)}
        sets = work.embed_model(
            Path(model),
            backbone,
            splits,
            by_turn,
            embedding=replace(embedding, device=target),
            untrained_seed=SEED if baselines else None,
            left_out=not_measured,
        )
        leaks = work.find_leaks(splits, sets, embedding.num_workers) if leakage else None
        if not baselines:
            del sets["pixels"]
        known_as = own_name(metadata, [*sets])
        # the numbers
        report = run_suite(
            sets,
            metadata,
            against=[other.name for other in others],
            start=next(iter(starts), None),
            not_compared=not_compared,
            not_measured=not_measured,
            leaked=None if leaks is None else leaks.ids,
            leaked_by="" if leaks is None else leaks.how,
            seed=SEED,
            device=target,
            say=lambda text: say(work.renamed(text, known_as)),
            progress=lambda title, total: progress(work.renamed(title, known_as), total),
        )
        out.parent.mkdir(parents=True, exist_ok=True)
        write_json(out, report)
        work.copy_to_trackers(Path(model), report)
        work.print_report(report, out)
    if (Path(model) / "recipe.json").is_file():
        say_next(["report", model, "--data", data])
