"""Labelled fine-tuning after pretraining: losses, heads, miners, batches with K images per class.

For whoever has labels: `sslpipe train` with a fine-tuning recipe uses all of it, a notebook one
part at a time, `TripletLoss(margin=0.2)(embeddings, labels, miner=SemiHardMiner())`. The tables
METRIC_LOSSES, HEADS and MINERS map a recipe's names to the classes. Start reading with `losses`,
then `finetune`, which trains. Nothing of pretraining imports this package.

Losses, heads and miners are imported when one is first used: a recipe is read without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sslpipe.metric_learning.heads import *  # noqa: F403
    from sslpipe.metric_learning.losses import *  # noqa: F403
    from sslpipe.metric_learning.miners import *  # noqa: F403
    from sslpipe.metric_learning.pk_sampler import *  # noqa: F403

_PARTS = ("heads", "losses", "miners", "pk_sampler")


def __getattr__(name: str) -> Any:
    """Import a public name of the parts when it is first used."""
    if name == "__all__":
        return _public()
    if not name.startswith("_"):
        for part in _PARTS:
            module = import_module(f"{__name__}.{part}")
            if name in module.__all__:
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names alone."""
    return _public()


def _public() -> list[str]:
    return [name for part in _PARTS for name in import_module(f"{__name__}.{part}").__all__]
