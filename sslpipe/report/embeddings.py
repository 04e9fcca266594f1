"""Make the sections of a report that need embeddings: map, neighbours, separation, spectrum."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from sslpipe.data.index import Split
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.verification import (
    Roc,
    auc,
    draw_pairs,
    fpr_at_tpr,
    pair_cosines,
    roc,
    tar_at_far,
)
from sslpipe.report.charts import (
    MOST_NAMES,
    Series,
    apart,
    class_colour,
    line_chart,
    map_rows,
    scatter,
)
from sslpipe.report.page import html, joined, missing, render
from sslpipe.report.pictures import (
    FEWEST_MAPPED,
    RANDOM_QUERIES,
    Row,
    mapped_rows,
    neighbour_rows,
    pca_map,
    small_thumbnails,
    thumbnails,
    tsne_map,
    unit_rows,
)
from sslpipe.report.results import NAMES, feature_colours
from sslpipe.report.run import RunFiles, Tree

EMBED = "sslpipe embed RUN --data DIR/dataset.json --split {0} --out RUN/features/{0}.safetensors"
REPORT = "sslpipe report RUN --data DIR/dataset.json"
LOWEST_SHARE = 1e-6  # of the variance, where the spectrum's axis ends
LOWEST_FPR = 1e-3  # where the ROC's axis ends
PAIRS = 10_000  # of one class, and as many of two
HERO_ROWS, HERO_NEIGHBOURS = 4, 6  # of the picture that the page begins with


class Features(NamedTuple):
    """Embeddings of one split, and the metadata saved with them (`facts` in their file)."""

    rows: Embeddings
    facts: dict[str, object]


class Curve(NamedTuple):
    """A ROC curve, whose it is, and its main numbers in words."""

    name: str
    roc: Roc
    note: str


def measured_curve(name: str, rows: Embeddings) -> Curve | None:
    """Compute the ROC of "of one class?" by the cosine of pairs.

    The pairs are those of `sslpipe evaluate verification`: seeded, PAIRS of each kind at most.

    Returns:
        None where the labelled rows have no pairs of both kinds.
    """
    labelled = rows.rows((rows.labels >= 0).nonzero()[:, 0])
    classes = np.unique(labelled.labels.numpy(), return_counts=True)[1]
    if len(classes) < 2 or classes.max() < 2:
        return None
    pairs = draw_pairs(labelled, PAIRS, seed=0)
    curve = roc(pair_cosines(labelled, pairs), pairs.same)
    same = int(pairs.same.sum())
    others = len(pairs.same) - same
    tpr, fpr = 100 * tar_at_far(curve, 0.01), 100 * fpr_at_tpr(curve, 0.95)
    note = (
        f"area under the ROC {auc(curve):.3f}; true positive rate {tpr:.1f} % at a false positive "
        f"rate of 1 %; false positive rate {fpr:.1f} % at a true positive rate of 95 % "
        f"({same:,} pairs of one class, {others:,} pairs of two)"
    )
    return Curve(name, curve, note)


def spectrum(rows: Embeddings) -> NDArray[np.float64]:
    """Return the share of the variance on each main axis of unit-length features, largest first."""
    unit = unit_rows(rows)
    centred = unit - unit.mean(axis=0)
    values = np.linalg.svd(centred, compute_uv=False) ** 2
    shares: NDArray[np.float64] = values / max(values.sum(), 1e-30)
    return shares  # (min(n, F),)


def run_colour(place: int) -> str:
    """Return the CSS colour of the run at this place of a comparison."""
    return f"var(--series-{place % 6 + 1})"


def evaluated_curves(evaluation: Tree | None) -> list[Series]:
    """Return the ROCs that eval.json holds, of plain features: the run's and the baselines'."""
    curves = []
    rows = evaluation["rows"] if evaluation else []
    colours = feature_colours(rows)
    for row in rows:
        if "roc" in row["details"] and not row["whitened"]:
            false, true = (np.array(row["details"]["roc"][key]) for key in ("false", "true"))
            shown = false >= LOWEST_FPR
            name = NAMES.get(row["features"], row["features"])
            colour = colours[row["features"]]
            curves.append(Series(name, 100 * false[shown], 100 * true[shown], colour))
    return curves


def embedding_quality(
    sets: dict[str, Features],
    evaluation: Tree | None = None,
    colours: Mapping[str, str] | None = None,
) -> Markup:
    """Draw ROC and spectrum of the test embeddings of each run.

    Args:
        sets: Embeddings by the name of their run.
        evaluation: eval.json; its ROCs, where it has any, are drawn instead of one of the
            embeddings alone, as they come with those of the baselines.
        colours: CSS colours by the name of the run; else by place.
    """
    # curves, spectra and their main numbers
    curves, axes, notes = [], [], []
    for place, (name, features) in enumerate(sets.items()):
        colour = run_colour(place) if colours is None else colours[name]
        owner = f"{name}: " if len(sets) > 1 else ""
        curve = measured_curve(name, features.rows)
        if curve is None:
            notes.append(f"{owner}no ROC: no labels, a single class, or one image of each")
        else:
            notes.append(owner + curve.note)
            shown = curve.roc.false >= LOWEST_FPR
            x, y = 100 * curve.roc.false[shown], 100 * curve.roc.true[shown]
            curves.append(Series(name, x, y, colour))
        shares = spectrum(mapped_rows(features.rows))
        kept = shares[shares >= LOWEST_SHARE]
        x = np.arange(1, len(kept) + 1, dtype=np.float64)
        axes.append(Series(name, x, kept, colour))
        most = int(np.searchsorted(np.cumsum(shares), 0.9)) + 1
        notes.append(f"{owner}{most} of {len(shares)} axes hold 90 % of the variance")
    curves = evaluated_curves(evaluation) or curves
    # the two charts
    spectra = line_chart(
        "spectrum: share of the variance",
        axes,
        x_label="main axis, largest first",
        log="y",
        last_values=False,
        within=(LOWEST_SHARE, 1.0),
    )
    return html(
        "<p>Test embeddings of length 1. ROC: the cosine of two images as a test for being of one "
        "class, over up to {:,} pairs of each kind. Spectrum: how many directions the features "
        "use; a line that falls early is a collapse.</p><div class='charts pair'>{}{}</div>{}",
        PAIRS,
        roc_chart(curves) if curves else "",
        spectra,
        render("items", items=[f"{note}." for note in notes], kind="note"),
    )


def roc_chart(curves: list[Series]) -> Markup:
    """Draw series of true positive rate over false positive rate, both in %."""
    chance = 100 * np.geomspace(LOWEST_FPR, 1, 60)
    return line_chart(
        "ROC: true positive rate, %",
        [*curves, Series("by chance", chance, chance, "var(--faint)", dashed=True)],
        x_label="false positive rate, %",
        x_ticks={10.0**power: f"{10.0**power:g}" for power in range(-1, 3)},
        log="x",
        last_values=False,
        within=(0.0, 100.0),
    )


def embedding_map(
    run: RunFiles, queries: Features | None, split: Split | None, shared: dict[str, Any]
) -> Markup:
    """Draw PCA and t-SNE of some test features; hovering shows the images where they are known.

    Args:
        run: Whose class names colour the points.
        queries: Test embeddings, if there are any.
        split: Their images; None: no images are shown.
        shared: Data sets of the page's charts; the points are put there.
    """
    if queries is None:
        return missing("No embeddings of the test split yet.", EMBED.format("test"))
    rows = mapped_rows(queries.rows)
    if len(rows.ids) < FEWEST_MAPPED:
        return missing(f"{len(rows.ids)} embeddings are too few for a map.")
    # points, and a name for each label
    names, labels = run.classes, rows.labels.numpy()
    count = max(len(names), int(labels.max()) + 1)
    names = [*names, *(f"class {label}" for label in range(len(names), count))]
    colours = [class_colour(label, count) for label in range(count)]
    flat, held = pca_map(rows)
    near, perplexity = tsne_map(rows)
    # their images: small ones for hovering, and some on the map
    hovered: dict[int, str] = {}
    pictures: dict[int, str] = {}
    if split is not None:
        ids = rows.ids.tolist()
        small = small_thumbnails(split, ids)
        hovered = {row: small[one] for row, one in enumerate(ids) if one in small}
        on_map = apart(near)
        large = thumbnails(split, [ids[row] for row in on_map])
        pictures = {row: large[ids[row]] for row in on_map if ids[row] in large}
    places = {"pca": flat, "tsne": near}
    shared["map"] = map_rows(places, labels, names, hovered, pictures)
    of = f"{len(rows.ids):,} test embeddings"
    with_images = f" with {len(pictures)} of the images" if pictures else ""
    tsne = scatter(
        f"t-SNE{with_images}, perplexity {perplexity:.0f}",
        f"t-SNE of {of}{with_images}, coloured by class",
        "map",
        ("tsne_x", "tsne_y"),
        colours,
        bool(pictures),
    )
    pca = scatter(
        f"PCA, {100 * held:.0f} % of the variance",
        f"PCA of {of}, coloured by class",
        "map",
        ("pca_x", "pca_y"),
        colours,
    )
    # legend, and what does not fit together
    keys = [(name, colour, "dot") for name, colour in zip(names, colours, strict=True)]
    many = f"; colours repeat in hue, as there are {count} classes" if count > MOST_NAMES else ""
    notes = [] if split else [missing("No images beside it without --data.", REPORT)]
    evaluated = run.evaluation["facts"].get("backbone_sha256") if run.evaluation else None
    if evaluated and queries.facts.get("backbone_sha256") != evaluated:
        text = "These embeddings are not of the backbone in the results."
        notes.append(missing(text, EMBED.format("test")))
    hint = " Point at one to see its image." if hovered else ""
    return html(
        "<p>{}, of length 1, coloured by their class{}. Distances between far groups mean little "
        "in t-SNE.{} Pinch or Ctrl + wheel zooms, a double click resets.</p>{}"
        "<div class='maps pixels'>{}{}</div>{}",
        of,
        many,
        hint,
        render("legend", keys=keys) if count <= MOST_NAMES else "",
        tsne,
        pca,
        joined(notes),
    )


class Neighbours(NamedTuple):
    """Rows of the table of neighbours as its template takes them, and where they were searched."""

    rows: list[tuple[Tree, list[Tree]]]
    searched: str


def found_neighbours(
    run: RunFiles,
    queries: Features | None,
    split: Split | None,
    bank: Features | None,
    bank_split: Split | None,
) -> Neighbours | None:
    """Search the neighbours of some test images.

    Args:
        run: Whose class names are shown.
        queries: Test embeddings, if there are any.
        split: Their images.
        bank: Embeddings to search in; None: the test embeddings.
        bank_split: Their images.

    Returns:
        None where there are no embeddings, no images, or a single one.
    """
    if queries is None or split is None:
        return None
    same_split = bank is None or bank_split is None
    if bank is None or bank_split is None:
        bank, bank_split = queries, split
    if len(bank.rows.ids) < 2:
        return None
    rows = neighbour_rows(bank.rows, queries.rows, same_split=same_split)
    query_pictures = thumbnails(split, (row.id for row in rows))
    bank_pictures = thumbnails(bank_split, {i for row in rows for i in row.neighbour_ids})
    shown = [_neighbours_of(row, run.classes, query_pictures, bank_pictures) for row in rows]
    return Neighbours(shown, f"the split {bank_split.name!r} ({len(bank.rows.ids):,} images)")


def _neighbours_of(
    row: Row, names: Sequence[str], queries: Mapping[int, str], bank: Mapping[int, str]
) -> tuple[Tree, list[Tree]]:
    """Return a query and its neighbours, marked by whether they are of its class."""
    cells = []
    for near, label, similar in zip(
        row.neighbour_ids, row.neighbour_labels, row.similarities, strict=True
    ):
        name, word, sign = _class_name(label, names), "unknown", "?"
        if label >= 0 and row.label >= 0:
            word, sign = ("right", "✓") if label == row.label else ("wrong", "✗")
        alt = f"neighbour {near}, {name}, {word}"
        cell = {"uri": bank.get(near), "alt": alt, "name": name, "word": word, "sign": sign}
        cells.append({**cell, "cosine": f"{similar:.2f}"})
    name = _class_name(row.label, names)
    return {"uri": queries.get(row.id), "alt": f"query {row.id}, {name}", "name": name}, cells


def neighbour_picture(found: Neighbours | None) -> Markup:
    """Show the first random queries with their first neighbours, for the head of the page."""
    if found is None:
        return Markup()
    rows = [(query, cells[:HERO_NEIGHBOURS]) for query, cells in found.rows[:HERO_ROWS]]
    heads = range(1, len(rows[0][1]) + 1)
    return html(
        "<figure class='first'>{}<figcaption>Test images chosen at random, and what the features "
        "take for most similar; <a href='#nearest-neighbours'>more</a></figcaption></figure>",
        render("neighbours", rows=rows, heads=heads),
    )


def nearest_neighbours(
    queries: Features | None,
    split: Split | None,
    bank: Features | None,
    found: Neighbours | None,
) -> Markup:
    """Tabulate each query and its neighbours, framed by whether they are of its class."""
    if queries is None:
        return missing("No embeddings of the test split yet.", EMBED.format("test"))
    if split is None:
        return missing("The images are shown with --data only.", REPORT)
    if found is None:
        return missing("One embedding has no neighbour.")
    sheet = html(
        "<p class='note'>Test images (left) and their nearest neighbours in {} by cosine. "
        "The first {} are chosen at random, the last because the nearest is of another class. "
        "Solid frame and ✓: same class; dashed frame and ✗: another. Below: the cosine.</p>{}",
        found.searched,
        RANDOM_QUERIES,
        render("neighbours", rows=found.rows, heads=range(1, len(found.rows[0][1]) + 1)),
    )
    if bank is None:
        sheet += missing("Searched among the test images themselves.", EMBED.format("train"))
    return sheet


def _class_name(label: int, names: Sequence[str]) -> str:
    if label < 0:
        return "no label"
    return names[label] if label < len(names) else f"class {label}"
