"""Evaluations of plain arrays, each in one line of a notebook, by the protocols of the suite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from sslpipe.arguments import checked
from sslpipe.errors import DataError
from sslpipe.evaluation.array_rows import Array, embeddings_from_arrays, is_text, labels_of
from sslpipe.evaluation.clustering import clusters
from sslpipe.evaluation.embed import Embeddings, SplitEmbeddings, check_finite_rows
from sslpipe.evaluation.few_shot import few_shot_knn
from sslpipe.evaluation.knn import INSTDISC_TEMPERATURE, Vote, check_apart, knn_results
from sslpipe.evaluation.linear_probe import linear_probe as probe_rows
from sslpipe.evaluation.neighbours import Search, usual_k
from sslpipe.evaluation.result import Result, Results
from sslpipe.evaluation.retrieval import retrieval as search_rows
from sslpipe.evaluation.vectors import Features, alike
from sslpipe.evaluation.verification import verification as verify_rows


@checked
def knn(
    train_features: Array,
    train_labels: Array,
    test_features: Array,
    test_labels: Array,
    *,
    k: int | None = None,
    temperature: float = INSTDISC_TEMPERATURE,
    vote: Vote = "weighted",
    search: Search = "torch",
    labels_per_class: int | None = None,
    seed: int = 0,
) -> Result:
    """Score arrays of features by their k nearest neighbours, in one line of a notebook.

    >>> print(sslpipe.knn(train_features, train_labels, test_features, test_labels))
    knn-weighted k=20 T=0.07 cosine: top1 0.8125 [0.7948, 0.829], 2000 queries, bank of 8000

    Args:
        train_features: (N, F) of any float dtype, numpy or torch, any scale, or `Embeddings`;
            compared by cosine.
        train_labels: (N,) integers >= 0 of any dtype, numpy, torch or a list; or texts, names of
            classes, which both sides then have; or the `Embeddings` that have them.
        test_features: (Q, F), as train_features; moved to their device.
        test_labels: (Q,), as train_labels.
        k: Neighbours that vote, 1 to N; None: 20, or N where there are fewer.
        temperature: T > 0 of the weights exp(cosine / T); without effect on a majority vote.
        vote: "weighted" (the field's protocol) or "majority".
        search: "torch" or "faiss"; both find the same neighbours.
        labels_per_class: Score by so many rows of each class of train, the mean of five draws; k is
            10 then. None: by all.
        seed: Of these draws.

    Returns:
        Top-1 accuracy as a `Result`: value in [0, 1], 95 % interval.

    Raises:
        DataError: Shapes or dtypes do not fit, a number is not finite, or a label is missing.

    Source:
        Wu et al. 2018 (InstDisc), arXiv:1805.01978, section 3.4; Caron et al. 2021 (DINO),
        arXiv:2104.14294.
    """
    train, test, _ = _pair(train_features, train_labels, test_features, test_labels)
    if labels_per_class is not None:
        (result,) = few_shot_knn(
            train,
            test,
            labels_per_class=labels_per_class,
            k=None if k is None else [k],
            seed=seed,
            temperature=temperature,
            vote=vote,
        )
        return result
    ks = usual_k((20,), len(train.ids)) if k is None else [k]
    (result,) = knn_results(train, test, k=ks, temperature=temperature, vote=vote, search=search)
    return result


@checked
def linear_probe(
    train_features: Array,
    train_labels: Array,
    test_features: Array,
    test_labels: Array,
    *,
    holdout: float = 0.15,
    seed: int = 0,
) -> Result:
    """Score logistic regression fitted on train, its C chosen on held-out rows of train.

    >>> print(sslpipe.linear_probe(train_features, train_labels, test_features, test_labels))

    Args:
        train_features: As in `knn`.
        train_labels: As in `knn`; each class has two rows or more.
        test_features: As in `knn`; read once, after C was chosen.
        test_labels: As in `knn`.
        holdout: Class-stratified share of train that chooses C.
        seed: Of that share.

    Returns:
        Top-1 accuracy; `details` has C, per-class accuracy and the confusion matrix, whose rows are
        "classes", sorted, where labels are texts.

    Raises:
        DataError: As in `knn`; or a class has a single row of train.
    """
    train, test, names = _pair(train_features, train_labels, test_features, test_labels)
    (result,) = probe_rows(train, test, holdout=holdout, seed=seed)
    return replace(result, details={**result.details, "classes": names}) if names else result


@checked
def retrieval(
    gallery_features: Array,
    gallery_labels: Array,
    query_features: Array | None = None,
    query_labels: Array | None = None,
    *,
    k: Sequence[int] | None = None,
) -> Results:
    """Search a gallery by each query: are images of its label found first?

    >>> print(sslpipe.retrieval(features, labels)["MAP@R"])

    Args:
        gallery_features: (N, F), as in `knn`.
        gallery_labels: (N,), as in `knn`.
        query_features: (Q, F); None: each row of the gallery searches all others.
        query_labels: (Q,); None with query_features.
        k: Ranks at which metrics are cut off; None: 1, 5 and 10, in a gallery of as many rows.

    Returns:
        Metric -> `Result`: "Recall@1" (is the nearest of its label?), "precision@1", "mAP@1",
        "recall (IR)@1" (share of all matches) and so on for each k, "MAP@R", "mAP", "R-precision",
        "MRR"; `sslpipe.evaluation.retrieval` defines them.

    Raises:
        DataError: As in `knn`; or k is beyond the gallery, no query has a match, or all queries are
            rows of the gallery.
    """
    if (query_features is None) != (query_labels is None):
        raise DataError("give query_features and query_labels, or neither: the gallery searches")
    if query_features is None or query_labels is None:
        gallery = queries = _scored(gallery_features, gallery_labels, "gallery")
    else:
        sides = ("gallery", "query")
        gallery, queries, _ = _pair(
            gallery_features, gallery_labels, query_features, query_labels, sides=sides
        )
        check_apart(gallery, queries)
    results = search_rows(gallery, queries, k=k, exclude_same_id=queries is gallery)
    return Results({result.metric: result for result in results})


@checked
def verification(
    features: Array,
    labels: Array,
    *,
    pairs: int = 10_000,
    far: Sequence[float] | None = None,
    seed: int = 0,
) -> Results:
    """Decide "one label or two" by the cosine of two rows, for drawn pairs.

    Args:
        features: (N, F), as in `knn`.
        labels: (N,), as in `knn`.
        pairs: So many of one label and as many of two, or all, where there are fewer.
        far: False accept rates, each in (0, 1). Default: 0.1, 0.01 and 0.001, each where it is at
            least one of the pairs of two labels.
        seed: Of the pairs.

    Returns:
        Metric -> `Result`: "auc", "eer", "fpr@95tpr", "tar@far=0.01" and so on for each of `far`,
        "accuracy 10-fold best threshold"; `sslpipe.evaluation.verification` defines them.

    Raises:
        DataError: As in `knn`; or there are too few pairs.
    """
    rows = _scored(features, labels, "")
    results = verify_rows(rows, rows, pairs=pairs, far=far, seed=seed)
    return Results({result.metric: result for result in results})


@checked
def clustering(features: Array, labels: Array, *, seed: int = 0) -> Results:
    """Compare k-means clusters of rows, as many as there are labels, with these labels.

    Prefer `retrieval`'s "MAP@R": NMI rises with the number of clusters whatever they hold.

    Args:
        features: (N, F), as in `knn`.
        labels: (N,), as in `knn`.
        seed: Of the first centres.

    Returns:
        "nmi", "ami" -> `Result`; `sslpipe.evaluation.clustering` defines them.

    Raises:
        DataError: As in `knn`; or there is one label, or there are fewer distinct rows than labels.
    """
    rows = _scored(features, labels, "")
    return Results({result.metric: result for result in clusters(rows, rows, seed=seed)})


def _pair(
    bank_features: Array,
    bank_labels: Array,
    query_features: Array,
    query_labels: Array,
    *,
    sides: tuple[str, str] = ("train", "test"),
) -> tuple[Embeddings, Embeddings, list[str]]:
    """Make the rows of both sides, on the bank's device, and the names of texts as labels.

    Raises: DataError.
    """
    if isinstance(bank_labels, SplitEmbeddings) and isinstance(query_labels, SplitEmbeddings):
        # numbers of two data sets may mean other classes
        opened = [Features(rows, dict(rows.facts)) for rows in (bank_labels, query_labels)]
        bank_labels, query_labels = (
            each.rows for each in alike(opened, [f"{side}_labels" for side in sides])
        )
    bank_numbers = labels_of(bank_labels, f"{sides[0]}_labels")
    query_numbers = labels_of(query_labels, f"{sides[1]}_labels")
    names: list[str] = []
    if is_text(bank_numbers) != is_text(query_numbers):
        raise DataError(
            f"{sides[0]}_labels are {bank_numbers.dtype} and {sides[1]}_labels "
            f"{query_numbers.dtype}; give both as texts, or both as integers"
        )
    if is_text(bank_numbers):
        known, places = np.unique([*bank_numbers, *query_numbers], return_inverse=True)
        names = known.tolist()
        bank_numbers, query_numbers = np.split(places, [len(bank_numbers)])
    bank = _scored(bank_features, bank_numbers, sides[0])
    queries = _scored(query_features, query_numbers, sides[1])
    if bank.features.shape[1] != queries.features.shape[1]:
        raise DataError(
            f"{sides[0]}_features have {bank.features.shape[1]} columns and {sides[1]}_features "
            f"{queries.features.shape[1]}; take both from one backbone"
        )
    return bank, queries.to(bank.features.device), names


def _scored(features: Array, labels: Array, side: str) -> Embeddings:
    """Make rows that can be scored: finite, each with a label. Raises: DataError."""
    rows = embeddings_from_arrays(features, labels, side)
    check_finite_rows(rows.features, f"{side}_features".removeprefix("_"))
    unlabelled = torch.nonzero(rows.labels < 0).flatten().tolist()
    if unlabelled:
        name = f"{side}_labels".removeprefix("_")
        raise DataError(
            f"{name}[{unlabelled[0]}] is {int(rows.labels[unlabelled[0]])}, no class, as are "
            f"{len(unlabelled):,} of {len(rows.labels):,}; leave such rows out"
        )
    return rows
