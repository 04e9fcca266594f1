"""Image files and folders for a gallery: which there are, and their embeddings."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from sslpipe.data.decode import BadSample, decode
from sslpipe.errors import UserError
from sslpipe.export.load import FrozenBackbone
from sslpipe.models.state import check_finite
from sslpipe.portable import read_regular


def embed_images(
    backbone: FrozenBackbone,
    paths: Sequence[Path],
    *,
    batch_size: int = 64,
    on_bad: Callable[[Path, str], None] | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> tuple[list[int], Tensor]:
    """Embed image files as `sslpipe embed` would embed them in shards, each at its own size.

    Args:
        backbone: On any device.
        paths: Of the images.
        batch_size: Images at a time.
        on_bad: Called with the path of an image that cannot be decoded, and why.
        advance: Called with the number of images of each batch that is done.

    Returns:
        Places in `paths` of the images that could be decoded, and their embeddings, (n, D) float32
        on the CPU.

    Raises:
        UserError: Where a file cannot be read, or no image can be decoded.
    """
    kept: list[int] = []
    rows: list[Tensor] = []
    device = backbone.view.mean.device  # an ONNX file has no parameters
    for start in range(0, len(paths), batch_size):
        views = []
        for place in range(start, min(start + batch_size, len(paths))):
            try:
                views.append(_view_of_file(backbone, paths[place]))
            except BadSample as error:
                if on_bad is not None:
                    on_bad(paths[place], str(error))
                continue
            kept.append(place)
        if views:
            with torch.no_grad():
                rows.append(backbone(torch.cat(views).to(device)).float().cpu())  # (b, D)
            check_finite(rows[-1], [str(paths[n]) for n in kept[-len(views) :]], backbone.name)
        advance(len(paths[start : start + batch_size]))
    if not kept:
        raise UserError("no image could be read")
    return kept, torch.cat(rows)


def _view_of_file(backbone: FrozenBackbone, path: Path) -> Tensor:
    """Return what the backbone sees of the image, (1, 3, S, S)."""
    try:
        raw = read_regular(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    pixels = decode(raw, canvas_px=backbone.view.canvas_px)
    image = torch.from_numpy(pixels)[None]
    view: Tensor = backbone.view.cpu()(image, torch.tensor([image.shape[-2:]]))
    return view
