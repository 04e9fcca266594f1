"""k nearest neighbours by cosine: the label of a query from the labels around it.

The textbook, of a query of cosines S (N,) with a bank of labels y (N,) in C classes:

    S, near = S.topk(k)                                     # the k nearest
    votes = torch.zeros(C).index_add_(0, y[near], torch.exp(S / T))  # majority: ones instead
    predicted = votes.argmax()

`_vote` does it for many queries at once, without a column for each class.
"""

from collections.abc import Sequence
from itertools import product
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sslpipe.distributed import Rank
from sslpipe.errors import DataError
from sslpipe.evaluation.embed import Embeddings, check_embeddings
from sslpipe.evaluation.groups import GroupCodes, hidden_ids
from sslpipe.evaluation.neighbours import Neighbours, Search, nearest, usable_rows, usual_k
from sslpipe.evaluation.result import Result, accuracy

Vote = Literal["weighted", "majority"]
Votes = Literal["weighted", "majority", "both"]

DINO_K = (10, 20, 100, 200)  # Caron et al. 2021, arXiv:2104.14294, its evaluation script
# Wu et al. 2018, arXiv:1805.01978, section 3.4: the same weights, exp(S / T), with k = 200; DINO's
# k = 200 and InstDisc's protocol are one number
INSTDISC_TEMPERATURE = 0.07
VOTING_ROWS = 8192  # queries at a time


def knn_results(
    bank: Embeddings,
    queries: Embeddings,
    *,
    k: Sequence[int] | None = None,
    temperature: float = INSTDISC_TEMPERATURE,
    vote: Votes = "weighted",
    search: Search = "torch",
    exclude_same_id: bool = False,
    exclude_same: GroupCodes | None = None,
    process: Rank = Rank(),  # noqa: B008 (immutable)
) -> list[Result]:
    """Score kNN by each k (and each vote, with "both"), all from one exact search. Collective.

    Args:
        bank: Features of any scale, compared by cosine; every row labelled, by any int64 >= 0. May
            lie on the CPU where the queries are on a GPU.
        queries: As bank.
        k: Numbers of neighbours. Default: 10, 20, 100 and 200, where the bank has as many rows.
        temperature: T > 0 of the weighted vote.
        vote: "weighted", "majority" or "both".
        search: "torch" or "faiss"; both find the same neighbours.
        exclude_same_id: A query does not see the row of its own id: for two files of one split.
        exclude_same: A column (camera, say): a query finds no row that has its own value of it; a
            missing value excludes nothing.
        process: This process.

    Returns:
        Top-1 accuracies.

    Raises:
        DataError: Labels are missing, or of no class of the bank; features not finite; k too large.
    """
    check_pair(bank, queries)
    check_classes(bank, queries)
    if not 0 < temperature < float("inf"):
        raise DataError(f"temperature = {temperature} must be > 0 and finite")
    hidden = hidden_ids(bank, queries, same_id=exclude_same_id, same=exclude_same)
    if k is None:
        k = usual_k(DINO_K, usable_rows(len(bank.ids), hidden))
    neighbours = nearest(
        bank.features, queries.features, max(k), search=search, hidden=hidden, process=process
    )
    suffix = " leave-one-out" if exclude_same_id else ""
    suffix += f" not-same={exclude_same.name}" if exclude_same is not None else ""
    labels = queries.labels.cpu().numpy()
    results = []
    kinds: tuple[Vote, ...] = ("weighted", "majority") if vote == "both" else (vote,)
    for kind, count in product(kinds, sorted(set(k))):
        predicted = _vote(
            neighbours=neighbours,
            labels=bank.labels,
            k=count,
            temperature=temperature,
            vote=kind,
        )
        protocol = protocol_id(count, temperature, kind) + suffix
        results.append(accuracy(protocol, predicted, labels, bank=len(bank.ids)))
    return results


def protocol_id(k: int, temperature: float, vote: Vote) -> str:
    """Name the protocol, as a `Result` carries it."""
    weighting = f" T={temperature:g}" if vote == "weighted" else ""
    return f"knn-{vote} k={k}{weighting} cosine"


def check_pair(bank: Embeddings, queries: Embeddings) -> None:
    """Check that both sides are complete, labelled and of one width. Raises: DataError."""
    check_embeddings(bank, "the bank")
    check_embeddings(queries, "the queries")
    if bank.features.shape[1] != queries.features.shape[1]:
        raise DataError(
            f"the bank has {bank.features.shape[1]} features and the queries "
            f"{queries.features.shape[1]}; they come from different backbones"
        )


def check_classes(bank: Embeddings, queries: Embeddings) -> None:
    """Raise DataError where no query can be right, as labels of two numberings, or new classes."""
    if not torch.isin(queries.labels, bank.labels.to(queries.labels.device)).any():
        raise DataError(
            f"no class of the {len(queries.ids):,} queries is one of the bank's, so that none can "
            "be right: label both alike; of new classes measure `retrieval` of the queries alone"
        )


def check_apart(bank: Embeddings, queries: Embeddings, *, exclude_same_id: bool = False) -> None:
    """Raise DataError where every query is a row of the bank, too, and would find itself.

    With `exclude_same_id`: where it would do so under another id.
    """
    if not torch.isin(queries.features[:, 0].cpu(), bank.features[:, 0].cpu()).all():
        return  # nearly always, and before all rows are hashed
    rows = [hash(row.tobytes()) for row in bank.features.cpu().numpy()]
    wanted = [hash(row.tobytes()) for row in queries.features.cpu().numpy()]
    few = 2 * len({*wanted}) < len(wanted)  # of a network that collapsed, or codes of classes
    if few or not {*wanted} <= {*rows}:
        return
    of_id = dict(zip(bank.ids.tolist(), rows, strict=True))
    pairs = zip(queries.ids.tolist(), wanted, strict=True)
    if not exclude_same_id or not any(of_id.get(number) == row for number, row in pairs):
        raise DataError(
            f"each of the {len(wanted):,} queries is a row of the bank, too, and would find "
            "itself; leave these rows out of the bank, or search one set in itself: of arrays by "
            "`retrieval` of the gallery alone, of files by `sslpipe evaluate retrieval FILE FILE "
            "--exclude-same-id`, with `ids` in both that number rows alike"
        )


def _vote(
    neighbours: Neighbours, labels: Tensor, k: int, temperature: float, vote: Vote
) -> NDArray[np.int64]:
    """Return each query's label of most votes, (Q,); of equal ones the nearest neighbour's."""
    labels = labels.to(neighbours.indices.device)
    predicted = []
    for indices, similarities in zip(
        torch.split(neighbours.indices[:, :k], VOTING_ROWS),
        torch.split(neighbours.similarities[:, :k], VOTING_ROWS),
        strict=True,
    ):
        # (q, k)
        voters = labels[indices]
        near = similarities.double()
        # the nearest has weight 1: the same winner as exp(S / T), without overflow at small T
        weights = ((near - near[:, :1]) / temperature).exp()
        if vote == "majority":
            weights = torch.ones_like(weights)
        # the votes for a label are summed where it is met first
        ordered, at = voters.sort(dim=1, stable=True)
        new = torch.ones_like(ordered, dtype=torch.bool)
        new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        begin = torch.arange(k, device=at.device).where(new, 0).cummax(dim=1).values
        first = torch.empty_like(at).scatter_(1, at, at.gather(1, begin))  # (q, k)
        votes = torch.zeros_like(weights).scatter_add_(1, first, weights)
        tied = votes == votes.max(dim=1, keepdim=True).values
        winner = tied.to(torch.uint8).argmax(dim=1, keepdim=True)  # the first of them
        predicted.append(voters.gather(1, winner)[:, 0].cpu().numpy())
    return np.concatenate(predicted)
