"""A split as a torch Dataset, for trainings and transforms of one's own."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from sslpipe.arguments import checked
from sslpipe.data.decode import BadSample, decode
from sslpipe.data.index import DatasetIndex, load_index
from sslpipe.data.reader import Reader
from sslpipe.errors import DataError, UserError, check_count, shown

MOST_PX = 2**16  # longer sides than decoders take: images keep their size


class ImageDataset(Dataset[tuple[Any, int]]):
    """One split, image by image: item i is (image, label) of the sample with id i.

    >>> images = sslpipe.ImageDataset("out/photos/dataset.json", "train", transform)
    >>> loader = torch.utils.data.DataLoader(images, batch_size=64, shuffle=True, num_workers=2)

    Reads one image at a time, from anywhere in the shards; `sslpipe train` reads them in windows.

    Args:
        data: The data set's index, or the path or URL of its dataset.json.
        split: Its name.
        transform: Called with each image, a tensor (C, h, w): uint8 RGB, or float32 of other types;
            torchvision's `transforms.v2` take it. None: the tensor itself; for the batches of a
            DataLoader it must give all images one size.
        most_px: Images with a longer side are reduced to it; None: none is.

    Attributes:
        labels: (N,) int64, -1 for none.
        classes: Names of the labels.

    Raises:
        UserError: An argument is of another type.
        DataError: The data set or an image cannot be read.
    """

    @checked
    def __init__(
        self,
        data: DatasetIndex | str | Path,
        split: str,
        transform: Callable[[torch.Tensor], Any] | None = None,
        *,
        most_px: int | None = None,
    ) -> None:
        index = load_index(data)
        self.split = index.split(split)
        if transform is not None and not callable(transform):
            raise UserError(f"transform = {shown(transform)} is not callable")
        if most_px is not None:
            check_count(most_px, "most_px")
        self.transform = transform
        self.most_px = MOST_PX if most_px is None else most_px
        self.labels = self.split.labels
        self.classes = list(index.manifest.classes)
        self._reader = Reader(self.split)

    def __len__(self) -> int:
        return len(self.split)

    def __repr__(self) -> str:
        where = f"{self.split.folder!r}, {self.split.name!r}"
        classes = len(self.classes)
        return f"ImageDataset({where}, images={len(self)}, classes={classes})"

    def __getitem__(self, sample_id: int) -> tuple[Any, int]:
        """Return an image and its label. Raises: DataError, with the sample's key."""
        sample_id = operator.index(sample_id)
        if not -len(self) <= sample_id < len(self):
            raise IndexError(f"sample {sample_id} of {len(self)}")
        sample_id %= len(self)
        raw = self._reader.one(sample_id)
        try:
            pixels = decode(
                raw.image,
                self.most_px,
                image_type=self.split.stored_type,
                channels=self.split.channels,
            )  # (C, h, w)
        except BadSample as error:
            raise DataError(
                f"sample {sample_id} of split {self.split.name!r} ({raw.key}): {error}"
            ) from error
        image = torch.from_numpy(pixels)
        label = int(self.labels[sample_id])
        return image if self.transform is None else self.transform(image), label
