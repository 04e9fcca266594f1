"""Self-supervised contrastive pretraining on webdataset shards."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sslpipe.export import load_backbone
    from sslpipe.recipe import load_recipe
    from sslpipe.train import train

__all__ = ["load_backbone", "load_recipe", "train"]
__version__ = "0.1.0"

_HOMES = {"load_backbone": "export.load", "load_recipe": "recipe.pretrain", "train": "train"}


def __getattr__(name: str) -> Any:
    """Import the public names when they are first used: `sslpipe --help` needs no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'sslpipe' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"sslpipe.{_HOMES[name]}"), name)
