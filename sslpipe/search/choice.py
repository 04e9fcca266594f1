"""Which weights, sizes, joins and flattening suit some images: the call behind `sslpipe choose`."""

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sslpipe.augment.eval_view import EvalView
from sslpipe.cli.inputs import check_folder, check_model, find_images
from sslpipe.data.image_type import RGB8
from sslpipe.data.index import DatasetIndex, Split, load_index
from sslpipe.data.reader import OnBad
from sslpipe.data.storage import is_remote
from sslpipe.distributed import pick_device
from sslpipe.errors import UserError, as_path, check_count, check_list, shown
from sslpipe.evaluation.arrays import Array, embeddings_from_arrays
from sslpipe.evaluation.embed import Embeddings, check_embeddings
from sslpipe.evaluation.features import Progress
from sslpipe.evaluation.flatten import why_unlabelled
from sslpipe.evaluation.label_free import concentration_text, uniformity
from sslpipe.files import Stored, json_text, read_json, write_json
from sslpipe.portable import return_freed_memory, write_atomically
from sslpipe.report.suite import Say, warn_bad
from sslpipe.search import candidates, ranking
from sslpipe.search.candidates import Candidate
from sslpipe.search.chosen import write_chosen
from sslpipe.search.pages import answer, choice_page, table_cells
from sslpipe.search.ranking import Ranked
from sslpipe.sharding.build import silent
from sslpipe.sharding.dataset import build_dataset
from sslpipe.weights.source import INSIDE

CHOICE = "choice.json"  # in the folder of a choice
PAGE = "choice.html"
BATCH_SIZE = 16  # images at a time: the candidates may be large
SEED = 0  # of the halves of the classes, and of the images that are taken


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
        doubt: What weakens the flattening of the backbone; None: nothing.
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
    doubt: str | None
    skipped: list[str]

    def __repr__(self) -> str:
        skipped = [f"skipped: {line}" for line in self.skipped]
        return "\n".join([*self.answer, f"{self.backbone}: {self.best.name}", *skipped])


def choose(
    sources: Sequence[str | Path],
    data: DatasetIndex | str | Path,
    out: str | Path,
    split: str = "train",
    *,
    px: Sequence[int] = (),
    most: int = 5000,
    num_workers: int = 2,
    device: str = "auto",
    say: Say = lambda text: None,
    progress: Progress = silent,
    on_bad: OnBad = warn_bad,
) -> Choice:
    """Rank pretrained weights on some images, and joins of them, as `sslpipe choose` does.

    >>> choice = sslpipe.choose(["timm:resnet50", "runs/photos"], "MY_PHOTOS", "out/choice")
    >>> print(choice)
    >>> backbone = sslpipe.load_backbone("out/choice")

    What an earlier call in `out` embedded and ranked is read there.

    Args:
        sources: Candidates, each what `load_backbone` takes as a text or a path; the folder of an
            earlier choice stands for its candidates.
        data: The data set's index, the path or URL of its dataset.json, or a folder of images.
        out: Folder for the page, the numbers, the kept features and the backbone.
        split: The split to choose on; keep test for the end.
        px: Sides of the images, where a source names none; (): the weights' own.
        most: Images to use at most, of each class alike.
        num_workers: Threads that decode.
        device: Where to compute: "auto", "cpu", "cuda" or "mps".
        say: Called with what comes next, and with each candidate that is skipped.
        progress: Makes a progress bar for each candidate.
        on_bad: Called with each sample that cannot be decoded.

    Returns:
        The answer, the table, and where the best row is as a backbone.

    Raises:
        UserError: The data set or the device cannot be had, or no candidate can be ranked.
    """
    check_list(sources, "sources")
    check_list(px, "px")
    check_count(most, "most", least=ranking.LEAST_IMAGES)
    check_count(num_workers, "num_workers", least=0)
    target = pick_device(device, f"device = {device!r}")
    out = as_path(out, "out")
    check_folder(out)
    skipped: list[str] = []

    def skip(source: str, error: UserError) -> None:
        skipped.append(f"{source}: {error}")
        say(f"skipped: {source}: {error}")

    wanted = []
    for source in dict.fromkeys(each for one in sources for each in _candidates_of(one)):
        try:
            check_model(source)
            wanted.append(source)
        except UserError as error:
            skip(source, error)
    if not wanted:
        raise UserError("no candidate can be read")
    index = load_index(_shards(data, out, say))
    rows = index.split(split)
    if not is_remote(index.folder):  # else a request a shard: once is enough
        index.check_files(split)
    ids = candidates.sample_ids(rows, most, SEED)
    if len(ids) < len(rows):
        say(f"{len(ids):,} of {len(rows):,} images; --most takes more")
    # labels by which a candidate was trained rank nothing
    seen = np.isin(rows.labels, candidates.labels_seen(wanted, index, split))
    labels = np.where(seen, -1, rows.labels)
    lacking = why_unlabelled(labels[ids])
    if seen.any():
        kept = len(np.unique(labels[labels >= 0]))
        say(f"a candidate was trained by labels: the {kept} classes that it has not seen rank")
        lacking = lacking and f"a candidate was trained by the labels, and of others {lacking}"

    def embedded(one: Candidate, view: EvalView, split: Split) -> tuple[Embeddings, str]:
        return candidates.embed_kept(
            one,
            view,
            split,
            ids,
            out / "features",
            progress=progress,
            say=say,
            # of the first candidate alone
            on_bad=(lambda bad: None) if features else on_bad,
            batch_size=BATCH_SIZE,
            num_workers=num_workers,
            device=target,
        )

    # features of each candidate, and of two corners of each image where labels cannot choose
    found: dict[str, Candidate] = {}
    features: dict[str, Embeddings] = {}
    corners: dict[str, Embeddings] = {}
    keys = []
    for source in (each for text in wanted for each in candidates.at_sizes(text, px)):
        try:
            one = candidates.load_candidate(source, found.values(), target)
            model, (own_rows,) = one.model.matched(rows)
            one = one._replace(model=model)
            made, key = embedded(one, one.model.view, own_rows)
            ranking.check_features(one.name, made, next(iter(features.values()), made))
            if lacking is not None:
                views = ranking.CornerViews(one.model.view)
                corners[one.name], _ = embedded(one, views, own_rows)
            one.model.backbone.to("meta")  # its weights are not needed again
            features[one.name] = made._replace(labels=torch.from_numpy(labels[made.ids.numpy()]))
            found[one.name] = one
            keys.append(key)
        except UserError as error:
            skip(source, error)
    if not features:
        raise UserError("no candidate can be ranked")
    # the ranking: read where these features have been ranked before
    sets = candidates.rows_to_rank(found.values())
    identity = {"keys": keys, "sets": sets, "seed": SEED, "labels": lacking is None}
    identity["seen"] = np.unique(rows.labels[seen]).tolist()
    ranked = ranking.ranking_from(out / CHOICE, identity)
    if not ranked:
        return_freed_memory()
        say(f"rank {len(sets)} rows of {len(found)} candidates")
        if lacking is None:
            ranked = ranking.rank_with_labels(features, sets, SEED)
        else:
            ranked = ranking.rank_without_labels(features, corners, sets)
    # the answer, in words, a table and a page
    few = ranking.few_labelled(labels[ids])
    best = ranking.to_use(ranked, candidates.two_sizes(found.values()) if few else ())
    sentences = answer(ranked, best, found, lacking=lacking, few=few)
    some = (features[name].features[:: len(ids) // 2000 + 1] for name in best.parts)
    spread = concentration_text(*(uniformity(each) for each in some))
    sentences.append(f"{' and '.join(best.parts)}: {spread}.")
    tree = {
        **ranking.to_json(ranked, identity),
        "answer": sentences,
        "used": ranked.index(best),
        "sources": [one.source for one in found.values()],
        "skipped": skipped,
    }
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / CHOICE, tree)
    heads, cells = table_cells(ranked, found)
    page = choice_page(rows, sentences, heads, cells, ranked, features, SEED)
    write_atomically(out / PAGE, page)
    shown = {*ranking.best_forms(ranked), ranked.index(best)}
    if lacking is None:  # and what they are compared with
        shown.add(ranked.index(ranking.best_single(ranked)))
    # the row to use as a backbone
    say(f"write {out / INSIDE}, and prove it in a clean process")
    together = ranking.best_first(best.parts, ranked)
    doubt = write_chosen(
        out / INSIDE,
        source="+".join(found[name].source for name in together),
        rows=ranking.side_by_side(features, together),
        split=rows,
        power=best.power,
    )
    return Choice(
        answer=sentences,
        heads=heads,
        rows=[cells[place] for place in sorted(shown)],
        best=best,
        backbone=out / INSIDE,
        page=out / PAGE,
        data=f"{index.folder}/dataset.json",
        by_labels=lacking is None,
        doubt=doubt,
        skipped=skipped,
    )


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


class _Earlier(Stored):
    """What choice.json says of the candidates."""

    sources: list[str]


def _candidates_of(source: str | Path) -> Iterable[str]:
    """Return the candidates of the folder of an earlier choice; else the source itself."""
    file = as_path(source, "sources") / CHOICE
    return read_json(file, _Earlier).sources if file.is_file() else [str(source)]


def _shards(data: DatasetIndex | str | Path, out: Path, say: Say) -> DatasetIndex | str | Path:
    """Return a data set; a folder of images is written as shards into OUT first."""
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
        build_dataset(shards, root=folder, skip_bad=True)
    return shards / "dataset.json"
