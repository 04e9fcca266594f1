"""Losses of pairs, triplets and tuples of labelled embeddings, as the papers print them.

For fine-tuning recipes (`loss.kind` is a name of METRIC_LOSSES) and for notebooks:
`TripletLoss(margin=0.2)(embeddings, labels)`. Those with weights of their own take num_classes and
dim, as heads do. Start with `metric_loss.MetricLoss`, then `pairwise`, which says who is compared
with whom; a new loss is a class with its settings as fields, `row_terms`, and a line below.
"""

from sslpipe.metric_learning.losses.clusters import (
    HardClusterLoss,
    HierarchicalTripletLoss,
    MagnetLoss,
)
from sslpipe.metric_learning.losses.metric_loss import MetricLoss
from sslpipe.metric_learning.losses.multi_label import MultiLabelCircleLoss
from sslpipe.metric_learning.losses.pair import (
    ChopraLoss,
    ContrastiveLoss,
    DeepID2Loss,
    HDCLoss,
    MarginLoss,
)
from sslpipe.metric_learning.losses.pml import DelegatedLoss
from sslpipe.metric_learning.losses.triplet import (
    BatchHardLoss,
    LMNNLoss,
    RankingAndTagsLoss,
    TripletLoss,
    TripletRatioLoss,
)
from sslpipe.metric_learning.losses.tuplet import (
    AngularLoss,
    CircleLoss,
    InfoNCELoss,
    LabelledNTXentLoss,
    LabelledSupConLoss,
    LiftedStructureLoss,
    MultiSimilarityLoss,
    NCALoss,
    NPairLoss,
    TupleMaxLoss,
    TupletMarginLoss,
    UnifiedLoss,
)
from sslpipe.registry import Table
from sslpipe.registry.part import Part

METRIC_LOSSES: Table[type[Part]] = Table(
    "metric loss",
    {
        "angular": AngularLoss,
        "batch_hard": BatchHardLoss,
        "chopra": ChopraLoss,
        "circle": CircleLoss,
        "contrastive": ContrastiveLoss,
        "deep_id2": DeepID2Loss,
        "hard_cluster": HardClusterLoss,
        "hdc": HDCLoss,
        "hierarchical_triplet": HierarchicalTripletLoss,
        "info_nce": InfoNCELoss,
        "lifted": LiftedStructureLoss,
        "lmnn": LMNNLoss,
        "magnet": MagnetLoss,
        "margin": MarginLoss,
        "multi_similarity": MultiSimilarityLoss,
        "n_pair": NPairLoss,
        "nca": NCALoss,
        "nt_xent": LabelledNTXentLoss,
        "pml": DelegatedLoss,
        "ranking_and_tags": RankingAndTagsLoss,
        "sup_con": LabelledSupConLoss,
        "triplet": TripletLoss,
        "triplet_ratio": TripletRatioLoss,
        "tuple_max": TupleMaxLoss,
        "tuplet_margin": TupletMarginLoss,
        "unified": UnifiedLoss,
    },
    "sslpipe.metric_losses",
)

__all__ = ["METRIC_LOSSES", "DelegatedLoss", "MetricLoss", "MultiLabelCircleLoss"]
__all__ += ["HardClusterLoss", "HierarchicalTripletLoss", "MagnetLoss"]
__all__ += ["ChopraLoss", "ContrastiveLoss", "DeepID2Loss", "HDCLoss", "MarginLoss"]
__all__ += ["BatchHardLoss", "LMNNLoss", "RankingAndTagsLoss", "TripletLoss", "TripletRatioLoss"]
__all__ += ["AngularLoss", "CircleLoss", "InfoNCELoss", "LabelledNTXentLoss", "LabelledSupConLoss"]
__all__ += ["LiftedStructureLoss", "MultiSimilarityLoss", "NCALoss", "NPairLoss"]
__all__ += ["TupleMaxLoss", "TupletMarginLoss", "UnifiedLoss"]
