"""Make thumbnails as data URIs."""

import base64
import io
from collections.abc import Iterable

import numpy as np
from PIL import Image

from sslpipe.data.index import Split
from sslpipe.data.loader import one_pass

THUMB_PX = 64
HOVER_PX, MOST_HOVER_BYTES = 48, 500_000  # thumbnails shown on hover, all together
MOST_PNG_BYTES = 1_500_000


def thumbnails(split: Split, ids: Iterable[int]) -> dict[int, str]:
    """Return id -> data URI, no side above THUMB_PX; what cannot be decoded is skipped."""
    wanted = np.unique(np.fromiter(ids, dtype=np.int64))
    pictures: dict[int, str] = {}
    for batch in one_pass(split, ids=wanted, num_workers=0, on_bad=lambda bad: None):
        for row, sample in enumerate(batch.ids.tolist()):
            height, width = batch.sizes[row].tolist()
            pixels = batch.images[row, :, :height, :width].permute(1, 2, 0).numpy()
            image = Image.fromarray(pixels)
            image.thumbnail((THUMB_PX, THUMB_PX))
            pictures[sample] = shortest_uri(image)
    return pictures


def small_thumbnails(split: Split, ids: Iterable[int]) -> dict[int, str]:
    """Return id -> data URI of WebP for hovering, of the first ids that fit MOST_HOVER_BYTES."""
    pictures: dict[int, str] = {}
    left = MOST_HOVER_BYTES
    for sample, uri in thumbnails(split, ids).items():
        image = Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))
        image.thumbnail((HOVER_PX, HOVER_PX))
        pictures[sample] = _uri("webp", _saved(image, "webp", quality=70, method=6))
        left -= len(pictures[sample])
        if left < 0:
            break
    return pictures


def shortest_uri(image: Image.Image) -> str:
    """Encode as PNG what is small or has few colours, else as JPEG: whichever is shorter."""
    image = image.convert("RGB")
    png, jpeg = _saved(image, "png", optimize=True), _saved(image, "jpeg", quality=85)
    if image.width * image.height > 32 * 32 and len(jpeg) <= len(png):
        return _uri("jpeg", jpeg)
    return _uri("png", png)


def png_uri(raw: bytes) -> str:
    """Return a PNG file as a data URI: as it is, or, where it is large, as JPEG."""
    if len(raw) <= MOST_PNG_BYTES:
        return _uri("png", raw)
    return shortest_uri(Image.open(io.BytesIO(raw)))


def _saved(image: Image.Image, kind: str, **options: int | bool) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def _uri(kind: str, raw: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(raw).decode()}"
