"""What `sslpipe evaluate` takes of a data set's columns: options, and the rows of two files."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from sslpipe.data.index import Split, load_index
from sslpipe.errors import DataError
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.features import split_of_file
from sslpipe.evaluation.groups import GroupCodes, group_codes, worst_sentence
from sslpipe.evaluation.nuisance import choose_columns
from sslpipe.evaluation.result import Result
from sslpipe.evaluation.selection import parse_conditions, select

SHOWN_VALUES = 10  # the worst of a column
_CODES = (GroupCodes, GroupCodes | None)  # arguments of evaluations that name a column


def _option(name: str, metavar: str | None, text: str) -> inspect.Parameter:
    """Describe an option --NAME of text, None where it is not given."""
    annotation = Annotated[str | None, typer.Option(f"--{name}", metavar=metavar, help=text)]
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=None, annotation=annotation)


_ROWS = "Keep those of {}'s rows where the data set's columns say so, as in 'theme {} papirus'; {}"
_SYMBOLS = "= != < <= > >= in, `and`."
OPTIONS = (
    _option("data", None, "The dataset.json that both files were embedded from: its columns."),
    _option("query", "CONDITION", _ROWS.format("TEST", "=", _SYMBOLS)),
    _option("gallery", "CONDITION", _ROWS.format("TRAIN", "!=", "see --query.")),
)
ERASE = inspect.Parameter(
    "erased",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        list[str] | None,
        typer.Option(
            "--erase",
            metavar="COLUMN",
            help="Change both sides so that no linear probe of TRAIN reads this column of the data "
            "set; before --whiten and --pca; repeatable.",
        ),
    ],
)


def column_option(parameter: inspect.Parameter) -> inspect.Parameter:
    """Let an argument that takes codes of a column be given as the column's name."""
    if parameter.annotation not in _CODES:
        return parameter
    text = str if parameter.annotation is GroupCodes else str | None
    return parameter.replace(annotation=text)


def names_a_column(parameter: inspect.Parameter) -> bool:
    """Say whether an evaluation's argument is a column."""
    return parameter.annotation in _CODES


class _File(NamedTuple):
    """A features file and where its samples are.

    Args:
        path: Of the file.
        rows: Of the file.
        split: Of the data set; None without --data.
    """

    path: Path
    rows: Embeddings
    split: Split | None


class ColumnRows:
    """The rows of TRAIN and TEST that --gallery and --query keep, and their columns.

    Args:
        files: Paths, rows and metadata of both features files.
        data: The dataset.json that --data names.
        gallery: Conditions on the rows of TRAIN.
        query: Conditions on those of TEST.

    Raises:
        DataError: The files were not embedded from that data set, or no row is left.
    """

    def __init__(
        self,
        files: Sequence[tuple[Path, Embeddings, dict[str, Any]]],
        data: str | None,
        gallery: str | None,
        query: str | None,
    ) -> None:
        self.protocol = ""
        self.kept: list[str] = []  # sentences
        kept = []
        for (path, rows, metadata), option, text in zip(
            files, ("gallery", "query"), (gallery, query), strict=True
        ):
            split = None if data is None else split_of_file(data, path, rows, metadata)
            file = _File(path, rows, split)
            kept.append(file if text is None else self._select(file, option, text))
        self.bank, self.queries = kept

    @property
    def apart(self) -> bool:
        """Whether no row is on both sides, by its id."""
        ids = self.bank.rows.ids
        return not bool(torch.isin(self.queries.rows.ids, ids).any())

    def codes(self, option: str, name: str) -> GroupCodes:
        """Look up a column for the rows kept. `option`: who asks, for the message."""
        sides = []
        for file in (self.bank, self.queries):
            if file.split is None:
                raise DataError(
                    f"--{option.replace('_', '-')} {name} is looked up in the data set; name the "
                    "dataset.json that both files were embedded from with --data"
                )
            sides.append((file.split, file.rows.ids.cpu().numpy()))
        return group_codes(name, sides[0], sides[1])

    def _select(self, file: _File, option: str, text: str) -> _File:
        if file.split is None:
            raise DataError(
                f"--{option} {text!r} is about columns of the data set; name the dataset.json that "
                "both files were embedded from with --data"
            )
        conditions = parse_conditions(text)
        chosen = torch.from_numpy(select(conditions, file.split, file.rows.ids.numpy()))
        said = " and ".join(map(str, conditions))
        total, left = len(chosen), int(chosen.sum())
        if not left:
            raise DataError(
                f"--{option} {said!r}: it holds for none of {total} rows of {file.path}"
            )
        self.protocol += f" {option}[{said}]"
        self.kept.append(f"{option} {said!r}: {left} of {total} rows of {file.path.name}")
        return file._replace(rows=file.rows.rows(chosen.nonzero()[:, 0]))


class Probed(NamedTuple):
    """The columns that a suite probes.

    Args:
        codes: By sample id of the whole splits.
        left_out: Sentences on columns that are not probed.
    """

    codes: Sequence[GroupCodes] = ()
    left_out: Sequence[str] = ()


def probed_columns(
    model: Any, data: str | None, splits: tuple[str, str], names: Sequence[str] | None
) -> Probed:
    """Choose the columns of a suite, before anything is embedded.

    Args:
        model: What is embedded; None where all features come from files.
        data: The dataset.json.
        splits: Names of train and test.
        names: Those of --columns; None: text columns of few values.

    Raises:
        DataError: A column is asked for that is none, or nothing is embedded.
    """
    if model is None or data is None:
        if names:
            raise DataError(
                "--columns are those of the data set that a model embeds; name a model and --data, "
                "or use `sslpipe evaluate nuisance TRAIN TEST --data ... --column ...`"
            )
        return Probed()
    index, left_out = load_index(data), list[str]()
    train, test = map(index.split, splits)
    return Probed(choose_columns(train, test, names, left_out), left_out)


def nuisance_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Rows: chance, and each kind of features. Columns: those of the data set that were probed."""
    table = Table(title="What else the features know: a linear probe's % right, 95 % interval")
    table.add_column("features")
    cells: dict[str, dict[str, str]] = {"chance": {}}
    for row in rows:
        cells["chance"][row["column"]] = f"{100 * row['details']['chance']:.1f}"
        shown = percent(row["value"], row["interval95"])
        cells.setdefault(row["features"], {})[row["column"]] = shown
    for column in cells["chance"]:
        table.add_column(column, justify="right")
    for name, line in cells.items():
        table.add_row(Text(name), *(line.get(column, "-") for column in cells["chance"]))
    return table


def percent(value: float, interval: tuple[float, float]) -> str:
    """Write a share and its interval in percent."""
    return f"{100 * value:.1f} [{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]"


def print_values(results: Sequence[Result]) -> None:
    """Print the worst values of a column, for each result of `groups.worst_value`."""
    for result in results:
        values = result.details.get("values")
        if "worst" not in result.details or not isinstance(values, dict):
            continue
        name, metric = (
            result.protocol.rpartition(" by=")[2],
            result.metric.split(" of the worst")[0],
        )
        table = Table(title=escape(result.protocol))
        table.add_column(name)
        for heading in (f"{metric} in %, 95 % interval", "queries"):
            table.add_column(heading, justify="right")
        for value, own in list(values.items())[:SHOWN_VALUES]:
            table.add_row(
                escape(value), percent(own["value"], own["interval95"]), str(own["queries"])
            )
        Console().print(table)
        Console().print(worst_sentence(result), highlight=False, markup=False, soft_wrap=True)
