"""Say whether features are better than those of weights that one could have used instead.

The answer stands on one measure, fixed before test is looked at: kNN top-1 with all labels (k = 20,
as in the table), or Recall@1 inside test where train has not the classes of most test samples. A
network whose features lie badly is not beaten for that: each is taken as it is or whitened,
whichever is better within train (`whitening_helps`). Further measures have intervals and no word.

The words are for all comparisons of an eval.json together, by Holm's method at 5 %; each interval
is a 95 % one of its own comparison. They are about new test samples, not about other trainings.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sslpipe.evaluation.difference import Difference, holm, paired_means, paired_top1
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.knn import knn_accuracies
from sslpipe.evaluation.result import Result
from sslpipe.evaluation.whiten import whiten
from sslpipe.random import permutation

Tree = dict[str, Any]

KNN, LINEAR, RECALL, MAP = "kNN", "linear", "Recall@1", "MAP@R"
PER_QUERY = {"hit_rate@1": RECALL, "map_at_r": MAP}  # metrics of retrieval that are compared
LEVEL = 0.05
FORM_DRAW = 1 << 20  # no draw of few-shot kNN has this number
FORM_BANK, FORM_QUERIES = 10_000, 2_000  # rows of train, at most
KNN_K = 20


class Scores(NamedTuple):
    """What each test sample scored.

    Args:
        top1: (features, whitened, "kNN" or "linear") -> (Q,) bool.
        retrieval: (features, whitened, "Recall@1" or "MAP@R") -> (q,) float64.
        classes: (q,) int64, labels of the retrieval's queries.
    """

    top1: dict[tuple[str, bool, str], NDArray[np.bool_]]
    retrieval: dict[tuple[str, bool, str], NDArray[np.float64]]
    classes: NDArray[np.int64]

    def take(
        self, features: str, whitened: bool, results: Sequence[tuple[str | None, Result]]
    ) -> None:
        """Take what is compared from results, each with its column in the table."""
        for column, result in results:
            if result.scores is None:
                continue
            if column is not None:
                self.top1[features, whitened, column] = result.scores
            elif result.metric in PER_QUERY:
                self.retrieval[features, whitened, PER_QUERY[result.metric]] = result.scores


def queries_with_a_match(labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the labels of the rows that retrieval inside a split scores: the class has two."""
    _, places, counts = np.unique(labels, return_inverse=True, return_counts=True)
    found: NDArray[np.int64] = labels[counts[places] > 1]
    return found


def whitening_helps(train: Embeddings, seed: int = 0) -> bool:
    """Say whether kNN is better on whitened features, from train alone.

    Whitening and bank are of one half of train (at most FORM_BANK rows), the queries of the other
    (at most FORM_QUERIES); the same rows for every network.

    Args:
        train: Labelled rows.
        seed: Of the halves.
    """
    order = torch.argsort(train.ids).cpu().numpy()
    shuffled = torch.from_numpy(order[permutation(len(order), seed, FORM_DRAW)])
    shuffled = shuffled.to(train.ids.device)
    half = len(shuffled) // 2
    bank = train.rows(shuffled[:half][:FORM_BANK])
    queries = train.rows(shuffled[half:][:FORM_QUERIES])
    if not half:
        return False
    plain, whitened = (
        next(iter(knn_accuracies(*pair, k=(min(KNN_K, len(bank.ids)),)).values()))
        for pair in ((bank, queries), whiten(bank, queries))
    )
    return whitened > plain


def compare_all(
    names: Sequence[str],
    others: Sequence[str],
    start: str | None,
    scores: Scores,
    forms: Mapping[str, bool],
    *,
    known_classes: bool,
) -> list[Tree]:
    """Compare each of our features with each other network's, on every measure there is.

    Args:
        names: Ours.
        others: Theirs.
        start: Which of them the run started from.
        scores: Of all of them.
        forms: Whether a network is taken whitened where it is taken in one form.
        known_classes: Whether train has the classes of most test samples.

    Returns:
        A plain value each, see `suite`; the one that decides first.
    """
    found: list[Tree] = []
    for ours in names:
        for theirs in others:
            chosen = forms[ours], forms[theirs]
            wanted = [(KNN, chosen), (KNN, (False, False)), (KNN, (True, True))] * known_classes
            wanted += [(LINEAR, (False, False))] * known_classes
            wanted += [(RECALL, chosen), (MAP, chosen)]
            primary = True
            for measure, (whitened, also) in dict.fromkeys(wanted):
                pair = (ours, whitened, measure), (theirs, also, measure)
                difference = _difference(scores, *pair)
                if difference is None:
                    continue
                found.append(
                    {
                        "features": ours,
                        "against": theirs,
                        "start": theirs == start,
                        "measure": measure,
                        "primary": primary,
                        "whitened": whitened,
                        "against_whitened": also,
                        **difference,
                    }
                )
                primary = False
    _decide([each for each in found if each["primary"]])
    return found


def _difference(
    scores: Scores, ours: tuple[str, bool, str], theirs: tuple[str, bool, str]
) -> Tree | None:
    """Both values and their difference as plain values; None where one was not measured."""
    difference: Difference
    if ours in scores.top1 and theirs in scores.top1:
        a, b = scores.top1[ours], scores.top1[theirs]
        difference = paired_top1(a, b)
        values = float(a.mean()), float(b.mean())
    elif ours in scores.retrieval and theirs in scores.retrieval:
        x, y = scores.retrieval[ours], scores.retrieval[theirs]
        difference = paired_means(x, y, scores.classes)
        values = float(x.mean()), float(y.mean())
    else:
        return None
    value, interval, p, unit, number = difference
    return {
        "value": values[0],
        "against_value": values[1],
        "difference": value,
        "interval95": list(interval),
        "p": p,
        "unit": unit,
        "count": number,
    }


def _decide(compared: Sequence[Tree]) -> None:
    """Add `p_holm`, `of` (how many comparisons) and `answer` to each."""
    for each, p in zip(compared, holm([each["p"] for each in compared]), strict=True):
        answer = "better" if each["difference"] > 0 else "worse"
        each["p_holm"], each["of"] = p, len(compared)
        each["answer"] = answer if p <= LEVEL else "no clear difference"
