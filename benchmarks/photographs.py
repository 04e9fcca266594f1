"""JPEGs cut from scikit-learn's two sample photographs, in folders of classes."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_images

CLASSES, QUALITY = 10, 90


def write_photographs(folder: Path, images: int, width: int, height: int) -> None:
    """Write folder/CLASS/NUMBER.jpg.

    The cuts are as wide as half to all of a photograph, so that files are as large as usual ones.
    """
    samples = [Image.fromarray(array) for array in load_sample_images().images]
    for label in range(CLASSES):
        (folder / f"class{label}").mkdir(parents=True, exist_ok=True)

    def write(number: int) -> None:
        rng, whole = np.random.default_rng(number), samples[number % 2]
        wide = rng.uniform(0.5, 1.0) * whole.width
        size = int(wide), min(int(wide * height / width), whole.height)
        left = rng.integers(whole.width - size[0] + 1)
        top = rng.integers(whole.height - size[1] + 1)
        cut = whole.crop((left, top, left + size[0], top + size[1])).resize((width, height))
        cut.save(folder / f"class{number % CLASSES}" / f"{number:06d}.jpg", quality=QUALITY)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(write, range(images)))
