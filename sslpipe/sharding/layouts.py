"""Read well-known data sets as their owners unpack them: no download, the folders as they are.

Where a data set is used for retrieval, its splits share no class, as published: CUB-200 and
Cars-196 take the first half of the classes for training and the rest for test (Oh Song et al. 2016,
arXiv:1511.06452), Stanford Online Products, Market-1501 and In-shop come so.
"""

import gzip
import inspect
import io
import math
import re
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sslpipe.errors import DataError, did_you_mean
from sslpipe.portable import write_atomically
from sslpipe.sharding.members import encode_png, png_bytes
from sslpipe.sharding.sources import (
    Images,
    Row,
    SourceOptions,
    class_names,
    files_under,
    from_rows,
    is_image,
    open_file,
    read_file,
    root_folder,
)

_LABEL_NAMES = ("targets", "labels", "_labels")  # torchvision's datasets do not agree on one
_MARKET_NAME = re.compile(r"(-?\d+)_c(\d+)s(\d+)_")


def read_cub(options: SourceOptions) -> dict[str, Images]:
    """Read CUB_200_2011: images.txt, image_class_labels.txt, classes.txt."""
    root = root_folder(options)
    tables = (_table(root / f"{name}.txt", 2) for name in ("classes", "image_class_labels"))
    names, label = (dict(table) for table in tables)
    ranked = sorted(names, key=int)
    train = set(ranked[: len(ranked) // 2])
    groups: dict[str, list[Row]] = {"train": [], "test": []}
    for image, path in _table(root / "images.txt", 2):
        split = "train" if label[image] in train else "test"
        groups[split].append((root / "images" / path, names[label[image]]))
    return from_rows(options, root, groups)


def read_cars(options: SourceOptions) -> dict[str, Images]:
    """Read Cars-196: car_ims with cars_annos.mat, or cars_train and cars_test with the devkit."""
    root = root_folder(options)
    # (image, label from 1), from either of the two ways it is published
    if (root / "cars_annos.mat").is_file():
        annotations = _matlab(root / "cars_annos.mat")
        rows = [
            (root / str(row.relative_im_path), int(getattr(row, "class")))
            for row in annotations["annotations"]
        ]
    else:
        annotations = _matlab(root / "devkit" / "cars_meta.mat")
        name = "cars_test_annos_withlabels.mat"  # its owner hands the labels out apart
        place = root if (root / name).is_file() else root / "devkit"
        files = {"train": root / "devkit" / "cars_train_annos.mat", "test": place / name}
        rows = [
            (root / f"cars_{part}" / str(row.fname), int(getattr(row, "class")))
            for part, file in files.items()
            for row in _matlab(file)["annotations"]
        ]
    names = [str(name) for name in annotations["class_names"]]
    groups: dict[str, list[Row]] = {"train": [], "test": []}
    for path, label in rows:
        groups["test" if label > len(names) // 2 else "train"].append((path, names[label - 1]))
    return from_rows(options, root, groups)


def read_products(options: SourceOptions) -> dict[str, Images]:
    """Read Stanford_Online_Products: Ebay_{train,test}.txt (id, class, superclass, path).

    A class is a product; `options.columns` may name "kind", of product, such as bicycle.
    """
    root = root_folder(options)
    groups: dict[str, list[Row]] = {}
    for split in ("train", "test"):
        rows = _table(root / f"Ebay_{split}.txt", 4)[1:]  # the first names the columns
        groups[split] = [
            (root / path, label, path.partition("/")[0].removesuffix("_final"))
            for _, label, _, path in rows
        ]
    return from_rows(options, root, groups, ("kind",))


def read_market(options: SourceOptions) -> dict[str, Images]:
    """Read Market-1501's layout: bounding_box_train, query, bounding_box_test; 0002_c1s1_....jpg.

    Splits are train, query and gallery; a class is a person. Gallery's persons 0000 and -1 are
    distractors and junk, and have no label. Columns are "person", "camera" and "sequence".

    Source: Zheng et al. 2015, Scalable person re-identification: a benchmark, and its readme.
    """
    root = root_folder(options)
    folders = {"train": "bounding_box_train", "query": "query", "gallery": "bounding_box_test"}
    groups: dict[str, list[Row]] = {}
    for split, name in folders.items():
        groups[split] = []
        for path in filter(is_image, files_under(root / name)):
            match = _MARKET_NAME.match(path.name)
            if match is None:
                raise DataError(f"{path} is not named as in 0002_c1s1_000451_03.jpg")
            person = "" if match[1] in ("0000", "-1") else match[1]
            groups[split].append((path, person, person, match[2], match[3]))
    return from_rows(options, root, groups, ("person", "camera", "sequence"))


def read_inshop(options: SourceOptions) -> dict[str, Images]:
    """Read DeepFashion's In-shop Clothes Retrieval: list_eval_partition.txt and its images.

    Splits are train, query and gallery; a class is a product. Columns are "kind", of clothes, and
    "view", such as front. Source: Liu et al. 2016, DeepFashion, and Eval/README.
    """
    root = root_folder(options)
    places = [root / "Eval" / "list_eval_partition.txt", root / "list_eval_partition.txt"]
    path = next((path for path in places if path.is_file()), places[1])
    groups: dict[str, list[Row]] = {"train": [], "query": [], "gallery": []}
    # the first line counts the images, the second names the columns
    for number, line in enumerate(read_file(path).decode().splitlines()[2:], 3):
        row = line.split()
        parts = row[0].split("/") if row else []
        if row and (len(row) != 3 or row[2] not in groups or len(parts) < 3):
            raise DataError(f"{path}, line {number}: {line!r} is not image, item and split")
        if row:
            view = Path(parts[-1]).stem.split("_", 2)[-1]  # 02_1_front.jpg
            groups[row[2]].append((root / row[0], row[1], parts[-3], view))
    return from_rows(options, root, groups, ("kind", "view"))


def read_torchvision(options: SourceOptions) -> dict[str, Images]:
    """Read a class of torchvision.datasets by its name.

    Images are the original files where the class takes a loader, else they are encoded as PNG.
    """
    import torchvision.datasets

    known = torchvision.datasets.__all__
    if options.name not in known:
        hint = did_you_mean(options.name or "", known)
        raise DataError(f"--name {options.name!r} is not a dataset of torchvision{hint}")
    constructor = getattr(torchvision.datasets, str(options.name))
    takes = inspect.signature(constructor).parameters
    if not {"train", "split"} & set(takes):
        raise DataError(f"torchvision's {options.name} has no train or split argument to choose by")
    splits = [options.split] if options.split else ["train", "test"] if "train" in takes else None
    if splits is None:
        raise DataError(f"torchvision's {options.name} needs --split NAME; one run for each split")
    return {split: _from_torchvision(constructor, takes, split, options) for split in splits}


def _from_torchvision(
    constructor: Any, takes: Iterable[str], split: str, options: SourceOptions
) -> Images:
    # the constructor's arguments: not two of these classes take the same
    root = root_folder(options, must_exist=not options.download)
    arguments: dict[str, Any] = {"root": str(root)}
    if "train" in takes:
        if split not in ("train", "test"):
            raise DataError(f"torchvision's {options.name} has no split {split!r}: train, test")
        arguments["train"] = split == "train"
    else:
        arguments["split"] = split
    if "download" in takes:
        arguments["download"] = options.download
    if "loader" in takes:
        arguments["loader"] = read_file
    try:
        dataset = constructor(**arguments)
    except (RuntimeError, ValueError, OSError) as error:
        raise DataError(f"torchvision's {options.name}: {error}") from error
    # labels: from the attribute where there is one, else by reading every image
    stored = next((getattr(dataset, k) for k in _LABEL_NAMES if hasattr(dataset, k)), None)
    if stored is None:
        stored = [label for _, label in dataset]
    labels = np.array(stored if isinstance(stored, list) else stored.tolist())  # array or tensor
    if labels.shape != (len(dataset),) or not np.issubdtype(labels.dtype, np.integer):
        raise DataError(f"torchvision's {options.name} does not give one integer label an image")
    names = getattr(dataset, "classes", None) or range(int(labels.max(initial=-1)) + 1)
    classes = tuple(
        n if isinstance(n, str) else str(n) if isinstance(n, int) else n[0] for n in names
    )

    def read(i: int) -> bytes:
        image = dataset[i][0]
        if isinstance(image, bytes):
            return image
        return encode_png(np.asarray(image if image.mode == "L" else image.convert("RGB")))

    first = len(read(0)) if len(dataset) else 0
    sizes = np.full(len(dataset), first, np.int64)
    numbers = [f"{split}/{i}" for i in range(len(dataset))]
    return Images(numbers, labels.astype(np.int64), sizes, classes, read)


def _table(path: Path, columns: int) -> list[list[str]]:
    """Read the lines of a text file, the first `columns` words of each."""
    lines = read_file(path).decode().splitlines()
    rows = [line.split()[:columns] for line in lines if line.strip()]
    for number, row in enumerate(rows):
        if len(row) < columns:
            raise DataError(f"{path}, line {number + 1}: {len(row)} columns, not {columns}")
    return rows


def _matlab(path: Path) -> dict[str, Any]:
    from scipy.io import loadmat  # comes with scikit-learn

    with open_file(path) as file:
        try:
            content: dict[str, Any] = loadmat(file, squeeze_me=True, struct_as_record=False)
        except (OSError, ValueError) as error:
            raise DataError(f"cannot read {path}: {error}") from error
    return content


# --- idx: MNIST and its like


def parse_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Read an idx file of uint8, plain or gzip, of so many dimensions. Raises DataError for others.

    Source: LeCun, Cortes and Burges: 00 00 08 (uint8) dimensions, each size as a big-endian int32,
    the data, last index fastest.
    """
    raw = read_file(path)
    if raw[:2] == b"\x1f\x8b":
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path}: damaged gzip: {error}") from error
    magic = bytes((0, 0, 8, dimensions))
    if raw[:4] != magic:
        raise DataError(f"{path}: magic is {raw[:4].hex()}, not {magic.hex()}: no such idx file")
    start = 4 + 4 * dimensions
    if len(raw) < start:
        raise DataError(f"{path}: truncated in its header")
    shape = struct.unpack_from(f">{dimensions}I", raw, 4)
    if len(raw) != start + math.prod(shape):
        raise DataError(
            f"{path}: {len(raw)} bytes, but sizes {shape} need {start + math.prod(shape)}"
        )
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def read_idx(options: SourceOptions) -> dict[str, Images]:
    """Read MNIST's idx files, plain or .gz: *images*idx3* and *labels*idx1*.

    A file with "t10k" or "test" in its name is of the split test, any other of train. Class names
    come from `options.class_file`, else from classes.txt where there is one, else they are the
    numbers.
    """
    root = root_folder(options)
    class_file = options.class_file or root / "classes.txt"
    classes = class_names(class_file) if options.class_file or class_file.exists() else ()
    result = {}
    for path in sorted(root.glob("*images*idx3*")):
        split = "test" if "t10k" in path.name or "test" in path.name else "train"
        if options.split in (None, split):
            labels = path.with_name(path.name.replace("images", "labels").replace("idx3", "idx1"))
            if split in result:
                raise DataError(f"{root} has several image files for split {split!r}: {path.name}")
            result[split] = _from_idx(path, labels, classes)
    if not result:
        which = f" of split {options.split!r}" if options.split else ""
        raise DataError(f"{root} has no *images*idx3* file{which}")
    return result


def _from_idx(path: Path, label_path: Path, classes: tuple[str, ...]) -> Images:
    pixels, labels = parse_idx(path, 3), parse_idx(label_path, 1).astype(np.int64)
    if len(pixels) != len(labels):
        raise DataError(f"{path} has {len(pixels)} images, {label_path.name} {len(labels)} labels")
    highest = int(labels.max(initial=-1))
    if classes and highest >= len(classes):
        raise DataError(f"{label_path}: label {highest}, but only {len(classes)} class names")
    classes = classes or tuple(str(k) for k in range(highest + 1))
    sizes = np.full(len(pixels), png_bytes(pixels.shape[1], pixels.shape[2], 1), np.int64)
    names = [f"{path.name}[{i}]" for i in range(len(pixels))]
    return Images(names, labels, sizes, classes, lambda i: encode_png(pixels[i]))


def write_idx(path: Path, values: NDArray[np.uint8]) -> None:
    """Write uint8 values as a gzip idx file without time or name in its header."""
    header = bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape)
    packed = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=packed, compresslevel=9, mtime=0) as file:
        file.write(header + values.tobytes())
    write_atomically(path, packed.getvalue())


def cut_idx(root: Path, out: Path, per_class: int) -> list[Path]:
    """Keep the first `per_class` training images of each class, in file order.

    Reads train-images-idx3-ubyte.gz and train-labels-idx1-ubyte.gz of `root`, never a test file;
    returns the files of the same names in `out`. Raises: DataError where a class has fewer.
    """
    names = ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz")
    pixels, labels = parse_idx(root / names[0], 3), parse_idx(root / names[1], 1)
    if len(pixels) != len(labels):
        raise DataError(f"{root}: {len(pixels)} images, {len(labels)} labels")
    counts = np.bincount(labels)
    if counts.min() < per_class:
        raise DataError(f"class {counts.argmin()} has {counts.min()} images, not {per_class}")
    of_class = [np.flatnonzero(labels == k)[:per_class] for k in np.unique(labels)]
    kept = np.sort(np.concatenate(of_class))
    out.mkdir(parents=True, exist_ok=True)
    for name, values in zip(names, (pixels[kept], labels[kept]), strict=True):
        write_idx(out / name, values)
    return [out / name for name in names]
