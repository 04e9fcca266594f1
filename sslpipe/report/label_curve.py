"""Draw what eval.json says of few labels: kNN's accuracy over the labelled images per class."""

import re
from collections.abc import Collection, Iterator, Mapping

import numpy as np
from markupsafe import Markup

from sslpipe.evaluation.against import KNN
from sslpipe.report.charts import Series, line_chart
from sslpipe.report.page import number
from sslpipe.report.results import Line, feature_colours, table_lines
from sslpipe.report.run import Tree

_FEW_PROTOCOL = re.compile(r"knn-weighted .* (\d+)/class ")
_FEW = re.compile(rf"{KNN}, (\d+)/class")


def few_shot_chart(
    evaluation: Tree,
    colours: Mapping[str, str] | None = None,
    *,
    whitened: bool = True,
    dashed: Collection[str] = (),
) -> Markup:
    """Draw the accuracy of the kNN columns over the labelled images per class.

    Args:
        evaluation: eval.json.
        colours: Of features, instead of the usual ones.
        whitened: Whether whitened features are shown, too.
        dashed: Features whose line is.

    Returns:
        '' where there is a single column.
    """
    # rows of more labels per class than the table shows are taken in by their protocol
    colours = {**feature_colours(evaluation["rows"]), **(colours or {})}
    classes = _classes(evaluation)
    series: list[Series] = []
    counts: dict[float, str] = {}  # labels per class -> text of the tick
    rows = [
        {**row, "column": f"{KNN}, {few.group(1)}/class"}
        if row["column"] is None
        and (few := _FEW_PROTOCOL.match(row["protocol"]))
        and _of_most_classes(row["protocol"])
        else row
        for row in evaluation["rows"]
    ]
    # a line for each kind of features
    for line in table_lines({"rows": rows}):
        points = sorted(_labels_a_class(line, classes))
        if len(points) < 2 or (line.whitened and not whitened):
            continue
        counts |= {count: text for count, text, _ in points}
        cells = [cell for *_, cell in points]
        beside = 10 ** (
            0.012 * (len(series) - 2.5)
        )  # side by side, so that no interval hides another
        series.append(
            Series(
                line.title,
                beside * np.array([count for count, *_ in points]),
                np.array([100 * cell["value"] for cell in cells]),
                colours[line.features],
                np.array([100 * cell["interval95"][0] for cell in cells]),
                np.array([100 * cell["interval95"][1] for cell in cells]),
                line.whitened or line.features in dashed,
            )
        )
    if not series:
        return Markup()
    return line_chart(
        "kNN top-1 in %",
        series,
        x_label="labelled train images per class",
        x_ticks=dict(sorted(counts.items())),
        log="x",
        last_values=False,
    )


def _of_most_classes(protocol: str) -> bool:
    """Say whether a number is of at least half of the classes."""
    some = re.search(r" classes=(\d+)/(\d+)", protocol)
    return not some or 2 * int(some[1]) >= int(some[2])


def _classes(evaluation: Tree) -> int:
    """Count the classes in the bank: few-shot banks hold n labels of each, or of the larger ones.

    The bank with the fewest labels per class has the most classes.
    """
    banks = {
        int(few.group(1)): int(row["bank"])
        for row in evaluation["rows"]
        if (few := _FEW_PROTOCOL.match(row["protocol"]) or _FEW.fullmatch(row["column"] or ""))
    }
    return banks[min(banks)] // min(banks) if banks else 0


def _labels_a_class(line: Line, classes: int) -> Iterator[tuple[float, str, Tree]]:
    """Yield (labels per class, text of its tick, result) of each kNN column; of all: the mean."""
    for column, cell in line.cells.items():
        few = _FEW.fullmatch(column)
        if few:
            yield float(few.group(1)), few.group(1), cell
        elif column == KNN and classes:
            mean = cell["bank"] / classes
            yield mean, f"all ({number(round(mean))})", cell
