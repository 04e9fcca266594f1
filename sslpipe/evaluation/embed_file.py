"""The embedding pass of `sslpipe embed`: several processes, one file, stopped and resumed.

While it runs, OUT's neighbour `.OUT.parts/` holds one file for each PART_SAMPLES consecutive ids,
whole or not there. Parts do not depend on the number of processes, so a pass that was killed is
resumed with any number of them and gives the same bytes.
"""

import json
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from sslpipe.augment.eval_view import EvalView
from sslpipe.data.index import Split
from sslpipe.data.store import OnBad, Quarantined
from sslpipe.distributed import Rank, agree
from sslpipe.errors import DataError
from sslpipe.evaluation.embed import (
    Embeddings,
    check_rows,
    embed_here,
    joined,
    read_embeddings,
    save_embeddings,
)
from sslpipe.portable import make_folder, write_atomically

PART_SAMPLES = 4096

Finish = Callable[[Embeddings], Embeddings]
Bar = Callable[[int], AbstractContextManager[Callable[[int], None]]]


def embed_to_file(
    out: Path,
    backbone: nn.Module,
    view: EvalView,
    split: Split,
    facts: dict[str, Any],
    *,
    network: str = "the backbone",
    process: Rank = Rank(),  # noqa: B008 (immutable)
    dtype: torch.dtype = torch.float32,
    finish: Finish | None = None,
    batch_size: int = 256,
    canvas_px: int = 256,
    num_workers: int = 2,
    device: torch.device | str = "cpu",
    bar: Bar | None = None,
    on_bad: OnBad | None = None,
) -> None:
    """Write features, labels and ids of each sample of the split, once, in id order. Collective.

    Args:
        out: The file; see `save_embeddings` for its kinds.
        backbone: Images (B, 3, S, S) -> (B, F).
        view: Makes its images.
        split: Where the samples are.
        facts: What decides the features, plain values; parts of other facts are thrown away. The
            file carries them, and `left_out`: the samples that could not be decoded.
        network: Names the backbone in messages.
        process: This process, which embeds every world_size-th part.
        dtype: Of the features in the file, float32 or float16.
        finish: What is done to the rows of each part: whitening, say.
        batch_size: Samples a forward.
        canvas_px: Images with a longer side are reduced to it when they are decoded.
        num_workers: Threads that decode.
        device: Where the backbone is.
        bar: Takes the number of samples left to this process and gives a context; what that yields
            is called with the size of each batch done.
        on_bad: As in `embed`.

    Raises:
        DataError: As `embed`, or features are not finite; what was done until then is kept.
    """
    # which parts are missing: one answer on all processes
    parts = out.with_name(f".{out.name}.parts")
    facts = {**facts, "canvas_px": canvas_px, "dtype": str(dtype).removeprefix("torch.")}
    numbers = range(-(-len(split) // PART_SAMPLES))
    if process.rank == 0:
        _open(parts, {**facts, "part_samples": PART_SAMPLES, "samples": len(split)})
    agree(False)  # the others wait for rank 0
    done = {number for number in numbers if _part(parts, number).is_file()}
    agree(False)  # all have looked before the first writes

    # each process embeds its share of them
    todo = [number for number in numbers if number not in done][process.rank :: process.world_size]
    left = sum(len(_ids(split, number)) for number in todo)
    with nullcontext() if bar is None else bar(left) as progress:
        for number in todo:
            bad: list[Quarantined] = []
            rows = embed_here(
                backbone,
                view,
                split,
                ids=_ids(split, number),
                process=Rank(),
                batch_size=batch_size,
                canvas_px=canvas_px,
                num_workers=num_workers,
                device=device,
                progress=progress,
                on_bad=None if on_bad is None else _both(on_bad, bad),
            )
            check_rows(rows, split.name, network)
            if finish is not None and len(rows.ids):
                rows = finish(rows)
            left_out = [one._asdict() for one in sorted(bad)]
            save_embeddings(_part(parts, number), rows, {"left_out": left_out}, dtype)
    agree(False)

    # rank 0 joins them into one file
    if process.rank == 0:
        _join(out, [_part(parts, number) for number in numbers], split, facts, dtype)
        shutil.rmtree(parts)
    agree(False)


def _open(parts: Path, identity: dict[str, Any]) -> None:
    """The folder of the parts; emptied unless they are of this very pass."""
    text = json.dumps(identity, sort_keys=True)
    path = parts / "identity.json"
    if parts.is_symlink():  # somebody planted it: it leads elsewhere
        parts.unlink()
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return
    shutil.rmtree(parts, ignore_errors=True)
    make_folder(parts.parent, parts.name)
    write_atomically(path, text)


def _part(parts: Path, number: int) -> Path:
    return parts / f"{number:06d}.safetensors"


def _ids(split: Split, number: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    first = number * PART_SAMPLES
    return np.arange(first, min(first + PART_SAMPLES, len(split)), dtype=np.int64)


def _both(on_bad: OnBad, bad: list[Quarantined]) -> OnBad:
    def report(one: Quarantined) -> None:
        bad.append(one)
        on_bad(one)

    return report


def _join(
    out: Path, files: list[Path], split: Split, facts: dict[str, Any], dtype: torch.dtype
) -> None:
    rows: list[Embeddings] = []
    left_out: list[dict[str, Any]] = []
    for path in files:
        try:
            part, metadata = read_embeddings(path)
        except DataError as error:
            path.unlink()
            raise DataError(f"{error}; it is removed: the same command makes it anew") from error
        left_out += metadata["left_out"]
        rows += [part] if len(part.ids) else []
    if not rows:
        raise DataError(f"split {split.name!r}: no sample of it could be read")
    together = joined(rows)
    assert bool((together.ids[1:] > together.ids[:-1]).all()), "a sample was embedded twice"
    assert len(together.ids) + len(left_out) == len(split), "a sample was skipped silently"
    save_embeddings(out, together, {**facts, "left_out": left_out}, dtype)
