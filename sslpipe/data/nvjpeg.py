"""JPEGs decoded on a CUDA device by nvJPEG, which torchcodec brings: `data.decoder = "nvjpeg"`.

The pixels come back to the host, where all else is as with the CPU's decoder: canvas, orientation,
caches, stand-ins. That costs a copy each way and spares the cores the decoding (docs/gpu.md).
"""

import threading
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import simplejpeg
import torch

from sslpipe.data.decode import Buffer, Pixels
from sslpipe.data.image_type import RGB8, ImageType
from sslpipe.errors import RecipeError
from sslpipe.recipe.pretrain import Data


class DeviceDecoder:
    """torchcodec's decoder: JPEGs in grey or YCbCr -> (h, w, 3) uint8 on the host, as stored.

    Raises:
        ImportError: torchcodec is not installed.
        OSError: Its libraries do not fit torch's.
        RuntimeError: From a call, where one of the images cannot be decoded.
    """

    def __init__(self, device: torch.device) -> None:
        from torchcodec.decoders import decode_jpeg  # type: ignore[attr-defined]

        self._decode, self._device = decode_jpeg, device
        self._of_thread = threading.local()

    def __call__(self, raws: list[Buffer]) -> list[Pixels]:
        """All in one call: nvJPEG decodes many much faster than one after the other."""
        with self._stream():
            images = self._decode([bytes(raw) for raw in raws], mode="RGB", device=self._device)
            return [image.permute(1, 2, 0).contiguous().cpu().numpy() for image in images]

    def _stream(self) -> AbstractContextManager[object]:
        """One for each thread that decodes: it waits for its images, not for the training step."""
        if self._device.type != "cuda":
            return nullcontext()
        if not hasattr(self._of_thread, "stream"):
            self._of_thread.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(self._of_thread.stream)


def jpeg_decoder(
    data: Data, device: torch.device, image_type: ImageType = RGB8
) -> DeviceDecoder | None:
    """Make what data.decoder asks for; None: the CPU's. Raises: RecipeError."""
    if data.decoder == "cpu":
        return None
    problem = "data.decoder = 'nvjpeg' needs "
    if not image_type.is_rgb8:
        raise RecipeError(
            f"{problem}JPEGs in 8-bit RGB, and the images have {len(image_type.channels)} channels "
            f"of {image_type.dtype}; set data.decoder = 'cpu'"
        )
    if device.type != "cuda":
        raise RecipeError(
            f"{problem}a CUDA device, and this run is on {device.type}; set data.decoder = 'cpu'"
        )
    try:
        decoder = DeviceDecoder(device)
        decoder([simplejpeg.encode_jpeg(np.zeros((8, 8, 3), np.uint8))])
    except ImportError as error:
        raise RecipeError(f"{problem}torchcodec: pip install 'sslpipe[nvjpeg]'") from error
    except (RuntimeError, OSError) as error:
        raise RecipeError(
            f"{problem}a torchcodec built for this torch and its CUDA "
            f"({str(error).splitlines()[0]}); set data.decoder = 'cpu'"
        ) from error
    return decoder
