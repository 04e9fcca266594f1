"""The HTML file of one run: which sections it has, and what each needs."""

import io
from collections.abc import Callable
from typing import Any

from markupsafe import Markup

from sslpipe.data.index import DatasetIndex, Split
from sslpipe.data.plan import holdout_ids
from sslpipe.errors import UserError
from sslpipe.recipe import is_finetune, parse_recipe
from sslpipe.recipe.pretrain import Recipe
from sslpipe.report.confusion import confusion
from sslpipe.report.curves import CHARTS, FINETUNE_CHARTS, SPEED_CHARTS, charts, steps_note
from sslpipe.report.embeddings import (
    EMBED,
    Features,
    embedding_map,
    embedding_quality,
    found_neighbours,
    nearest_neighbours,
    neighbour_picture,
)
from sslpipe.report.label_curve import few_shot_chart
from sslpipe.report.leakage import leakage
from sslpipe.report.page import html, html_page, missing, render
from sslpipe.report.pictures import png_uri
from sslpipe.report.results import result_table
from sslpipe.report.run import RunFiles
from sslpipe.report.sections import alarms, header, quarantine, settings
from sslpipe.report.tables import OTHER_MEASURES, task_tables
from sslpipe.run.preview import preview_recipe

SUITE = "sslpipe evaluate suite RUN --data DIR/dataset.json --out RUN/eval.json"
NEEDS_RESULTS = Markup(
    "<p class='missing'>Needs eval.json: see <a href='#results'>Results</a>.</p>"
)
OPENED = ("Results", "Embedding map", "Nearest neighbours")  # the others are folded
PREVIEWED = 4  # images of the view grid where the run has none of its own


def build_page(
    facts: RunFiles,
    index: DatasetIndex | None,
    queries: Features | None,
    bank: Features | None,
    say: Callable[[str], None] = lambda text: None,
) -> str:
    """Return the whole HTML file of a run; it loads nothing from the network.

    Args:
        facts: What the run directory holds.
        index: The data set that was evaluated, for pictures; None: no pictures.
        queries: Embeddings of the test split.
        bank: Embeddings to search in.
        say: Called with the section that comes next.

    Raises:
        UserError: Where the embeddings are of another data set.
    """
    evaluation, split = facts.evaluation, _split_of(index, queries, "--features")
    bank_split = _split_of(index, bank, "--bank")
    shared: dict[str, Any] = {}
    rows = found_neighbours(facts, queries, split, bank, bank_split)
    builders: dict[str, Callable[[], Markup]] = {
        "Results": lambda: (
            result_table(evaluation)
            + leakage(evaluation)
            + render("folded", title=OTHER_MEASURES, text=task_tables(evaluation))
            if evaluation
            else missing("No eval.json yet.", SUITE)
            if facts.data["classes"]
            else missing(
                "Without labels there is no accuracy. Scores without labels: see Training."
            )
        ),
        "Nearest neighbours": lambda: nearest_neighbours(queries, split, bank, rows),
        "Embedding map": lambda: embedding_map(facts, queries, split, shared),
        "Few labels": lambda: few_labels(facts),
        "Confusion": lambda: confusion(evaluation, facts.classes) if evaluation else NEEDS_RESULTS,
        "Training": lambda: (
            charts(facts, FINETUNE_CHARTS if is_finetune(facts.recipe) else CHARTS)
            + steps_note(facts)
        ),
        "Views": lambda: views(facts, index),
        "Separation": lambda: (
            embedding_quality({facts.recipe["name"]: queries}, evaluation)
            if queries
            else missing("No embeddings of the test split yet.", EMBED.format("test"))
        ),
        "Alarms": lambda: alarms(facts),
        "Speed": lambda: charts(facts, SPEED_CHARTS),
        "Quarantine": lambda: quarantine(facts),
        "Settings": lambda: settings(facts),
    }
    if not (evaluation or facts.data["classes"]):  # nothing to compare with
        del builders["Few labels"], builders["Confusion"]
    sections = {}
    for name, build in builders.items():
        say(name.lower())
        sections[name] = build()
    opened = [*OPENED, *(["Alarms"] if facts.alarms else [])]
    head = header(facts, held_out(facts, index), neighbour_picture(rows))
    return html_page(facts.recipe["name"], head, sections, opened=opened, shared=shared)


def held_out(facts: RunFiles, index: DatasetIndex | None) -> int | None:
    """Count the images that were held out, which classes round; None without the data set."""
    if index is None or not index.has_sha256(facts.data["index_sha256"]):
        return None
    recipe = parse_recipe(facts.given_recipe, "recipe.json", recorded=True)
    if not isinstance(recipe, Recipe):
        return None
    return len(holdout_ids(recipe, index.split(recipe.data.split)))


def few_labels(facts: RunFiles) -> Markup:
    """Return the section about kNN with few labels per class."""
    if facts.evaluation is None:
        return NEEDS_RESULTS
    chart = few_shot_chart(facts.evaluation)
    if not chart:
        return missing("eval.json has no kNN with few labels per class.")
    return html(
        "<p>How many labels the features need: the same kNN vote, with few labels per class "
        "(mean over several draws) and with all. Bars: 95 % intervals.</p><div class='charts one'>"
        "{}</div>",
        chart,
    )


def views(facts: RunFiles, index: DatasetIndex | None) -> Markup:
    """Return the grid that `sslpipe preview` left in the run, else one made from the data set."""
    raw = facts.views_png
    if raw is None and index is not None and index.has_sha256(facts.data["index_sha256"]):
        raw = _preview(facts, index)
    if raw is None:
        return missing(
            "No views.png yet, and no --data of the data set that was trained on.",
            "sslpipe preview RECIPE --data DIR/dataset.json --out RUN/views.png",
        )
    alt = "A row for each image: the image with the crops framed, and the views training made of it"
    return html(
        "<p>What training sees: images, and beside each the two views of an epoch with the "
        "parameters that were drawn.</p>"
        "<div class='wide views'><img src='{}' alt='{}'></div>",
        png_uri(raw),
        alt,
    )


def _split_of(index: DatasetIndex | None, features: Features | None, option: str) -> Split | None:
    """The split that was embedded. Raises: UserError where --data is another data set."""
    if index is None or features is None:
        return None
    if not index.has_sha256(features.facts.get("data_sha256")):
        raise UserError(
            f"--data is not the data set of {option} (its sha256 is another one); "
            "embed it again with `sslpipe embed`"
        )
    return index.split(str(features.facts["split"]))


def _preview(facts: RunFiles, index: DatasetIndex) -> bytes:
    """The grid of `sslpipe preview`, of the run's own recipe, as PNG."""
    recipe = parse_recipe(facts.given_recipe, "recipe.json", recorded=True)
    grid, _ = preview_recipe(recipe, index, images=PREVIEWED)
    file = io.BytesIO()
    grid.save(file, "PNG")
    return file.getvalue()
