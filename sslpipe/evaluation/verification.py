"""Verification: are two images of one label? Thresholds on the cosine of seeded pairs."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sslpipe.distributed import Rank, all_gather_rows, message_device
from sslpipe.errors import DataError
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.intervals import Floats, Integers, Interval, quantiles95
from sslpipe.evaluation.knn import check_pair
from sslpipe.evaluation.neighbours import exact_cosines, fixed_point_units
from sslpipe.evaluation.result import Result
from sslpipe.random import hash_integers

RESAMPLES = 300
FOLDS = 10  # of the accuracy
FARS = (1e-1, 1e-2, 1e-3)  # where none are given


class LabelledPairs(NamedTuple):
    """(P,) rows of each pair, and whether it is of one label; those of one label come first."""

    first: Integers
    second: Integers
    same: NDArray[np.bool_]


class Roc(NamedTuple):
    """Of each distinct score, falling: the shares of different and same pairs accepted at it."""

    threshold: Floats
    false: Floats
    true: Floats


def verification(
    bank: Embeddings,
    queries: Embeddings,
    *,
    pairs: int | LabelledPairs = 10_000,
    far: Sequence[float] | None = None,
    seed: int = 0,
    process: Rank = Rank(),  # noqa: B008 (immutable)
) -> list[Result]:
    """Decide "one label or two" by the cosine of two of the queries; the bank takes no part.

    A threshold accepts all pairs of its score together: no value depends on the order of ties.
    Collective: each process scores its share; all get the results of one process, bit for bit.

    Args:
        bank: Checked only.
        queries: Labelled rows.
        pairs: So many of one label and as many of two, drawn without repetition by hashes of `seed`
            and the places of the sorted ids (all, where there are fewer); or the pairs themselves,
            by rows of `queries`, whose labels then take no part.
        far: False accept rates, each in (0, 1). Default: 0.1, 0.01 and 0.001, each where it is at
            least one of the different pairs.
        seed: Of the pairs and of the resamples.
        process: This process.

    Returns:
        fpr@95tpr: share of different pairs accepted at the highest threshold that accepts 95 % of
        the same ones; small is good. tar@far=f: largest share of same pairs accepted where at most
        f of the different ones are. auc: of the ROC, ties half. eer: the error where as large a
        share of different pairs is accepted as of same ones is not; small is good. accuracy: of
        FOLDS parts in turn, at the threshold that is best on the others (LFW's protocol; of its
        list the parts are its own).
        details["folds"]: each fold's accuracy.
        The interval is over pairs, which share images: too narrow where there are few images.

    Raises:
        DataError: A FAR is below one different pair, or there are no pairs of a kind.
    """
    is_listed = isinstance(pairs, LabelledPairs)
    if isinstance(pairs, LabelledPairs):
        chosen = pairs
    else:
        check_pair(bank, queries)
        chosen = draw_pairs(queries, pairs, seed)
    same_count = int(chosen.same.sum())
    different_count = int((~chosen.same).sum())
    if far is None:
        far = [each for each in FARS if each * different_count >= 1]
    for each in far:
        if not 0 < each < 1:
            raise DataError(f"far = {tuple(far)} must lie between 0 and 1")
        if each * different_count < 1:
            raise DataError(
                f"far = {each:g} of {different_count} different pairs is less than one; "
                f"{'draw' if different_count == pairs else 'have images for'} at least "
                f"{1 / each:.0f} pairs, or name a larger far"
            )
    scores = pair_cosines(queries, chosen, process)
    if process.world_size > 1:  # all shares, in order, on every process
        scores = all_gather_rows(torch.from_numpy(scores).to(message_device())).cpu().numpy()

    # numbers of the ROC, then accuracy at thresholds chosen on other pairs
    origin = "listed" if is_listed else f"seed={seed}"
    protocol = f"verification cosine pairs={same_count}+{different_count} {origin}"
    counts = {"same_pairs": same_count, "different_pairs": different_count}
    names = ("fpr@95tpr", *(f"tar@far={each:g}" for each in far), "auc", "eer")
    values, intervals = _roc_numbers(scores, chosen.same, far, seed)
    numbers = dict(zip(names, zip(values, intervals, strict=True), strict=True))
    right, per_fold = kfold_accuracy(scores, chosen.same, FOLDS, in_order=is_listed)
    half = 1.96 * float(np.std(per_fold, ddof=1)) / FOLDS**0.5
    ends = (max(0.0, right - half), min(1.0, right + half))
    numbers[f"accuracy {FOLDS}-fold best threshold"] = (right, ends)
    results = [
        Result(
            protocol=protocol,
            metric=metric,
            value=value,
            interval95=interval,
            queries=len(queries.ids),
            bank=0,
            details=dict(counts),
        )
        for metric, (value, interval) in numbers.items()
    ]
    results[-1].details["folds"] = per_fold
    return results


def _roc_numbers(
    scores: NDArray[np.float32], same: NDArray[np.bool_], far: Sequence[float], seed: int
) -> tuple[list[float], list[Interval]]:
    """FPR at 95 % TPR, TAR at each FAR, AUC, EER; and their bootstrap intervals over pairs."""
    falling = np.argsort(-scores, kind="stable")  # once, for all resamples
    scores = scores[falling]
    same = same[falling]

    def numbers(weights: Floats | None = None) -> Floats:
        curve = roc(scores, same, weights)
        fars = (tar_at_far(curve, each) for each in far)
        return np.array([fpr_at_tpr(curve, 0.95), *fars, auc(curve), eer(curve)])

    generator = np.random.default_rng(seed)
    kinds = (int(same.sum()), int((~same).sum()))  # resampled apart; pairs of one label come first

    def resampled() -> Floats:
        weights = [np.bincount(generator.integers(n, size=n), minlength=n) for n in kinds]
        return numbers(np.concatenate(weights).astype(np.float64)[falling])

    return numbers().tolist(), quantiles95([resampled() for _ in range(RESAMPLES)])


def draw_pairs(rows: Embeddings, count: int, seed: int) -> LabelledPairs:
    """Draw `count` pairs of one label and of two, uniform, none twice; all where they are fewer.

    They are the same samples for every backbone and order of rows; none of a kind is a DataError.
    """
    if count < 1:
        raise DataError(f"pairs = {count} must be at least 1")
    ids = rows.ids.cpu().numpy()
    labels = rows.labels.cpu().numpy()
    order = np.lexsort((ids, labels))
    _, starts, sizes = np.unique(labels[order], return_index=True, return_counts=True)
    # of each row's label
    size = np.repeat(sizes, sizes)
    start = np.repeat(starts, sizes)

    # of one label: a row's partners are those before and behind it; of two: all other rows
    first, offset = _draw_partners(size - 1, 4 * count, seed, 0)
    second = start[first] + offset
    same = _distinct(first, second + (second >= first), count)
    first, offset = _draw_partners(len(ids) - size, 4 * count, seed, 1)
    second = offset + np.where(offset >= start[first], size[first], 0)
    different = _distinct(first, second, count)
    for name, kind in (("one label", same), ("two labels", different)):
        if kind.shape[1] == 0:
            none = f"there is no pair of {name} among {len(labels)} rows"
            raise DataError(f"{none}: give a split with two classes or more, of two images or more")
    both = order[np.concatenate([same, different], axis=1)]
    is_same = np.arange(both.shape[1]) < same.shape[1]
    return LabelledPairs(both[0], both[1], is_same)


def _draw_partners(
    partners: Integers, draws: int, seed: int, kind: int
) -> tuple[Integers, Integers]:
    """Draw rows and the numbers of their partners, so many; all of them where they are few."""
    ends = np.cumsum(partners)
    total = int(ends[-1])
    if total <= 4 * draws:  # all of them, in a hashed order
        numbers = np.argsort(hash_integers((seed, kind, np.arange(total))), kind="stable")
    else:  # each unordered pair is there twice: few repeat
        words = hash_integers((seed, kind, np.arange(draws)))
        numbers = (words % np.uint64(total)).astype(np.int64)
    first = np.searchsorted(ends, numbers, "right")
    return first, numbers - (ends[first] - partners[first])


def _distinct(first: Integers, second: Integers, count: int) -> Integers:
    """Keep the first `count` distinct unordered pairs, in order of drawing. Returns (2, n)."""
    pairs = np.stack([np.minimum(first, second), np.maximum(first, second)])
    _, at = np.unique(pairs, axis=1, return_index=True)
    return pairs[:, np.sort(at)[:count]]


def pair_cosines(
    rows: Embeddings,
    pairs: LabelledPairs,
    process: Rank = Rank(),  # noqa: B008 (immutable)
) -> NDArray[np.float32]:
    """Compute the exact cosines of this process's share of the pairs; in order."""
    units = fixed_point_units(rows.features).cpu()
    share = process.share(len(pairs.same))
    part = slice(share.start, share.stop)
    first, second = (torch.from_numpy(side[part]) for side in (pairs.first, pairs.second))
    return exact_cosines(units, first, units, second).numpy()


def roc(scores: NDArray[np.float32], same: NDArray[np.bool_], weights: Floats | None = None) -> Roc:
    """Compute the curve over all distinct scores; pairs of one score are accepted together.

    scores: (P,), larger is more alike; same: (P,), one label; weights: (P,) how often each counts.
    """
    times = np.ones(len(scores)) if weights is None else weights
    order = np.argsort(-scores, kind="stable")
    falling = scores[order]
    last = np.append(np.flatnonzero(falling[1:] != falling[:-1]), len(falling) - 1)
    true = np.cumsum((times * same)[order])[last]
    false = np.cumsum((times * ~same)[order])[last]
    return Roc(falling[last].astype(np.float64), false / false[-1], true / true[-1])


def fpr_at_tpr(curve: Roc, tpr: float) -> float:
    """Compute the share of different pairs accepted where at least `tpr` of the same are."""
    return float(curve.false[np.argmax(curve.true >= tpr - 1e-12)])


def tar_at_far(curve: Roc, far: float) -> float:
    """Compute the most of the same pairs accepted while at most `far` of the different ones are."""
    good = np.flatnonzero(curve.false <= far + 1e-12)
    return float(curve.true[good[-1]]) if len(good) else 0.0


def auc(curve: Roc) -> float:
    """Compute the chance that a same pair scores above a different one; ties count half."""
    false = np.append(0.0, curve.false)
    true = np.append(0.0, curve.true)
    return float((np.diff(false) * (true[1:] + true[:-1])).sum() / 2)


def eer(curve: Roc) -> float:
    """Compute the error rate where both kinds of error are equal, on straight lines between points.

    False accepts of different pairs, false rejects of same ones.
    """
    false = np.append(0.0, curve.false)
    rejected = 1 - np.append(0.0, curve.true)
    excess = false - rejected  # rises from -1 to 1
    after = int(np.argmax(excess >= 0))
    before = after - 1
    along = excess[before] / (excess[before] - excess[after])  # of the line between the two
    return float(false[before] + along * (false[after] - false[before]))


def kfold_accuracy(
    scores: NDArray[np.float32], same: NDArray[np.bool_], folds: int, *, in_order: bool = False
) -> tuple[float, list[float]]:
    """Compute the mean accuracy over the folds, each at the threshold best on the others.

    Fold f has every folds-th pair of each kind or, with `in_order`, the f-th part of them. Of equal
    thresholds the highest is taken.
    """
    kinds = [np.flatnonzero(same), np.flatnonzero(~same)]
    if folds < 2 or min(map(len, kinds)) < folds:
        raise DataError(
            f"there are {len(kinds[0])} pairs of one label and {len(kinds[1])} of two, and the "
            f"accuracy over {folds} folds needs {folds} of each; give more rows"
        )
    fold = np.empty(len(same), np.int64)
    for rows in kinds:
        places = np.arange(len(rows))
        fold[rows] = places * folds // len(rows) if in_order else places % folds
    accuracies = []
    for number in range(folds):
        held = fold == number
        threshold = best_threshold(scores[~held], same[~held])
        accuracies.append(float(((scores[held] >= threshold) == same[held]).mean()))
    return float(np.mean(accuracies)), accuracies


def best_threshold(scores: NDArray[np.float32], same: NDArray[np.bool_]) -> float:
    """Find the threshold that gets most pairs right, the highest of equals.

    It is a score, the least one accepted, or lies just above all of them: then none is.
    """
    curve = roc(scores, same)
    right = curve.true * same.sum() + (1 - curve.false) * (~same).sum()
    at = int(np.argmax(np.round(right)))
    if (~same).sum() >= np.round(right[at]):
        return float(np.nextafter(scores.max(), np.float32(np.inf)))
    return float(curve.threshold[at])
