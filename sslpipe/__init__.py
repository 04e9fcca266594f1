"""Contrastive pretraining on webdataset shards: exact order and resume, honest evaluation.

What a notebook needs stands here, imported when it is first used, so that `sslpipe --help` needs no
torch. Start reading at `pretrain.py` (pretraining, from top to bottom) or at the command line,
`__main__.py`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sslpipe.api import check_recipe, embed, preview, train, write_report
    from sslpipe.augment.two_views import TwoViews
    from sslpipe.data.index import load_index
    from sslpipe.data.torch_dataset import ImageDataset
    from sslpipe.evaluation.arrays import knn, linear_probe, retrieval, verification
    from sslpipe.export.load import load_backbone
    from sslpipe.export.write import export_backbone
    from sslpipe.losses import DCLLoss, HardNegativeLoss, MoCoLoss, NTXentLoss, SupConLoss
    from sslpipe.recipe.reading import load_recipe
    from sslpipe.registry.plugins import load_plugins
    from sslpipe.report.suite import suite
    from sslpipe.sharding.dataset import build_dataset

__all__ = [
    "DCLLoss",
    "HardNegativeLoss",
    "ImageDataset",
    "MoCoLoss",
    "NTXentLoss",
    "SupConLoss",
    "TwoViews",
    "build_dataset",
    "check_recipe",
    "embed",
    "export_backbone",
    "knn",
    "linear_probe",
    "load_backbone",
    "load_index",
    "load_plugins",
    "load_recipe",
    "preview",
    "retrieval",
    "suite",
    "train",
    "verification",
    "write_report",
]

_LOSSES = ("DCLLoss", "HardNegativeLoss", "MoCoLoss", "NTXentLoss", "SupConLoss")
_HOMES = {
    **dict.fromkeys(_LOSSES, "losses"),
    "ImageDataset": "data.torch_dataset",
    "TwoViews": "augment.two_views",
    "build_dataset": "sharding.dataset",
    "check_recipe": "api",
    "embed": "api",
    "export_backbone": "export.write",
    "knn": "evaluation.arrays",
    "linear_probe": "evaluation.arrays",
    "load_backbone": "export.load",
    "load_index": "data.index",
    "load_plugins": "registry.plugins",
    "load_recipe": "recipe.reading",
    "preview": "api",
    "retrieval": "evaluation.arrays",
    "suite": "report.suite",
    "train": "api",
    "verification": "evaluation.arrays",
    "write_report": "api",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name == "__version__":
        return _version()
    homes = _homes()
    if name not in homes:
        raise AttributeError(f"module 'sslpipe' has no attribute {name!r}")
    value = getattr(import_module(homes[name]), name)
    globals()[name] = value
    return value


def _homes() -> dict[str, str]:
    """Return the public names, those of satellites too, with the modules that have them."""
    from sslpipe.satellites import gather

    homes = {name: f"sslpipe.{module}" for name, module in _HOMES.items()}
    return gather("names", "NAMES", homes)


def _version() -> str:
    """Return the version of the tag that was installed; of a tree on the path, "0+unknown"."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("sslpipe")
    except PackageNotFoundError:
        return "0+unknown"


def __dir__() -> list[str]:
    """List the public names alone."""
    return sorted(_homes())
