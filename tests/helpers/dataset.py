"""A tiny data set written with tarfile and PIL alone, so that it does not share code with ours."""

import hashlib
import io
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
    shards, number = [], 0
    for k, size in enumerate(sizes):
        name = f"{split}-{k:06d}"
        path = folder / f"{name}.tar"
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
            for _ in range(size):
                label = number % classes
                raw = (broken or {}).get(number, png(picture(number, px)))
                files = [("png", raw)] + ([("cls", str(label).encode())] if labelled else [])
                for suffix, content in files:
                    info = tarfile.TarInfo(f"{split}{number:06d}.{suffix}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
                number += 1
        with tarfile.open(path) as tar:
            members = tar.getmembers()
        rows = []
        for member in members:
            end = member.offset_data + -(-member.size // 512) * 512
            if member.name.endswith(".png"):
                position = int(member.name[len(split) : -4])
                rows.append([member.offset, end, position % classes if labelled else -1])
            else:
                rows[-1][1] = end
        offsets = io.BytesIO()
        np.save(offsets, np.array(rows, dtype=np.int64))
        (folder / f"{name}.offsets.npy").write_bytes(offsets.getvalue())
        raw_tar = path.read_bytes()
        shards.append(
            {
                "file": path.name,
                "samples": size,
                "bytes": len(raw_tar),
                "sha256": hashlib.sha256(raw_tar).hexdigest(),
                "offsets": f"{name}.offsets.npy",
                "offsets_sha256": hashlib.sha256(offsets.getvalue()).hexdigest(),
            }
        )
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
