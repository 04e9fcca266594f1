"""Measure the backbone during training, inside a slice of train that it never sees."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from sslpipe.augment.eval_view import EvalView, ProbeViews, by_view
from sslpipe.data.index import Split
from sslpipe.data.subsets import with_a_partner
from sslpipe.evaluation.embed import Embeddings, EmbedOptions, View, embed
from sslpipe.evaluation.knn import knn_results
from sslpipe.evaluation.label_free import label_free_numbers
from sslpipe.evaluation.retrieval import retrieval_per_query
from sslpipe.precision import wide_dtype

MONITOR_K = 20  # DINO's script reports its best at 10 and 20
SMALL_CLASS = 5  # images of the largest held-out class, at most, where the nearest one decides


class Watched(NamedTuple):
    """The held-out samples of a run, and how they are embedded."""

    split: Split
    ids: NDArray[np.int64]  # (n,)
    bank: NDArray[np.int64] | None = None  # (m,) trained on, that they search, too; None: nothing
    options: EmbedOptions = EmbedOptions()

    def embed(self, backbone: nn.Module, view: View, ids: NDArray[np.int64]) -> Embeddings:
        """Embed samples on the device; rows stay there, to be searched, where it has float64.

        Bad samples are skipped: quarantine.jsonl lists what training meets, and a run may diverge.
        """
        device = torch.device(self.options.device)
        rows_on = device if wide_dtype(device) == torch.float64 else "cpu"
        options = replace(self.options, rows_on=rows_on, on_bad=lambda bad: None)
        return embed(backbone, view, self.split, options, ids=ids, network=None)


class HeldOutScores(NamedTuple):
    """What was measured of held-out samples; empty on ranks other than 0, and of too few."""

    numbers: dict[str, float]  # by name
    rows: Embeddings | None = None  # of the held-out samples
    searched: Embeddings | None = None  # what they searched, themselves among it
    by_sample: Mapping[int, float] = {}  # id -> MAP@R, of those that have one


def monitor(backbone: nn.Module, view: EvalView, watched: Watched) -> HeldOutScores:
    """Score held-out samples: leave-one-out weighted kNN, and scores without labels. Collective.

    k is 20, but 1 where no class has more than SMALL_CLASS held-out images. Three forwards an
    image: as evaluation sees it, and the two `ProbeViews` of the label-free scores.

    Args:
        backbone: Images (B, 3, S, S) -> (B, F).
        view: As evaluation sees images.
        watched: The samples.

    Returns:
        The numbers "holdout_knn": top-1 of the labelled samples, where two are of one class,
        "holdout_recall_at_1", "holdout_map_at_r": where one has another of its class to find,
        "holdout_" + each name of `label_free.NUMBERS`. Nothing where fewer than two samples can be
        decoded.
    """
    rows = watched.embed(backbone, view, watched.ids)
    more = None if watched.bank is None else watched.embed(backbone, view, watched.bank)
    settings = view.config()
    channels = watched.split.image_type.channels
    probe = ProbeViews(view.crop_px, settings["mean"], settings["std"], channels)
    views = watched.embed(backbone, probe, watched.ids)
    if watched.options.process.rank != 0 or len(rows.ids) < 2:
        return HeldOutScores({})
    numbers = {}
    by_sample: Mapping[int, float] = {}
    labelled = rows.rows(rows.labels >= 0)
    classes = labelled.labels.cpu().numpy()
    if with_a_partner(classes) and _finite(labelled):
        # of classes this small most of 20 neighbours are of others: Recall@1 instead
        small = np.unique(classes, return_counts=True)[1].max() <= SMALL_CLASS
        k = 1 if small else min(MONITOR_K, len(classes) - 1)
        (result,) = knn_results(labelled, labelled, k=(k,), exclude_same_id=True)
        numbers["holdout_knn"] = result.value
    searched = labelled if more is None else Embeddings.joined([labelled, more])
    if len(torch.unique(searched.labels)) > 1:  # of one class every neighbour is right
        retrieved, by_sample = _retrieval(labelled, searched, "holdout")
        numbers |= retrieved
    free = label_free_numbers(rows.features, by_view(views.features))
    numbers |= {f"holdout_{name}": value for name, value in free.items()}
    everyone = rows if more is None else Embeddings.joined([rows, more])
    return HeldOutScores(numbers, rows, everyone, by_sample)


def retrieval_monitor(backbone: nn.Module, view: EvalView, watched: Watched) -> HeldOutScores:
    """Score leave-one-out retrieval of held-out samples; see `monitor`. Collective.

    Returns:
        The numbers "validation_recall_at_1" and "validation_map_at_r"; none where no two samples
        are of one class.
    """
    rows = watched.embed(backbone, view, watched.ids)
    more = None if watched.bank is None else watched.embed(backbone, view, watched.bank)
    if watched.options.process.rank != 0:
        return HeldOutScores({})
    searched = rows if more is None else Embeddings.joined([rows, more])
    numbers, by_sample = _retrieval(rows, searched, "validation")
    if len(searched.ids) < 2:
        return HeldOutScores(numbers)
    return HeldOutScores(numbers, rows, searched, by_sample)


def _finite(rows: Embeddings) -> bool:
    return bool(torch.isfinite(rows.features).all())


def _retrieval(
    queries: Embeddings, rows: Embeddings, prefix: str
) -> tuple[dict[str, float], dict[int, float]]:
    """Search rows, among which the queries are: the scores, and MAP@R by sample.

    {} where none has another row of its class. The scores of features that are not finite are NaN:
    the run has diverged, and says so itself.
    """
    names = (f"{prefix}_recall_at_1", f"{prefix}_map_at_r")
    if not len(queries.ids):
        return {}, {}
    if not _finite(rows):
        return dict.fromkeys(names, math.nan), {}
    scores = retrieval_per_query(rows, queries, k=(1,), exclude_same_id=True)
    has_match = scores.matches > 0
    matched = scores.values[has_match]
    if not len(matched):
        return {}, {}
    values = dict(zip(scores.names, matched.mean(0).tolist(), strict=True))
    numbers = dict(zip(names, (values["Recall@1"], values["MAP@R"]), strict=True))
    map_at_r = matched[:, scores.names.index("MAP@R")]
    ids = queries.ids.cpu().numpy()[has_match]
    return numbers, dict(zip(ids.tolist(), map_at_r.tolist(), strict=True))
