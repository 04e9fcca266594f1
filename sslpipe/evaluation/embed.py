"""A backbone and a split -> one row of features a sample, in the order of their ids."""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import torch
from numpy.typing import ArrayLike
from safetensors.torch import save_file
from torch import Tensor, nn

from sslpipe.augment.eval_view import EvalView
from sslpipe.data.index import Split
from sslpipe.data.loader import OnBad, one_pass
from sslpipe.distributed import Shard, all_gather_rows
from sslpipe.errors import DataError


class Embeddings(NamedTuple):
    """features: (N, F) float32, not normalised; labels: (N,) int64, -1 none; ids: (N,) int64."""

    features: Tensor
    labels: Tensor
    ids: Tensor

    def rows(self, index: Tensor) -> "Embeddings":
        return Embeddings(self.features[index], self.labels[index], self.ids[index])

    def to(self, device: torch.device | str) -> "Embeddings":
        return Embeddings(*(tensor.to(device) for tensor in self))


def embed(
    backbone: nn.Module,
    view: EvalView,
    split: Split,
    *,
    ids: ArrayLike | None = None,
    shard: Shard = Shard(),  # noqa: B008 (immutable)
    batch_size: int = 256,
    canvas_px: int = 256,
    num_workers: int = 2,
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] | None = None,
    on_bad: OnBad | None = None,
) -> Embeddings:
    """Features of each sample of the split (or of `ids`), exactly once, in id order, on the CPU.

    backbone: images (B, 3, S, S) -> (B, F); used in eval mode without gradient, its train mode is
    put back, and neither its parameters nor its buffers change (checked by hash).
    shard: this process's part; where torch.distributed runs, every process returns all rows.
    progress: called with the number of samples of each batch done on this process.
    on_bad: told of each sample that cannot be decoded, which then has no row; without it, a
        DataError.
    """
    before = module_sha256(backbone)
    batches = one_pass(
        split,
        ids=None if ids is None else np.asarray(ids, dtype=np.int64),
        shard=shard,
        batch_size=batch_size,
        canvas_px=canvas_px,
        num_workers=num_workers,
        on_bad=on_bad,
    )
    parts: list[Embeddings] = []
    view = view.to(device)
    dtype = next((p.dtype for p in backbone.parameters()), torch.float32)
    with evaluating(backbone), torch.no_grad():
        for batch in batches:
            batch = batch.to(torch.device(device))
            images = view(batch.images, batch.sizes).to(dtype)  # (B, 3, S, S)
            features = backbone(images)  # (B, F)
            parts.append(Embeddings(features.float().cpu(), batch.labels.cpu(), batch.ids.cpu()))
            if progress is not None:
                progress(len(parts[-1].ids))
    assert module_sha256(backbone) == before, "evaluation changed the backbone"
    nothing = Embeddings(torch.zeros(0, 0), *torch.zeros(2, 0, dtype=torch.int64))
    local = (
        Embeddings(*(torch.cat(part) for part in zip(*parts, strict=True))) if parts else nothing
    )
    together = _gather(local, device)
    if len(together.ids) == 0:
        raise DataError(f"split {split.name!r}: no sample of it could be read")
    together = together.rows(torch.argsort(together.ids))
    assert bool((together.ids[1:] > together.ids[:-1]).all()), "a sample was embedded twice"
    return together


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Eval mode inside; afterwards every submodule is in the mode it was in."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training


def module_sha256(module: nn.Module) -> str:
    """sha256 over names, types, shapes and bytes of all parameters and buffers."""
    state = hashlib.sha256()
    tensors = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        state.update(raw.numpy().data)
    return state.hexdigest()


def _gather(local: Embeddings, device: torch.device | str) -> Embeddings:
    """Every process's rows on every process; the numbers of rows may differ."""
    widths = torch.tensor([local.features.shape[1]], device=device)
    width = int(all_gather_rows(widths).max())  # a process without rows does not know it
    if len(local.ids) == 0:
        local = local._replace(features=local.features.new_zeros(0, width))
    return Embeddings(*(all_gather_rows(tensor.to(device)).cpu() for tensor in local))


def save_embeddings(path: str | Path, embeddings: Embeddings, facts: dict[str, Any]) -> None:
    """Write a safetensors file. facts: where they come from (backbone hash, data, view, split)."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    tensors = {name: tensor.contiguous() for name, tensor in embeddings._asdict().items()}
    save_file(tensors, partial, metadata={"facts": json.dumps(facts, sort_keys=True)})
    partial.replace(path)


def load_embeddings(path: str | Path) -> tuple[Embeddings, dict[str, Any]]:
    """Rows and facts as they were saved. Raises: DataError where the file is none of ours."""
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            missing = {*Embeddings._fields} - {*file.keys()}
            if missing or "facts" not in metadata:
                raise DataError(
                    f"{path} holds no embeddings (no {', '.join(sorted(missing)) or 'facts'}); "
                    "write one with `python -m tools.embed`"
                )
            rows = Embeddings(*(file.get_tensor(name) for name in Embeddings._fields))
    except (OSError, safetensors.SafetensorError) as error:
        raise DataError(f"cannot read embeddings from {path}: {error}") from error
    check_embeddings(rows, str(path), labelled=False)
    facts: dict[str, Any] = json.loads(metadata["facts"])
    return rows, facts


def check_embeddings(rows: Embeddings, name: str, *, labelled: bool = True) -> None:
    """Raise one DataError for wrong shapes or types, non-finite features or missing labels."""
    features, labels, ids = rows
    if features.dtype != torch.float32 or features.ndim != 2:
        raise DataError(
            f"{name}: features are {features.dtype} {tuple(features.shape)}, not float32 (N, F)"
        )
    for key, tensor in (("labels", labels), ("ids", ids)):
        if tensor.dtype != torch.int64 or tensor.shape != features.shape[:1]:
            raise DataError(
                f"{name}: {key} are {tensor.dtype} {tuple(tensor.shape)}, "
                f"not int64 ({len(features)},)"
            )
    if len(features) == 0:
        raise DataError(f"{name}: has no rows")
    bad_rows = int((~torch.isfinite(features)).any(dim=1).sum())
    if bad_rows:
        raise DataError(
            f"{name}: {bad_rows} rows of features are not finite; did training diverge?"
        )
    unlabelled = int((labels < 0).sum())
    if labelled and unlabelled:
        raise DataError(
            f"{name}: {unlabelled} of {len(labels)} rows have no label (-1); "
            "leave them out or give the split labels"
        )
