"""Which weights, sizes, joins and flattening suit some images: the call behind `sslpipe choose`."""

from __future__ import annotations

import hashlib
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from sslpipe.arguments import Progress, Say, checked, silent
from sslpipe.cli.inputs import check_folder, check_model, find_images
from sslpipe.data.image_type import RGB8
from sslpipe.data.index import DatasetIndex, Split, load_index
from sslpipe.data.reader import OnBad
from sslpipe.data.storage import is_remote
from sslpipe.distributed import pick_device
from sslpipe.errors import (
    UserError,
    as_output,
    as_path,
    check_count,
    check_list,
    counted,
    for_caller,
    shown,
)
from sslpipe.evaluation.array_rows import Array, embeddings_from_arrays
from sslpipe.evaluation.embed import Embeddings, EmbedOptions, check_embeddings
from sslpipe.evaluation.flatten import why_unlabelled
from sslpipe.evaluation.whiten import fit_whitening
from sslpipe.export.load import load_backbone
from sslpipe.export.whitening import flatten_backbone
from sslpipe.export.write import export_backbone
from sslpipe.files import Stored, json_text, read_json, write_json
from sslpipe.portable import return_freed_memory, write_atomically
from sslpipe.report.suite import warn_bad
from sslpipe.search import candidates, ranking
from sslpipe.search.candidates import Candidate
from sslpipe.search.pages import answer, choice_page, table_cells
from sslpipe.search.ranking import Ranked
from sslpipe.sharding.dataset import build_dataset
from sslpipe.weights.source import INSIDE

CHOICE = "choice.json"  # in the folder of a choice
PAGE = "choice.html"
BATCH_SIZE = 16  # images at a time: the candidates may be large
SEED = 0  # of the halves of the classes, and of the images that are taken
Skip = Callable[[str, UserError], None]


@dataclass(frozen=True)
class Choice:
    """What `choose` found.

    Args:
        answer: What to use, what it is worth, what it costs and how far that can be trusted.
        heads: Of the table.
        rows: Of the table: the best form of each row of the ranking, and the network they are
            compared with.
        best: The row that is to be used.
        backbone: The folder of its export: a source of weights, as is the folder above it.
        page: The same queries under each row, in one HTML file.
        data: The dataset.json of the images.
        by_labels: Whether labels ranked.
        skipped: "SOURCE: reason" of each candidate that cannot be ranked.
    """

    answer: list[str]
    heads: list[str]
    rows: list[list[str]]
    best: Ranked
    backbone: Path
    page: Path
    data: str
    by_labels: bool
    skipped: list[str]

    def __repr__(self) -> str:
        skipped = [f"skipped: {line}" for line in self.skipped]
        answer = map(for_caller, self.answer)
        return "\n".join([*answer, f"{self.backbone}: {self.best.name}", *skipped])


@checked
def choose(
    sources: Sequence[str | Path | nn.Module],
    data: DatasetIndex | str | Path,
    out: str | Path,
    split: str = "train",
    *,
    px: Sequence[int] = (),
    most: int = 5000,
    num_workers: int = 2,
    device: str = "auto",
    say: Say | None = None,
    progress: Progress | None = None,
    on_bad: OnBad | None = None,
) -> Choice:
    """Rank pretrained weights on some images, and joins of them, as `sslpipe choose` does.

    >>> choice = sslpipe.choose(["timm:resnet50", "runs/photos"], "MY_PHOTOS", "out/choice")
    >>> print(choice)
    >>> backbone = sslpipe.load_backbone("out/choice")

    What an earlier call in `out` embedded and ranked is read there.

    Args:
        sources: Candidates, each what `load_backbone` takes, or returns; the folder of an earlier
            choice stands for its candidates.
        data: The data set's index, the path or URL of its dataset.json, or a folder of images.
        out: Folder for the page, the numbers, the kept features and the backbone.
        split: The split to choose on; keep test for the end.
        px: Sides of the images, where a source names none; (): the weights' own.
        most: Images to use at most, of each class alike.
        num_workers: Threads that decode.
        device: Where to compute: "auto", "cpu", "cuda" or "mps".
        say: Called with what comes next, and with each candidate that is skipped; None: nobody is.
        progress: Makes a progress bar for each candidate; None: there is none.
        on_bad: Called with each sample that cannot be decoded; None: it is warned of.

    Returns:
        The answer, the table, and where the best row is as a backbone.

    Raises:
        UserError: The data set or the device cannot be had, or no candidate can be ranked.
    """
    if not sources:
        raise UserError("sources is empty; name a candidate, such as 'timm:resnet50'")
    check_count(most, "most", least=ranking.LEAST_IMAGES)
    check_count(num_workers, "num_workers", least=0)
    target = pick_device(device, f"device = {device!r}")
    out = as_output(out, "out")
    check_folder(out)
    check_list(sources, "sources")
    skipped = _Skipped(say)
    warn = say or warnings.warn
    say = say or (lambda text: None)
    # the candidates, the images, the features of each
    wanted = _readable([_written(source, out) for source in sources], skipped.add)
    if not wanted:
        raise UserError(f"no candidate can be read{skipped.reasons()}")
    index = load_index(_shards(data, out, say, warn=warn))
    images = _images_that_rank(index=index, split=split, sources=wanted, most=most, say=say)
    embed = partial(
        candidates.embed_kept,
        ids=images.ids,
        folder=out / "features",
        progress=progress or silent,
        say=say,
    )
    options = EmbedOptions(
        device=target,
        batch_size=BATCH_SIZE,
        num_workers=num_workers,
        on_bad=on_bad or warn_bad,
    )
    networks = _embed_all(wanted, px, images, embed, options, skip=skipped.add)
    if not networks.features:
        raise UserError(f"no candidate can be ranked{skipped.reasons()}")
    loaded = [one.model for one in networks.candidates.values()]
    for note in dict.fromkeys(note for model in loaded for note in model.notes):
        say(note)  # of a network at several sizes once
    # the ranking, and what is to be used
    identity = {  # all that decides the ranking
        "keys": networks.keys,
        "sets": candidates.rows_to_rank(networks.candidates.values()),
        "seed": SEED,
        "labels": images.lacking is None,
        "seen": images.seen.tolist(),
    }
    ranked = ranking.ranking_from(out / CHOICE, identity)  # of an earlier call
    if not ranked:
        ranked = _rank(networks, images, identity["sets"], say)
    ranked = ranking.for_these_images(ranked, networks.features)
    few = ranking.few_labelled(images.labels[images.ids])
    is_guess = few is not None or images.lacking is not None
    two_sizes = candidates.two_sizes(networks.candidates.values()) if is_guess else ()
    best = ranking.to_use(ranked, two_sizes)
    # the answer in words, a table and a page; and the row to use as a backbone
    table = table_cells(ranked, networks.candidates)
    shown = {*ranking.best_forms(ranked), ranked.index(best)}
    if best.values:  # ranked by labels, and compared with this one
        shown.add(ranked.index(ranking.best_single(ranked)))
    places = sorted(shown)
    choice = Choice(
        answer=answer(ranked, best, networks.candidates, lacking=images.lacking, few=few),
        heads=table.heads,
        rows=[table.rows[place] for place in places],
        best=best,
        backbone=out / INSIDE,
        page=out / PAGE,
        data=f"{index.folder}/dataset.json",
        by_labels=images.lacking is None,
        skipped=skipped.lines,
    )
    tree = {
        **ranking.to_json(ranked, identity),
        "answer": choice.answer,
        "used": ranked.index(best),
        "sources": [one.source for one in networks.candidates.values()],
        "skipped": skipped.lines,
    }
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / CHOICE, tree)
    page = choice_page(
        images.rows,
        choice.answer,
        table,
        ranked=ranked,
        places=places,
        features=networks.features,
        seed=SEED,
    )
    write_atomically(choice.page, page)
    say(f"write {choice.backbone}, and prove it in a clean process")
    _write_backbone(choice.backbone, best, ranked, networks, images.rows)
    return choice


def _write_backbone(
    folder: Path, row: Ranked, ranked: Sequence[Ranked], networks: _Networks, images: Split
) -> None:
    """Export a row of the ranking: its networks side by side, flattened by its power."""
    parts = ranking.best_first(row.parts, ranked)
    source = "+".join(networks.candidates[name].source for name in parts)
    model, _ = load_backbone(source).matched(images)
    if row.power is not None:
        features = ranking.side_by_side(networks.features, parts)
        flatten_backbone(model, fit_whitening(features, power=row.power))
    export_backbone(model, folder, overwrite=True)


class _Skipped:
    """The candidates that cannot be ranked.

    Attributes:
        lines: "SOURCE: reason" of each.
    """

    def __init__(self, say: Say | None) -> None:
        self.lines: list[str] = []
        self._say = say

    def add(self, source: str, error: UserError) -> None:
        """Take a candidate, and say so at once where somebody is told."""
        text = str(error)
        line = text if text.startswith(source) else f"{source}: {text}"  # each is named once
        self.lines.append(line)
        if self._say is not None:
            self._say(f"skipped: {line}")

    def reasons(self) -> str:
        """Return ": " and all lines, to end an error with; "" where they have been said."""
        return f": {'; '.join(self.lines)}" if self._say is None else ""


def _written(source: str | Path | nn.Module, out: Path) -> str | Path:
    """Return a source; a network in memory is written below `out` first, and is one there."""
    if not isinstance(source, nn.Module):
        return source
    model = load_backbone(source)
    folder = out / "networks" / f"{model.name}-{model.config.weights_sha256[:8]}"
    if not folder.exists():
        export_backbone(model, folder)
    return folder


@dataclass(frozen=True)
class _Images:
    """The images on which candidates are ranked.

    Args:
        rows: The split that they are of.
        ids: (n,) their sample ids, sorted.
        labels: (samples of the split,) below 0 where a label cannot rank.
        seen: Labels by which a candidate was trained, sorted: they are SEEN in `labels`.
        lacking: Why labels cannot rank; None: they do.
    """

    rows: Split
    ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    seen: NDArray[np.int64]
    lacking: str | None


@dataclass(frozen=True)
class _Networks:
    """What is ranked, by the names of the candidates.

    Args:
        candidates: Those that could be read and embedded.
        features: Of the images.
        corners: Features of two corners of each image, where labels cannot rank.
        keys: A hash of all that decided the features, in the candidates' order.
    """

    candidates: dict[str, Candidate] = field(default_factory=dict)
    features: dict[str, Embeddings] = field(default_factory=dict)
    corners: dict[str, Embeddings] = field(default_factory=dict)
    keys: list[str] = field(default_factory=list)


class _Earlier(Stored):
    """What choice.json says of the candidates."""

    sources: list[str]


def _readable(sources: Sequence[str | Path], skip: Skip) -> list[str]:
    """Return the sources that name something, each once; of an earlier choice its candidates."""
    named: list[str] = []
    for place, source in enumerate(sources):
        file = as_path(source, f"sources[{place}]") / CHOICE
        named += read_json(file, _Earlier).sources if file.is_file() else [str(source)]
    readable = []
    for source in dict.fromkeys(named):
        try:
            check_model(source)
            readable.append(source)
        except UserError as error:
            skip(source, error)
    return readable


def _images_that_rank(
    index: DatasetIndex, split: str, sources: Sequence[str], most: int, say: Say
) -> _Images:
    """Take up to `most` images of a split, and the labels of it that can rank the sources."""
    rows = index.split(split)
    if not is_remote(index.folder):  # else a request a shard: once is enough
        index.check_files(split)
    ids = candidates.sample_ids(rows, most, SEED)
    if len(ids) < len(rows):
        say(for_caller(f"{len(ids):,} of {len(rows):,} images; --most takes more"))
    # labels by which a candidate was trained rank nothing
    is_seen = np.isin(rows.labels, candidates.labels_seen(sources, index, split))
    labels = np.where(is_seen, ranking.SEEN, rows.labels)
    lacking = why_unlabelled(labels[ids])
    if is_seen.any():
        kept = len(np.unique(labels[labels >= 0]))
        say(f"a candidate was trained by labels: the {kept} classes that it has not seen rank")
        lacking = lacking and f"a candidate was trained by the labels, and of others {lacking}"
    return _Images(
        rows=rows, ids=ids, labels=labels, seen=np.unique(rows.labels[is_seen]), lacking=lacking
    )


def _embed_all(
    sources: Sequence[str],
    px: Sequence[int],
    images: _Images,
    embed: Callable[..., tuple[Embeddings, str]],
    options: EmbedOptions,
    *,
    skip: Skip,
) -> _Networks:
    """Embed the images by each source at each size.

    Args:
        sources: What `_readable` returned.
        px: Sides of the images, where a source names none.
        images: What is embedded.
        embed: `candidates.embed_kept`, but for the network, its view, split and options.
        options: How; a sample that cannot be decoded is reported once.
        skip: Called with a source that cannot be ranked, and why.
    """
    done = _Networks()
    quiet = replace(options, on_bad=lambda bad: None)
    for source in (each for text in sources for each in candidates.at_sizes(text, px)):
        try:
            one = candidates.load_candidate(source, done.candidates.values(), options.device)
            model, (rows,) = one.model.matched(images.rows)
            one = one._replace(model=model)
            made, key = embed(one, model.view, rows, options=quiet if done.features else options)
            ranking.check_features(one.name, made, next(iter(done.features.values()), made))
            if images.lacking is not None:
                corners = ranking.CornerViews(model.view)
                done.corners[one.name], _ = embed(one, corners, rows, options=quiet)
            model.backbone.to("meta")  # its weights are not needed again
            labels = torch.from_numpy(images.labels[made.ids.numpy()])
            done.features[one.name] = made._replace(labels=labels)
            done.candidates[one.name] = one
            done.keys.append(key)
        except UserError as error:
            skip(source, error)
    return done


def _rank(
    networks: _Networks, images: _Images, rows: Sequence[ranking.Names], say: Say
) -> list[Ranked]:
    return_freed_memory()
    alone = len(networks.candidates)
    joins = len(rows) - alone
    also = f" and {counted(joins, 'join')}" if joins else ""
    say(f"rank {counted(alone, 'candidate')}{also}")
    if images.lacking is None:
        return ranking.rank_with_labels(networks.features, rows, SEED)
    return ranking.rank_without_labels(networks.features, networks.corners, rows)


@checked
def rank_features(features: Mapping[str, Array], labels: Array) -> list[Ranked]:
    """Rank vectors of the same images, made anywhere, as `choose` ranks networks by labels.

    >>> for row in sslpipe.rank_features({"mine": mine, "theirs": theirs}, labels):
    ...     print(row)

    Each is ranked as it is, flattened in part, and side by side with each other.

    Args:
        features: Name -> (N, F) floats, numpy or torch, of the same N images in the same order.
        labels: (N,) integers or texts: two images or more in each of four classes or more.

    Returns:
        The rows, the first one best on the classes that chose; `values` are of the others.

    Raises:
        UserError: Shapes do not fit, or there are too few labels or images.
    """
    if not isinstance(features, Mapping) or not features:
        raise UserError(
            f"features = {shown(features)} is no dictionary of names and arrays; give "
            '{"mine": features}'
        )
    rows = {name: embeddings_from_arrays(each, labels, name) for name, each in features.items()}
    first = next(iter(rows.values()))
    if (lacking := why_unlabelled(first.labels.cpu().numpy())) is not None:
        raise UserError(f"labels cannot rank: {lacking}")
    for name, each in rows.items():
        check_embeddings(each, name, labelled=False)
        ranking.check_features(name, each, first)
    sets: list[tuple[str, ...]] = [(name,) for name in rows]
    return ranking.rank_with_labels(rows, [*sets, *itertools.combinations(rows, 2)], SEED)


def _shards(
    data: DatasetIndex | str | Path, out: Path, say: Say, warn: Say
) -> DatasetIndex | str | Path:
    """Return a data set; a folder of images is written as shards into OUT first.

    `warn` is called with what is skipped, or lost of an image.
    """
    if not isinstance(data, str | Path):
        return data
    folder = Path(data)
    if not folder.is_dir() or (folder / "dataset.json").is_file():
        return data
    stats = [(str(path), path.stat()) for path in find_images(folder, RGB8)]
    listed = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    state: Any = [str(folder.absolute()), listed]
    digest = hashlib.sha256(json_text(state).encode()).hexdigest()
    shards = out / f"shards-{digest[:8]}"  # of these very files
    if not (shards / "dataset.json").is_file():
        say(f"{folder}: write its images as shards into {shards}")
        built = build_dataset(shards, root=folder, skip_bad=True)
        lines = built.report.lines()
        splits = len(built.report.splits)  # a line each
        for line in lines[:splits]:
            say(line)
        for line in [*(f"skipped: {each}" for each in built.skipped), *lines[splits:]]:
            warn(line)
    return shards / "dataset.json"
