"""Tables of retrieval, verification, geometry and columns, beside that of accuracies."""

from markupsafe import Markup

from sslpipe.report.page import html, joined
from sslpipe.report.results import feature_table, table_lines
from sslpipe.report.run import Tree

OTHER_MEASURES = "Retrieval, verification, geometry, and what else the features know"
TABLES = {  # heading -> what it is, and metric -> title of its column
    "Retrieval": (
        "Each test image against all others, in %.",
        {
            "Recall@1": "Recall@1",
            "Recall@10": "Recall@10",
            "precision@10": "precision@10",
            "r_precision": "R-precision",
            "map_at_r": "MAP@R",
            "mrr": "MRR",
        },
    ),
    "Verification": (
        "Same class or not, by the cosine of pairs, in %. Of FPR at 95 % TPR the smallest is best.",
        {
            "auc": "area under the ROC",
            "fpr@95tpr": "FPR at 95 % TPR",
            "tar@far=0.01": "TAR at 1 % FAR",
            "accuracy 10-fold best threshold": "10-fold accuracy",
        },
    ),
    "Geometry": (
        "How the features lie; no accuracies, and more is not always better.",
        {
            "alignment": "alignment",
            "uniformity": "uniformity",
            "effective_rank": "effective rank",
            "std": "std",
        },
    ),
}


def task_tables(evaluation: Tree) -> Markup:
    """Return all tables but that of accuracies as HTML; '' where nothing was measured."""
    all_rows = [*evaluation["rows"], *evaluation.get("geometry", [])]
    tables = []
    for heading, (note, metrics) in TABLES.items():
        rows = [{**row, "column": row["metric"]} for row in all_rows if row["metric"] in metrics]
        if rows:
            columns = [each for each in metrics if any(row["metric"] == each for row in rows)]
            tables.append(
                html(
                    "<h3>{}</h3><p class='note'>{} <code>{}</code></p>{}",
                    heading,
                    note,
                    ", ".join(sorted({row["protocol"] for row in rows})),
                    feature_table(
                        table_lines({"rows": rows}), columns, metrics, mark=heading != "Geometry"
                    ),
                )
            )
    return joined([*tables, nuisance_table(evaluation)])


def nuisance_table(evaluation: Tree) -> Markup:
    """Tabulate how well a probe predicts columns of the data set; '' where none was probed."""
    rows = evaluation.get("nuisance", [])
    if not rows:
        return Markup()
    titles = {
        row["column"]: f"{row['column']} ({row['details']['values']} values, "
        f"chance {100 * row['details']['chance']:.1f})"
        for row in rows
    }
    return html(
        "<h3>What else the features know</h3><p class='note'>How well a linear probe, fitted on "
        "train, predicts columns of the data set that are no label, in % of test images right. "
        "Chance is the share of the most frequent value: features at chance do not know the "
        "column.</p>{}",
        feature_table(table_lines({"rows": rows}), list(titles), titles, mark=False),
    )
