"""How far to flatten the spectrum of features: chosen by half the classes, for the others.

Where there are no labels to choose with, by a rule: docs/graded.md says how often it was right.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sslpipe.data.subsets import has_a_partner
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.retrieval import retrieval_per_query
from sslpipe.evaluation.whiten import fit_powers
from sslpipe.random import permutation

POWERS = (0.25, 0.5, 1.0)
UNLABELLED_POWER = 0.25  # of every row that is ranked without labels
METRICS = ("Recall@1", "MAP@R")
CHOSEN_BY = "MAP@R"
LEAST_CLASSES = 4  # with two images or more: two choose, two report
MOST_SCORED = 1000  # images of a half by which a power is chosen


def why_unlabelled(labels: NDArray[np.int64]) -> str | None:
    """Return why labels cannot choose; None where they can."""
    known = len(with_matches(labels))
    lacking = f"{known} classes have two images or more, and choosing takes {LEAST_CLASSES}"
    return lacking if known < LEAST_CLASSES else None


class Power(NamedTuple):
    """How far to flatten a spectrum, and why; `helps`: no label says that it does harm."""

    power: float
    why: str
    helps: bool


def choose_power(rows: Embeddings, dims: int | None = None, seed: int = 0) -> Power:
    """Choose how far to flatten the spectrum of features; `dims` as in `fit_whitening`.

    With labels by MAP@R: each half of the classes, cut by `seed`, is searched in itself, flattened
    by the spectrum of all rows that are not in it. Of many rows each class has its share of
    MOST_SCORED. Without labels UNLABELLED_POWER, which docs/graded.md measures.
    """
    labels = rows.labels.cpu().numpy()
    if (lacking := why_unlabelled(labels)) is not None:
        why = f"power {UNLABELLED_POWER:g}, as labels cannot choose: {lacking}"
        return Power(UNLABELLED_POWER, why, True)
    scores: dict[float | None, list[float]] = {power: [] for power in (None, *POWERS)}
    for classes in halves_of(labels, seed):
        each = max(2, MOST_SCORED // len(classes))  # images of a class
        some = classes[: MOST_SCORED // 2]  # two rows of a class at least: more are never used
        queries = np.concatenate([np.flatnonzero(labels == label)[:each] for label in some])
        half = torch.from_numpy(queries[:MOST_SCORED])
        others = torch.from_numpy(np.flatnonzero(~np.isin(labels, classes))).to(rows.ids.device)
        for power, metrics in score_forms(rows=rows, half=half, others=others, dims=dims):
            scores[power].append(float(metrics[CHOSEN_BY].mean()))
    mean = {power: sum(each) / 2 for power, each in scores.items()}
    best = max(POWERS, key=lambda power: mean[power])
    helps = mean[None] <= mean[best]
    why = (
        f"power {best:g}: {CHOSEN_BY} {mean[best]:.1%} within classes whose spectrum was not used; "
        f"as they are {mean[None]:.1%}"
    )
    return Power(best, why, helps)


def with_matches(labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the classes of two images or more, ascending."""
    return np.unique(labels[has_a_partner(labels)])


def halves_of(labels: NDArray[np.int64], seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cut the classes that have two images or more in two: those that choose, and the others."""
    known = with_matches(labels)
    shuffled = known[permutation(len(known), (seed,))]
    return shuffled[::2], shuffled[1::2]


def score_forms(
    rows: Embeddings,
    half: Tensor,
    others: Tensor,
    *,
    dims: int | None = None,
    distractors: Tensor | None = None,
) -> Iterator[tuple[float | None, dict[str, Any]]]:
    """Score some rows as they are, then flattened by the spectrum of the others to each power.

    They search each other, and among the `distractors`: rows of none of their classes.
    """
    scored = rows.rows(half)
    wrong = None
    if distractors is not None and len(rows.ids[distractors]):
        wrong = rows.rows(distractors)
        no_class = torch.full_like(wrong.labels, int(rows.labels.max()) + 1)
        wrong = wrong._replace(labels=no_class)
    yield None, _scores(scored, wrong)
    fitted = fit_powers(rows, POWERS, dims=dims, some=others)
    for power in POWERS:  # each is freed before the next spectrum is fitted
        form = fitted.pop(0)
        yield power, _scores(form(scored), None if wrong is None else form(wrong))


def _scores(rows: Embeddings, distractors: Embeddings | None) -> dict[str, Any]:
    """Score each row as a query for all others: metric, and "class" -> (Q,)."""
    searched = rows if distractors is None else Embeddings.joined([rows, distractors])
    scores = retrieval_per_query(searched, rows, k=(1,), exclude_same_id=True)
    values = {m: scores.values[:, scores.names.index(m)] for m in METRICS}
    return {**values, "class": scores.labels}
