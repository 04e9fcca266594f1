"""The row that `sslpipe choose` says to use, as the folder of an ordinary backbone."""

from pathlib import Path

from sslpipe.data.index import Split
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.whiten import fit_whitening
from sslpipe.export.load import load_backbone
from sslpipe.export.whiten import flatten_backbone
from sslpipe.export.write import export_model


def write_chosen(
    out: Path,
    source: str,
    rows: Embeddings,
    split: Split,
    power: float | None,
) -> None:
    """Write an export of a source, flattened as its row of the ranking is, and prove it.

    Args:
        out: The folder; one that is there is replaced.
        source: What `load_backbone` takes: one network, or a join.
        rows: Its features of the images that chose, not flattened.
        split: Where these are.
        power: Of the flattening, which is fitted on all rows; None: as they are.

    Raises:
        ExportError: The weights that are reloaded give other features.
    """
    model, _ = load_backbone(source).matched(split)
    if power is not None:
        flatten_backbone(model, fit_whitening(rows, power=power))
    export_model(model, out, ["safetensors"], overwrite=True)
