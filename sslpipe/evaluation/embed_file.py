"""A backbone and a split -> a file of features, in parts that outlast a stop: `sslpipe embed`."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from sslpipe.arguments import Advance, silent
from sslpipe.augment.eval_view import EvalView
from sslpipe.data.index import Split
from sslpipe.data.reader import Quarantined
from sslpipe.distributed import Rank, agree
from sslpipe.errors import DataError
from sslpipe.evaluation.embed import (
    Embeddings,
    EmbedOptions,
    check_all,
    check_rows,
    embed_share,
)
from sslpipe.evaluation.feature_files import read_embeddings, save_embeddings
from sslpipe.evaluation.whiten import Whitening
from sslpipe.files import json_text
from sslpipe.portable import disk_error, write_atomically

# The pass of `sslpipe embed`. While it runs, OUT's neighbour `.OUT.parts/` holds one file for each
# PART_SAMPLES consecutive ids, whole or not there. Parts do not depend on the number of processes,
# so a pass that was killed is resumed with any number of them and gives the same bytes.
PART_SAMPLES = 4096


def embed_to_file(
    out: Path,
    backbone: nn.Module,
    view: EvalView,
    split: Split,
    facts: dict[str, Any],
    options: EmbedOptions = EmbedOptions(),  # noqa: B008 (immutable)
    *,
    network: str = "the backbone",
    whitening: Whitening | None = None,
    bar: Callable[[int], AbstractContextManager[Advance]] = lambda left: silent("", left),
) -> None:
    """Write features, labels and ids of each sample of the split, once, in id order. Collective.

    Args:
        out: The file; see `save_embeddings`.
        backbone: As in `embed`.
        view: Makes its images.
        split: Where the samples are.
        facts: What decides the features, plain values; parts of other facts are thrown away. The
            file carries them, and `left_out`: the samples that could not be decoded.
        options: As in `embed`; each process embeds every world_size-th part.
        network: Names the backbone in messages.
        whitening: Flattens the rows; None: they stay as they are.
        bar: Takes the samples left to this process; a context of what is called for each batch.

    Raises:
        DataError: As `embed`; what was done until then is kept.
    """
    process = options.process
    # which parts are missing: one answer on all processes
    parts = out.with_name(f".{out.name}.parts")
    all_ids = np.arange(len(split), dtype=np.int64)
    ids = [all_ids[at : at + PART_SAMPLES] for at in range(0, len(split), PART_SAMPLES)]
    files = [parts / f"{number:06d}.safetensors" for number in range(len(ids))]
    if process.rank == 0:
        with _room_for(out):
            _open(parts, {**facts, "part_samples": PART_SAMPLES, "samples": len(split)})
    agree(False)  # the others wait for rank 0
    todo = [part for part in zip(files, ids, strict=True) if not part[0].is_file()]
    agree(False)  # all have looked before the first writes

    # each process embeds its share of them
    todo = todo[process.rank :: process.world_size]
    left = sum(len(part_ids) for _, part_ids in todo)
    bad: list[Quarantined] = []

    def report(one: Quarantined) -> None:
        bad.append(one)
        assert options.on_bad is not None
        options.on_bad(one)

    on_bad = None if options.on_bad is None else report
    alone = replace(options, process=Rank(), on_bad=on_bad)
    with bar(left) as progress:
        for file, part_ids in todo:
            bad.clear()
            rows = embed_share(backbone, view, split, alone, ids=part_ids, progress=progress)
            check_rows(rows, split.name, network)
            if whitening is not None and len(rows.ids):
                rows = whitening(rows)
            left_out = [one._asdict() for one in sorted(bad)]
            with _room_for(out):
                save_embeddings(file, rows, {"left_out": left_out})
    agree(False)

    # rank 0 joins them into one file
    if process.rank == 0:
        with _room_for(out):
            _join(out, files, split, facts)
        shutil.rmtree(parts)
    agree(False)


@contextmanager
def _room_for(out: Path) -> Iterator[None]:
    """Where the disk fails, name the file to be made, and give back what its parts take."""
    try:
        yield
    except OSError as error:
        if not disk_error(error):
            raise
        shutil.rmtree(out.with_name(f".{out.name}.parts"), ignore_errors=True)
        raise OSError(error.errno, error.strerror, str(out)) from error


def _open(parts: Path, identity: dict[str, Any]) -> None:
    """The folder of the parts; emptied unless they are of this very pass."""
    text = json_text(identity)
    path = parts / "identity.json"
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return
    shutil.rmtree(parts, ignore_errors=True)
    parts.mkdir(parents=True)
    write_atomically(path, text)


def _join(out: Path, files: list[Path], split: Split, facts: dict[str, Any]) -> None:
    rows: list[Embeddings] = []
    left_out: list[dict[str, Any]] = []
    for path in files:
        try:
            part, metadata = read_embeddings(path)
        except DataError as error:
            path.unlink()
            raise DataError(f"{error}; it is removed: the same command makes it anew") from error
        left_out += metadata["left_out"]
        rows.append(part)
    some = [part for part in rows if len(part.ids)] or rows[:1]
    together = Embeddings.joined(some)
    check_all(together, split)
    assert len(together.ids) + len(left_out) == len(split), "a sample was skipped silently"
    save_embeddings(out, together, {**facts, "left_out": left_out})
