"""A tiny data set written with tarfile and PIL alone, so that it does not share code with ours."""

import hashlib
import io
import itertools
import json
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image


def picture(number: int, px: int = 16) -> np.ndarray:
    """(px, px, 3) uint8; every number has another one, red is the number itself."""
    rng = np.random.default_rng(number)
    pixels = rng.integers(0, 256, (px, px, 3), dtype=np.uint8)
    pixels[0, 0] = (number % 256, number // 256, 7)
    return pixels


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def write_dataset(
    folder: Path,
    sizes: tuple[int, ...] = (16,) * 8,
    *,
    px: int = 16,
    classes: int = 4,
    broken: dict[int, bytes] | None = None,
    labelled: bool = True,
    split: str = "train",
) -> Path:
    """Shards of the given sample counts and their index; returns dataset.json.

    broken: bytes that stand in a sample's file instead of its picture, by sample id.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards, numbers = [], itertools.count()
    for k, size in enumerate(sizes):
        path = folder / f"{split}-{k:06d}.tar"
        rows = []
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
            for number in itertools.islice(numbers, size):
                label, first = number % classes if labelled else -1, tar.offset
                files = {"png": (broken or {}).get(number, png(picture(number, px)))}
                files |= {"cls": str(label).encode()} if labelled else {}
                for suffix, content in files.items():
                    info = tarfile.TarInfo(f"{split}{number:06d}.{suffix}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
                rows.append([first, tar.offset, label])
        offsets = path.with_suffix(".offsets.npy")
        np.save(offsets, np.array(rows, dtype=np.int64))
        sha256 = [hashlib.sha256(each.read_bytes()).hexdigest() for each in (path, offsets)]
        shards.append(
            {"file": path.name, "samples": size, "bytes": path.stat().st_size, "sha256": sha256[0],
             "offsets": offsets.name, "offsets_sha256": sha256[1]}
        )  # fmt: skip
    manifest_path = folder / "dataset.json"
    manifest = {
        "schema_version": 1,
        "name": "tiny",
        "classes": [f"class {c}" for c in range(classes)] if labelled else [],
        "mean": [0.5, 0.5, 0.5],
        "std": [0.25, 0.25, 0.25],
        "splits": {},
    }
    if manifest_path.exists():
        manifest = json.loads(manifest_path.read_text())
    manifest["splits"][split] = shards
    manifest_path.write_text(json.dumps(manifest))
    return manifest_path
