"""A PCA, whitening or not, inside an export, beside the weights that its features come from."""

import json
from pathlib import Path

from sslpipe.errors import UserError
from sslpipe.evaluation.embed import load_embeddings
from sslpipe.evaluation.whiten import FLOOR, fit_pca, fit_whitening, save_whitening
from sslpipe.export.load import SSLPIPE_KEY, load_backbone
from sslpipe.export.model_card import sha256_sums
from sslpipe.portable import write_atomically


def whiten_export(
    export: Path,
    train: Path,
    floor: float | None = None,
    dims: int | None = None,
    *,
    pca: bool = False,
) -> tuple[int, int]:
    """Fit a whitening and store it in an export with the crops of the features it was fitted on.

    Args:
        export: The folder of an export; whitening.safetensors is added, config.json and
            SHA256SUMS are written anew.
        train: A features file of the train split, by this export, not whitened.
        floor: Added to each variance, as a share of their mean; None: FLOOR.
        dims: Principal axes that are kept, the largest first; None: all.
        pca: Rotate to the principal axes, the largest first, without whitening; takes no floor.

    Returns:
        The number of features before and after.

    Raises:
        UserError: Where the folder is no export, or the features are not its own.
    """
    config_json = export / "config.json"
    if not config_json.is_file():
        raise UserError(f"{export} holds no config.json; name the folder of an export")
    backbone = load_backbone(export)
    rows, metadata = load_embeddings(train)
    if metadata.get("backbone_sha256") != backbone.config.weights_sha256:
        raise UserError(f"{train} is of another backbone; embed the train split with {export}")
    if "whitening_sha256" in metadata:
        raise UserError(f"{train} is whitened already; embed with an export without whitening")
    width = rows.features.shape[1]
    if dims is not None and dims > width:
        raise UserError(f"--dims {dims} is more than the {width} features")
    if pca and floor is not None:
        raise UserError(
            f"--floor {floor:g} is of whitening, and --pca does not whiten; leave one out"
        )
    chosen = FLOOR if floor is None else floor
    fitted = fit_pca(rows, dims) if pca else fit_whitening(rows, chosen, dims)
    # the new file first: a config.json that names it is written when it is there
    sha256 = save_whitening(export / "whitening.safetensors", fitted)
    tree = json.loads(config_json.read_text(encoding="utf-8"))
    ours = tree.get(SSLPIPE_KEY, tree)  # inside another library's, or alone
    ours |= {"whitening_sha256": sha256, "view": metadata["view"]}
    write_atomically(config_json, json.dumps(tree, indent=2) + "\n")
    sums = export / "SHA256SUMS"
    sums.unlink(missing_ok=True)  # it does not list itself
    sums.write_text(sha256_sums(export), encoding="utf-8")
    return width, dims or width
