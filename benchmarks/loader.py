"""Shards -> images on one core: ours against the peers, and each beside the limit of the same run.

    python -m benchmarks.loader [--images 1500] [--rounds 3] [--json FILE]

The images are 500 x 375 JPEGs (quality 90) cut from scikit-learn's two sample photographs, in tar
shards, in a folder and in litdata's format. Each contender runs in a fresh process held to one
core; the files are in the page cache. Best of --rounds, each of whole passes over all images for a
second or more, in images/s of the processor time used.

reading    compressed bytes of every sample, in order; ours along the planned order
decoding   full RGB images (batches of one canvas count as decoded)
one view   random resized crop to 224 px, uint8
two views  two crops of each image from one decode; the peer decodes once as well

Ours and the limits keep freed memory (sslpipe.portable), as every run does.

Contenders that need a package of the extra `bench` are named as skipped where it is missing.
"""

import io
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import torch
from PIL import Image
from rich.progress import track
from torch.nn import functional
from torchvision.transforms import RandomResizedCrop

from benchmarks.common import absent, in_fresh_process, machine, parser, print_table, save, sslpipe
from benchmarks.photographs import write_photographs
from sslpipe.portable import keep_freed_memory

WIDTH, HEIGHT, CROP_PX, PER_SHARD = 500, 375, 224, 250
WARM_UP = 640  # images: ten batches
SECONDS = 1.0  # whole passes for at least so long
Items = Callable[[Path], Iterable[object]]


def write_data(folder: Path, images: int) -> None:
    """folder/images/CLASS/*.jpg, and shards with their index in folder/shards."""
    write_photographs(folder / "images", images, WIDTH, HEIGHT)
    words = ["--root", folder / "images", "--samples-per-shard", PER_SHARD]
    sslpipe("shards", "build", folder / "shards", *words)


def shards(folder: Path) -> list[str]:
    return sorted(map(str, (folder / "shards").glob("*.tar")))


def raw_jpegs(folder: Path) -> Iterator[bytes]:
    """Straight off the disk: what no loader can beat."""
    for path in sorted((folder / "images").rglob("*.jpg")):
        yield path.read_bytes()


# --- reading


def planned_order(folder: Path) -> Iterator[object]:
    from sslpipe.data.index import load_index
    from sslpipe.data.order import Order
    from sslpipe.data.reader import Reader

    split = load_index(folder / "shards").split("train")
    order = Order(split.starts, seed=0, batch_size=64, num_streams=8, window=128)
    reader = Reader(split, window_bytes=64 * 2**20)
    plan = order.epoch(0)
    for number in range(order.num_streams):
        stream = plan.stream(number)
        for window, (shard, _, _) in enumerate(stream.windows.tolist()):
            yield from reader.rows(shard, stream.window_ids(window) - split.starts[shard])


def webdataset_raw(folder: Path) -> Iterator[object]:
    import webdataset

    yield from webdataset.WebDataset(shards(folder), shardshuffle=False, empty_check=False)


def whole_files(folder: Path) -> Iterator[object]:
    """Every shard read in one go: as many samples as it holds, none of them taken apart."""
    for path in shards(folder):
        content = Path(path).read_bytes()
        yield from [content] * PER_SHARD


# --- decoding


def our_batches(folder: Path) -> Iterator[torch.Tensor]:
    from sslpipe.data.index import load_index
    from sslpipe.data.loader import batches
    from sslpipe.data.order import Order
    from sslpipe.distributed import Rank
    from sslpipe.recipe.sections import RunConfig

    split = load_index(folder / "shards").split("train")
    order = Order(split.starts, seed=0, batch_size=64, num_streams=8, window=128)
    run = RunConfig(num_workers=0)
    stream = batches(split, order, run, Rank(), canvas_px=WIDTH, on_bad=print)
    for _, batch in zip(range(order.steps_per_epoch), stream, strict=False):
        yield batch.images
    stream.close()


def ours_decoded(folder: Path) -> Iterator[object]:
    for images in our_batches(folder):
        yield from images


def webdataset_decoded(folder: Path) -> Iterator[object]:
    import webdataset

    data = webdataset.WebDataset(shards(folder), shardshuffle=False, empty_check=False)
    return (np.asarray(sample["jpg"]) for sample in data.decode("pil"))


def simplejpeg_decoded(folder: Path) -> Iterator[object]:
    return (simplejpeg.decode_jpeg(raw) for raw in raw_jpegs(folder))


def litdata_decoded(folder: Path) -> Iterator[object]:
    import litdata

    data: Any = litdata.StreamingDataset(str(folder / "litdata"))
    return (np.asarray(sample["image"]) for sample in data)


# --- views


def box(rng: np.random.Generator, height: int, width: int) -> tuple[int, int, int, int]:
    """SimCLR's crop: area 8-100 %, aspect 3/4-4/3; top, left, height, width."""
    while True:
        area = height * width * rng.uniform(0.08, 1.0)
        aspect = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            top, left = rng.integers(height - h + 1), rng.integers(width - w + 1)
            return int(top), int(left), h, w


def native_crop(rng: np.random.Generator, image: torch.Tensor) -> torch.Tensor:
    """(3, H, W) uint8, channels last -> (3, 224, 224) uint8, antialiased."""
    top, left, height, width = box(rng, image.shape[1], image.shape[2])
    part = image[:, top : top + height, left : left + width]
    part = part.permute(1, 2, 0)[None].permute(0, 3, 1, 2)  # torch tells channels last by it
    size = (CROP_PX, CROP_PX)
    return functional.interpolate(part, size=size, mode="bilinear", antialias=True)[0]


def our_views(folder: Path, count: int) -> Iterator[object]:
    rng = np.random.default_rng(0)
    for images in our_batches(folder):
        shape = (count * len(images), 3, CROP_PX, CROP_PX)
        views = torch.empty(shape, dtype=torch.uint8, memory_format=torch.channels_last)
        for row, image in enumerate(images):
            for view in range(count):
                views[row + view * len(images)] = native_crop(rng, image)
        yield from range(len(images))


def pil_views(folder: Path, count: int) -> Iterator[object]:
    """ImageFolder's loader and torchvision's transform on PIL images."""
    crop = RandomResizedCrop(CROP_PX)
    for raw in raw_jpegs(folder):
        image = Image.open(io.BytesIO(raw)).convert("RGB")
        yield [np.asarray(crop(image)) for _ in range(count)]


def bare_views(folder: Path, count: int) -> Iterator[object]:
    """simplejpeg and the native resize on bytes off the disk: no shards, no order, no batches."""
    rng = np.random.default_rng(0)
    for raw in raw_jpegs(folder):
        image = torch.from_numpy(simplejpeg.decode_jpeg(raw)).permute(2, 0, 1)
        yield [native_crop(rng, image) for _ in range(count)]


def views(count: int) -> dict[str, Items]:
    return {
        "ours, shards to batches": partial(our_views, count=count),
        "PIL, torchvision crop": partial(pil_views, count=count),
        "limit: simplejpeg + native resize": partial(bare_views, count=count),
    }


# stage -> contender -> items; the first is ours, the second the one that ratios are against
STAGES: dict[str, dict[str, Items]] = {
    "reading": {
        "ours, planned order": planned_order,
        "webdataset": webdataset_raw,
        "limit: whole files": whole_files,
    },
    "decoding": {
        "ours, shards to batches": ours_decoded,
        'webdataset decode("pil")': webdataset_decoded,
        "litdata": litdata_decoded,
        "limit: simplejpeg": simplejpeg_decoded,
    },
    "one view": views(1),
    "two views": views(2),
}


def write_litdata(folder: Path) -> None:
    import litdata

    # litdata keeps a JPEG's bytes only where it opens the file itself
    paths = sorted(map(str, (folder / "images").rglob("*.jpg")))
    where = {"output_dir": str(folder / "litdata"), "chunk_bytes": "16MB", "num_workers": 1}
    litdata.optimize(fn=_litdata_sample, inputs=paths, **where)


def _litdata_sample(path: str) -> dict[str, Any]:
    return {"image": Image.open(path)}


def measure(stage: str, contender: str, folder: Path) -> float:
    """Images/s of one pass over the data, in this process, on one core."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    if contender.startswith(("ours", "limit")):
        keep_freed_memory()  # as every run does
    items = STAGES[stage][contender]
    for _, _ in zip(range(WARM_UP), items(folder), strict=False):  # imports, memory
        pass
    start, count, spent = time.process_time(), 0, 0.0
    while spent < SECONDS:
        for _ in items(folder):
            count += 1
        spent = time.process_time() - start
    return count / spent


def main() -> None:
    parse = parser(__doc__)
    parse.add_argument("--images", type=int, default=1500)
    parse.add_argument("--rounds", type=int, default=3)
    given = parse.parse_args()
    skipped = absent({"litdata": "litdata"})
    rates: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        write_data(Path(name), given.images)
        if not skipped:
            write_litdata(Path(name))
        jobs = [
            (stage, contender)
            for _ in range(given.rounds)
            for stage, contenders in STAGES.items()
            for contender in contenders
            if contender not in skipped
        ]
        for stage, contender in track(jobs, "measuring", transient=True):
            rate = in_fresh_process(measure, stage, contender, Path(name))
            best = rates.setdefault(stage, {}).get(contender, 0.0)
            rates[stage][contender] = max(best, rate)

    rows = []
    for stage, actual in rates.items():
        _, peer, *_ = actual.values()
        limit = next(rate for name, rate in actual.items() if name.startswith("limit"))
        for name, rate in actual.items():
            shares = [f"{rate:,.0f}", f"{rate / peer:.2f}x", f"{rate / limit:.0%}"]
            rows.append([stage, name, *shares])
    head = ["stage", "contender", "images/s", "against the second", "share of the limit"]
    print_table(head, rows)
    save(given.json, {"machine": machine(threads=1), "images_per_s": rates})


if __name__ == "__main__":
    main()
