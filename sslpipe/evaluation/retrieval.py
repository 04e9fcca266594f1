"""Retrieval: does a query find rows of its own label first? All metrics from the matches' ranks."""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from sslpipe.distributed import Rank, all_gather_rows, message_device
from sslpipe.errors import DataError
from sslpipe.evaluation.difference import Floats, Integers, means95
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.groups import GroupCodes, worst_value
from sslpipe.evaluation.knn import check_pair
from sslpipe.evaluation.ranking import Ranks, ranks_of_matches
from sslpipe.evaluation.rerank import augmented, check_reranked
from sslpipe.evaluation.result import Result

_OVER = " interval={}"  # in the protocol: what is taken anew for the interval
_BY_VALUE = re.compile(r"Recall@\d+|map|map_at_r")  # of which the worst value is shown


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
    k: Sequence[int] = (1, 5, 10),
    exclude_same_id: bool = False,
    exclude_same: GroupCodes | None = None,
    cross: GroupCodes | None = None,
    by: GroupCodes | None = None,
    augment: int = 0,
    rerank: int = 0,
    process: Rank = Rank(),  # noqa: B008 (immutable)
) -> list[Result]:
    """Average all retrieval metrics over the queries, over the whole gallery.

    Collective: of several processes, each searches for its share of the queries; all get the same
    results, bit for bit those of one process.

    Args:
        gallery: Labelled rows that are searched.
        queries: Labelled rows that search.
        k: Ranks at which metrics are cut off.
        exclude_same_id: A query does not see the row of its own id: for two files of one split.
        exclude_same: A column: a query sees no row that has its own value of it (a theme, say); a
            missing value excludes nothing.
        cross: A column (camera, say), as re-identification counts: a query does not see rows of its
            own label and its own value of it; those of other labels stay as distractors.
        by: A column: Recall@k, map and map_at_r of its worst value beside them; see
            `groups.worst_value`.
        augment: Also show rows with each image of the gallery mixed with its nearest ones, so many,
            itself among them (database-side augmentation).
        rerank: Also show rows with the first so many, up to 1,000, ordered by k-reciprocal
            re-ranking. Both at once: of the mixed ones. These rows are marked transductive, since
            an answer depends on the other images of the gallery.
        process: This process.

    Returns:
        Queries without a match are skipped, and counted in details["lone"]. Recall@k: a match among
        the k nearest (the hit rate; CMC@k of re-identification, whose mAP is map). recall (IR)@k:
        matches among them / R, R all matches of the query. precision@k: the same / k. map@k: mean
        over queries of sum of precision@i at the matches i <= k / min(k, R). map: over all ranks,
        / R. r_precision: precision@R. map_at_r: sum of precision@i at the matches i <= R / R. mrr:
        1 / rank of the first match.

    Raises:
        DataError: Labels are missing, k is beyond the gallery, or no query has a match.

    Source:
        map_at_r: Musgrave et al. 2020, arXiv:2003.08505. cross: Zheng et al. 2015, "Scalable
        Person Re-identification: A Benchmark" (Market-1501), ICCV.
    """
    if by is not None:
        by.check(gallery, queries)
    check_reranked(rerank)
    score = partial(retrieval_per_query, k=k, exclude_same_id=exclude_same_id, process=process)
    score = partial(score, queries=queries, exclude_same=exclude_same, cross=cross)
    scores = score(gallery)
    protocol = "retrieval cosine lone=skip" + " self-removed" * exclude_same_id
    named = {"not-same": exclude_same, "cross": cross}
    protocol += "".join(f" {rule}={it.name}" for rule, it in named.items() if it is not None)
    shown = _rows(scores, protocol, len(gallery.ids), by)
    if augment or rerank:
        if augment:
            gallery = gallery._replace(features=augmented(gallery.features, augment))
        scores = score(gallery, rerank=rerank)
        protocol += " transductive" + f" augment={augment}" * bool(augment)
        protocol += f" rerank={rerank}" * bool(rerank)
        shown += _rows(scores, protocol, len(gallery.ids), by)
    return shown


def _rows(scores: PerQuery, protocol: str, bank: int, by: GroupCodes | None) -> list[Result]:
    """Average each metric; with `by`, its worst value beside it."""
    results = summary(scores, protocol, bank=bank)
    if by is None:
        return results
    scored = by.of_queries(scores.matches > 0)
    shown = []
    for result in results:
        shown.append(result)
        if _BY_VALUE.fullmatch(result.metric):  # a value's own interval is over its queries
            protocol = result.protocol.replace(_OVER.format("classes"), _OVER.format("queries"))
            shown.append(worst_value(replace(result, protocol=protocol), scored))
    return shown


def retrieval_per_query(
    gallery: Embeddings,
    queries: Embeddings,
    *,
    k: Sequence[int] = (1, 5, 10),
    exclude_same_id: bool = False,
    exclude_same: GroupCodes | None = None,
    cross: GroupCodes | None = None,
    rerank: int = 0,
    process: Rank = Rank(),  # noqa: B008 (immutable)
) -> PerQuery:
    """Score each query, in order of their rows; see `retrieval`. Collective: each its share."""
    check_pair(gallery, queries)
    ks = sorted(set(k))
    if not ks or ks[0] < 1 or ks[-1] > len(gallery.ids):
        raise DataError(f"k = {tuple(k)} must lie in 1..{len(gallery.ids)}, the gallery's rows")
    same = gallery.features.shape == queries.features.shape and all(
        torch.equal(a, b) for a, b in zip(gallery, queries, strict=True)
    )
    if same and not exclude_same_id:
        raise DataError(
            "gallery and queries are the same rows, and each would find itself; set "
            "exclude_same_id (--exclude-same-id)"
        )
    for codes in (exclude_same, cross):
        if codes is not None:
            codes.check(gallery, queries)
    share = process.share(len(queries.ids))
    queries = queries.rows(torch.arange(share.start, share.stop, device=queries.ids.device))
    part, names = slice(share.start, share.stop), metric_names(ks)
    values, matches = [np.zeros((0, len(names)))], [np.zeros(0, np.int64)]
    tiles = ranks_of_matches(
        gallery,
        queries,
        itself=not exclude_same_id,
        unlike=None if exclude_same is None else exclude_same.of_queries(part),
        cross=None if cross is None else cross.of_queries(part),
        rerank=rerank,
    )
    for tile in tiles:
        values.append(query_metrics(tile, ks))
        matches.append(tile.matches)
    own = (queries.ids.cpu().numpy(), queries.labels.cpu().numpy())
    scores = PerQuery(names, *own, np.concatenate(matches), np.concatenate(values))
    if process.world_size == 1:
        return scores
    parts = (torch.from_numpy(array).to(message_device()) for array in scores[1:])
    return PerQuery(names, *(all_gather_rows(rows).cpu().numpy() for rows in parts))


def metric_names(ks: Sequence[int]) -> tuple[str, ...]:
    """Name the metrics, those at each k first."""
    at = ("Recall@{}", "recall (IR)@{}", "precision@{}", "map@{} /min(k,R)")
    whole = ("map", "r_precision", "map_at_r", "mrr")
    return (*(name.format(k) for k in ks for name in at), *whole)


def query_metrics(tile: Ranks, ks: Sequence[int]) -> Floats:
    """Compute (q, metrics) in the order of `metric_names`; zeros for a lone query."""
    ranks, total = tile.ranks, tile.matches[:, None].astype(np.float64)  # (q, M), (q, 1)
    precision = np.arange(1, ranks.shape[1] + 1) / ranks  # at each match; 0 behind the last
    some = np.maximum(total, 1)
    columns: list[Floats] = []
    for k in ks:
        hits = (ranks <= k).sum(axis=1, keepdims=True)
        sums = _sum(np.where(ranks <= k, precision, 0))
        columns += [hits > 0, hits / some, hits / k, sums / np.minimum(k, some)]
    within_r = ranks <= total
    columns += [
        _sum(precision) / some,
        within_r.sum(axis=1, keepdims=True) / some,
        _sum(np.where(within_r, precision, 0)) / some,
        1 / ranks[:, :1],
    ]
    return np.concatenate(columns, axis=1, dtype=np.float64)


def _sum(columns: Floats) -> Floats:
    """(q, M) -> (q, 1), from left to right: how many zeros follow the last match changes no bit."""
    return np.cumsum(columns, axis=1)[:, -1:]


def summary(scores: PerQuery, protocol: str, *, bank: int = 0) -> list[Result]:
    """Average each metric over the queries with a match, each with the interval of `means95`."""
    kept = scores.matches > 0
    values, labels = scores.values[kept], scores.labels[kept]
    if len(values) == 0:
        raise DataError(
            f"none of {len(kept)} queries has a match in the gallery: give one with images of "
            "their classes, or search a split in itself without the query (--exclude-same-id)"
        )
    details: dict[str, Any] = {"lone": int((~kept).sum())}
    intervals, over = means95(values, labels)
    protocol += _OVER.format(over)
    return [
        Result(protocol, name, float(mean), interval, len(values), bank, details, scores=each)
        for name, mean, interval, each in zip(
            scores.names, values.mean(axis=0), intervals, values.T, strict=True
        )
    ]
