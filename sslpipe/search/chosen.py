"""The row that `sslpipe choose` says to use, as the folder of an ordinary backbone."""

from pathlib import Path

from sslpipe.data.index import Split
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.flatten import UNLABELLED_POWER
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
) -> str | None:
    """Write an export of a source, flattened as its row of the ranking is, and prove it.

    Args:
        out: The folder; one that is there is replaced.
        source: What `load_backbone` takes: one network, or a join.
        rows: Its features of the images that chose, not flattened.
        split: Where these are.
        power: Of the flattening, which is fitted on all rows; None: as they are.

    Returns:
        What weakens it, as a sentence; None: nothing.

    Raises:
        ExportError: The weights that are reloaded give other features.
    """
    model, _ = load_backbone(source).matched(split)
    if power is not None:
        flatten_backbone(model, fit_whitening(rows, power=power))
    export_model(model, out, ["safetensors"], overwrite=True)
    count, width = rows.features.shape
    if power is None or power <= UNLABELLED_POWER or count > width:
        return None
    return (
        f"power {power:g} is fitted on {count:,} images, fewer than the {width:,} features: these "
        "very images are then nearly orthogonal to each other; search among other images, or fit "
        f"it anew by `sslpipe whiten --power {UNLABELLED_POWER:g}`"
    )
