"""What a fine-tuning takes: a metric loss, a head, a miner."""

import torch.nn.functional as F
from torch import nn

from sslpipe.metric_learning.heads import Head
from sslpipe.metric_learning.heads.head import row_mean
from sslpipe.metric_learning.losses.metric_loss import MetricLoss
from sslpipe.metric_learning.losses.pairwise import per_pair
from sslpipe.metric_learning.miners import Miner


class CosinePairs(MetricLoss):
    """[margin - cos]+ of positives, [cos]+ of negatives."""

    margin: float = 0.9
    """The cosine that positives should reach."""
    normalize: bool = True

    def row_terms(self, batch, pairs):
        similarities = batch.similarities()
        return [
            per_pair(F.relu(self.margin - similarities), pairs.positive),
            per_pair(F.relu(similarities), pairs.negative),
        ]


class LinearHead(Head):
    """Cross entropy of a linear layer."""

    def setup(self):
        super().setup()
        self.layer = nn.Linear(self.dim, self.num_classes)

    def compute_loss(self, x, labels):
        return row_mean(F.cross_entropy(self.layer(x), labels, reduction="none"))


class NearNegatives(Miner):
    """Negatives at an angle below 90 degrees."""

    def select(self, batch, pairs):
        return pairs._replace(negative=pairs.negative & (batch.similarities() > 0))
