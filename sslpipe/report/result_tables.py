"""Show what eval.json holds: verdict, sentences, tables."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from markupsafe import Markup

from sslpipe.evaluation.advice import Advice, advise
from sslpipe.evaluation.comparison import BASELINES, KNN, RECALL
from sslpipe.evaluation.result import measured_columns, query_counts
from sslpipe.evaluation.verdict import leakage_sentence, unfinished, verdict
from sslpipe.files import Tree
from sslpipe.report.page import feature_title, percent, render
from sslpipe.report.run_files import RunFiles

ORDER = ("ssl", "pixels", "random")  # of the lines of a table; others come behind
COLOURS = {"ssl": "var(--series-1)", "pixels": "var(--series-2)", "random": "var(--series-3)"}
SMALL_IS_GOOD = ("fpr@", "eer")  # how such metrics begin; others: large is good
OTHER_MEASURES = "Retrieval and verification"
TABLES = (  # heading, what it is, and metric -> title of its column
    (
        "Retrieval",
        "Each test image against all others, in %.",
        {
            name: name
            for name in ("Recall@1", "Recall@10", "precision@10", "R-precision", "MAP@R", "MRR")
        },
    ),
    (
        "Verification",
        "Same class or not, by the cosine of pairs, in %. Errors (FPR, equal error rate): smallest "
        "is best.",
        {
            "auc": "area under the ROC",
            "fpr@95tpr": "FPR at 95 % TPR",
            "eer": "equal error rate",
            "tar@far=0.01": "TAR at 1 % FAR",
            "accuracy 10-fold best threshold": "10-fold accuracy",
        },
    ),
)


class Line(NamedTuple):
    """A row of the table."""

    features: str  # "ssl" for the run's own, "pixels", "random", or another name
    whitened: bool
    cells: dict[str, Tree]  # results by column
    baseline: bool = False
    power: float | None = None  # see `suite_file`

    @property
    def title(self) -> str:
        """Return what the features are, in words."""
        return feature_title(self._asdict())


class First(NamedTuple):
    """The number that the page begins with, of plain features, and the baselines beside it."""

    measure: str  # the column
    cell: Tree
    beside: list[tuple[str, str, str]]  # title, colour and percent of each baseline


def table_lines(rows: Iterable[Tree]) -> list[Line]:
    """Return the run's own rows first, then whatever else was measured, then the baselines."""
    lines: dict[tuple[str, bool], Line] = {}
    for row in rows:
        new = Line(
            features=row["features"],
            whitened=row["whitened"],
            cells={},
            baseline=row.get("baseline", row["features"] in BASELINES),
            power=row.get("power"),
        )
        line = lines.setdefault((new.features, new.whitened), new)
        if row["column"] is not None:
            line.cells[row["column"]] = row
    order = {name: place for place, name in enumerate(ORDER)}
    return sorted(
        lines.values(),
        key=lambda line: (line.baseline, order.get(line.features, len(order))),
    )


def clear_best(lines: list[Line], column: str) -> list[Line]:
    """Return the lines whose whole interval is better than those of all other features.

    Plain and flattened features of one backbone do not compete.
    """
    measured = [line for line in lines if column in line.cells]
    clear = []
    for line in measured:
        (low, high), metric = (line.cells[column][key] for key in ("interval95", "metric"))
        others = [e.cells[column]["interval95"] for e in measured if e.features != line.features]
        if metric.startswith(SMALL_IS_GOOD):
            is_clear = all(high < their_low for their_low, _ in others)
        else:
            is_clear = all(low > their_high for _, their_high in others)
        if others and is_clear:
            clear.append(line)
    return clear


def advice(run: RunFiles) -> Advice:
    """Return the suite's two sentences: how the features do, and what to do next."""
    if run.evaluation is not None:
        return advise(run.evaluation)
    if run.data["classes"]:
        return Advice(
            "Not evaluated yet: how good the features are is not known.",
            "Measure them, by `sslpipe evaluate suite`.",
        )
    return Advice(
        "No labels, so no accuracy.",
        "Look at the nearest neighbours, or label a few hundred images and measure.",
    )


def first_number(evaluation: Tree | None) -> First | None:
    """Find the number that the page begins with; None: nothing was measured."""
    rows = evaluation["rows"] if evaluation else []
    lines = [line for line in table_lines(rows) if not line.whitened]
    trained = next((line for line in lines if line.features not in BASELINES), None)
    measure = next((each for each in (KNN, RECALL) if trained and each in trained.cells), None)
    if trained is None or measure is None:
        return None
    beside = [
        (line.title, COLOURS[line.features], percent(line.cells[measure]["value"]))
        for line in lines
        if line.features in BASELINES and measure in line.cells
    ]
    return First(measure, trained.cells[measure], beside)


def summary(run: RunFiles) -> Markup:
    """Write whether the weights are the end's, the verdict, what was trained, the first number.

    Which is better is the verdict's to say, by paired intervals; those of the table overlap sooner.
    """
    if run.evaluation is None:
        reason = "it has no eval.json" if run.data["classes"] else "its images have no labels"
        answer = f"Whether it is better than random weights is not known: {reason}."
    else:
        answer = verdict(run.evaluation)
    leaked = run.evaluation.get("leakage") if run.evaluation else None
    clean = [
        row["clean_value"]
        for row in (leaked["rows"] if leaked else ())
        if row["features"] == "ssl" and not row["whitened"] and row["column"] in (KNN, RECALL)
    ]
    return render(
        "run.summary",
        run=run,
        unfinished=unfinished_text(run),
        verdict=answer,
        first=first_number(run.evaluation),
        leaked=leaked,
        clean=clean,
    )


def unfinished_text(run: RunFiles) -> str:
    """Warn of weights that are not those of the end of training; '' where they are."""
    return unfinished(run.metadata, run.recipe.get("steps"))


def result_table(evaluation: Tree) -> Markup:
    """Tabulate features by the columns of eval.json, in percent with intervals; protocols below."""
    rows = evaluation["rows"]
    shown = [row for row in rows if row["column"] is not None]
    top1 = all(row["metric"] == "top1" for row in shown)
    columns = evaluation["columns"]
    used = {(r["column"], r["protocol"], r["bank"]) for r in shown if r["column"] in columns}
    compared = evaluation.get("against", [])
    return render(
        "results.result_table",
        evaluation=evaluation,
        table=feature_table(table_lines(rows), measured_columns(evaluation)),
        measured="Top-1 accuracy in %" if top1 else "Shares in %",
        queries=query_counts(evaluation, "test images"),
        protocols=sorted(used, key=lambda each: (columns.index(each[0]), *each[1:])),
        compared=compared,
        several=len({each["features"] for each in compared}) > 1,
    )


def feature_table(
    lines: list[Line],
    columns: Iterable[str],
    titles: Mapping[str, str] | None = None,
) -> Markup:
    """Tabulate features by columns, under `titles` where given; a clear best is marked."""
    winners = {column: clear_best(lines, column) for column in columns}
    return render(
        "results.feature_table",
        heads=["features", *((titles or {}).get(column, column) for column in winners)],
        lines=lines,
        winners=winners,
        kind="results more" if titles else "results",
    )


def task_tables(evaluation: Tree) -> Markup:
    """Return all tables but that of accuracies as HTML; '' where nothing was measured."""
    tables = []
    for heading, note, titles in TABLES:
        rows = [row for row in evaluation["rows"] if row["metric"] in titles]
        if rows:
            columns = [each for each in titles if any(row["metric"] == each for row in rows)]
            lines = table_lines({**row, "column": row["metric"]} for row in rows)
            protocols = ", ".join(sorted({row["protocol"] for row in rows}))
            tables.append((heading, note, protocols, feature_table(lines, columns, titles)))
    return render("results.task_tables", tables=tables)


def leakage(evaluation: Tree) -> Markup:
    """Tabulate each number of the table with and without leaked test samples; '' where unknown."""
    leaks = evaluation.get("leakage")
    if not leaks:
        return Markup()
    return render("results.leakage", sentence=leakage_sentence(leaks), leaks=leaks)
