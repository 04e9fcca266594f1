"""What a fine-tuning takes: a metric loss, a head, a miner."""

import torch.nn.functional as F
from torch import nn

from sslpipe.metric_learning.heads import Head
from sslpipe.metric_learning.heads.base import row_mean
from sslpipe.metric_learning.losses.base import MetricLoss
from sslpipe.metric_learning.losses.pairwise import per_pair
from sslpipe.metric_learning.miners import Miner


class CosinePairs(MetricLoss, normalize=True):
    """[margin - cos]+ of positives, [cos]+ of negatives."""

    @staticmethod
    def row_terms(batch, pairs, *, margin: float = 0.9):
        similarities = batch.similarities()
        return [
            per_pair(F.relu(margin - similarities), pairs.positive),
            per_pair(F.relu(similarities), pairs.negative),
        ]


class LinearHead(Head):
    """Cross entropy of a linear layer."""

    def __init__(self, num_classes, dim):
        super().__init__(num_classes, dim)
        self.layer = nn.Linear(dim, num_classes)

    def compute_loss(self, x, labels):
        return row_mean(F.cross_entropy(self.layer(x), labels, reduction="none"))


class NearNegatives(Miner):
    """Negatives at an angle below 90 degrees."""

    def select(self, batch, pairs, *, loss=None):
        return pairs._replace(negative=pairs.negative & (batch.similarities() > 0))
