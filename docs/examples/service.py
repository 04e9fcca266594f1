"""An embedding service: POST an image, get its features as JSON.

    pip install fastapi uvicorn onnxruntime pillow numpy
    MODEL=out/backbone/model.pixels.onnx uvicorn --app-dir docs/examples service:app

MODEL is what `sslpipe export --format onnx --with-preprocessing` wrote.
"""

import io
import json
import os

import numpy as np
import onnxruntime
from fastapi import FastAPI, HTTPException, Request
from PIL import Image, ImageOps

MOST_BYTES = 20 * 2**20
MOST_PX = 256  # longer sides are reduced first, as `encode` does; see canvas_px in docs/export.md
Image.MAX_IMAGE_PIXELS = 50_000_000
session = onnxruntime.InferenceSession(os.environ["MODEL"], providers=["CPUExecutionProvider"])
about = session.get_modelmeta().custom_metadata_map
background = json.loads(about.get("image", "{}")).get("background")  # under transparent parts
app = FastAPI()


def read(raw: bytes) -> np.ndarray:
    """(1, height, width, 3) uint8 RGB of an image file."""
    image = Image.open(io.BytesIO(raw), formats=("JPEG", "PNG", "WEBP"))
    image = ImageOps.exif_transpose(image)
    if background and image.has_transparency_data:
        under = Image.new("RGBA", image.size, (*background, 255))
        image = Image.alpha_composite(under, image.convert("RGBA"))
    image = image.convert("RGB")
    image.thumbnail((MOST_PX, MOST_PX), Image.Resampling.BILINEAR)
    return np.asarray(image)[None]


@app.post("/embed")
async def embed(request: Request) -> list[float]:
    """Features (F,) of the image that is the request's body."""
    raw = bytearray()
    async for part in request.stream():
        raw += part
        if len(raw) > MOST_BYTES:
            raise HTTPException(413, f"more than {MOST_BYTES:,} bytes")
    try:
        pixels = read(bytes(raw))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise HTTPException(415, "the body is no JPEG, PNG or WebP image") from error
    (features,) = session.run(["features"], {"pixels": pixels})
    return features[0].tolist()
