"""Channels and bits beyond 8-bit RGB on public images: what they are worth after equal steps.

    apt-get download nexuiz-textures mricron-data
    for deb in *.deb; do dpkg -x $deb debian; done
    python -m benchmarks.sensors out/sensors --debian debian --seeds 0,1 --jobs 1

surfaces: a game's materials that have a colour, a normal and a gloss map, as TIFFs of seven
channels, in tiles of 64 px. A class is a material; half of the families (names that are equal but
for what follows the last digit or underscore), by a hash, nothing has seen. Each of their tiles
searches all others. brain: a monkey's (INIA19), its left half to train on: tiles of slices in
float32 (NIfTI), in 16 bits (TIFF of many pages), and as 8-bit RGB, converted between the 0.1 and
99.9 percentiles. Each tile of the right half searches the left one for the same region of the atlas
at its middle. scans: five DICOM files that ship with pydicom, tiles of 32 px in float32, rescaled,
and as 8-bit RGB, each file converted between its own 0.1 and 99.9 percentiles. Each tile searches
all others for those of its file.

Recipe `sensors`, smaller, the same views in all rows but "usual colour views", --steps of each run
(of surfaces, of brain, of scans). What each took, imports included, is in the table. Intervals are
over classes; of scans, which are five, over tiles.
"""

import hashlib
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks import trainings
from benchmarks.common import machine, print_table, save, sslpipe
from benchmarks.trainings import QUIET, RECIPES, Found, Training, run_folder
from sslpipe.data.index import load_index
from sslpipe.evaluation.embed import Embeddings, embed
from sslpipe.evaluation.retrieval import retrieval_per_query
from sslpipe.export.load import load_run

SURFACE = "red,green,blue,normal_x,normal_y,normal_z,gloss"
SIDE_PX, TILE_PX = 256, 64  # of a surface's shorter side, of its tiles
BRAIN_TILE_PX, BRAIN_STRIDE_PX = 32, 8
HALF = 84  # slice of the atlas between the halves
COLOUR = ('data.channels=["red","green","blue"]',)
SMALL = "augment.crop_px=32 data.canvas_px=64 data.batch_size=128 run.save_steps=9999 "
SMALL += "backbone.widths=[16,32,64,128] optim.precision=fp32"
SCANS = ("693_J2KI", "CT_small", "J2K_pixelrep_mismatch", "JPEG2000", "MR_small")
# set -> row -> data set, settings; others are compared with the first
ROWS: dict[str, dict[str, tuple[str, tuple[str, ...]]]] = {
    "surfaces": {
        "seven channels": ("surfaces", ()),
        "colour alone": ("surfaces", COLOUR),
        "usual colour views": ("surfaces", (*COLOUR, "augment.preset=simclr")),
    },
    "brain": {
        "float32": ("brain_float32", ()),
        "16 bits": ("brain_16", ()),
        "8-bit RGB": ("brain_8", ()),
    },
    "scans": {"float32": ("scans_float32", ()), "8-bit RGB": ("scans_8", ())},
}


def main() -> None:
    args = trainings.arguments(__doc__, debian="debian", steps="500,300,200")
    torch.set_num_threads(1)
    share, lengths = Path(args.debian) / "usr" / "share", map(int, args.steps.split(","))
    tree: dict[str, Any] = {"machine": machine(1), "seeds": args.seeds, "steps": args.steps}
    for name, make, steps in zip(ROWS, (surfaces, brain, scans), lengths, strict=True):
        make(share, args.folder)
        runs = [[training(name, row, k, steps)] for k in args.seeds for row in ROWS[name]]
        trainings.train_all(runs, args.folder, args.jobs)
        tree[name] = scored(name, args.folder, args.seeds, share)
    save(args.json, tree)


def training(name: str, row: str, seed: int, steps: int) -> Training:
    data, settings = ROWS[name][row]
    lengths = (f"steps={steps}", f"optim.warmup_steps={steps // 10}")
    settings = (*lengths, *SMALL.split(), *QUIET, *settings)
    return Training(f"{name} {row}", seed, RECIPES / "sensors.toml", data, settings)


def build(out: Path, *options: object) -> None:
    if not (out / "dataset.json").exists():
        sslpipe("shards", "build", out, *options)


def surfaces(share: Path, out: Path) -> None:
    """Write materials with three maps as TIFFs of seven channels, SPLIT/MATERIAL/maps.tif."""
    import tifffile

    images, seen = out / "images" / "surfaces", set[bytes]()
    with zipfile.ZipFile(share / "games/nexuiz/data/textures.pk3") as archive:
        names = [name for name in sorted(archive.namelist()) if name.endswith((".jpg", ".tga"))]
        files = {name[:-4]: name for name in names}

        def opened(stem: str, mode: str, size: tuple[int, int] | None = None) -> Image.Image:
            with archive.open(files[stem]) as file, Image.open(file) as image:
                made = image.convert(mode)
            return made if size is None else made.resize(size, Image.Resampling.BOX)

        for stem in files:
            if not {f"{stem}_norm", f"{stem}_gloss"} <= files.keys():
                continue
            colour = opened(stem, "RGB")
            scale = min(1.0, SIDE_PX / min(colour.size))
            size = round(colour.width * scale), round(colour.height * scale)
            if min(size) < TILE_PX or colour.tobytes() in seen:
                continue
            seen.add(colour.tobytes())
            maps: list[Any] = [opened(stem, "RGB", size), opened(f"{stem}_norm", "RGB", size)]
            maps.append(opened(f"{stem}_gloss", "L", size))
            family = re.sub(r"(\d+[a-z]*|_[^_/]*)$", "", stem.lower()).encode()
            split = ("train", "test")[hashlib.sha256(family).digest()[0] % 2]
            path = images / split / stem.replace("/", "-") / "maps.tif"
            path.parent.mkdir(parents=True, exist_ok=True)
            tifffile.imwrite(path, np.dstack(maps), photometric="minisblack", planarconfig="contig")
    build(out / "surfaces", "--root", images, "--channels", SURFACE, "--tile", TILE_PX)


def brain(share: Path, out: Path) -> None:
    """Write both halves of the brain as NIfTI in float32, and as TIFFs of 16 and of 8 bits."""
    import nibabel
    import tifffile

    image: Any = nibabel.load(share / "mricron/templates/inia19-t1-brain.nii.gz")
    pixels = np.asanyarray(image.dataobj)
    low, high = np.percentile(pixels, (0.1, 99.9))
    eight = np.round((pixels.clip(low, high) - low) / (high - low) * 255).astype(np.uint8)
    stacks = {"16": np.round(pixels * 100).astype(np.uint16), "8": eight}
    tiles = ("--tile", BRAIN_TILE_PX, "--stride", BRAIN_STRIDE_PX, "--min-content", 0.5)
    for split, half in {"train": slice(0, HALF), "test": slice(HALF, None)}.items():
        folders = {kind: out / "images" / f"brain_{kind}" / split for kind in ("float32", *stacks)}
        for folder in folders.values():
            folder.mkdir(parents=True, exist_ok=True)
        nibabel.save(image.slicer[half], folders["float32"] / "half.nii.gz")
        for kind, stack in stacks.items():
            slices = stack[half].transpose(2, 0, 1)
            tifffile.imwrite(folders[kind] / "half.tif", slices, photometric="minisblack")
    grey, pages = ("--channels", "t1"), ("--pages", "samples")
    for kind, options in (("float32", grey), ("16", (*grey, *pages)), ("8", pages)):
        build(out / f"brain_{kind}", "--root", out / "images" / f"brain_{kind}", *options, *tiles)


def scans(share: Path, out: Path) -> None:
    """Copy DICOM files of pydicom's to a folder, and convert them to PNGs of 8 bits."""
    from pydicom import dcmread
    from pydicom.data import get_testdata_file
    from pydicom.pixels import apply_rescale

    folders = {kind: out / "images" / f"scans_{kind}" for kind in ("float32", "8")}
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    for name in SCANS:
        path = Path(str(get_testdata_file(f"{name}.dcm", download=False)))
        (folders["float32"] / path.name).write_bytes(path.read_bytes())
        scan = dcmread(path)
        pixels = apply_rescale(scan.pixel_array, scan).astype(np.float64)
        low, high = np.percentile(pixels, (0.1, 99.9))
        eight = np.round((pixels.clip(low, high) - low) / (high - low) * 255).astype(np.uint8)
        Image.fromarray(eight).save(folders["8"] / f"{name}.png")
    for kind, options in {"float32": ("--channels", "intensity"), "8": ()}.items():
        build(out / f"scans_{kind}", "--root", folders[kind], "--tile", BRAIN_TILE_PX, *options)


def scored(name: str, folder: Path, seeds: list[int], share: Path) -> dict[str, Any]:
    """Score each row's runs; print the table, the first row compared with each by classes."""
    found: dict[str, list[Found]] = {}
    for row, (data, _) in ROWS[name].items():
        runs = [run_folder(folder, f"{name} {row}", seed) for seed in seeds]
        found[row] = [SEARCHES[name](run, folder / data, share) for run in runs]
    took = trainings.cpu_seconds(folder, [f"{name} {row}" for row in ROWS[name]], seeds)
    first, tree = next(iter(found.values())), dict[str, Any]()
    for row, each in found.items():
        tree[row] = {"cpu_s": took[f"{name} {row}"]}
        for metric in each[0].values:
            own, base = ([run.values[metric] for run in runs] for runs in (each, first))
            units = np.arange(len(own[0])) if name == "scans" else first[0].classes
            pair = trainings.paired(np.mean(base, 0), np.mean(own, 0), units)
            tree[row][metric] = {**trainings.mean_score(own), "less than the first": pair}
    form = "{value:.3f}, {interval95[0]:.3f} to {interval95[1]:.3f}"
    lines = []
    for row, cells in tree.items():
        means = (f"{100 * cells[metric]['value']:.1f}" for metric in first[0].values)
        less = form.format(**cells["Recall@1"]["less than the first"])
        lines.append([row, *means, less, ", ".join(f"{each:.0f}" for each in cells["cpu_s"])])
    print_table([name, *first[0].values, "the first - row, Recall@1", "CPU s"], lines)
    return tree


def search_surfaces(run: Path, data: Path, share: Path) -> Found:
    return trainings.search(embedded(run, data, "test"))


def search_brain(run: Path, data: Path, share: Path) -> Found:
    """Search the left half for each tile of the right one, by the region in their middle."""
    import nibabel

    atlas: Any = nibabel.load(share / "mricron" / "templates" / "inia19-NeuroMaps.nii.gz")
    regions = np.asanyarray(atlas.dataobj) % 1000  # 1000 more on the other side
    sides = []
    for split, half in {"train": regions[:HALF], "test": regions[HALF:]}.items():
        rows, places = embedded(run, data, split), load_index(data).split(split)
        y, x, page = (places.column(name).values for name in ("y", "x", "page"))
        labels = half[y + BRAIN_TILE_PX // 2, x + BRAIN_TILE_PX // 2, page].astype(np.int64)
        rows = rows._replace(labels=torch.from_numpy(labels))
        sides.append(rows.rows(rows.labels > 0))
    found = retrieval_per_query(*sides, k=(1,))
    known, names = found.matches > 0, {"Recall@1": "Recall@1", "MAP@R": "map_at_r"}
    values = {m: found.values[known, found.names.index(n)] for m, n in names.items()}
    return Found(sides[1].labels.numpy()[known], values, int((~known).sum()))


def search_scans(run: Path, data: Path, share: Path) -> Found:
    files = load_index(data).split("train").column("parent").values.astype(np.int64)
    return trainings.search(embedded(run, data, "train")._replace(labels=torch.from_numpy(files)))


SEARCHES = {"surfaces": search_surfaces, "brain": search_brain, "scans": search_scans}


def embedded(run: Path, data: Path, split: str) -> Embeddings:
    """Embed a split by a run, in the run's own view."""
    model, (rows,) = load_run(run).matched(load_index(data).split(split))
    return embed(model.backbone, model.view, rows, canvas_px=64, num_workers=0)


if __name__ == "__main__":
    main()
