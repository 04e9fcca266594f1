"""What each augmentation does, for the page about views: strips of one photograph.

    python -m benchmarks.view_pictures [--out docs/pictures]

Each strip is the photograph and five views in which one op alone is on, with the strength of the
preset "simclr" where it has the op. Presets for one channel show a slice of a CT scan that ships
with pydicom. Writes NAME.jpg, 672 x 112 px, one an op and a preset.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from pydicom.data import get_testdata_file
from sklearn.datasets import load_sample_image
from torch import Tensor

from sslpipe.augment.two_views import TwoViews
from sslpipe.data.image_type import RGB8
from sslpipe.sensors.readers import Pages, open_planes

SIDE_PX, VIEWS = 112, 5
OFF: dict[str, Any] = {
    "crop_area": [1.0, 1.0],
    "crop_ratio": [1.0, 1.0],
    "flip_prob": 0.0,
    "jitter_prob": 0.0,
    "brightness": 0.0,
    "contrast": 0.0,
    "saturation": 0.0,
    "hue": 0.0,
    "grayscale_prob": 0.0,
    "blur_prob": 0.0,
}
OPS: dict[str, dict[str, Any]] = {
    "crop": {"crop_area": [0.08, 1.0], "crop_ratio": [3 / 4, 4 / 3]},
    "flip": {"flip_prob": 0.5},
    "rotation": {"rotation_deg": 30.0},
    "brightness": {"jitter_prob": 1.0, "brightness": 0.8},
    "contrast": {"jitter_prob": 1.0, "contrast": 0.8},
    "saturation": {"jitter_prob": 1.0, "saturation": 0.8},
    "hue": {"jitter_prob": 1.0, "hue": 0.2},
    "grayscale": {"grayscale_prob": 0.5},
    "blur": {"blur_prob": 1.0},
    "solarize": {"solarize_prob": 0.5},
}
PRESETS = ("simclr", "simclr_small", "mocov2", "byol", "grayscale", "microscopy", "satellite")
ONE_CHANNEL = ("grey", "xray")


def photograph() -> Tensor:
    """(3, 240, 240) uint8: the pavilion of scikit-learn's sample images."""
    pixels = load_sample_image("china.jpg")[0:420, 90:510]
    small = Image.fromarray(pixels).resize((240, 240), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.asarray(small).copy()).permute(2, 0, 1)


def scan() -> Tensor:
    """(1, 128, 128) float32 in units of views: a CT slice, from -1000 HU (air) to 1000."""
    path = Path(str(get_testdata_file("CT_small.dcm", download=False)))
    pixels = open_planes(path, Pages()).read(0, slice(None), slice(None))  # (128, 128, 1)
    return torch.from_numpy((pixels + 1000) * (255 / 2000)).permute(2, 0, 1)


def strip(image: Tensor, preset: str, settings: dict[str, Any]) -> Image.Image:
    """The image and VIEWS views of it, side by side."""
    channels = RGB8.channels if len(image) == 3 else ("ct",)
    make_views = TwoViews(preset, crop_px=SIDE_PX, channels=channels, **settings)
    first, second = make_views([image] * VIEWS)  # (VIEWS, C, SIDE_PX, SIDE_PX) each, in [0, 1]
    views = first if settings else torch.stack([first, second], 1).flatten(0, 1)[:VIEWS]
    plain, _ = TwoViews("simclr", crop_px=SIDE_PX, channels=channels, **OFF)([image])
    row = torch.cat([*plain, *views], dim=2).expand(3, -1, -1)  # (3, SIDE_PX, (1 + VIEWS) SIDE_PX)
    return Image.fromarray((row * 255).round().clamp(0, 255).byte().permute(1, 2, 0).numpy())


def main() -> None:
    """Write one picture an op and one a preset."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"))
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    image, slice_of_ct = photograph(), scan()
    for name, settings in OPS.items():
        strip(image, "simclr", OFF | settings).save(folder / f"{name}.jpg", quality=72)
    for preset in (*PRESETS, *ONE_CHANNEL):
        strip(slice_of_ct if preset in ONE_CHANNEL else image, preset, {}).save(
            folder / f"preset_{preset}.jpg", quality=72
        )


if __name__ == "__main__":
    main()
