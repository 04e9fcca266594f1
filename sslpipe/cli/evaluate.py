"""`sslpipe evaluate`: a subcommand for each entry of EVALS, and `suite` for all."""

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperGroup

from sslpipe.cli.columns import (
    ERASE,
    OPTIONS,
    ColumnRows,
    column_option,
    names_a_column,
    percent,
    print_values,
)
from sslpipe.cli.next_step import after_evaluation, after_suite
from sslpipe.cli.processes import refuse_several, start, start_alone
from sslpipe.cli.progress import working
from sslpipe.cli.recipes import CanvasPx, Checkpoint, Device, NumWorkers, Weights
from sslpipe.cli.suite import suite
from sslpipe.cli.terminal import console, report_bad, say_weights, write_json
from sslpipe.data.index import load_index
from sslpipe.distributed import end_processes
from sslpipe.errors import DataError, UserError
from sslpipe.evaluation import EVALS
from sslpipe.evaluation.embed import Embeddings, check_comparable, load_embeddings
from sslpipe.evaluation.erase import erase
from sslpipe.evaluation.features import check_one_split, two_splits
from sslpipe.evaluation.result import Result, caveats
from sslpipe.evaluation.sgd_probe import CROP_AREA, EPOCHS, FLIP_PROB, RATES, augmented_sgd_probe
from sslpipe.evaluation.whiten import pca, whiten
from sslpipe.export.load import checkpoint_metadata, load_backbone

MOST_DEFAULTS = 8  # of an option, that its help lists one by one


class Evaluations(TyperGroup):
    """The sub-commands, and those of installed packages; such a one is imported when it is used."""

    def list_commands(self, ctx: Any) -> list[str]:
        """List the built-in ones, then those of packages that can be imported."""
        plugged = [name for name in EVALS.names() if name not in self.commands]
        return [*self.commands, *filter(self._add, plugged)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a sub-command; one of a package is imported."""
        if cmd_name not in self.commands and cmd_name in EVALS:
            alone = typer.Typer(add_completion=False, rich_markup_mode="rich")
            _add_command(alone, cmd_name, EVALS[cmd_name])
            self.commands[cmd_name] = typer.main.get_command(alone)
        return super().get_command(ctx, cmd_name)

    def _add(self, name: str) -> bool:
        """Import an evaluation of a package; one that cannot be is a line on stderr."""
        try:
            self.get_command(None, name)
        except UserError as error:
            console.print(f"warning: {error}", style="yellow", highlight=False, soft_wrap=True)
            return False
        return True


app = typer.Typer(
    cls=Evaluations,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Measure frozen features: kNN, linear probes, retrieval and more. TRAIN and TEST are "
    "files of `sslpipe embed`.",
    epilog="Examples: sslpipe evaluate knn train.safetensors test.safetensors --k 20 | "
    "accelerate launch --multi_gpu --num_processes 2 -m sslpipe evaluate retrieval "
    "train.safetensors test.safetensors (several processes share the work of few-shot, knn, "
    "retrieval and verification) | "
    "sslpipe evaluate suite out/backbone --data out/photos/dataset.json --out eval.json",
)

SHARE_THE_BANK = ("few-shot", "knn")
LEARNS_FROM_TRAIN = ("few-shot", "knn", "linear", "nuisance", "ridge", "sgd")

TrainFile = Annotated[Path, typer.Argument(help="Embeddings of the labelled train split.")]
TestFile = Annotated[Path, typer.Argument(help="Embeddings of the test split.")]
Whiten = Annotated[bool, typer.Option("--whiten", help="PCA-whiten both sides, fitted on TRAIN.")]
Axes = Annotated[
    int | None,
    typer.Option(
        "--pca", min=1, help="Project both sides to so many principal axes of TRAIN, not whitened."
    ),
]
JsonFile = Annotated[Path | None, typer.Option("--out", help="Write the results as JSON, too.")]

app.command(
    epilog="Examples: sslpipe evaluate suite out/backbone --data out/photos/dataset.json "
    "--out eval.json | sslpipe evaluate suite runs/photos --data out/photos/dataset.json "
    "--against timm:resnet50 --out runs/photos/eval.json"
)(suite)


@app.command(
    "sgd-augmented",
    epilog="Example: sslpipe evaluate sgd-augmented runs/photos --data out/photos/dataset.json "
    "--epochs 10",
)
def sgd_augmented(
    model: Annotated[Path, typer.Argument(help="An export's folder or a run directory.")],
    data: Annotated[str, typer.Option(help="The dataset.json to embed.")],
    train_split: Annotated[str, typer.Option(help="The split that is trained on.")] = "train",
    test_split: Annotated[str, typer.Option(help="The split that is scored.")] = "test",
    rates: Annotated[list[float], typer.Option(help="Learning rates for 256 rows.")] = list(RATES),  # noqa: B006
    epochs: Annotated[int, typer.Option(min=1, help="Two take one pass over the images.")] = EPOCHS,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of a step.")] = 256,
    smallest_crop: Annotated[float, typer.Option(help="Least share of the area.")] = CROP_AREA[0],
    flip_prob: Annotated[float, typer.Option(help="0 where left and right matter.")] = FLIP_PROB,
    holdout: Annotated[float, typer.Option(help="Share of train, for several rates.")] = 0.15,
    seed: Annotated[int, typer.Option(help="Of views, order and hold-out.")] = 0,
    canvas_px: CanvasPx = None,
    num_workers: NumWorkers = 2,
    device: Device = "auto",
    checkpoint: Checkpoint = None,
    weights: Weights = None,
    out: JsonFile = None,
) -> None:
    """SimCLR's linear evaluation with augmented images: a linear layer on a frozen backbone."""
    target = start_alone("sgd-augmented", device)
    backbone = load_backbone(model, checkpoint=checkpoint, weights=weights)
    say_weights(backbone)
    index = load_index(data)
    results = augmented_sgd_probe(
        backbone.backbone.to(target),
        backbone.view,
        *two_splits(index, train_split, test_split),
        rates=rates,
        epochs=epochs,
        batch_size=batch_size,
        holdout=holdout,
        seed=seed,
        crop_area=(smallest_crop, 1.0),
        flip_prob=flip_prob,
        say=console.print,
        canvas_px=canvas_px or backbone.view.canvas_px,
        num_workers=num_workers,
        device=target,
        on_bad=report_bad,
    )
    _print_results(f"sgd-augmented: {model}", results)
    if out is not None:
        named = checkpoint_metadata(backbone)
        write_json(out, [{"whitened": False, **result.to_json(), **named} for result in results])
    after_suite(str(model), data)


def _shown(result: Result) -> str:
    if result.unit == "share":
        return f"{percent(result.value, result.interval95)} %"
    low, high = result.interval95
    return f"{result.value:.4g} [{low:.4g}, {high:.4g}]"


def _print_results(title: str, results: list[Result], prefix: str = "") -> None:
    table = Table(title=title)
    for heading in ("protocol", "metric", "value", "queries", "bank"):
        table.add_column(heading, justify="left" if heading in ("protocol", "metric") else "right")
    for result in results:
        table.add_row(
            escape(prefix + result.protocol),
            escape(result.metric),
            _shown(result),
            str(result.queries),
            str(result.bank),
        )
    Console().print(table)
    for result in results:
        for said in caveats(result.details):
            line = f"{result.protocol}: {said}"
            Console().print(line, highlight=False, markup=False, soft_wrap=True)


class _Map(NamedTuple):
    """What is done to the features of both files before they are evaluated.

    Args:
        erased: Columns whose values are, in this order.
        whitened: Whether they are, after that.
        axes: Principal axes that they are projected to; None: as they are.
    """

    erased: Sequence[str]
    whitened: bool
    axes: int | None

    def of_rows(self, rows: ColumnRows) -> tuple[Embeddings, Embeddings]:
        """Map the rows of both files, by what those of the first say."""
        bank, queries = rows.bank.rows, rows.queries.rows
        if self.erased:
            codes = {column: rows.codes("erase", column).bank for column in self.erased}
            bank, queries = erase(bank, queries, columns=codes)
        if self.whitened:
            bank, queries = whiten(bank, queries)
        if self.axes is not None:
            bank, queries = pca(bank, queries, dims=self.axes)
        return bank, queries

    @property
    def prefix(self) -> str:
        """What stands before the protocols in a table."""
        erased = f"erased={','.join(self.erased)} " if self.erased else ""
        axes = "" if self.axes is None else f"pca={self.axes} "
        return erased + ("whitened " if self.whitened else axes)

    def to_json(self) -> dict[str, Any]:
        """Return what stands beside each number."""
        axes = {} if self.axes is None else {"pca": self.axes}
        erased = {"erased": self.erased} if self.erased else {}
        return {"whitened": self.whitened, **axes, **erased}


def _add_command(group: typer.Typer, name: str, evaluate: Callable[..., list[Result]]) -> None:
    """A subcommand whose options are the evaluation's own keyword arguments."""
    accepted = list(inspect.signature(evaluate).parameters.values())[2:]
    shared = any(parameter.name == "process" for parameter in accepted)
    columns = [parameter.name for parameter in accepted if names_a_column(parameter)]

    def command(
        train: Path,
        test: Path,
        whiten_both: bool,
        axes: int | None,
        device: str,
        out: Path | None,
        data: str | None = None,
        gallery: str | None = None,
        query: str | None = None,
        erased: list[str] | None = None,
        **options: Any,
    ) -> None:
        if whiten_both and axes is not None:
            raise DataError("--whiten and --pca are two maps of the features; name one")
        target, process = start(device)
        if shared:
            options["process"] = process
        else:
            refuse_several(name, process)
        (bank, bank_metadata), (queries, query_metadata) = map(load_embeddings, (train, test))
        files = ((train, bank, bank_metadata), (test, queries, query_metadata))
        rows = ColumnRows(files, data, gallery, query)
        itself = name not in LEARNS_FROM_TRAIN or options.get("exclude_same_id", False)
        check_comparable(bank_metadata, query_metadata, itself=itself or rows.apart)
        if options.get("exclude_same_id"):
            check_one_split(bank_metadata, query_metadata)
        for column in columns:
            if options[column] is not None:
                options[column] = rows.codes(column, options[column])
        mapped = _Map(erased or [], whiten_both, axes)
        bank, queries = mapped.of_rows(rows)
        if process.world_size == 1 or name not in SHARE_THE_BANK:  # else each moves its share
            bank = bank.to(target)
        with working(name):
            results = evaluate(bank, queries.to(target), **options)
        results = [replace(result, protocol=result.protocol + rows.protocol) for result in results]
        if process.rank == 0:
            _print_results(f"{name}: {train.name} -> {test.name}", results, mapped.prefix)
            print_values(results)
            for kept in rows.kept:
                Console().print(kept, highlight=False, markup=False, soft_wrap=True)
            if out is not None:
                write_json(out, [{**mapped.to_json(), **result.to_json()} for result in results])
        end_processes()
        after_evaluation(name, train, test)

    summary, helps = documentation(evaluate)
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter("train", kind, annotation=TrainFile),
        inspect.Parameter("test", kind, annotation=TestFile),
        *(_option(column_option(p), helps.get(p.name)) for p in accepted if p.name != "process"),
        *OPTIONS,
        ERASE,
        inspect.Parameter("whiten_both", kind, annotation=Whiten, default=False),
        inspect.Parameter("axes", kind, annotation=Axes, default=None),
        inspect.Parameter("device", kind, annotation=Device, default="auto"),
        inspect.Parameter("out", kind, annotation=JsonFile, default=None),
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    group.command(
        name,
        help=summary,
        epilog=f"Example: sslpipe evaluate {name} train.safetensors test.safetensors"
        + _EXTRA.get(name, ""),
    )(command)


_EXTRA = {
    "few-shot": " --labels-per-class 10",
    "knn": " --k 10 --k 20 --vote majority",
    "nuisance": " --data out/photos/dataset.json --column scanner",
}


def documentation(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Split a docstring into what a command's help says and what each option's says.

    Returns:
        The text with its Returns block, without headings; and each argument's line of Args.
    """
    summary: list[str] = []
    helps: dict[str, str] = {}
    name = ""
    for paragraph in inspect.cleandoc(function.__doc__ or "").split("\n\n"):
        heading, _, block = paragraph.partition("\n")
        if heading == "Args:":
            for line in map(str.rstrip, inspect.cleandoc(block).splitlines()):
                if not line.startswith(" "):
                    name, _, line = line.partition(": ")
                helps[name] = f"{helps.get(name, '')} {line.strip()}".strip()
        elif heading == "Returns:":
            summary.append(inspect.cleandoc(block))
        elif heading not in ("Raises:", "Source:"):
            summary.append(paragraph)
    return "\n\n".join(summary), helps


def _option(parameter: inspect.Parameter, text: str | None) -> inspect.Parameter:
    """A sequence becomes a repeatable option; everything else is as it is. text: its help."""
    annotation, default = parameter.annotation, parameter.default
    shown: bool | str = True
    if get_origin(annotation) is Sequence:
        annotation = GenericAlias(list, get_args(annotation))
        if default is not parameter.empty:
            default = list(default)
            if len(default) > MOST_DEFAULTS:
                ends = [f"{x:.3g}" if isinstance(x, float) else str(x) for x in default]
                shown = f"{ends[0]}, {ends[1]}, ... {ends[-1]}: {len(ends)} values"
    if text is not None:  # without what is meant for those who read the code
        text = re.sub(r"; see `[\w.]+`( and `[\w.]+`)*", "", text)
    annotation = Annotated[annotation, typer.Option(help=text, show_default=shown)]
    return parameter.replace(annotation=annotation, default=default)


for _name, _evaluate in EVALS.items():
    _add_command(app, _name, _evaluate)
