"""The parts of a report that are drawn from embeddings: maps, neighbours, separation, spectrum."""

from html import escape
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sslpipe.data.index import Split
from sslpipe.evaluation.embed import Embeddings
from tools.report_charts import MOST_NAMES, Marks, Series, apart, class_colour, line_chart, scatter
from tools.report_pictures import (
    FEWEST_MAPPED,
    mapped_rows,
    neighbour_rows,
    pca_map,
    thumbnails,
    tsne_map,
    unit_rows,
)
from tools.report_run import Run
from tools.report_sections import missing, neighbour_sheet

EMBED = (
    "python -m tools.embed RUN --data DIR/dataset.json --split {0} "
    "--out RUN/features/{0}.safetensors"
)
REPORT = "python -m tools.report RUN --data DIR/dataset.json"
ASPECT = 2.0  # of the map with images: the page is wider than high
LOWEST_SHARE = 1e-6  # of the variance, where the spectrum's axis ends
LOWEST_FPR = 1e-4  # where the ROC's axis ends


class Features(NamedTuple):
    """Embeddings of one split and the facts saved with them."""

    rows: Embeddings
    facts: dict[str, object]


class Separation(NamedTuple):
    """Cosines of all pairs of rows as a test for "same class". rates: (n,) of pairs of two classes
    and of one that lie at or above a threshold, from the highest threshold down."""

    false_positive_rate: NDArray[np.float64]
    true_positive_rate: NDArray[np.float64]
    area: float
    pairs: int
    same: int


def separation(rows: Embeddings) -> Separation | None:
    """The ROC over all pairs of labelled rows, tied cosines accepted together; None where the pairs
    are all of one class, or all of two."""
    from sklearn.metrics import auc, roc_curve

    labelled = rows.rows((rows.labels >= 0).nonzero()[:, 0])
    labels, unit = labelled.labels.numpy(), unit_rows(labelled)
    first, second = np.triu_indices(len(labels), k=1)
    same = labels[first] == labels[second]
    if not len(same) or same.all() or not same.any():
        return None
    # equal cosines come out of a matrix product a last bit apart; rounded, they are tied again
    cosines = (unit @ unit.T)[first, second].round(12)
    low, high, _ = roc_curve(same, cosines)
    return Separation(low, high, float(auc(low, high)), len(same), int(same.sum()))


def spectrum(rows: Embeddings) -> NDArray[np.float64]:
    """The share of the variance of unit-length features on each main axis, largest first: (F,)."""
    unit = unit_rows(rows)
    centred = unit - unit.mean(axis=0)
    values = np.linalg.svd(centred, compute_uv=False) ** 2
    shares: NDArray[np.float64] = values / max(values.sum(), 1e-30)
    return shares


def run_colour(place: int) -> str:
    return f"var(--series-{place % 6 + 1})"


def embedding_quality(sets: dict[str, Features]) -> str:
    """ROC and spectrum of the test embeddings of each run, over one sample of them."""
    roc, axes, notes = [], [], []
    for place, (name, features) in enumerate(sets.items()):
        rows, colour = mapped_rows(features.rows), run_colour(place)
        said = f"{escape(name)}: " if len(sets) > 1 else ""
        found = separation(rows)
        if found is None:
            notes.append(f"{said}no ROC: the test embeddings have no labels, or a single class")
        else:
            low = found.false_positive_rate
            at = np.interp(0.01, low, found.true_positive_rate)
            at95 = low[np.searchsorted(found.true_positive_rate, 0.95)]
            notes.append(
                f"{said}area under the ROC {found.area:.3f}; at 1 % false positives "
                f"{100 * at:.1f} % of the {found.same:,} pairs of one class are found; to find "
                f"95 % of them, {100 * at95:.1f} % of the {found.pairs - found.same:,} pairs of "
                "two classes are taken in"
            )
            shown = low >= LOWEST_FPR
            roc.append(
                Series(name, np.log10(low[shown]), 100 * found.true_positive_rate[shown], colour)
            )
        shares = spectrum(rows)
        kept = shares[shares >= LOWEST_SHARE]
        axes.append(
            Series(name, np.arange(1, len(kept) + 1, dtype=np.float64), np.log10(kept), colour)
        )
        half = int(np.searchsorted(np.cumsum(shares), 0.9)) + 1
        notes.append(f"{said}{half} of {len(shares)} axes hold 90 % of the variance")
    drawn = ""
    if roc:
        decades = np.arange(round(np.log10(LOWEST_FPR)), 1).tolist()
        chance = np.linspace(decades[0], 0, 60)
        roc.append(Series("by chance", chance, 100 * 10**chance, "var(--faint)", dashed=True))
        drawn += line_chart(
            "ROC: pairs of one class found, %",
            roc,
            x_label="pairs of two classes taken in, %",
            x_marks=Marks(decades, [f"{100 * 10.0**d:g}" for d in decades]),
            last_values=False,
            within=(0.0, 100.0),
        )
    powers = np.arange(round(np.log10(LOWEST_SHARE)), 1)
    drawn += line_chart(
        "spectrum: share of the variance",
        axes,
        x_label="main axis, largest first",
        y_marks=Marks(powers.tolist(), [f"{10.0**p:g}" for p in powers]),
        last_values=False,
        within=(float(powers[0]), 0.0),
    )
    count = min(len(mapped_rows(features.rows).ids) for features in sets.values())
    told = "".join(f"<li>{note}.</li>" for note in notes)
    return (
        f"<p>{count:,} test embeddings of length 1. ROC: the cosine of two images as a test for "
        "being of one class, over all pairs. Spectrum: how many directions the features use; a "
        f"line that falls early is a collapse.</p><div class='charts pair'>{drawn}</div>"
        f"<ul class='note'>{told}</ul>"
    )


def embedding_map(facts: Run, queries: Features | None, split: Split | None) -> str:
    """PCA and t-SNE of some test features, and t-SNE again under the images themselves."""
    if queries is None:
        return missing("No embeddings of the test split yet.", EMBED.format("test"))
    rows = mapped_rows(queries.rows)
    if len(rows.ids) < FEWEST_MAPPED:
        return f"<p class='missing'>{len(rows.ids)} embeddings are too few for a map.</p>"
    names, labels = facts.classes, rows.labels.numpy()
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
    evaluated = facts.evaluation["facts"].get("backbone_sha256") if facts.evaluation else None
    if evaluated and queries.facts.get("backbone_sha256") != evaluated:
        without += missing(
            "These embeddings are not of the backbone in the results.", EMBED.format("test")
        )
    return (
        f"<p>{of}, of length 1, coloured by their class{many}. Distances between far groups mean "
        f"little in t-SNE.</p>{key}<div class='maps pixels'>{figures}</div>{without}"
    )


def nearest_neighbours(
    facts: Run,
    queries: Features | None,
    split: Split | None,
    bank: Features | None,
    bank_split: Split | None,
) -> str:
    """Some test images with what is nearest to them; without a bank, among the test images."""
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
    found = {i for row in rows for i in row.neighbour_ids}
    sheet = neighbour_sheet(
        rows,
        facts.classes,
        thumbnails(split, (row.id for row in rows)),
        thumbnails(bank_split, found),
        f"the split {bank_split.name!r} ({len(bank.rows.ids):,} images)",
    )
    note = missing("Searched among the test images themselves.", EMBED.format("train"))
    return sheet + (note if same_split else "")
