"""Make the sections of a report that need embeddings: map, neighbours, separation, spectrum."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

import numpy as np
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
    Marks,
    Series,
    apart,
    class_colour,
    line_chart,
    scatter,
)
from sslpipe.report.pictures import (
    FEWEST_MAPPED,
    Row,
    mapped_rows,
    neighbour_rows,
    pca_map,
    thumbnails,
    tsne_map,
    unit_rows,
)
from sslpipe.report.results import NAMES, feature_colours
from sslpipe.report.run import RunFiles, Tree
from sslpipe.report.sections import missing

EMBED = "sslpipe embed RUN --data DIR/dataset.json --split {0} --out RUN/features/{0}.safetensors"
REPORT = "sslpipe report RUN --data DIR/dataset.json"
ASPECT = 2.0  # of the map with images: the page is wider than high
LOWEST_SHARE = 1e-6  # of the variance, where the spectrum's axis ends
LOWEST_FPR = 1e-3  # where the ROC's axis ends
PAIRS = 10_000  # of one class, and as many of two


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
            curves.append(Series(name, np.log10(false[shown]), 100 * true[shown], colour))
    return curves


def embedding_quality(
    sets: dict[str, Features],
    evaluation: Tree | None = None,
    colours: Mapping[str, str] | None = None,
) -> str:
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
        owner = f"{escape(name)}: " if len(sets) > 1 else ""
        curve = measured_curve(name, features.rows)
        if curve is None:
            notes.append(f"{owner}no ROC: no labels, a single class, or one image of each")
        else:
            notes.append(owner + curve.note)
            shown = curve.roc.false >= LOWEST_FPR
            x, y = np.log10(curve.roc.false[shown]), 100 * curve.roc.true[shown]
            curves.append(Series(name, x, y, colour))
        shares = spectrum(mapped_rows(features.rows))
        kept = shares[shares >= LOWEST_SHARE]
        x = np.arange(1, len(kept) + 1, dtype=np.float64)
        axes.append(Series(name, x, np.log10(kept), colour))
        most = int(np.searchsorted(np.cumsum(shares), 0.9)) + 1
        notes.append(f"{owner}{most} of {len(shares)} axes hold 90 % of the variance")
    curves = evaluated_curves(evaluation) or curves
    # the two charts
    charts = roc_chart(curves) if curves else ""
    powers = np.arange(round(np.log10(LOWEST_SHARE)), 1)
    charts += line_chart(
        "spectrum: share of the variance",
        axes,
        x_label="main axis, largest first",
        y_marks=Marks(powers.tolist(), [f"{10.0**p:g}" for p in powers]),
        last_values=False,
        within=(float(powers[0]), 0.0),
    )
    items = "".join(f"<li>{note}.</li>" for note in notes)
    return (
        "<p>Test embeddings of length 1. ROC: the cosine of two images as a test for being of one "
        f"class, over up to {PAIRS:,} pairs of each kind. Spectrum: how many directions the "
        "features use; a line that falls early is a collapse.</p>"
        f"<div class='charts pair'>{charts}</div><ul class='note'>{items}</ul>"
    )


def roc_chart(curves: list[Series]) -> str:
    """Draw series of true positive rate in % over log10 of the false positive rate."""
    decades = np.arange(round(np.log10(LOWEST_FPR)), 1).tolist()
    chance = np.linspace(decades[0], 0, 60)
    by_chance = Series("by chance", chance, 100 * 10**chance, "var(--faint)", dashed=True)
    return line_chart(
        "ROC: true positive rate, %",
        [*curves, by_chance],
        x_label="false positive rate, %",
        x_marks=Marks(decades, [f"{100 * 10.0**d:g}" for d in decades]),
        last_values=False,
        within=(0.0, 100.0),
    )


def embedding_map(run: RunFiles, queries: Features | None, split: Split | None) -> str:
    """Draw PCA and t-SNE of some test features, and t-SNE again under the images themselves.

    Args:
        run: Whose class names colour the points.
        queries: Test embeddings, if there are any.
        split: Their images; None: no images are shown.
    """
    if queries is None:
        return missing("No embeddings of the test split yet.", EMBED.format("test"))
    rows = mapped_rows(queries.rows)
    if len(rows.ids) < FEWEST_MAPPED:
        return f"<p class='missing'>{len(rows.ids)} embeddings are too few for a map.</p>"
    # points, and a name for each label
    names, labels = run.classes, rows.labels.numpy()
    count = max(len(names), int(labels.max()) + 1)
    names = [*names, *(f"class {label}" for label in range(len(names), count))]
    flat, held = pca_map(rows)
    near, perplexity = tsne_map(rows)
    of = f"{len(rows.ids):,} test embeddings"
    maps = {
        f"PCA, {100 * held:.0f} % of the variance": scatter(
            f"PCA of {of}, coloured by class", flat, labels, names
        ),
        f"t-SNE, perplexity {perplexity:.0f}": scatter(
            f"t-SNE of {of}, coloured by class", near, labels, names
        ),
    }
    if split is not None:
        shown = apart(near, aspect=ASPECT)
        pictures = thumbnails(split, rows.ids[shown].tolist())
        at = {row: pictures[i] for row in shown if (i := int(rows.ids[row])) in pictures}
        maps["t-SNE with the images"] = scatter(
            f"t-SNE of {of} with {len(at)} of the images", near, labels, names, at, aspect=ASPECT
        )
    # legend, and what does not fit together
    legend = "".join(
        f"<li><i class='dot' style='--c:{class_colour(label, count)}'></i>{escape(name)}</li>"
        for label, name in enumerate(names)
    )
    key = f"<ul class='legend'>{legend}</ul>" if count <= MOST_NAMES else ""
    figures = "".join(
        f"<figure class='wide'><figcaption><b>{title}</b></figcaption>{svg}</figure>"
        for title, svg in maps.items()
    )
    many = f"; colours repeat in hue, as there are {count} classes" if count > MOST_NAMES else ""
    without = missing("No images beside it without --data.", REPORT) if split is None else ""
    evaluated = run.evaluation["facts"].get("backbone_sha256") if run.evaluation else None
    if evaluated and queries.facts.get("backbone_sha256") != evaluated:
        without += missing(
            "These embeddings are not of the backbone in the results.", EMBED.format("test")
        )
    return (
        f"<p>{of}, of length 1, coloured by their class{many}. Distances between far groups mean "
        f"little in t-SNE.</p>{key}<div class='maps pixels'>{figures}</div>{without}"
    )


def nearest_neighbours(
    run: RunFiles,
    queries: Features | None,
    split: Split | None,
    bank: Features | None,
    bank_split: Split | None,
) -> str:
    """Show some test images with what is nearest to them.

    Args:
        run: Whose class names are shown.
        queries: Test embeddings, if there are any.
        split: Their images; None: nothing is shown.
        bank: Embeddings to search in; None: the test embeddings.
        bank_split: Their images.
    """
    if queries is None:
        return missing("No embeddings of the test split yet.", EMBED.format("test"))
    if split is None:
        return missing("The images are shown with --data only.", REPORT)
    same_split = bank is None or bank_split is None
    if bank is None or bank_split is None:
        bank, bank_split = queries, split
    if len(bank.rows.ids) < 2:
        return "<p class='missing'>One embedding has no neighbour.</p>"
    rows = neighbour_rows(bank.rows, queries.rows, same_split=same_split)
    neighbours = {i for row in rows for i in row.neighbour_ids}
    sheet = neighbour_sheet(
        rows,
        run.classes,
        thumbnails(split, (row.id for row in rows)),
        thumbnails(bank_split, neighbours),
        f"the split {bank_split.name!r} ({len(bank.rows.ids):,} images)",
    )
    note = missing("Searched among the test images themselves.", EMBED.format("train"))
    return sheet + (note if same_split else "")


def neighbour_sheet(
    rows: Sequence[Row],
    names: Sequence[str],
    query_pictures: dict[int, str],
    bank_pictures: dict[int, str],
    bank_name: str,
) -> str:
    """Tabulate each query and its neighbours, framed by whether they are of its class.

    Args:
        rows: Of `neighbour_rows`.
        names: Classes by label.
        query_pictures: Sample id -> data URI.
        bank_pictures: Sample id -> data URI.
        bank_name: Where the neighbours were searched, in words.
    """
    head = "".join(f"<th scope='col'>{k + 1}</th>" for k in range(len(rows[0].neighbour_ids)))
    body = ""
    for row in rows:
        cells = ""
        for near, label, similar in zip(
            row.neighbour_ids, row.neighbour_labels, row.similarities, strict=True
        ):
            name, word, sign = _class_name(label, names), "unknown", "?"
            if label >= 0 and row.label >= 0:
                word, sign = ("right", "✓") if label == row.label else ("wrong", "✗")
            picture = _picture(bank_pictures.get(near), f"neighbour {near}, {name}, {word}")
            cells += (
                f"<td class='{word}'>{picture}<b>{sign}</b> {escape(name)}<br>"
                f"<small>{similar:.2f}</small></td>"
            )
        name = _class_name(row.label, names)
        picture = _picture(query_pictures.get(row.id), f"query {row.id}, {name}")
        body += f"<tr><th scope='row'>{picture}{escape(name)}</th>{cells}</tr>"
    chosen = "the first are chosen at random, the last where the nearest is of another class"
    return (
        "<p class='note'>Test images (left) and their nearest neighbours in "
        f"{escape(bank_name)} by cosine; {chosen}. Solid frame and ✓: of the same class; dashed "
        "frame and ✗: of another. Below: the cosine.</p>"
        "<div class='wide pixels'><table class='sheet'>"
        f"<thead><tr><th scope='col'>query</th>{head}</tr></thead><tbody>{body}</tbody>"
        "</table></div>"
    )


def _picture(uri: str | None, alt: str) -> str:
    if uri is None:
        return "<span class='none'></span>"
    return f"<img src='{uri}' alt='{escape(alt, quote=True)}'>"


def _class_name(label: int, names: Sequence[str]) -> str:
    if label < 0:
        return "no label"
    return names[label] if label < len(names) else f"class {label}"
