"""Labelled fine-tuning after pretraining: losses, heads, miners, batches with K images per class.

For whoever has labels: `sslpipe train` with a fine-tuning recipe uses all of it, a notebook one
part at a time, `TripletLoss(margin=0.2)(embeddings, labels, miner=SemiHardMiner())`. The tables
METRIC_LOSSES, HEADS and MINERS map a recipe's names to the classes. Start reading with `losses`,
then `finetune`, which trains. Nothing of pretraining imports this package.
"""

from sslpipe.metric_learning import heads, losses, miners
from sslpipe.metric_learning.heads import *  # noqa: F403
from sslpipe.metric_learning.losses import *  # noqa: F403
from sslpipe.metric_learning.miners import *  # noqa: F403

__all__ = [*heads.__all__, *losses.__all__, *miners.__all__]
