"""A backbone and a split -> one row of features a sample, in the order of their ids."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from sslpipe.data.index import Split
from sslpipe.data.loader import one_pass
from sslpipe.data.pipeline import Batch
from sslpipe.data.reader import OnBad, Reader
from sslpipe.distributed import Rank, all_gather_rows
from sslpipe.errors import DataError
from sslpipe.models.state import (
    check_finite,
    evaluating,
    module_sha256,
    rows_not_finite,
    weights_dtype,
)
from sslpipe.precision import wide_dtype


class Embeddings(NamedTuple):
    """Features (N, F) float32, not normalised; labels (N,) int64, -1: none; ids (N,) in a split."""

    features: Tensor
    labels: Tensor
    ids: Tensor

    def __repr__(self) -> str:
        labelled = self.labels[self.labels >= 0]
        return (
            f"Embeddings(features={(*self.features.shape,)} {self.features.dtype}, labels of "
            f"{len(labelled)} in {len(torch.unique(labelled))} classes)"
        )

    def rows(self, index: Tensor | slice) -> "Embeddings":
        """Select some rows, by numbers, a mask or a slice, in the order of `index`."""
        return Embeddings(self.features[index], self.labels[index], self.ids[index])

    def to(self, device: torch.device | str) -> "Embeddings":
        """Move to a device; to the CPU where it has no float64 (MPS), which evaluations need."""
        target = torch.device(device)
        if wide_dtype(target) != torch.float64:
            target = torch.device("cpu")
        return Embeddings(*(tensor.to(target) for tensor in self))

    @staticmethod
    def joined(parts: "Sequence[Embeddings]") -> "Embeddings":
        """Put rows behind one another, those of the first part first."""
        return Embeddings(
            features=torch.cat([part.features for part in parts]),
            labels=torch.cat([part.labels for part in parts]),
            ids=torch.cat([part.ids for part in parts]),
        )


class SplitEmbeddings(Embeddings):
    """Embeddings that say of which split and network they are, as a features file does."""

    facts: Mapping[str, Any] = MappingProxyType({})

    @classmethod
    def of(cls, rows: Embeddings, facts: Mapping[str, Any]) -> "SplitEmbeddings":
        """Add to rows what their file says, or would say."""
        known = cls(features=rows.features, labels=rows.labels, ids=rows.ids)
        known.facts = facts
        return known


class View(Protocol):
    """Makes a batch's images, (n B, 3, S, S), and of their features (n B, F) one row a sample."""

    @property
    def canvas_px(self) -> int: ...  # noqa: D102
    def to(self, device: torch.device | str) -> Any: ...  # noqa: D102
    def make_views(self, batch: Batch) -> Tensor: ...  # noqa: D102
    def reduced(self, features: Tensor) -> Tensor: ...  # noqa: D102


@dataclass(frozen=True)
class EmbedOptions:
    """How the images of a split are embedded: the same for all networks that are compared.

    Attributes:
        device: Where the backbone is.
        rows_on: Where the rows are wanted: the CPU, or `device` for an evaluation there.
        process: This process, which embeds its share; every process returns all rows.
        batch_size: Images of a forward pass, at most.
        num_workers: Threads that decode; 0: the caller does.
        canvas_px: Images with a longer side are reduced to it before the view is made; None: the
            view's own.
        on_bad: Called for each sample that cannot be decoded, which is skipped; None: a DataError.
        reader: Of the split; None: one that runs no command and keeps nothing on disk.
    """

    device: torch.device | str = "cpu"
    rows_on: torch.device | str = "cpu"
    process: Rank = field(default_factory=Rank)
    batch_size: int = 256
    num_workers: int = 2
    canvas_px: int | None = None
    on_bad: OnBad | None = None
    reader: Reader | None = None


def embed(
    backbone: nn.Module,
    view: View,
    split: Split,
    options: EmbedOptions = EmbedOptions(),
    *,
    ids: ArrayLike | None = None,
    network: str | None = "the backbone",
    progress: Callable[[int], None] | None = None,
) -> Embeddings:
    """Compute features of each sample, exactly once, in id order. Collective.

    Args:
        backbone: Images (B, 3, S, S) -> (B, F). Used in eval mode without gradient; its train mode
            is restored, and neither its parameters nor its buffers change (checked by hash).
        view: Makes its images.
        split: Where the samples are.
        options: Where, by whom, and how many at a time.
        ids: (n,) the samples wanted, sorted; None: all of the split.
        network: Names the backbone where features are not finite, a DataError; None: they may be.
        progress: Called with the size of each batch that this process has done.
    """
    device = options.device
    rows_on = options.rows_on
    local = embed_share(backbone, view, split, options, ids=ids, progress=progress)
    widths = torch.tensor([local.features.shape[1]], device=device)
    width = int(all_gather_rows(widths).max())  # a process without rows does not know it
    if len(local.ids) == 0:
        local = local._replace(features=local.features.new_zeros(0, width))
    together = Embeddings(*(all_gather_rows(each.to(device)).to(rows_on) for each in local))
    if not bool((together.ids[1:] > together.ids[:-1]).all()):
        together = together.rows(torch.argsort(together.ids))
    check_all(together, split)
    if network is not None:
        check_rows(together, split.name, network)
    return together


def check_all(rows: Embeddings, split: Split) -> None:
    """Check that a split has rows, each sample once. Raises: DataError where none could be read."""
    if len(rows.ids) == 0:
        raise DataError(f"split {split.name!r}: no sample of it could be read")
    assert bool((rows.ids[1:] > rows.ids[:-1]).all()), "a sample was embedded twice"


def check_rows(rows: Embeddings, split: str, network: str) -> None:
    """Check that a network's features of a split are finite. Raises: DataError."""
    if not bool(torch.isfinite(rows.features.sum())):  # else no row needs a name
        names = [f"sample {number} of split {split!r}" for number in rows.ids.tolist()]
        check_finite(rows.features, names, network)


def embed_share(
    backbone: nn.Module,
    view: View,
    split: Split,
    options: EmbedOptions,
    *,
    ids: ArrayLike | None = None,
    progress: Callable[[int], None] | None = None,
) -> Embeddings:
    """Compute this process's rows of `embed`; (0, 0) features where it has none. Not collective."""
    before = module_sha256(backbone)
    wanted = None if ids is None else np.asarray(ids, dtype=np.int64)
    batches = one_pass(
        split,
        ids=wanted,
        process=options.process,
        batch_size=options.batch_size,
        canvas_px=options.canvas_px or view.canvas_px,
        num_workers=options.num_workers,
        on_bad=options.on_bad,
        reader=options.reader,
    )
    share = options.process.share(len(split) if wanted is None else len(wanted))
    nobody = torch.zeros(0, dtype=torch.int64)
    made = Embeddings(features=torch.zeros(0, 0), labels=nobody, ids=nobody)
    done = 0
    view = view.to(options.device)
    dtype = weights_dtype(backbone)
    with evaluating(backbone), torch.no_grad():
        for batch in batches:
            batch = batch.to(torch.device(options.device))
            images = view.make_views(batch).to(dtype)  # (B, 3, S, S)
            features = view.reduced(forward_in_parts(backbone, images))  # (B, F)
            rows = Embeddings(features.float(), batch.labels, batch.ids)
            if not done:  # one piece of memory: joining parts takes it twice
                made = _space_for(len(share), rows, options.rows_on)
            for whole, part in zip(made, rows, strict=True):
                whole[done : done + len(part)] = part
            done += len(rows.ids)
            if progress is not None:
                progress(len(rows.ids))
    assert module_sha256(backbone) == before, "evaluation changed the backbone"
    return Embeddings(*(tensor[:done].to(options.rows_on) for tensor in made))


def _space_for(count: int, like: Embeddings, device: torch.device | str) -> Embeddings:
    """Return `count` rows to be written, of the widths and types of others."""
    return Embeddings(*(each.new_empty((count, *each.shape[1:]), device=device) for each in like))


# Of one forward on a CPU: the activations of more images leave its caches, which takes
# EfficientNet-Lite0 twice as long for 256 images of 128 px.
CPU_PX = 16 * 128 * 128
CPU_IMAGES = 16  # at least; below, some convolutions round otherwise


def forward_in_parts(backbone: nn.Module, images: Tensor) -> Tensor:
    """Compute features, (N, C, S, S) -> (N, F): of all at once but on a CPU.

    An autocast around it changes nothing: rows are compared with those of other calls.
    """
    with torch.autocast(images.device.type, enabled=False):
        if images.device.type != "cpu":
            features: Tensor = backbone(images)
            return features
        at_once = max(CPU_IMAGES, CPU_PX // (images.shape[-2] * images.shape[-1]))
        return torch.cat([backbone(some) for some in torch.split(images, at_once)])


def check_embeddings(rows: Embeddings, name: str, *, labelled: bool = True) -> None:
    """Check shapes, types, that features are finite and, if `labelled`, that labels are there."""
    features, labels, ids = rows
    if features.dtype != torch.float32 or features.ndim != 2 or features.shape[1] == 0:
        described = f"features are {features.dtype} {tuple(features.shape)}"
        raise DataError(f"{name}: {described}, not float32 (N, F)")
    for key, tensor in (("labels", labels), ("ids", ids)):
        if tensor.dtype != torch.int64 or tensor.shape != features.shape[:1]:
            described = f"{key} are {tensor.dtype} {tuple(tensor.shape)}"
            raise DataError(f"{name}: {described}, not int64 ({len(features)},)")
    if len(features) == 0:
        raise DataError(f"{name}: has no rows")
    check_finite_rows(features, f"{name}: features")
    unlabelled = int((labels < 0).sum())
    if labelled and unlabelled:
        raise DataError(
            f"{name}: {unlabelled} of {len(labels)} rows have no label (-1); "
            "leave them out, give the split labels, or save them beside the features: "
            "numpy.savez(FILE, features=..., labels=...)"
        )


def check_finite_rows(features: Tensor, name: str) -> None:
    """Raise DataError where a number of features (N, F) is not finite, with the first such row."""
    bad = rows_not_finite(features)
    if bad:
        raise DataError(
            f"{name}[{bad[0]}] is not finite, as are {len(bad):,} of {len(features):,} rows; leave "
            "them out (of a network of yours: did its training diverge?)"
        )
