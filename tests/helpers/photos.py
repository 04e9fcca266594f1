"""A folder of image files in class folders, as a user has it."""

from pathlib import Path

import numpy as np
from PIL import Image


def write_photos(folder: Path) -> None:
    """40 pictures of noise in each of "cats" and "my dogs"."""
    rng = np.random.default_rng(0)
    for name in ("cats", "my dogs"):
        (folder / name).mkdir(parents=True)
        for number in range(40):
            pixels = rng.integers(0, 256, (20, 24, 3), np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
