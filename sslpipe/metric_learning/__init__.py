"""Labelled fine-tuning after pretraining: losses, heads, miners, batches with K images per class.

For whoever has labels: `sslpipe train` with a fine-tuning recipe uses all of it, a notebook one
part at a time, `METRIC_LOSSES["triplet"](margin=0.2)(embeddings, labels)`. METRIC_LOSSES, HEADS and
MINERS map a recipe's names to the classes. Start reading with `losses`, then `finetune`, which
trains. Nothing of pretraining imports this package.
"""

from sslpipe.metric_learning.heads import HEADS, Head
from sslpipe.metric_learning.losses import METRIC_LOSSES, MetricLoss
from sslpipe.metric_learning.miners import MINERS, Miner

__all__ = ["HEADS", "METRIC_LOSSES", "MINERS", "Head", "MetricLoss", "Miner"]
