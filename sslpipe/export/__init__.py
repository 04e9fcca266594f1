"""Hand a trained backbone over: written in the formats of others, proved equal, loaded in one line.

`load_backbone` reads an export or a run directory (`load`), for anyone with images to embed;
`export_backbone` and `export_model` write formats (`write`), each loaded again in a clean process
(`verify`); `model_card` writes what people read. Start reading at `load.load_backbone`; a format of
one's own is an entry in `formats.FORMATS` and one in `verify.READERS`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sslpipe.export.load import FrozenBackbone, load_backbone, load_run
    from sslpipe.export.write import export_backbone, export_model

__all__ = ["FrozenBackbone", "export_backbone", "export_model", "load_backbone", "load_run"]


def __getattr__(name: str) -> Any:
    """Import the public names when they are first used.

    `python -m sslpipe.export.verify` would otherwise import itself twice, and a stranger's file
    format would be read with the whole package loaded.
    """
    if name not in __all__:
        raise AttributeError(f"module 'sslpipe.export' has no attribute {name!r}")
    from importlib import import_module

    module = "write" if name.startswith("export_") else "load"
    return getattr(import_module(f"sslpipe.export.{module}"), name)
