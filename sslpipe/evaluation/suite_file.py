"""What stands in an eval.json, which `table.run_suite` makes, and whether one is whole."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from sslpipe.errors import DataError, UserError, one_line
from sslpipe.files import Finite, Stored, Tree, explain, json_text, read_json

SCHEMA_VERSION: Literal[1] = 1

Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1, le=2**53)]
Ends = Annotated[list[Finite], Field(min_length=2, max_length=2)]


class _Number(Stored):
    """What rows of all kinds have, in part from `result.Result`."""

    features: str  # "ssl" (the model's own), "pixels", "random", ...
    whitened: bool  # whether the features were flattened before, by what was learned on train
    power: Share | None = None  # of a flattened row: chosen on train
    protocol: str
    metric: str
    value: Finite
    interval95: Ends
    queries: int


class _Row(_Number):
    column: str | None  # the heading this number stands under; None: not in the table
    bank: int
    details: dict[str, Any]


class _Comparison(Stored):
    """The features against a baseline: see `verdict.comparisons`."""

    features: str
    baseline: Literal["random", "pixels"]
    column: Literal["kNN", "linear"]
    whitened: bool
    value: Finite
    baseline_value: Finite
    difference: Finite
    interval95: Ends
    p: Share | None = None
    power: Share | None = None


class _Against(Stored):
    """Ours against theirs on one measure, see `against`; of two networks the deciding one first."""

    features: str
    against: str
    start: bool  # whether the run started from theirs
    measure: Literal["kNN", "linear", "Recall@1", "MAP@R"]
    primary: bool  # whether it decides: then it has an answer
    # in which form each is taken: both in the same one
    whitened: bool
    against_whitened: bool
    power: Share | None = None
    against_power: Share | None = None
    value: Share
    against_value: Share
    difference: Annotated[float, Field(ge=-1, le=1)]
    interval95: Ends  # of the difference; also p, two-sided
    unit: Literal["images", "classes"]  # what the interval is over, and `count` how many
    count: Count
    # by Holm's method at 5 % over all `of` deciding comparisons (p_holm), and in both forms
    answer: Literal["better", "no clear difference", "worse"] | None = None
    of: Count | None = None
    # what the network that is behind scores in its other form; the difference of both in that form
    other_form_value: Share | None = None
    other_form_difference: Annotated[float, Field(ge=-1, le=1)] | None = None

    @model_validator(mode="after")
    def _answered(self) -> Self:
        if self.primary and None in (self.answer, self.of):
            raise ValueError("a deciding comparison has no answer")
        if (self.other_form_value is None) != (self.other_form_difference is None):
            raise ValueError("other_form_value and other_form_difference belong together")
        return self


class _Other(Stored):
    name: str
    source: str
    sha256: str
    format: str


class _Facts(Stored):
    against: list[_Other] = Field(default_factory=list)


class _LeakRow(Stored):
    """A number of the table, with and without test samples that are in train, too."""

    features: str
    whitened: bool
    power: Share | None = None
    column: str
    value: Share
    clean_value: Share | None  # and its interval; None where no sample is left
    clean_interval95: Ends | None
    clean_queries: Annotated[int, Field(ge=0)]


class _Leakage(Stored):
    samples: Count  # of test
    leaked: Annotated[int, Field(ge=0)]
    how: str  # they were found
    rows: list[_LeakRow]


class _Report(Stored):
    """What an eval.json must have to be shown; also verdict and sha256."""

    schema_version: Literal[1] = SCHEMA_VERSION
    facts: _Facts  # where the features come from: plain values, whatever the caller gave
    columns: list[str]  # headings of the table, in order
    rows: list[_Row]  # an object a number
    left_out: list[str]  # sentences: what could not be measured, and why
    comparisons: list[_Comparison] = Field(default_factory=list)
    against: list[_Against] = Field(default_factory=list)
    # sentences: networks that could not be compared, and why
    not_compared: list[str] = Field(default_factory=list)
    # name of a set -> why it is not there, as "interrupted"
    incomplete: dict[str, str] = Field(default_factory=dict)
    start_uniformity: Finite | None = None  # of the start's features, see label_free.uniformity
    leakage: _Leakage | None = None  # None: not checked

    @model_validator(mode="after")
    def _measured(self) -> Self:
        if self.columns and not self.rows:
            raise ValueError("rows are missing")
        return self


def check_split(split: str) -> None:
    """Raise UserError for the split that the suite learns from: every sample would find itself."""
    if split == "train":
        raise UserError(
            "--split=train: every sample would find itself, the suite learns from train; name "
            "another split"
        )


def check_report(report: dict[str, Any]) -> None:
    """Check that what was read is what `run_suite` returned; else a ValueError of one line."""
    if report.get("sha256", content_sha256(report)) != content_sha256(report):
        raise ValueError("its sha256 is another one")
    try:
        _Report.model_validate(report)
    except ValidationError as error:
        raise ValueError(explain(error, _Report)) from None


def read_suite(path: Path) -> Tree:
    """Read an eval.json. Raises: DataError: it is damaged, or of another version."""
    again = "write it again with `sslpipe evaluate suite`"
    report = read_json(path, Tree, remedy=again)
    try:
        check_report(report)
    except ValueError as error:
        raise DataError(f"{path} is damaged ({error}); {again}") from None
    return report


def content_sha256(report: dict[str, Any]) -> str:
    """Compute a sha256 over all but the key sha256."""
    rest = {key: value for key, value in report.items() if key != "sha256"}
    return hashlib.sha256(json_text(rest).encode()).hexdigest()


def form_name(whitened: bool, power: float | None) -> str:
    """Name the form of a row's features."""
    if not whitened:
        return "as it is"
    return f"flattened (power {1 if power is None else power:g})"


def features_name(row: Mapping[str, Any], name: str | None = None) -> str:
    """Name the features of a row, under another name where one is given, with their form."""
    form = form_name(row["whitened"], row.get("power"))
    return (name or str(row["features"])) + (f", {form}" if row["whitened"] else "")


def own_name(facts: Mapping[str, Any], others: Iterable[str]) -> str:
    """Return what "ssl" is called where people read; not one of the `others`."""
    name = facts.get("name")
    return one_line(name) if isinstance(name, str) and name not in ("", *others) else "this model"


def with_own_name(rows: Sequence[Mapping[str, Any]], own: str) -> list[dict[str, Any]]:
    """Return a table of eval.json with the model's own name for "ssl"."""
    return [{**row, "features": own} if row["features"] == "ssl" else {**row} for row in rows]
