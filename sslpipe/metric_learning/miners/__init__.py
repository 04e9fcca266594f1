"""Miners: which pairs or triplets of a batch a loss sees.

For fine-tuning recipes (`miner.kind` is a name of MINERS) and for notebooks: alone,
`SemiHardMiner()(embeddings, labels)`, or in a loss, `loss(embeddings, labels, miner=miner)`. Start
with `base.Miner`; a new miner is a class with `select` and a line below.
"""

from collections.abc import Callable

from sslpipe.metric_learning.miners.base import CurriculumMiner, Miner
from sslpipe.metric_learning.miners.pairs import (
    AllPairsMiner,
    BatchHardMiner,
    HardestShareMiner,
    MaximumLossMiner,
    MultiSimilarityMiner,
    OnePerClassMiner,
    PackagedMiner,
    PairMarginMiner,
)
from sslpipe.metric_learning.miners.triplets import (
    AngularMiner,
    DistanceWeightedMiner,
    RandomNegativeMiner,
    SemiHardMiner,
    TripletMiner,
)
from sslpipe.registry import Table

MINERS: Table[Callable[..., Miner]] = Table(
    "miner",
    {
        "all": AllPairsMiner,
        "angular": AngularMiner,
        "batch_hard": BatchHardMiner,
        "curriculum": CurriculumMiner,
        "distance_weighted": DistanceWeightedMiner,
        "hardest_share": HardestShareMiner,
        "maximum_loss": MaximumLossMiner,
        "multi_similarity": MultiSimilarityMiner,
        "one_per_class": OnePerClassMiner,
        "packaged": PackagedMiner,
        "pair_margin": PairMarginMiner,
        "random_negative": RandomNegativeMiner,
        "triplets": TripletMiner,
    },
    "sslpipe.miners",
)

__all__ = [
    "MINERS",
    "AllPairsMiner",
    "AngularMiner",
    "BatchHardMiner",
    "CurriculumMiner",
    "DistanceWeightedMiner",
    "HardestShareMiner",
    "MaximumLossMiner",
    "Miner",
    "MultiSimilarityMiner",
    "OnePerClassMiner",
    "PackagedMiner",
    "PairMarginMiner",
    "RandomNegativeMiner",
    "SemiHardMiner",
    "TripletMiner",
]
