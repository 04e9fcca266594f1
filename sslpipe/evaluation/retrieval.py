"""Retrieval: does a query find rows of its own label first? All metrics from the matches' ranks."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sslpipe.distributed import Rank, all_gather_rows, message_device
from sslpipe.errors import DataError
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.groups import GroupCodes
from sslpipe.evaluation.intervals import Floats, Integers, means95
from sslpipe.evaluation.knn import check_pair
from sslpipe.evaluation.neighbours import (
    exact_cosines,
    fixed_point_units,
    float32_error,
    rank_keys,
    usual_k,
)
from sslpipe.evaluation.result import Result
from sslpipe.precision import full_float32

RETRIEVAL_K = (1, 5, 10)
TILE_NUMBERS = 2**23  # similarities of a tile: 32 MiB of float32
SORTED_NUMBERS = 2**20  # of a tile whose rows are sorted, with float64 products and integer keys
COUNTED = 16  # up to so many matches, what precedes each is counted; beyond that the row is sorted
_NONE = torch.iinfo(torch.int64).min  # a key behind all others


class PerQuery(NamedTuple):
    """What each of Q queries scored: values (Q, metrics) float64, 0 where it has no match."""

    names: tuple[str, ...]
    ids: Integers
    labels: Integers
    matches: Integers
    values: Floats


def retrieval(
    gallery: Embeddings,
    queries: Embeddings,
    *,
    k: Sequence[int] | None = None,
    exclude_same_id: bool = False,
    exclude_same: GroupCodes | None = None,
    cross: GroupCodes | None = None,
    process: Rank = Rank(),  # noqa: B008 (immutable)
) -> list[Result]:
    """Average all retrieval metrics over the queries, over the whole gallery.

    Collective: each process searches for its share; all get the results of one process, bit for
    bit.

    Args:
        gallery: Labelled rows that are searched.
        queries: Labelled rows that search.
        k: Ranks at which metrics are cut off. Default: 1, 5 and 10, in a gallery of as many rows.
        exclude_same_id: A query does not see the row of its own id: for two files of one split.
        exclude_same: A column: a query sees no row that has its own value of it (a theme, say); a
            missing value excludes nothing.
        cross: A column (camera, say), as re-identification counts: a query does not see rows of its
            own label and its own value of it; those of other labels stay as distractors.
        process: This process.

    Returns:
        Means over the queries that have a match, R of them; others are counted as `lone`.
        Recall@k: whether a match is among the k nearest (CMC@k of re-identification).
        recall (IR)@k: matches among the k nearest / R. precision@k: the same / k.
        mAP: sum of precision@i at the matches / R. mAP@k: at those of i <= k, / min(k, R).
        MAP@R: at those of i <= R, / R. R-precision: precision@R. MRR: 1 / rank of the first match.

    Raises:
        DataError: Labels are missing, k is beyond the gallery, or no query has a match.

    Source:
        MAP@R: Musgrave et al. 2020, arXiv:2003.08505. cross: Zheng et al. 2015, "Scalable
        Person Re-identification: A Benchmark" (Market-1501), ICCV.
    """
    scores = retrieval_per_query(
        gallery,
        queries,
        k=k,
        exclude_same_id=exclude_same_id,
        exclude_same=exclude_same,
        cross=cross,
        process=process,
    )
    protocol = "retrieval cosine lone=skip" + " self-removed" * exclude_same_id
    named = {"not-same": exclude_same, "cross": cross}
    columns = [it.name for it in named.values() if it is not None]
    if columns and not scores.matches.any():
        raise DataError(
            f"none of {len(scores.matches)} queries has a match with another value of "
            f"{' and '.join(columns)}, which `--exclude-same` or `--cross` asks for; leave it out, "
            "or give a gallery with images of their classes and other values"
        )
    protocol += "".join(f" {rule}={it.name}" for rule, it in named.items() if it is not None)
    return summary(scores, protocol, bank=len(gallery.ids))


def summary(scores: PerQuery, protocol: str, *, bank: int = 0) -> list[Result]:
    """Average each metric over the queries with a match, each with the interval of `means95`."""
    kept = scores.matches > 0
    values = scores.values[kept]
    labels = scores.labels[kept]
    if len(values) == 0:
        raise DataError(
            f"none of {len(kept)} queries has a match in the gallery: give one with images of "
            "their classes, or search a split in itself: of files by `--exclude-same-id`, of "
            "arrays by the gallery alone"
        )
    details: dict[str, Any] = {"lone": int((~kept).sum())}
    intervals, over = means95(values, labels)
    protocol += f" interval={over}"
    columns = zip(scores.names, values.mean(axis=0), intervals, values.T, strict=True)
    return [
        Result(
            protocol=protocol,
            metric=name,
            value=float(mean),
            interval95=interval,
            queries=len(values),
            bank=bank,
            details=details,
            scores=each,
        )
        for name, mean, interval, each in columns
    ]


def retrieval_per_query(
    gallery: Embeddings,
    queries: Embeddings,
    *,
    k: Sequence[int] | None = None,
    exclude_same_id: bool = False,
    exclude_same: GroupCodes | None = None,
    cross: GroupCodes | None = None,
    process: Rank = Rank(),  # noqa: B008 (immutable)
) -> PerQuery:
    """Score each query, in order of their rows; see `retrieval`. Collective: each its share."""
    check_pair(gallery, queries)
    ks = usual_k(RETRIEVAL_K, len(gallery.ids)) if k is None else sorted(set(k))
    if not ks or ks[0] < 1 or ks[-1] > len(gallery.ids):
        raise DataError(f"k = {tuple(ks)} must lie in 1..{len(gallery.ids)}, the gallery's rows")
    share = process.share(len(queries.ids))
    part = slice(share.start, share.stop)
    unlike: list[tuple[bool, Tensor, Tensor]] = []  # of the own label alone?, codes of both sides
    for own_label_alone, codes in ((False, exclude_same), (True, cross)):
        if codes is not None:
            values_of_part = torch.from_numpy(codes.queries[part])
            unlike.append((own_label_alone, torch.from_numpy(codes.bank), values_of_part))
    queries = queries.rows(torch.arange(share.start, share.stop, device=queries.ids.device))
    matches: list[Integers] = []
    values: list[Floats] = []
    for ranks, total in _ranks(gallery, queries, exclude_same_id, unlike):
        columns = query_metrics(ranks, total, ks)
        matches.append(total)
        values.append(np.stack([*columns.values()], axis=1))
    scores = PerQuery(
        names=tuple(columns),
        ids=queries.ids.cpu().numpy(),
        labels=queries.labels.cpu().numpy(),
        matches=np.concatenate(matches),
        values=np.concatenate(values),
    )
    if process.world_size == 1:
        return scores
    parts = (torch.from_numpy(array).to(message_device()) for array in scores[1:])
    return PerQuery(scores.names, *(all_gather_rows(rows).cpu().numpy() for rows in parts))


def query_metrics(ranks: Floats, matches: Integers, ks: Sequence[int]) -> dict[str, Floats]:
    """Compute each metric of some queries, (q,); zeros for a lone one.

    `ranks` (q, M) are those of each query's matches, ascending, 1 the nearest, then inf; `matches`
    (q,) how many there are.
    """
    total = matches.astype(np.float64)
    precision = np.arange(1, ranks.shape[1] + 1) / ranks  # at each match; 0 behind the last
    some = np.maximum(total, 1)
    values: dict[str, Floats] = {}
    for k in ks:
        hits = (ranks <= k).sum(axis=1)
        sums = _sum(np.where(ranks <= k, precision, 0))
        values |= {f"Recall@{k}": np.minimum(hits, 1.0), f"recall (IR)@{k}": hits / some}
        values |= {f"precision@{k}": hits / k, f"mAP@{k}": sums / np.minimum(k, some)}
    within_r = ranks <= total[:, None]
    at_r = _sum(np.where(within_r, precision, 0)) / some
    values |= {"mAP": _sum(precision) / some, "R-precision": within_r.sum(axis=1) / some}
    return values | {"MAP@R": at_r, "MRR": 1 / ranks[:, 0]}


def _sum(columns: Floats) -> Floats:
    """(q, M) -> (q,), from left to right: how many zeros follow the last match changes no bit."""
    return np.cumsum(columns, axis=1)[:, -1]


def _ranks(
    gallery: Embeddings,
    queries: Embeddings,
    hide_own: bool,
    unlike: Sequence[tuple[bool, Tensor, Tensor]],
) -> Iterator[tuple[Floats, Integers]]:
    """Rank all matches by their cosine, exactly, a tile of queries at a time; see `query_metrics`.

    Equal cosines (in float32) rank by the lower row of the gallery.
    """
    ids = gallery.ids.cpu()
    labels = gallery.labels.cpu()
    wanted = queries.labels.cpu()
    known, counts = torch.unique(labels, return_counts=True)
    most = max([1, *counts[torch.isin(known, wanted)].tolist()])
    # exact products rank many matches; of few, the doubtful ones are looked at again
    few = most <= COUNTED
    step = max(1, (TILE_NUMBERS if few else SORTED_NUMBERS) // len(ids))
    units = fixed_point_units(gallery.features)
    bank = units if few else units.double()
    buffer = bank.new_empty(min(step, len(wanted)), len(bank))  # used again: fresh memory is slow
    for start in range(0, max(1, len(wanted)), step):
        part = slice(start, start + step)
        asked = fixed_point_units(queries.features[part])
        with full_float32():
            product = torch.mm(asked.to(bank.dtype), bank.T, out=buffer[: len(asked)])
        similarities = product.float().cpu()
        # what a query sees, and what of it has its label
        same = labels == wanted[part, None]  # (q, N)
        hidden = ids == queries.ids.cpu()[part, None] if hide_own else torch.zeros_like(same)
        for of_own_label, codes, query_codes in unlike:
            query_codes = query_codes[part, None]  # a missing value excludes nothing
            excluded = (codes == query_codes) & (query_codes >= 0)
            hidden |= excluded & same if of_own_label else excluded
        similarities.masked_fill_(hidden, -torch.inf)
        matches = same & ~hidden
        if few:
            similarities.masked_fill_(same, -torch.inf)  # what is left is no match
            ranks = _by_counting(
                others=similarities,
                matches=matches,
                most=most,
                bank=units.cpu(),
                queries=asked.cpu(),
            )
        else:
            ranks = _by_sorting(similarities, matches, most)
        yield ranks.numpy(), matches.sum(1).numpy()


def _by_counting(
    others: Tensor, matches: Tensor, most: int, bank: Tensor, queries: Tensor
) -> Tensor:
    """Rank by float32 products with all that is no match, exactly where one is too near to call."""
    # of a float32 product against the exact similarity, both ways
    margin = float32_error(bank.shape[1]) + 2.0**-23
    asked, rows = matches.nonzero(as_tuple=True)
    is_match = torch.arange(most) < matches.sum(1, keepdim=True)
    exact = exact_cosines(bank, rows, queries, asked)
    keys = torch.full(is_match.shape, _NONE)
    keys[is_match] = rank_keys(exact, rows)
    similarities = torch.zeros(is_match.shape, dtype=exact.dtype)
    similarities[is_match] = exact
    keys, order = keys.sort(1, descending=True)
    similarities = similarities.gather(1, order)
    ranks = torch.full(is_match.shape, torch.inf, dtype=torch.float64)
    for number in range(most):
        some = is_match[:, number].nonzero()[:, 0]
        row = others[some]
        similarity = similarities[some, number, None]
        key = keys[some, number]
        near = row >= similarity - margin
        above = (row > similarity + margin).sum(1)
        doubtful = (near.sum(1) > above).nonzero()[:, 0]
        close = near[doubtful] & (row[doubtful] <= similarity[doubtful] + margin)
        which, place = close.nonzero(as_tuple=True)
        which = doubtful[which]
        before = rank_keys(exact_cosines(bank, place, queries, some[which]), place) > key[which]
        above.index_add_(0, which, before.long())
        ranks[some, number] = (1 + number + above).double()
    return ranks


def _by_sorting(similarities: Tensor, matches: Tensor, most: int) -> Tensor:
    """Rank by exact similarities (q, N), those of all queries sorted; -inf is behind all others."""
    keys = rank_keys(similarities, torch.arange(similarities.shape[1]))
    every = torch.from_numpy(np.sort(keys.numpy(), axis=1))  # several times as fast as torch's
    is_match = torch.arange(most) < matches.sum(1, keepdim=True)
    padded = torch.full(is_match.shape, _NONE)
    padded[is_match] = keys[matches]
    ranks = (keys.shape[1] - torch.searchsorted(every, padded)).double()
    return ranks.masked_fill_(~is_match, torch.inf).sort(1).values
