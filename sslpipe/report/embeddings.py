"""Make the sections of a report that need embeddings: map and neighbours."""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from markupsafe import Markup

from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.feature_files import CLASSES
from sslpipe.evaluation.intervals import Floats, Integers
from sslpipe.evaluation.neighbours import nearest
from sslpipe.evaluation.vectors import Features
from sslpipe.random import permutation
from sslpipe.report.charts import MOST_NAMES, apart, class_colour, scatter
from sslpipe.report.page import render
from sslpipe.report.pictures import thumbnails
from sslpipe.report.run_files import RunFiles

EMBED = "sslpipe embed RUN --data DIR/dataset.json --split {0} --out RUN/features/{0}.safetensors"
# of the points' images: half a megabyte of photos
HOVER_PX = 48
MOST_HOVERED = 500
MOST_MAPPED = 1000  # points of a map: t-SNE takes seconds, and more would cover each other
FEWEST_MAPPED = 10
TSNE_STEPS = 500  # its divergence is 2 % above that of 1,000, which take twice as long
NEIGHBOURS = 8
RANDOM_QUERIES = 8
WRONG_QUERIES = 4


def mapped_rows(rows: Embeddings, seed: int = 0) -> Embeddings:
    """Return at most MOST_MAPPED rows, by a hash of seed, in the order of the hash."""
    return rows.rows(torch.from_numpy(permutation(len(rows.ids), (seed,))[:MOST_MAPPED]))


def unit_rows(rows: Embeddings) -> Floats:
    """Return features of length 1, (n, F)."""
    return F.normalize(rows.features.double(), dim=1).numpy()


def embedding_map(run: RunFiles, queries: Features) -> Markup:
    """Draw t-SNE of some test features; hovering shows the images where they are known."""
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    rows = mapped_rows(queries.rows)
    split = queries.split
    if len(rows.ids) < FEWEST_MAPPED:
        return render("missing", text=f"{len(rows.ids)} embeddings are too few for a map.")
    ids = rows.ids.tolist()
    names, labels = named_labels(class_names(run, queries), rows.labels.numpy())
    count = len(names)
    # unit-length features, from 50 main axes
    features = unit_rows(rows)
    perplexity = min(30.0, (len(ids) - 1) / 3)
    reduced = PCA(min(50, *features.shape), svd_solver="full").fit_transform(features)
    tsne = TSNE(2, perplexity=perplexity, init="pca", random_state=0, max_iter=TSNE_STEPS)
    places = tsne.fit_transform(reduced).astype(np.float64)
    # images: small ones for hovering, and some on the map
    small: dict[int, str] = {}
    large: dict[int, str] = {}
    on_map = apart(places)
    if split is not None:
        small = thumbnails(split, ids[:MOST_HOVERED], HOVER_PX)
        large = thumbnails(split, [ids[row] for row in on_map])
    hovered = {row: small[one] for row, one in enumerate(ids) if one in small}
    pictures = {row: large[ids[row]] for row in on_map if ids[row] in large}
    of = f"{len(ids):,} test embeddings"
    some = f" with {len(pictures)} of the images" if pictures else ""
    title = f"t-SNE{some}, perplexity {perplexity:.0f}"
    alt = f"t-SNE of {of}{some}, by class"
    compared = [key for key in ("backbone_sha256", "data_sha256") if key in run.metadata]
    return render(
        "embeddings.map",
        of=of,
        keys=[(name, class_colour(label, count), "dot") for label, name in enumerate(names)],
        most=MOST_NAMES,
        hovered=hovered,
        map=scatter(
            title=title,
            alt=alt,
            places=places,
            labels=labels,
            names=names,
            hovered=hovered,
            pictures=pictures,
        ),
        without_images=split is None,
        other=any(queries.facts.get(key) != run.metadata[key] for key in compared),
        embed=EMBED.format("test"),
    )


def class_names(run: RunFiles, features: Features) -> list[str]:
    """Return the names of the features' labels, whose data set may be another than the run's."""
    if features.split is not None:
        return list(features.split.index.manifest.classes)
    return list(features.facts.get(CLASSES, run.classes))


def named_labels(classes: list[str], labels: Integers) -> tuple[list[str], Integers]:
    """Name labels; those behind the last name are numbered by rank, as they may be of any size.

    Args:
        classes: Names by label.
        labels: (n,), -1 for none.

    Returns:
        Names, and (n,) the place of each label among them.
    """
    others = np.unique(labels[labels >= len(classes)])
    places = len(classes) + np.searchsorted(others, labels)
    names = [*classes, *(f"class {label}" for label in others.tolist())]
    return names, np.where(labels >= len(classes), places, labels)


class Row(NamedTuple):
    """A query and its nearest rows of the bank, nearest first."""

    id: int
    label: int  # -1 for none
    near: list[tuple[int, int, float]]  # id, label and cosine of each neighbour

    @property
    def wrong(self) -> bool:
        """Return whether the nearest row has another label."""
        return self.near[0][1] != self.label


class NeighbourSheet(NamedTuple):
    """What the sheet of neighbours shows, and where they were searched."""

    rows: list[Row]
    pictures: tuple[dict[int, str], dict[int, str]]  # of the queries, of the bank
    names: list[str]
    searched: str


def nearest_rows(bank: Embeddings, queries: Embeddings, *, same_split: bool) -> list[Row]:
    """Search the NEIGHBOURS nearest of each query; in the same split it does not find itself."""
    k = min(NEIGHBOURS, len(bank.ids) - same_split)
    ids = (bank.ids, queries.ids) if same_split else None
    neighbours = nearest(bank.features, queries.features, k, hidden=ids)
    rows = []
    for place, at in enumerate(neighbours.indices):
        columns = (bank.ids[at], bank.labels[at], neighbours.similarities[place])
        near = list(zip(*(column.tolist() for column in columns), strict=True))
        rows.append(Row(int(queries.ids[place]), int(queries.labels[place]), near))
    return rows


def neighbour_rows(bank: Embeddings, queries: Embeddings, *, same_split: bool) -> list[Row]:
    """Search the neighbours of RANDOM_QUERIES, then of WRONG_QUERIES.

    The first are chosen by a hash, the others among those whose nearest has another label.
    """
    rows = nearest_rows(bank, mapped_rows(queries, seed=1), same_split=same_split)
    wrong = [row for row in rows[RANDOM_QUERIES:] if row.wrong]
    return [*rows[:RANDOM_QUERIES], *wrong[:WRONG_QUERIES]]


def found_neighbours(
    run: RunFiles, queries: Features | None, bank: Features | None
) -> NeighbourSheet | None:
    """Search some test images in the bank, else among themselves.

    None where there are no embeddings, none of their images, or a single one.
    """
    if queries is None or queries.split is None:
        return None
    same_split = bank is None or bank.split is None
    rows, _, split = queries if bank is None or bank.split is None else bank
    if split is None or len(rows.ids) < 2:
        return None
    shown = neighbour_rows(rows, queries.rows, same_split=same_split)
    pictures = thumbnails(queries.split, (row.id for row in shown))
    others = thumbnails(split, {near for row in shown for near, *_ in row.near})
    searched = f"the split {split.name!r} ({len(rows.ids):,} images)"
    return NeighbourSheet(shown, (pictures, others), class_names(run, queries), searched)
