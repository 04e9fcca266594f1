"""Damaged input for each reader: whatever comes, it is read, or refused by the one clear error.

    python -m tests.helpers.fuzz image,tar 10000 [first]

Input k is a function of the reader's name and k alone. The input at work stands in the file named
by FUZZ_PROGRESS, so that a crash of the whole process names its input.
"""

import hashlib
import io
import json
import os
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from sslpipe.data.decode import BadSample, decode
from sslpipe.data.index import load_index
from sslpipe.data.reader import Reader
from sslpipe.errors import DataError, RecipeError
from sslpipe.recipe.reading import load_recipe
from tests.helpers.dataset import picture, write_dataset

SLOWEST_S = 20.0  # for one input; a bomb or a quadratic parser takes minutes
TOKENS = (
    b"0", b"-1", b"1e400", b"nan", b"inf", b"9223372036854775808", b"true", b"[]", b"{}", b'""',
    b"'", b'"""', b"[[", b"]", b"=", b".", b"#", b"\n", b"\0", b"\xff\xfe", b"null", b"\\ud800",
)  # fmt: skip
NUMBERS = tuple(
    value.to_bytes(size, order)
    for size in (1, 2, 4, 8)
    for value in (0, 1, 2 ** (8 * size - 1) - 1, 2 ** (8 * size - 1), 2 ** (8 * size) - 1)
    for order in ("little", "big")
)


def mutated(raw: bytes, rng: random.Random, tokens: tuple[bytes, ...]) -> bytes:
    """One to eight of: flip bits, write a token over, insert one, cut out, repeat, truncate."""
    data = bytearray(raw)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 8))):
        at, length = rng.randrange(len(data) + 1), rng.choice((1, 2, 4, 16, 64, 512))
        match rng.randrange(7):
            case 0 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                token = rng.choice(tokens)
                data[at : at + len(token)] = token
            case 2:
                data[at:at] = rng.choice(tokens)
            case 3:
                del data[at : at + length]
            case 4:
                data[at:at] = data[at : at + length] * rng.choice((1, 2, 50))
            case 5:
                data[at : at + length] = rng.randbytes(length)
            case 6 if rng.random() < 0.3:
                del data[at:]
    return bytes(data)


def recipes(folder: Path) -> Callable[[random.Random], bool]:
    """Text of the shipped recipes, and overrides on the command line."""
    shipped = Path(__file__).parents[2] / "recipes"
    texts = [path.read_bytes() for path in sorted(shipped.glob("*.toml"))]
    words = [line.partition("#")[0].strip() for line in texts[0].decode().splitlines()]
    overrides = [word.replace(" ", "").encode() for word in words if "=" in word]
    path = folder / "recipe.toml"

    def read(rng: random.Random) -> bool:
        path.write_bytes(mutated(rng.choice(texts), rng, TOKENS))
        given = [
            mutated(rng.choice(overrides), rng, TOKENS).decode(errors="replace")
            for _ in range(rng.choice((0, 0, 1)))
        ]
        try:
            load_recipe(path, given)
        except RecipeError:
            return False
        return True

    return read


def indexes(folder: Path) -> Callable[[random.Random], bool]:
    """dataset.json and the sidecars of offsets, with and without a sha256 that agrees."""
    data = write_dataset(folder / "data", (5, 3, 4), px=4)
    manifest, sidecar = data.read_bytes(), folder / "data" / "train-000001.offsets.npy"
    offsets = sidecar.read_bytes()

    def read(rng: random.Random) -> bool:
        tree, damaged = manifest, offsets
        if rng.random() < 0.5:
            tree = mutated(manifest, rng, TOKENS + NUMBERS)
        else:
            damaged = mutated(offsets, rng, NUMBERS)
            entries = json.loads(manifest)
            entries["splits"]["train"][1]["offsets_sha256"] = hashlib.sha256(damaged).hexdigest()
            tree = json.dumps(entries).encode()
        data.write_bytes(tree)
        sidecar.write_bytes(damaged)
        try:
            index = load_index(data)
            for name in index.manifest.splits:
                index.check_files(name)
                assert len(index.split(name).labels) == len(index.split(name))
        except DataError:
            return False
        return True

    return read


def tars(folder: Path) -> Callable[[random.Random], bool]:
    """A shard's bytes under an index that knows the whole one: every sample, or why not."""
    data = write_dataset(folder / "data", (6,), px=8)
    shard = folder / "data" / "train-000000.tar"
    whole = shard.read_bytes()
    split = load_index(data).split("train")
    reader = Reader(split, window_bytes=8192)

    def read(rng: random.Random) -> bool:
        shard.write_bytes(mutated(whole, rng, NUMBERS))
        try:
            raws = reader.rows(0, np.arange(6))
        except DataError:
            return False
        assert len(raws) == 6
        good = 0
        for raw in raws:
            if isinstance(raw.image, BadSample):
                continue
            try:
                decode(raw.image, 8)
                good += 1
            except BadSample:
                pass
        return good == 6

    return read


def images(folder: Path) -> Callable[[random.Random], bool]:
    """JPEG, PNG and WebP of many kinds, damaged: uint8 RGB that fits the canvas, or BadSample."""
    seeds = []
    for number, px in enumerate((1, 7, 24, 40)):
        image = Image.fromarray(picture(number, px))
        exif = Image.Exif()
        exif[0x0112] = 6
        for mode, kind, options in (
            ("RGB", "JPEG", {"exif": exif}),
            ("RGB", "JPEG", {"progressive": True, "subsampling": 0}),
            ("L", "JPEG", {}),
            ("CMYK", "JPEG", {}),
            ("RGBA", "PNG", {}),
            ("P", "PNG", {"transparency": 3}),
            ("I;16", "PNG", {}),
            ("RGB", "WEBP", {}),
            ("RGB", "WEBP", {"lossless": True}),
            ("RGBA", "WEBP", {}),
        ):
            file = io.BytesIO()
            grey = image.convert("L")
            made = grey.convert("I").convert("I;16") if mode == "I;16" else image.convert(mode)
            made.save(file, kind, **options)
            seeds.append(file.getvalue())

    def read(rng: random.Random) -> bool:
        raw = mutated(rng.choice(seeds), rng, NUMBERS)
        try:
            image = decode(raw, 16)
        except BadSample:
            return False
        assert image.dtype == np.uint8
        assert image.ndim == 3
        assert max(image.shape) <= 16
        return True

    return read


READERS = {"recipe": recipes, "index": indexes, "tar": tars, "image": images}


def run(name: str, count: int, first: int = 0) -> dict[str, int]:
    """Inputs first to first + count: how many were read and how many refused."""
    progress = os.environ.get("FUZZ_PROGRESS")
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # decoders warn of what they then refuse
        read = READERS[name](Path(folder))
        for number in range(first, first + count):
            if progress:
                Path(progress).write_text(f"{name} {number}")
            begin_s = time.monotonic()
            good = read(random.Random(f"{name} {number}"))
            assert time.monotonic() - begin_s < SLOWEST_S, f"{name} {number} is too slow"
            outcomes["read" if good else "refused"] += 1
    return dict(outcomes)


if __name__ == "__main__":
    names, count, *first = sys.argv[1:]
    print(json.dumps({k: run(k, int(count), *map(int, first)) for k in names.split(",")}))
