"""Make thumbnails as data URIs."""

import base64
import io
from collections.abc import Iterable, Iterator

import numpy as np
from PIL import Image

from sslpipe.data.index import Split
from sslpipe.data.loader import one_pass

THUMB_PX = 64
MOST_PNG_BYTES = 1_500_000


def thumbnails(split: Split, ids: Iterable[int], most_px: int = THUMB_PX) -> dict[int, str]:
    """Return id -> data URI, no side above `most_px`; what cannot be decoded is skipped."""
    pictures = small_images(split, ids, most_px, num_workers=0)
    return {sample: shortest_uri(image) for sample, image in pictures}


def small_images(
    split: Split, ids: Iterable[int], most_px: int = THUMB_PX, *, num_workers: int = 2
) -> Iterator[tuple[int, Image.Image]]:
    """Yield id and image of what can be decoded, no side above `most_px`."""
    wanted = np.unique(np.fromiter(ids, dtype=np.int64))
    for batch in one_pass(split, ids=wanted, num_workers=num_workers, on_bad=lambda bad: None):
        for row, sample in enumerate(batch.ids.tolist()):
            height, width = batch.sizes[row].tolist()
            units = batch.images[row, :, :height, :width].numpy()  # (C, h, w)
            image = Image.fromarray(split.image_type.picture(units))
            image.thumbnail((most_px, most_px))
            yield sample, image


def shortest_uri(image: Image.Image) -> str:
    """Encode as PNG what is small or has few colours, else as JPEG: whichever is shorter."""
    image = image.convert("RGB")
    png = encoded(image, "png")
    jpeg = encoded(image, "jpeg")
    if image.width * image.height > 32 * 32 and len(jpeg) <= len(png):
        return _uri("jpeg", jpeg)
    return _uri("png", png)


def png_uri(raw: bytes) -> str:
    """Return a PNG file as a data URI: as it is, or, where it is large, as JPEG."""
    if len(raw) <= MOST_PNG_BYTES:
        return _uri("png", raw)
    return shortest_uri(Image.open(io.BytesIO(raw)))


def encoded(image: Image.Image, kind: str) -> bytes:
    """Write an image as PNG, as short as can be, or as JPEG: its bytes."""
    file = io.BytesIO()
    image.save(file, kind, optimize=True, quality=85)
    return file.getvalue()


def _uri(kind: str, raw: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(raw).decode()}"
