"""The tables that a `kind` of a fine-tuning's recipe is looked up in, beside those of the core."""

from sslpipe.metric_learning.heads import HEADS
from sslpipe.metric_learning.losses import METRIC_LOSSES
from sslpipe.metric_learning.miners import MINERS

SETTINGS = {
    "loss": (("metric loss", METRIC_LOSSES), ("head", HEADS)),
    "miner": (("miner", MINERS),),
}
