"""A whitening inside an export, beside the weights that its features come from."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import save

from sslpipe.arguments import checked
from sslpipe.errors import UserError, as_path, for_caller
from sslpipe.evaluation.flatten import choose_power
from sslpipe.evaluation.vectors import Vectors, open_features
from sslpipe.evaluation.whiten import Whitening, beside_whitening, fit_whitening
from sslpipe.export.folder import SSLPIPE_KEY, sha256_sums
from sslpipe.export.load import FrozenBackbone, load_backbone
from sslpipe.export.model_card import with_flattening
from sslpipe.files import Tree, json_text, read_json
from sslpipe.portable import write_atomically
from sslpipe.weights.source import is_export


def flatten_backbone(model: FrozenBackbone, fitted: Whitening) -> None:
    """Let `encode` of a backbone, and of its exports, apply a whitening."""
    model.whitening = fitted
    model.update_config(whitening_sha256=hashlib.sha256(save(fitted._asdict())).hexdigest())


@checked
def whiten(
    export: str | Path,
    train: Vectors,
    *,
    dims: int | None = None,
    power: float | None = None,
    say: Callable[[str], None] | None = None,
) -> Whitening:
    """Flatten the features of an export by the PCA of train features, as `sslpipe whiten` does.

    >>> train = sslpipe.embed("out/backbone", "out/photos", "train")
    >>> sslpipe.whiten("out/backbone", train)  # `load_backbone` of it encodes flattened from now on

    Args:
        export: Its folder: whitening.safetensors is added, config.json and SHA256SUMS change.
        train: Features of the train split, by this export, not flattened: a file, a result of
            `embed`, or an array.
        dims: Axes of the largest variances that are kept; None: all.
        power: 1 whitens, 0 only centres and rotates; None: what is best on train by its labels,
            without labels 0.25.
        say: Called with the power that was chosen, and why; None: nobody is.

    Returns:
        What `encode` of the export applies from now on.

    Raises:
        UserError: The folder is no export, or the features are not its own, or of other data.
    """
    export = as_path(export, "export")
    say = say or (lambda text: None)
    if not (export / "config.json").is_file():
        raise UserError(f"{export} holds no config.json; name the folder of an export")
    if not is_export(export / "config.json"):
        raise UserError(
            f"{export} is of another program; write an export of it with `sslpipe export` first"
        )
    backbone = load_backbone(export)
    if backbone.whitening is not None:
        for file in (*sorted(export.glob("model*.onnx")), export / "model.pt2"):
            if file.exists():
                raise UserError(
                    f"{file} may hold the flattening that {export} has; whiten a folder of "
                    "--format=safetensors alone, and export the other formats from it"
                )
    rows, metadata, _ = open_features(train)
    width = rows.features.shape[1]
    if metadata or isinstance(train, str | Path):
        named = str(train) if isinstance(train, str | Path) else "train"
        if metadata.get("backbone_sha256") != backbone.config.weights_sha256:
            raise UserError(f"{named} is of another backbone; embed the train split with {export}")
        if "whitening_sha256" in metadata:
            raise UserError(f"{named} is flattened already; embed with the export as it was before")
    elif backbone.whitening is not None:  # nothing is known of an array
        raise UserError(
            f"{export} flattens its features already, so that train may be flattened, too; give "
            "the file that `sslpipe embed` wrote with the export as it was before"
        )
    elif width != backbone.num_features:
        raise UserError(
            f"train has {width} features a row, and {export} makes {backbone.num_features}; "
            "embed the train split with it"
        )
    kept = width if dims is None else dims
    if power is None:
        power, why, helps = choose_power(rows, dims=kept)
        unhelpful = for_caller("flattening does not help here: --power=0 keeps distances")
        say(why if helps else f"{why}; {unhelpful}")
    fitted = fit_whitening(rows, dims=kept, power=power, say=say)
    view: dict[str, Any] = {k: metadata[k] for k in ("view", "image") if k in metadata}
    card = export / "README.md"
    text = card.read_text(encoding="utf-8") if card.is_file() else ""
    _put(export, fitted, view, with_flattening(text, num_features=width, num_encoded=kept))
    return fitted


def _put(export: Path, fitted: Whitening, view: dict[str, Any], card: str) -> None:
    """Write a whitening, its view (the range of its images), and the model card into an export.

    At every instant the folder is the export before or the one after: until config.json names it,
    the new whitening lies beside the old one (see `load_whitening`), and SHA256SUMS lists what both
    exports have.
    """
    file, config_json, sums = (
        export / name for name in ("whitening.safetensors", "config.json", "SHA256SUMS")
    )
    tree = read_json(config_json, Tree)
    content = save(fitted._asdict())
    sha256 = hashlib.sha256(content).hexdigest()
    ours = tree.get(SSLPIPE_KEY, tree)  # inside another library's, or alone
    ours |= {"whitening_sha256": sha256, **view}
    text = json_text(tree)
    # the new whitening, then lines for it
    beside = beside_whitening(file, sha256)
    write_atomically(beside, content)
    lines = sums.read_text(encoding="utf-8") if sums.exists() else sha256_sums(export)
    config_sha256 = hashlib.sha256(text.encode()).hexdigest()
    card_sha256 = hashlib.sha256(card.encode()).hexdigest()
    lines += f"{config_sha256}  {config_json.name}\n{sha256}  {file.name}\n"
    lines += f"{card_sha256}  README.md\n"
    write_atomically(sums, lines)
    # from here on it is the new export
    write_atomically(config_json, text)
    beside.replace(file)
    for left in export.glob(f"{file.stem}-*{file.suffix}"):  # of one that was stopped
        left.unlink()
    write_atomically(export / "README.md", card)
    others = sha256_sums(export).splitlines(keepends=True)
    write_atomically(sums, "".join(line for line in others if not line.endswith("  SHA256SUMS\n")))
