"""Contrastive pretraining on webdataset shards: exact order and resume, honest evaluation.

What a notebook needs is listed in `__init__.pyi` and imported when it is first used, so that
`sslpipe --help` needs no torch. Start reading at `pretrain.py` (pretraining, from top to bottom) or
at the command line, `__main__.py`.
"""

from importlib import import_module
from typing import Any

import lazy_loader

_core_name, _, __all__ = lazy_loader.attach_stub(__name__, __file__)  # what __init__.pyi imports


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name == "__version__":
        return _version()
    if name in __all__:
        return _core_name(name)
    modules = _modules()
    if name not in modules:
        raise AttributeError(f"module 'sslpipe' has no attribute {name!r}")
    value = getattr(import_module(modules[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names alone, those of satellites too."""
    return sorted(_modules())


def _modules() -> dict[str, str]:
    """Return where each public name comes from; of the core's, `__init__.pyi` says where."""
    from sslpipe.satellites import gather

    return gather("names", "NAMES", dict.fromkeys(__all__, "sslpipe"))


def _version() -> str:
    """Return the version of the tag that was installed; of a tree on the path, "0+unknown"."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("sslpipe")
    except PackageNotFoundError:
        return "0+unknown"
