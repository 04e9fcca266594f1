"""Read a data set of torchvision by the name of its class."""

import inspect
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sslpipe.errors import DataError, did_you_mean
from sslpipe.sharding.members import encode_png
from sslpipe.sharding.sources import (
    Images,
    SourceOptions,
    distinct_names,
    read_file,
    root_folder,
)

_LABEL_NAMES = ("targets", "labels", "_labels")  # torchvision's datasets do not agree on one


def read_torchvision(options: SourceOptions) -> dict[str, Images]:
    """Read a class of torchvision.datasets by its name.

    Images are the original files where the class takes a loader, else they are encoded as PNG.
    """
    import torchvision.datasets

    known = torchvision.datasets.__all__
    if options.name not in known:
        hint = did_you_mean(options.name or "", known)
        raise DataError(f"--name={options.name!r} is not a dataset of torchvision{hint}")
    constructor = getattr(torchvision.datasets, str(options.name))
    takes = inspect.signature(constructor).parameters
    if not {"train", "split"} & set(takes):
        raise DataError(f"torchvision's {options.name} has no train or split argument to choose by")
    if options.split:
        splits = [options.split]
    elif "train" in takes:
        splits = ["train", "test"]
    else:
        raise DataError(f"torchvision's {options.name} needs --split NAME; one run for each split")
    return {split: _from_torchvision(constructor, takes, split, options) for split in splits}


def _from_torchvision(
    constructor: Any, takes: Iterable[str], split: str, options: SourceOptions
) -> Images:
    # not two of these classes take the same arguments
    root = root_folder(options, must_exist=not options.download)
    arguments: dict[str, Any] = {"root": str(root)}
    if "train" not in takes:
        arguments["split"] = split
    elif split in ("train", "test"):
        arguments["train"] = split == "train"
    else:
        raise DataError(f"torchvision's {options.name} has no split {split!r}: train, test")
    if "download" in takes:
        arguments["download"] = options.download
    if "loader" in takes:
        arguments["loader"] = read_file
    try:
        dataset = constructor(**arguments)
    except (RuntimeError, ValueError, OSError) as error:
        raise DataError(f"torchvision's {options.name}: {error}") from error
    labels = _labels(dataset, options.name)
    names = getattr(dataset, "classes", None) or range(int(labels.max(initial=-1)) + 1)

    def read(i: int) -> bytes:
        image = dataset[i][0]
        if isinstance(image, bytes):
            return image
        return encode_png(np.asarray(image if image.mode == "L" else image.convert("RGB")))

    first = len(read(0)) if len(dataset) else 0
    return Images(
        names=[f"{split}/{i}" for i in range(len(dataset))],
        labels=labels,
        sizes=np.full(len(dataset), first, np.int64),
        # texts, numbers, or synonyms, of which the first is taken
        classes=distinct_names(
            [str(name[0] if isinstance(name, tuple | list) else name) for name in names]
        ),
        read=read,
    )


def _labels(dataset: Any, name: str | None) -> NDArray[np.int64]:
    """Return the label of each image, (n,), from an attribute, else by reading every image."""
    stored = next((getattr(dataset, k) for k in _LABEL_NAMES if hasattr(dataset, k)), None)
    if stored is None:
        stored = [label for _, label in dataset]
    labels = np.array(stored if isinstance(stored, list) else stored.tolist())  # array or tensor
    if labels.shape != (len(dataset),) or not np.issubdtype(labels.dtype, np.integer):
        raise DataError(f"torchvision's {name} does not give one integer label an image")
    return labels.astype(np.int64)
