"""Is the backbone getting better? kNN inside a slice of train that training never sees."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from sslpipe.augment.eval_view import EvalView
from sslpipe.data.index import Split
from sslpipe.data.reader import Reader
from sslpipe.distributed import Rank
from sslpipe.evaluation.embed import embed
from sslpipe.evaluation.knn import knn_accuracies
from sslpipe.evaluation.retrieval import retrieval_per_query

MONITOR_K = 20  # DINO's script reports its best at 10 and 20


def monitor(
    backbone: nn.Module,
    view: EvalView,
    split: Split,
    ids: NDArray[np.int64],
    process: Rank,
    *,
    canvas_px: int,
    num_workers: int,
    device: torch.device,
    reader: Reader | None = None,
) -> dict[str, float]:
    """Leave-one-out weighted kNN over the held-out samples `ids`: {"holdout_knn": top-1 in [0, 1]}.

    Every rank embeds its part and has all rows afterwards; train or eval mode, weights and buffers
    are as before. A sample that cannot be decoded is left out.
    """
    features = embed(
        backbone,
        view,
        split,
        ids=ids,
        process=process,
        canvas_px=canvas_px,
        num_workers=num_workers,
        device=device,
        reader=reader,
        on_bad=lambda _: None,  # quarantine.jsonl lists what training meets; this is a monitor
    )
    if process.rank != 0:
        return {}
    k = min(MONITOR_K, len(features.ids) - 1)
    if k < 1:  # all but one could not be decoded
        return {}
    (accuracy,) = knn_accuracies(features, features, k=(k,), exclude_same_id=True).values()
    return {"holdout_knn": accuracy}


def retrieval_monitor(
    backbone: nn.Module,
    view: EvalView,
    split: Split,
    ids: NDArray[np.int64],
    process: Rank,
    *,
    canvas_px: int,
    num_workers: int,
    device: torch.device,
    reader: Reader | None = None,
) -> dict[str, float]:
    """Leave-one-out retrieval among the samples `ids`, of classes that training never sees.

    {"validation_recall_at_1": share of queries whose nearest other sample is of their class,
    "validation_map_at_r": mean average precision within the first R, R the others of the class}.
    """
    features = embed(
        backbone,
        view,
        split,
        ids=ids,
        process=process,
        canvas_px=canvas_px,
        num_workers=num_workers,
        device=device,
        reader=reader,
        on_bad=lambda _: None,
    )
    if process.rank != 0:
        return {}
    every = retrieval_per_query(features, features, k=(1,), exclude_same_id=True)
    values = dict(zip(every.names, every.values[every.matches > 0].mean(0).tolist(), strict=True))
    return {
        "validation_recall_at_1": values["hit_rate@1"],
        "validation_map_at_r": values["map_at_r"],
    }
