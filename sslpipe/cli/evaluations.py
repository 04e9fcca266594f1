"""The subcommands of `sslpipe evaluate` that take two files of features."""

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import GenericAlias, NoneType
from typing import Annotated, Any, get_args, get_origin

import torch
import typer

from sslpipe.cli.inputs import check_file, start
from sslpipe.cli.options import (
    Device,
    argument,
    documentation,
    option,
    set_parameters,
)
from sslpipe.cli.terminal import (
    list_examples,
    new_app,
    percent_interval,
    print_table,
    say_once,
    show,
    text_table,
    working,
)
from sslpipe.distributed import end_processes
from sslpipe.errors import DataError
from sslpipe.evaluation.embed import check_embeddings
from sslpipe.evaluation.feature_files import CLASSES, NAMES, check_comparable
from sslpipe.evaluation.groups import GroupCodes, group_codes
from sslpipe.evaluation.knn import check_apart
from sslpipe.evaluation.pair_list import read_pairs
from sslpipe.evaluation.result import Result, caveats
from sslpipe.evaluation.suite_file import form_name
from sslpipe.evaluation.vectors import Features, alike, open_features
from sslpipe.evaluation.verification import LabelledPairs
from sslpipe.evaluation.whiten import whiten
from sslpipe.files import write_json

SHARE_THE_BANK = ("few-shot", "knn")
LEARNS_FROM_TRAIN = ("few-shot", "knn", "linear")
COLUMNS = ("exclude_same", "cross")  # options by which a query may not find its own row

_OPTIONS = {  # of the arguments of our own evaluations; the others keep their defaults
    "clusters": (),
    "few-shot": ("labels_per_class", "k", "vote"),
    "knn": ("k", "vote", "exclude_same_id", "exclude_same"),
    "linear": (),
    "retrieval": ("k", "exclude_same_id", "exclude_same", "cross"),
    "verification": ("pairs", "far"),
}
_LISTED = int | LabelledPairs  # the argument of an evaluation that a list of pairs is read for
_EXTRA = {  # of the examples
    "few-shot": " --labels-per-class 10",
    "knn": " --k 10 --k 20 --vote majority",
}
_CODES = (GroupCodes, GroupCodes | None)  # arguments of evaluations that name a column


def _codes(sides: Sequence[Features], option: str, name: str) -> GroupCodes:
    """Look up a column for the rows of both sides, as an option asks."""
    rows = []
    for side in sides:
        if side.split is None:
            raise DataError(
                f"--{option.replace('_', '-')} {name} is looked up in the data set; name the "
                "dataset.json that both files were embedded from with --data"
            )
        rows.append((side.split, side.rows.ids.cpu().numpy()))
    return group_codes(name, *rows)


def _listed_pairs(path: Path, queries: Features) -> LabelledPairs:
    """Read the pairs that a list names by the paths of images, or by texts that are ids."""
    ids = queries.rows.ids
    names = None
    if NAMES in queries.facts:
        names = [queries.sample_name(each) for each in ids.tolist()]
    elif queries.split is not None:
        names = queries.split.names_of(ids.numpy())
    if names is None:
        raise DataError(
            f"--pairs {path} names images by their paths; give the dataset.json that TEST was "
            "embedded from with --data, if it was built from files, or save features with ids= of "
            "texts"
        )
    return read_pairs(path, names)


def print_results(title: str, results: Sequence[Result], prefix: str = "") -> None:
    """Print a table of results, and what weakens them."""
    rows = []
    for one in results:
        low, high = one.interval95
        value = f"{one.value:.4g} [{low:.4g}, {high:.4g}]"
        if one.unit == "share":
            value = f"{percent_interval(one.value, one.interval95)} %"
        rows.append([prefix + one.protocol, one.metric, value, str(one.queries), str(one.bank)])
    heads = ("protocol", "metric", "value", "queries", "bank")
    # what all rows share is said once, above them
    shared = [
        place for place in (0, 3, 4) if len(rows) > 1 and len({row[place] for row in rows}) == 1
    ]
    said_once = [f"{heads[place]}: {rows[0][place]}" for place in shared if rows[0][place] != "0"]
    kept = [place for place in range(len(heads)) if place not in shared]
    table = text_table(
        [heads[place] for place in kept],
        [[row[place] for place in kept] for row in rows],
        left=1 if 0 in shared else 2,
    )
    show("; ".join([title, *said_once]))
    print_table(table)
    for one in results:
        for caveat in caveats(one.details):
            show(f"{one.protocol}: {caveat}")


@dataclass(frozen=True)
class Files:
    """Two files of features, and what is done with them before and after an evaluation."""

    train: Annotated[Path, argument("Features of the labelled train split.")]
    test: Annotated[Path, argument("Features of the test split.")]
    data: Annotated[
        str | None,
        option("The dataset.json that both files were embedded from, for its columns."),
    ] = None
    whiten_power: Annotated[
        float | None,
        option(
            "Flatten the spectrum of both sides: divide each principal axis of TRAIN by its spread "
            "to this power; 1: PCA whitening.",
            min=0,
            max=1,
        ),
    ] = None
    device: Device = "auto"
    out: Annotated[Path | None, option("Also write the results as JSON.")] = None


def _open_sides(
    name: str, files: Files, *, one_split: bool, labelled: bool
) -> tuple[Features, Features]:
    """Open both files, and check that they can be compared by an evaluation.

    `one_split`: queries do not see themselves, so that both files must be of one split. `labelled`:
    both need the classes of all rows.
    """
    paths = (files.train, files.test)
    train, test = alike([open_features(path, files.data) for path in paths], [*map(str, paths)])
    if labelled:
        check_embeddings(train.rows, str(files.train))
        check_embeddings(test.rows, str(files.test))
    check_comparable(train.facts, test.facts)
    sides = dict(zip(paths, (train, test), strict=True))  # one file may be both
    for path, side in sides.items():
        zeros = int((side.rows.features == 0).all(dim=1).sum())
        if zeros:
            say_once(
                f"{path}: {zeros:,} of {len(side.rows.ids):,} rows are all zeros, so that all are "
                "as near to them; were these images embedded?"
            )
    # what the files say of their splits: of one, where equal ids are to be the same sample
    if one_split:
        sources = [(side.facts.get("data"), side.facts.get("split")) for side in (train, test)]
        if not any(None in source for source in sources) and sources[0] != sources[1]:
            first, second = (f"split {split!r} of {data}" for data, split in sources)
            raise DataError(
                f"`--exclude-same-id` is for two files of one split, and these are of {first} and "
                f"{second}, whose equal ids are different samples; leave it out"
            )
        for path, side in sides.items():
            _warn_of_ids(str(path), side)
    elif name in LEARNS_FROM_TRAIN and torch.isin(test.rows.ids, train.rows.ids).any():
        sources = [
            (side.facts.get("data_sha256"), side.facts.get("split")) for side in (train, test)
        ]
        if None not in sources[0] and sources[0] == sources[1]:
            raise DataError(
                f"both files are of split {train.facts['split']!r}: every sample would find "
                "itself; name the files of two splits"
            )
    return train, test


def _warn_of_ids(name: str, side: Features) -> None:
    """Mention rows of two classes that have one id, as names of files without folders have."""
    ids, order = side.rows.ids.sort(stable=True)
    labels = side.rows.labels[order]
    clash = ((ids[1:] == ids[:-1]) & (labels[1:] != labels[:-1])).nonzero()[:, 0].tolist()
    if clash:
        first, second = (side.class_name(int(labels[clash[0] + n])) for n in (0, 1))
        say_once(
            f"{name} has the id {side.sample_name(int(ids[clash[0]]))!r} for rows of the classes "
            f"{first} and {second}, which do not see each other by `--exclude-same-id`; where they "
            "are no crops of one image, give each image an id of its own, such as its path"
        )


def _form(train: Features, power: float | None) -> dict[str, Any]:
    """Return what stands beside each result in the JSON file."""
    form: dict[str, Any] = {"whitened": power == 1}
    if CLASSES in train.facts:
        form[CLASSES] = train.facts[CLASSES]
    if power is not None and power != 1:
        form["power"] = power
    return form


def _measure(
    name: str, evaluate: Callable[..., list[Result]], files: Files, options: dict[str, Any]
) -> None:
    """Open both files, evaluate, print the results and write them. `options`: of `evaluate`."""
    check_file(files.out, (".json",))
    accepted = inspect.signature(evaluate).parameters
    target, process = start(files.device, "" if "process" in accepted else name)
    if "process" in accepted:
        options["process"] = process
    listed = None
    if "pairs" in accepted and accepted["pairs"].annotation == _LISTED:
        listed = options.pop("pairs", None)
    train, test = _open_sides(
        name,
        files,
        one_split=options.get("exclude_same_id", False),
        labelled=name in _OPTIONS and listed is None,  # each of ours needs them
    )
    for key, column in options.items():
        if column is not None and accepted[key].annotation in _CODES:
            options[key] = _codes((train, test), key, column)
    if listed is not None:
        options["pairs"] = _listed_pairs(listed, test)
    bank = train.rows
    queries = test.rows
    if name in LEARNS_FROM_TRAIN:
        unknown = int((~torch.isin(queries.labels, bank.labels)).sum())
        if 0 < unknown < len(queries.labels):
            say_once(
                f"{unknown:,} of {len(queries.labels):,} queries are of classes that {files.train} "
                "lacks: they count as wrong"
            )
    if name in (*LEARNS_FROM_TRAIN, "retrieval") and not any(options.get(c) for c in COLUMNS):
        check_apart(bank, queries, exclude_same_id=options.get("exclude_same_id", False))
    power = files.whiten_power
    if power is not None:
        bank, queries = whiten(bank, queries, power=power)
    if process.world_size == 1 or name not in SHARE_THE_BANK:  # else each moves its share
        bank = bank.to(target)
    with working(name):
        results = evaluate(bank, queries.to(target), **options)
    if process.rank == 0:
        prefix = "" if power is None else f"{form_name(True, power)} "
        print_results(f"{name}: {files.train.name} -> {files.test.name}", results, prefix)
        if files.out is not None:
            beside = _form(train, power)
            files.out.parent.mkdir(parents=True, exist_ok=True)
            write_json(files.out, [{**beside, **result.to_json()} for result in results])
    end_processes()


def make_command(name: str, evaluate: Callable[..., list[Result]]) -> Any:
    """Make a subcommand whose options are the evaluation's own keyword arguments."""
    accepted = list(inspect.signature(evaluate).parameters.values())[2:]

    def run(**values: Any) -> None:
        files = Files(**{field.name: values.pop(field.name) for field in fields(Files)})
        _measure(name, evaluate, files, values)

    summary, helps = documentation(evaluate)
    names = _OPTIONS.get(name, [p.name for p in accepted if p.name != "process"])
    options = [_option(p, helps.get(p.name)) for p in accepted if p.name in names]
    set_parameters(run, [*options, *inspect.signature(Files).parameters.values()])
    example = f"sslpipe evaluate {name} train.safetensors test.safetensors{_EXTRA.get(name, '')}"
    alone = new_app()
    alone.command(name, help=summary, epilog=list_examples([example]))(run)
    return typer.main.get_command(alone)


def _option(parameter: inspect.Parameter, text: str | None) -> inspect.Parameter:
    """Make an option of an argument: a column's codes are given by its name, a sequence one by one.

    `text` is what the docstring of the evaluation says of it.
    """
    kind = parameter.annotation
    default = parameter.default
    if kind == _LISTED:
        kind = Path | None
        default = None
        text = (
            "Pairs as LFW's pairs.txt lists them, or two paths and 1 or 0 a line, instead of drawn "
            "ones; images are found in --data, or are texts of ids."
        )
    elif kind in _CODES:
        kind = str if kind is GroupCodes else str | None
    elif get_args(kind)[1:] == (NoneType,) and get_origin(get_args(kind)[0]) is Sequence:
        kind = GenericAlias(list, get_args(get_args(kind)[0])) | None
    elif get_origin(kind) is Sequence:
        kind = GenericAlias(list, get_args(kind))
        if default is not parameter.empty:
            default = list(default)
    if text is not None:  # without what is meant for those who read the code
        text = re.sub(r"; see `[\w.]+`( and `[\w.]+`)*", "", text)
    annotation = Annotated[kind, option(text or "")]  # type: ignore[valid-type]
    return parameter.replace(default=default, annotation=annotation)
