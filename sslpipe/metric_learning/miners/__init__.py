"""Miners: which pairs or triplets of a batch a loss sees.

For fine-tuning recipes (`miner.kind` is a name of MINERS) and for notebooks: alone,
`MINERS["triplets"]()(embeddings, labels)`, or in a loss, `loss(embeddings, labels, miner=miner)`.
Start with `base.Miner`; a new miner is a class with `select` and a line below.
"""

from collections.abc import Callable

from sslpipe.metric_learning.miners import base, pairs, triplets
from sslpipe.metric_learning.miners.base import Miner
from sslpipe.registry import Table

MINERS: Table[Callable[..., Miner]] = Table(
    "miner",
    {
        "all": pairs.AllPairsMiner,
        "angular": triplets.AngularMiner,
        "batch_hard": pairs.BatchHardMiner,
        "curriculum": base.CurriculumMiner,
        "distance_weighted": triplets.DistanceWeightedMiner,
        "hardest_share": pairs.HardestShareMiner,
        "maximum_loss": pairs.MaximumLossMiner,
        "multi_similarity": pairs.MultiSimilarityMiner,
        "one_per_class": pairs.OnePerClassMiner,
        "packaged": pairs.PackagedMiner,
        "pair_margin": pairs.PairMarginMiner,
        "random_negative": triplets.RandomNegativeMiner,
        "triplets": triplets.TripletMiner,
    },
    "sslpipe.miners",
)

__all__ = ["MINERS", "Miner"]
