"""The HTML file of one run: which sections it has, and what each needs."""

from collections.abc import Callable

import numpy as np
from markupsafe import Markup

from sslpipe.data.index import DatasetIndex
from sslpipe.errors import UserError
from sslpipe.evaluation.comparison import LINEAR, RECALL
from sslpipe.evaluation.vectors import Features
from sslpipe.files import Tree
from sslpipe.report.charts import CHARTS, SPEED_CHARTS, charts
from sslpipe.report.embeddings import (
    EMBED,
    RANDOM_QUERIES,
    embedding_map,
    found_neighbours,
)
from sslpipe.report.page import html_page, render
from sslpipe.report.pictures import png_uri
from sslpipe.report.result_tables import (
    OTHER_MEASURES,
    advice,
    first_number,
    leakage,
    result_table,
    summary,
    table_lines,
    task_tables,
    unfinished_text,
)
from sslpipe.report.run_files import RunFiles

NEEDS_RESULTS = Markup(
    "<p class='missing'>Needs eval.json: see <a href='#results'>Results</a>.</p>"
)
OPENED = ("Results", "Embedding map", "Nearest neighbours")  # the others are folded
MOST_CLASSES = 20  # of a confusion matrix that is shown whole


def build_page(
    run: RunFiles,
    index: DatasetIndex | None,
    queries: Features | None,
    bank: Features | None,
    say: Callable[[str], None] = lambda text: None,
) -> str:
    """Return the whole HTML file of a run; it loads nothing from the network.

    Args:
        run: What the run directory holds.
        index: The data set that was evaluated; None: no pictures.
        queries: Embeddings of the test split.
        bank: Embeddings to search in.
        say: Called with the section that comes next.

    Raises:
        UserError: The embeddings are of another data set.
    """
    queries = _with_split(queries, index)
    bank = _with_split(bank, index)
    neighbours = found_neighbours(run, queries, bank)
    evaluation = run.evaluation
    split = shown_split(run)
    no_embeddings = render(
        "missing", text=f"No embeddings of the {split} split yet.", command=EMBED.format(split)
    )

    def show_neighbours() -> Markup:
        if queries is None:
            return no_embeddings
        searched = searched_split(run)
        return render(
            "embeddings.neighbours",
            images=queries.split is not None,
            found=neighbours,
            random=RANDOM_QUERIES,
            among_test=bank is None and searched != split,
            embed=EMBED.format(searched),
        )

    builders: dict[str, Callable[[], Markup]] = {
        "Results": lambda: results(run),
        "Nearest neighbours": show_neighbours,
        "Embedding map": lambda: embedding_map(run, queries) if queries else no_embeddings,
        "Confusion": lambda: confusion(evaluation, run.classes) if evaluation else NEEDS_RESULTS,
        "Training": lambda: render("run.training", charts=charts(run, CHARTS), run=run),
        "Views": lambda: render("run.views", uri=png_uri(run.views_png) if run.views_png else ""),
        "Alarms": lambda: render("run.alarms", run=run),
        "Speed": lambda: charts(run, SPEED_CHARTS),
        "Quarantine": lambda: render("run.quarantine", run=run),
        "Settings": lambda: render("run.settings", run=run),
    }
    if not (evaluation or run.data["classes"]):  # nothing to compare with
        del builders["Confusion"]
    sections = {}
    for name, build in builders.items():
        say(name.lower())
        sections[name] = build()
    opened = [*OPENED, *(["Alarms"] if run.alarms else [])]
    picture = render("embeddings.first", found=neighbours) if neighbours else ""
    caption = index.image_type.caption if index else ""
    return html_page(run.recipe["name"], header(run, picture, caption), sections, opened=opened)


def results(run: RunFiles) -> Markup:
    """Show the tables of eval.json, if there is one."""
    evaluation = run.evaluation
    return render(
        "run.results",
        run=run,
        table=evaluation and result_table(evaluation),
        leakage=evaluation and leakage(evaluation),
        others_title=OTHER_MEASURES,
        others=evaluation and task_tables(evaluation),
    )


def shown_split(run: RunFiles) -> str:
    """Return the split whose embeddings are shown: the one that was measured, else test."""
    samples = run.data["samples"]
    measured = run.metadata.get("split")
    names = (name for name in (measured, "test", *samples) if name in samples)
    return next(names, "test")


def searched_split(run: RunFiles) -> str:
    """Return the split that its images are searched in, as the first number of the page has it.

    That is the split itself for Recall@1: the training images do not show its classes.
    """
    first = first_number(run.evaluation)
    if first is not None and first.measure == RECALL:
        return shown_split(run)
    return str(run.metadata.get("train_split", "train"))


def header(run: RunFiles, picture: Markup | str = "", caption: str = "") -> Markup:
    """Begin the page: one sentence, one number with its interval, one picture; the rest folds."""
    return render(
        "run.header",
        run=run,
        advice=advice(run),
        summary=summary(run),
        first=first_number(run.evaluation),
        split=shown_split(run),
        unfinished=unfinished_text(run),
        picture=picture,
        caption=caption,
    )


def confusion(evaluation: Tree, classes: list[str]) -> Markup:
    """Return the linear probe's matrix, or the most frequent confusions where classes are many."""
    lines = table_lines(evaluation["rows"])
    cells = [line.cells[LINEAR] for line in lines if LINEAR in line.cells]
    cell = next((each for each in cells if each["details"].get("confusion")), None)
    if cell is None:
        return render("missing", text="No linear probe in eval.json, so no confusion matrix.")
    counts = np.array(cell["details"]["confusion"], dtype=np.int64)  # (C, C) [true][predicted]
    labels = cell["details"].get("numbers", range(len(counts)))  # of the rows
    names = [classes[k] if k < len(classes) else f"class {k}" for k in labels]
    matrix = len(counts) <= MOST_CLASSES
    totals = counts.sum(axis=1)
    hits = counts.diagonal()
    # the most frequent confusions, and the classes of the lowest recall
    off = counts - np.diag(hits)
    order = np.argsort(off, axis=None, kind="stable")[::-1][: 8 if matrix else 20]
    pairs = [divmod(int(place), len(off)) for place in order]
    recall = np.where(totals > 0, hits / np.maximum(totals, 1), np.inf)
    lowest = [int(label) for label in np.argsort(recall, kind="stable")[:10] if totals[label]]
    return render(
        "run.confusion",
        cell=cell,
        names=names,
        counts=counts.tolist(),
        matrix=matrix,
        pairs=[f"{names[t]} predicted as {names[p]}: {off[t, p]}" for t, p in pairs if off[t, p]],
        worst=[f"{names[label]}: recall {100 * recall[label]:.0f} %" for label in lowest],
    )


def _with_split(features: Features | None, index: DatasetIndex | None) -> Features | None:
    """Add the split that was embedded. Raises: UserError where --data is another data set."""
    if index is None or features is None:
        return features
    if not index.has_sha256(features.facts.get("data_sha256")):
        raise UserError(
            "--data is not the data set of the run's features (its sha256 is another one); embed "
            "it again with `sslpipe embed`"
        )
    return features._replace(split=index.split(str(features.facts["split"])))
