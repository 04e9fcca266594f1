"""Which classes lie near each other, so that the sampler can put them into one batch."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sslpipe.distributed import all_gather_rows, broadcast_
from sslpipe.metric_learning.losses.clusters import follow_means, squared_distances_of_rows
from sslpipe.metric_learning.losses.pairwise import unit

PART = 1024  # classes compared with all others at a time


class ClassNeighbours(nn.Module):
    """Tabulate each class's nearest ones by the running means of their embeddings, once an epoch.

    Reading is ahead of training, so an epoch's table is made when the epoch before it begins, and
    the first two epochs have none; an epoch must not be shorter than the reader's lead.
    All state lies in buffers, and is saved. Tables are equal on all ranks, so that their plans are;
    means to rounding, and again at each epoch's beginning: on a GPU sums are in no fixed order.

    Args:
        num_classes: C.
        dim: D of the embeddings.
        size: How many classes a row of the table names, itself the first.
        momentum: Of the running means of unit rows; see `HierarchicalTripletLoss`.

    Source:
        Ge et al. 2018, arXiv:1810.06951, section 3.
    """

    means: Tensor
    seen: Tensor
    tables: Tensor

    def __init__(self, num_classes: int, dim: int, size: int, momentum: float = 0.1) -> None:
        super().__init__()
        self.momentum = momentum
        self.register_buffer("means", torch.zeros(num_classes, dim))
        self.register_buffer("seen", torch.zeros(num_classes, dtype=torch.bool))
        # of the even epoch and of the odd one: writing the next leaves alone what is being read
        self.register_buffer("tables", torch.zeros(2, num_classes, size, dtype=torch.int64))

    @torch.no_grad()
    def follow(self, embeddings: Tensor, labels: Tensor) -> None:
        """Take a step's rows (n, D), (n,) of this rank into the means. Collective."""
        rows = all_gather_rows(embeddings.detach())
        labels = all_gather_rows(labels)
        follow_means(
            means=self.means,
            seen=self.seen,
            rows=unit(rows.to(self.means.dtype)),
            labels=labels,
            momentum=self.momentum,
        )

    @torch.no_grad()
    def begin(self, epoch: int) -> None:
        """Make the table of the epoch after `epoch`, which begins; rank 0's on all. Collective."""
        broadcast_(self.means)
        table = self.tables[(epoch + 1) % 2]
        classes = torch.arange(len(table), device=table.device)
        for part in torch.split(classes, PART):
            between = squared_distances_of_rows(self.means, part)  # (c, C)
            between = between.scatter(1, part[:, None], -torch.inf)  # itself first
            nearest = torch.sort(between, dim=1, stable=True).indices
            table[part] = nearest[:, : table.shape[1]]
        broadcast_(table)

    def nearest_classes(self, epoch: int) -> NDArray[np.int64] | None:
        """Return (C, size) for the current epoch or the next; None: not known yet."""
        if epoch < 2:
            return None
        table: NDArray[np.int64] = self.tables[epoch % 2].cpu().numpy().copy()
        return table
