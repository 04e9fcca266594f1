"""The row that `sslpipe choose` puts first, as the folder of an ordinary backbone."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from sslpipe.data.index import Split
from sslpipe.evaluation.embed import Embeddings, save_embeddings
from sslpipe.evaluation.flatten import UNLABELLED_POWER
from sslpipe.export.load import load_backbone
from sslpipe.export.whiten import whiten_export
from sslpipe.export.write import export_model


def write_chosen(
    out: Path,
    source: str,
    rows: Embeddings,
    split: Split,
    power: float | None,
    say: Callable[[str], None] = lambda text: None,
) -> str | None:
    """Write an export of a source, flattened as its row of the ranking is, and prove it.

    Args:
        out: The folder; one that is there is replaced.
        source: What `load_backbone` takes: one network, or a join.
        rows: Its features of the images that chose, not flattened.
        split: Where these are.
        power: Of the flattening, which is fitted on all rows; None: as they are.
        say: Called with what comes next.

    Returns:
        What weakens it, as a sentence; None: nothing.

    Raises:
        ExportError: The weights that are reloaded give other features.
    """
    model, _ = load_backbone(source).matched(split)
    export_model(model, out, ["safetensors"], overwrite=True, say=say)
    if power is None:
        return None
    with TemporaryDirectory() as folder:
        features = Path(folder) / "rows.safetensors"
        save_embeddings(features, rows, model.features_metadata(model.view, split))
        whiten_export(out, features, power=power, say=say)
    count, width = rows.features.shape
    if power <= UNLABELLED_POWER or count > width:
        return None
    return (
        f"power {power:g} is fitted on {count:,} images, fewer than the {width:,} features: these "
        "very images are then nearly orthogonal to each other; search among other images, or fit "
        f"it anew by `sslpipe whiten --power {UNLABELLED_POWER:g}`"
    )
