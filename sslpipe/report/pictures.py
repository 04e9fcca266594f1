"""Make thumbnails as data URIs, flat maps of embeddings, and rows of nearest neighbours."""

import base64
import io
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image

from sslpipe.data.index import Split
from sslpipe.data.loader import one_pass
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.neighbours import nearest
from sslpipe.random import permutation

MOST_MAPPED = 1000  # points of a map: t-SNE takes seconds, and more would cover each other
FEWEST_MAPPED = 10
TSNE_STEPS = 500  # its divergence is 2 % above that of 1,000, which take twice as long
NEIGHBOURS = 8
RANDOM_QUERIES, WRONG_QUERIES = 8, 4
THUMB_PX = 64
HOVER_PX, MOST_HOVER_BYTES = 48, 500_000  # thumbnails shown on hover, all together
MOST_PNG_BYTES = 1_500_000


class Row(NamedTuple):
    """A query and its nearest rows of the bank, nearest first.

    Args:
        id: Sample id of the query.
        label: Of the query; -1 for none.
        neighbour_ids: Sample ids.
        neighbour_labels: Their labels.
        similarities: Their cosines with the query.
    """

    id: int
    label: int
    neighbour_ids: list[int]
    neighbour_labels: list[int]
    similarities: list[float]

    @property
    def wrong(self) -> bool:
        """Say whether the nearest row has another label."""
        return self.neighbour_labels[0] != self.label


def mapped_rows(rows: Embeddings, seed: int = 0) -> Embeddings:
    """Return at most MOST_MAPPED rows, by a hash of seed, in the order of the hash."""
    chosen = permutation(len(rows.ids), seed)[:MOST_MAPPED]
    return rows.rows(torch.from_numpy(np.asarray(chosen, dtype=np.int64)))


def pca_map(rows: Embeddings) -> tuple[NDArray[np.float64], float]:
    """Map unit-length features to their two main axes.

    Returns:
        (n, 2) places, and the share of the variance that these axes hold.
    """
    from sklearn.decomposition import PCA

    pca = PCA(2, svd_solver="full")
    places = pca.fit_transform(unit_rows(rows))
    return places, float(pca.explained_variance_ratio_.sum())


def tsne_map(rows: Embeddings) -> tuple[NDArray[np.float64], float]:
    """Map unit-length features by t-SNE, from 50 main axes at most.

    Returns:
        (n, 2) places, and the perplexity.
    """
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    features = unit_rows(rows)
    axes = min(50, *features.shape)
    perplexity = min(30.0, (len(features) - 1) / 3)
    reduced = PCA(axes, svd_solver="full").fit_transform(features)
    tsne = TSNE(2, perplexity=perplexity, init="pca", random_state=0, max_iter=TSNE_STEPS)
    return tsne.fit_transform(reduced).astype(np.float64), perplexity


def unit_rows(rows: Embeddings) -> NDArray[np.float64]:
    """Return features of length 1, (n, F)."""
    return F.normalize(rows.features.double(), dim=1).numpy()


def neighbour_rows(bank: Embeddings, queries: Embeddings, *, same_split: bool) -> list[Row]:
    """Search the neighbours of RANDOM_QUERIES, then of WRONG_QUERIES.

    The first are chosen by a hash, the others among those whose nearest has another label.

    Args:
        bank: Embeddings to search in.
        queries: Embeddings to choose from.
        same_split: Bank and queries are one split, so that a query must not find itself.
    """
    some = mapped_rows(queries, seed=1)
    k = min(NEIGHBOURS, len(bank.ids) - same_split)
    neighbours = nearest(
        bank.features,
        some.features,
        k,
        bank_ids=bank.ids if same_split else None,
        query_ids=some.ids if same_split else None,
    )
    rows = [
        Row(query, label, bank.ids[near].tolist(), bank.labels[near].tolist(), similar.tolist())
        for query, label, near, similar in zip(
            some.ids.tolist(), some.labels.tolist(), *neighbours, strict=True
        )
    ]
    wrong = [row for row in rows[RANDOM_QUERIES:] if row.wrong]
    return [*rows[:RANDOM_QUERIES], *wrong[:WRONG_QUERIES]]


def thumbnails(split: Split, ids: Iterable[int]) -> dict[int, str]:
    """Return id -> data URI, no side above THUMB_PX; what cannot be decoded is skipped."""
    wanted = np.unique(np.fromiter(ids, dtype=np.int64))
    pictures: dict[int, str] = {}
    for batch in one_pass(split, ids=wanted, num_workers=0, on_bad=lambda bad: None):
        for row, sample in enumerate(batch.ids.tolist()):
            height, width = batch.sizes[row].tolist()
            pixels = batch.images[row, :, :height, :width].permute(1, 2, 0).numpy()
            image = Image.fromarray(pixels)
            image.thumbnail((THUMB_PX, THUMB_PX))
            pictures[sample] = data_uri(image)
    return pictures


def small_thumbnails(split: Split, ids: Iterable[int]) -> dict[int, str]:
    """Return id -> data URI of WebP for hovering, of the first ids that fit MOST_HOVER_BYTES."""
    pictures: dict[int, str] = {}
    left = MOST_HOVER_BYTES
    for sample, uri in thumbnails(split, ids).items():
        image = Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))
        image.thumbnail((HOVER_PX, HOVER_PX))
        file = io.BytesIO()
        image.save(file, "webp", quality=70, method=6)
        pictures[sample] = f"data:image/webp;base64,{base64.b64encode(file.getvalue()).decode()}"
        left -= len(pictures[sample])
        if left < 0:
            break
    return pictures


def data_uri(image: Image.Image) -> str:
    """Encode as PNG what is small or has few colours, else as JPEG: whichever is shorter."""
    files = []
    for kind, options in (("png", {"optimize": True}), ("jpeg", {"quality": 85})):
        file = io.BytesIO()
        image.convert("RGB").save(file, kind, **options)
        files.append((len(file.getvalue()), kind, file.getvalue()))
    _, kind, raw = min(files) if image.width * image.height > 32 * 32 else files[0]
    return f"data:image/{kind};base64,{base64.b64encode(raw).decode()}"


def png_uri(raw: bytes) -> str:
    """Return a PNG file as a data URI: as it is, or, where it is large, as JPEG."""
    if len(raw) <= MOST_PNG_BYTES:
        return f"data:image/png;base64,{base64.b64encode(raw).decode()}"
    return data_uri(Image.open(io.BytesIO(raw)))
