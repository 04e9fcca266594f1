"""PK batches for a training loop of one's own; a fine-tuning plans its own, see `sampling`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Sampler

from sslpipe.arguments import checked
from sslpipe.errors import UserError, check_count

__all__ = ["PKSampler"]


class PKSampler(Sampler[list[int]]):
    """Draw batches of P classes with K images each, for `DataLoader(batch_sampler=...)`.

    >>> images = sslpipe.ImageDataset("out/photos", "train", transform)
    >>> batches = PKSampler(images.labels, classes_per_batch=16, images_per_class=4)
    >>> loader = torch.utils.data.DataLoader(images, batch_sampler=batches)

    A pass over it shows an image once at most, and no class twice in a batch; the classes with most
    images left come first. Each pass draws anew. accelerate's `prepare(loader)` deals its batches
    out to the processes; a DDP loop without it gives each process a `seed` of its own.

    Args:
        labels: (N,) integers, numpy, torch or a list; below 0: none, never drawn.
        classes_per_batch: P.
        images_per_class: K; classes with fewer images are skipped.
        seed: Of the draws.

    Attributes:
        epoch: Number of the next pass, from 0; with `seed` it decides the draws.

    Raises:
        UserError: Fewer than P classes have K images.

    Source:
        Hermans et al. 2017, arXiv:1703.07737, section 2.
    """

    @checked
    def __init__(
        self,
        labels: Sequence[int] | torch.Tensor | NDArray[np.int64],
        *,
        classes_per_batch: int,
        images_per_class: int,
        seed: int = 0,
    ) -> None:
        check_count(classes_per_batch, "classes_per_batch")
        check_count(images_per_class, "images_per_class")
        numbers = _integers(labels)
        places = [np.flatnonzero(numbers == label) for label in np.unique(numbers[numbers >= 0])]
        self._members = [each for each in places if len(each) >= images_per_class]
        if len(self._members) < classes_per_batch:
            raise UserError(
                f"classes_per_batch = {classes_per_batch}: {len(self._members)} classes have "
                f"{images_per_class} images; give fewer, or a smaller images_per_class"
            )
        self.classes_per_batch = classes_per_batch
        self.images_per_class = images_per_class
        self.seed = seed
        self.epoch = 0

    def __repr__(self) -> str:
        classes = f"classes_per_batch={self.classes_per_batch}"
        return f"PKSampler({classes}, images_per_class={self.images_per_class}, seed={self.seed})"

    def __len__(self) -> int:
        """Return the number of batches of a pass: the largest T for which they can be filled."""
        groups = np.array([len(each) // self.images_per_class for each in self._members])
        batches = np.arange(1, groups.sum() // self.classes_per_batch + 1)  # T
        filled = np.minimum(groups, batches[:, None]).sum(1) >= self.classes_per_batch * batches
        return int(filled.sum())

    def __iter__(self) -> Iterator[list[int]]:
        rng = np.random.default_rng([self.seed, self.epoch])
        self.epoch += 1
        size = self.images_per_class
        groups = []  # of each class, (n, K)
        for members in self._members:
            shuffled = rng.permutation(members)
            groups.append(shuffled[: len(shuffled) // size * size].reshape(-1, size))
        left = np.array([len(each) for each in groups])
        for _ in range(len(self)):
            order = np.lexsort((rng.random(len(left)), -left))
            chosen = order[: self.classes_per_batch]
            left[chosen] -= 1
            yield np.concatenate([groups[k][left[k]] for k in chosen]).tolist()


def _integers(labels: ArrayLike | torch.Tensor) -> NDArray[np.int64]:
    numbers = labels.cpu().numpy() if isinstance(labels, torch.Tensor) else np.asarray(labels)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise UserError(f"labels must be integers (N,), not {numbers.dtype} {numbers.shape}")
    return numbers.astype(np.int64)
