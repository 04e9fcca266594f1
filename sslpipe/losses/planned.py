"""How many negatives the planned batches have: counted from ids and columns, no image is read."""

import numpy as np
import torch
from torch import Tensor

from sslpipe.data.index import Split
from sslpipe.data.order import Order
from sslpipe.data.partners import Pairing
from sslpipe.data.pipeline import Batch
from sslpipe.distributed import current_rank
from sslpipe.losses.base import ContrastiveObjective, InBatchLoss, Objective

MOST_PLANNED = 16  # batches that are looked at; fewer of large ones


def planned_negatives(
    loss_fn: Objective, split: Split, order: Order, pairing: Pairing | None
) -> list[float]:
    """Count the negatives of an anchor in some batches of the first epoch. Collective.

    Args:
        loss_fn: The objective.
        split: That is trained on.
        order: Of the run.
        pairing: What [pairs] says, or None.

    Returns:
        The mean of each batch, the first step's first; [] for an objective without negatives. One
        with a queue meets earlier batches: of these all are counted as one.
    """
    if not isinstance(loss_fn, ContrastiveObjective):
        return []
    batch_size = order.batch_size
    steps = order.steps_per_epoch
    most = min(MOST_PLANNED, max(2, MOST_PLANNED * 256 // batch_size))
    looked_at = np.unique(np.linspace(0, steps - 1, min(steps, most)).astype(np.int64)).tolist()
    streams = current_rank().share(order.num_streams)
    shown = split if pairing is None else pairing.split  # its labels are those of pairs.label
    arguments = [
        planned_arguments(split=shown, order=order, pairing=pairing, step=step, streams=streams)
        for step in looked_at
    ]
    if not isinstance(loss_fn, InBatchLoss):
        arguments = [{key: torch.cat([each[key] for each in arguments]) for key in arguments[0]}]
    means = []
    for known in arguments:
        rows = torch.empty(len(known["ids"]), 1)
        anchors = loss_fn.find_anchors(rows, known["ids"], known["labels"], known.get("groups"))
        means.append(float(anchors.mean_negatives))
    return means


def planned_arguments(
    split: Split, order: Order, pairing: Pairing | None, step: int, streams: range
) -> dict[str, Tensor]:
    """Return what the objective will get of a step's samples beside the embeddings."""
    epoch, ids = order.ids(step, streams)
    nothing = torch.empty(0)
    batch = Batch(
        images=nothing,
        sizes=nothing,
        labels=torch.from_numpy(split.labels_of(ids)),
        ids=torch.from_numpy(ids),
        source_ids=torch.from_numpy(ids),
        epoch=epoch,
    )
    if pairing is not None:
        batch = pairing.describe(step, streams, batch, pairing.partners_of_step(step, streams))
    return batch.loss_arguments
