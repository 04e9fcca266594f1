"""Contrastive pretraining on webdataset shards: exact order and resume, honest evaluation.

What a notebook needs stands here, imported when it is first used, so that `sslpipe --help` needs no
torch. Start reading at `train.py` (pretraining, from top to bottom) or at the command line,
`__main__.py`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sslpipe.api import train
    from sslpipe.augment.two_views import TwoViews
    from sslpipe.data.index import load_index
    from sslpipe.evaluation.knn import knn
    from sslpipe.export.load import load_backbone
    from sslpipe.export.write import export_backbone
    from sslpipe.losses import (
        DCLLoss,
        HardNegativeLoss,
        MoCoLoss,
        NTXentLoss,
        SupConLoss,
    )
    from sslpipe.recipe import load_recipe

__all__ = [
    "DCLLoss",
    "HardNegativeLoss",
    "MoCoLoss",
    "NTXentLoss",
    "SupConLoss",
    "TwoViews",
    "export_backbone",
    "knn",
    "load_backbone",
    "load_index",
    "load_recipe",
    "train",
]
__version__ = "0.1.0"

_HOMES = {
    "DCLLoss": "losses",
    "HardNegativeLoss": "losses",
    "MoCoLoss": "losses",
    "NTXentLoss": "losses",
    "SupConLoss": "losses",
    "TwoViews": "augment.two_views",
    "export_backbone": "export.write",
    "knn": "evaluation.knn",
    "load_backbone": "export.load",
    "load_index": "data.index",
    "load_recipe": "recipe",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name == "train":  # the module of that name, which can be called
        return import_module("sslpipe.train")
    if name not in _HOMES:
        raise AttributeError(f"module 'sslpipe' has no attribute {name!r}")
    value = getattr(import_module(f"sslpipe.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, for completion."""
    return sorted({*globals(), *__all__})
