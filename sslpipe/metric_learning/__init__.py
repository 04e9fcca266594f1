"""Labelled fine-tuning after pretraining: losses, heads, miners, batches with K images a class.

METRIC_LOSSES: losses `forward(embeddings, labels, *, ids, ref, miner) -> ()` of pairs, triplets and
tuples. Those with weights of their own take num_classes and dim as heads do. MINERS: what narrows
their pairs down.
"""

from collections.abc import Callable

from torch import nn

from sslpipe.metric_learning.losses import clusters, pair, triplet
from sslpipe.metric_learning.losses import tuplet as contrast
from sslpipe.metric_learning.losses.angular import angular
from sslpipe.metric_learning.losses.base import loss_of
from sslpipe.metric_learning.losses.cascade import hdc
from sslpipe.metric_learning.losses.pml import DelegatedLoss
from sslpipe.metric_learning.miners.pairs import MINERS

__all__ = ["METRIC_LOSSES", "MINERS"]

METRIC_LOSSES: dict[str, Callable[..., nn.Module]] = {
    "angular": loss_of(angular, normalize=True),
    "batch_hard": loss_of(triplet.batch_hard, normalize=False),
    "chopra": loss_of(pair.chopra, normalize=True),
    "circle": loss_of(contrast.circle, normalize=True),
    "contrastive": loss_of(pair.contrastive, normalize=False),
    "deep_id2": loss_of(pair.DeepID2, normalize=False),
    "hard_cluster": loss_of(clusters.hard_cluster, normalize=False),
    "hdc": loss_of(hdc, normalize=False),
    "hierarchical_triplet": loss_of(clusters.HierarchicalTriplet, normalize=True),
    "info_nce": loss_of(contrast.info_nce, normalize=True),
    "lifted": loss_of(contrast.lifted, normalize=False),
    "lmnn": loss_of(triplet.LargeMarginNeighbours, normalize=False, reduction="sum"),
    "magnet": loss_of(clusters.magnet, normalize=False),
    "margin": loss_of(pair.Margin, normalize=True),
    "multi_similarity": loss_of(contrast.multi_similarity, normalize=True),
    "n_pair": loss_of(contrast.n_pair, normalize=False),
    "nca": loss_of(contrast.nca, normalize=False),
    "nt_xent": loss_of(contrast.nt_xent, normalize=True),
    "pml": DelegatedLoss,
    "ranking_and_tags": loss_of(triplet.RankingAndTags, normalize=False),
    "sup_con": loss_of(contrast.sup_con, normalize=True),
    "triplet": loss_of(triplet.triplet, normalize=True),
    "triplet_ratio": loss_of(triplet.triplet_ratio, normalize=False),
    "tuple_max": loss_of(contrast.tuple_max, normalize=True),
    "tuplet_margin": loss_of(contrast.tuplet_margin, normalize=True),
    "unified": loss_of(contrast.unified, normalize=True),
}
