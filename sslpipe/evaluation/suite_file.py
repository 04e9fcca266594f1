"""What stands in an eval.json, which `table.run_suite` makes, and whether one is whole.

schema_version  1
facts           where the features come from: plain values, whatever the caller gave; `against`
                has name, source, sha256 and format of each other network
columns         headings of the table, in order; they begin with what decides
rows            an object a number: the keys of `result.Result` and
    features    "ssl" (the model's own), "pixels", "random" or another network
    whitened    whether the features were flattened before, by what was learned on train
    power       of a flattened row: chosen on train
    column      the heading this number stands under; null: not in the table
left_out        sentences: what could not be measured, and why
against         ours against another network's on one measure, by `comparison.compare_all`; of a
                pair the one that decides is first
    features, against, start        their names; whether the run started from theirs
    measure, unit, count            "kNN", "linear", "Recall@1" or "MAP@R"; what the interval
                                    is over, "images" or "classes", and how many
    whitened, against_whitened      in which form each is taken: both in the same one
    power, against_power            as in a row
    value, against_value, difference, interval95, p    of the difference; p is two-sided
    primary                         whether it decides: then it has an answer
    answer, p_holm, of              "better", "no clear difference" or "worse", by Holm's
                                    method at 5 % over all `of` deciding ones, in both forms
    other_form_value                what the network that is behind scores in its other form
    other_form_difference           of both in that form
baselines       the same, ours against "random" and "pixels"; `of` counts these
not_compared    sentences: networks that could not be compared, and why
incomplete      name of a set -> why it is not there, as "interrupted"
start_uniformity    of the start's features, see `label_free.uniformity`
leakage         null or not there: not checked; else
    samples, leaked, how            of test, how many of them, and how they were found
    rows        features, whitened, power, column, protocol, value, interval95, queries of each
                number of the table, and without the leaked samples clean_value,
                clean_interval95 (null where no sample is left) and clean_queries
verdict         sentences: is it better than other networks, random weights, pixels?
sha256          of the rest, see `content_sha256`
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sslpipe.errors import DataError, UserError, one_line, shown
from sslpipe.files import Tree, json_text, read_json

SCHEMA_VERSION = 1


def check_split(split: str) -> None:
    """Raise UserError for the split that the suite learns from: every sample would find itself."""
    if split == "train":
        raise UserError(
            "--split=train: every sample would find itself, the suite learns from train; name "
            "another split"
        )


def check_report(report: dict[str, Any]) -> None:
    """Check that what was read is what `run_suite` returned; else a ValueError of one line."""
    version = report.get("schema_version")
    if version != SCHEMA_VERSION:
        raise ValueError(f"schema_version = {shown(version)}: input should be {SCHEMA_VERSION}")
    if "sha256" not in report:
        raise ValueError("sha256 is missing")
    if report["sha256"] != content_sha256(report):
        raise ValueError("its sha256 is another one")


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


def with_own_name(rows: Sequence[Mapping[str, Any]], model_name: str) -> list[dict[str, Any]]:
    """Return a table of eval.json with the model's own name for "ssl"."""
    return [
        {**row, "features": model_name} if row["features"] == "ssl" else {**row} for row in rows
    ]
