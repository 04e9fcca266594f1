"""Losses of pairs, triplets and tuples of labelled embeddings, as the papers print them.

For fine-tuning recipes (`loss.kind` is a name of METRIC_LOSSES) and for notebooks:
`METRIC_LOSSES["triplet"](margin=0.2)(embeddings, labels)`. Those with weights of their own take
num_classes and dim, as heads do. Start with `base.MetricLoss`, then `pairwise`, which says who is
compared with whom; a new loss is a class with `row_terms` and a line below.
"""

from collections.abc import Callable

from torch import nn

from sslpipe.metric_learning.losses import clusters, pair, pml, triplet, tuplet
from sslpipe.metric_learning.losses.base import MetricLoss
from sslpipe.registry import Table

METRIC_LOSSES: Table[Callable[..., nn.Module]] = Table(
    "metric loss",
    {
        "angular": tuplet.AngularLoss,
        "batch_hard": triplet.BatchHardLoss,
        "chopra": pair.ChopraLoss,
        "circle": tuplet.CircleLoss,
        "contrastive": pair.ContrastiveLoss,
        "deep_id2": pair.DeepID2Loss,
        "hard_cluster": clusters.HardClusterLoss,
        "hdc": pair.HDCLoss,
        "hierarchical_triplet": clusters.HierarchicalTripletLoss,
        "info_nce": tuplet.InfoNCELoss,
        "lifted": tuplet.LiftedStructureLoss,
        "lmnn": triplet.LMNNLoss,
        "magnet": clusters.MagnetLoss,
        "margin": pair.MarginLoss,
        "multi_similarity": tuplet.MultiSimilarityLoss,
        "n_pair": tuplet.NPairLoss,
        "nca": tuplet.NCALoss,
        "nt_xent": tuplet.LabelledNTXentLoss,
        "pml": pml.DelegatedLoss,
        "ranking_and_tags": triplet.RankingAndTagsLoss,
        "sup_con": tuplet.LabelledSupConLoss,
        "triplet": triplet.TripletLoss,
        "triplet_ratio": triplet.TripletRatioLoss,
        "tuple_max": tuplet.TupleMaxLoss,
        "tuplet_margin": tuplet.TupletMarginLoss,
        "unified": tuplet.UnifiedLoss,
    },
    "sslpipe.metric_losses",
)

__all__ = ["METRIC_LOSSES", "MetricLoss"]
