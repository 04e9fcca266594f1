"""`sslpipe choose`: which weights, sizes, joins and flattening suit these images."""

import hashlib
import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from sslpipe.cli.inputs import check_folder, check_model, find_images, open_data
from sslpipe.cli.next_step import say_next
from sslpipe.cli.options import (
    MOST_SEED,
    SOURCES,
    BatchSize,
    Device,
    NumWorkers,
    argument,
    option,
)
from sslpipe.cli.terminal import new_app, progress, report_bad, say, write_json
from sslpipe.errors import DataError, UserError
from sslpipe.portable import write_atomically

if TYPE_CHECKING:
    from sslpipe.augment.eval_view import EvalView
    from sslpipe.data.index import DatasetIndex, Split
    from sslpipe.evaluation.choose import Parts, Ranked
    from sslpipe.evaluation.embed import Embeddings
    from sslpipe.export.load import FrozenBackbone

app = new_app()
FEW = 8  # images of a class that are kept whole
COSTS = ("ms an image", "MB", "numbers")


class Candidate(NamedTuple):
    """A network at a size, as it was loaded, and what it costs."""

    name: str
    source: str  # SOURCE or SOURCE@PX, as `embed` takes it
    model: "FrozenBackbone"
    ms: float  # an image, on this device
    megabytes: float


@app.command(
    epilog="Examples: sslpipe choose timm:resnet50 timm:vit_small_patch14_dinov2 --data "
    "out/photos/dataset.json --out out/choice | sslpipe choose weights.pth --px 128 --px 224 "
    "--data MY_PHOTOS --out out/choice (a folder of images, classes by folder)"
)
def main(
    sources: Annotated[list[str], argument(f"Candidates: a run, {SOURCES}.", metavar="SOURCE...")],
    data: Annotated[str, option("The data set's dataset.json, or a folder of images.")],
    out: Annotated[Path, option("Folder for the page, the numbers and the kept features.")],
    split: Annotated[str, option("The split to choose on; keep test for the end.")] = "train",
    px: Annotated[
        list[int] | None,
        option("Side of the images, where SOURCE names none; repeatable. Default: the weights'."),
    ] = None,
    most: Annotated[int, option("Images to use at most, of each class alike.", min=20)] = 5000,
    seed: Annotated[int, option("For the halves of the classes.", min=0, max=MOST_SEED)] = 0,
    batch_size: BatchSize = 32,
    num_workers: NumWorkers = 2,
    device: Device = "auto",
) -> None:
    """Rank pretrained weights on your images: sizes, joins and flattening. Nothing is trained.

    With labels of two images or more in each of four classes, half the classes choose and the
    others say what it is worth; without, candidates are ranked by how well they recognise an
    image's other corner. A candidate that fails is reported and skipped (exit status 2).
    """
    check_folder(out)
    failed: list[str] = []
    wanted = []
    for source in dict.fromkeys(sources):
        try:
            check_model(source)
            wanted.append(source)
        except UserError as error:
            _skip(failed, source, error)
    if not wanted:
        raise UserError("no candidate can be read")
    data = _shards(data, out)
    index = open_data(data, split)
    rows = index.split(split)

    from sslpipe.cli.processes import start
    from sslpipe.evaluation.choose import (
        CornerViews,
        check_features,
        rank_with_labels,
        rank_without_labels,
        to_json,
        why_unlabelled,
    )
    from sslpipe.report.choice import choice_page

    target, _ = start(device, "choose")
    ids = _some(rows, most, seed)
    lacking = why_unlabelled(rows.labels[ids])
    options: dict[str, Any] = {"batch_size": batch_size, "num_workers": num_workers}
    options |= {"device": target, "on_bad": report_bad}
    # features of each candidate, and of two corners of each image where labels cannot choose
    found: dict[str, Candidate] = {}
    features: dict[str, Embeddings] = {}
    corners, keys = {}, []
    for source in (each for text in wanted for each in _at_sizes(text, px)):
        try:
            one = _load(source, found, target)
            made, key = _embedded(one, one.model.view, index, rows, ids, out, **options)
            check_features(one.name, made)
            if features:
                _check_same(one.name, made, next(iter(features.values())))
            if lacking is not None:
                both, _ = _embedded(
                    one, CornerViews(one.model.view), index, rows, ids, out, **options
                )
                corners[one.name] = _two(both.features)
            features[one.name], found[one.name] = made, one
            options["on_bad"] = lambda bad: None  # reported with the first features
            keys.append(key)
        except UserError as error:
            _skip(failed, source, error)
    if not features:
        raise UserError("no candidate can be ranked")
    # the ranking: read where these features have been ranked before
    sets = _rows(found)
    identity = {"keys": keys, "sets": [list(parts) for parts in sets], "seed": seed}
    identity["labels"] = lacking is None
    file = out / "choice.json"
    ranked = _kept(file, identity)
    if not ranked:
        say(f"rank {len(sets)} rows of {len(found)} candidates")
        if lacking is None:
            ranked = rank_with_labels(features, sets, seed)
        else:
            ranked = rank_without_labels(features, corners, sets)
    # the answer, in words, a table and a page
    sentences = _answer(ranked, sets[0], found, lacking)
    heads, cells = _table(ranked, sets[0], found)
    tree = {"identity": identity, "answer": sentences, "rows": to_json(ranked), "skipped": failed}
    write_json(file, tree)
    page = choice_page(
        rows, sentences, heads, cells, ranked, features, index.manifest.classes, seed
    )
    write_atomically(out / "choice.html", page)
    _print(ranked, heads, cells)
    typer.echo("\n".join(sentences))
    say(f"{out / 'choice.html'}: the same queries under each")
    best = ranked[0]
    source = "+".join(found[name].source for name in best.parts)
    say_next("export", source, "--out", out / "backbone")
    if best.power is not None:
        train = out / "backbone.safetensors"
        where = ["--data", data, "--split", split, "--out", train]
        say_next("embed", out / "backbone", *where, when=", to flatten")
        say_next("whiten", out / "backbone", train, "--power", f"{best.power:g}", when=", last")
    if failed:
        raise typer.Exit(2)


def _skip(failed: list[str], source: str, error: Exception) -> None:
    """Report a candidate that cannot be ranked; the others are."""
    failed.append(f"{source}: {error}")
    say(f"skipped: {source}: {error}", "yellow")


def _shards(data: str, out: Path) -> str:
    """Return a data set's dataset.json; a folder of images is written as shards into OUT first."""
    folder = Path(data)
    if not folder.is_dir() or (folder / "dataset.json").is_file():
        return data
    from sslpipe.sharding.build import build_dataset
    from sslpipe.sharding.sources import SourceOptions
    from sslpipe.sharding.writer import Layout

    stats = [(str(path), path.stat()) for path in find_images(folder)]
    listed = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    state = hashlib.sha256(json.dumps([str(folder.absolute()), listed]).encode()).hexdigest()
    shards = out / f"shards-{state[:8]}"  # of these very files
    if not (shards / "dataset.json").is_file():
        say(f"{folder}: write its images as shards into {shards}")
        layout = Layout(seed=0, samples_per_shard=1000, max_shard_bytes=10**9, scatter=False)
        build_dataset(shards, "folder", SourceOptions(root=folder), layout, skip_bad=True)
    return str(shards / "dataset.json")


def _some(rows: "Split", most: int, seed: int) -> Any:
    """Choose sample ids, sorted: all, or up to `most`.

    Of a large class as many as all can have, but FEW or more; then random classes, and last images
    of no class.
    """
    import numpy as np

    from sslpipe.random import permutation

    if len(rows) <= most:
        return np.arange(len(rows))
    shuffled = permutation(len(rows), seed, 2)
    labels = rows.labels[shuffled]
    labelled = shuffled[labels >= 0]
    known, of_class, counts = np.unique(
        labels[labels >= 0], return_inverse=True, return_counts=True
    )
    cap = max(FEW, most // max(1, len(known)))
    # each image's place in its class, in the order of the shuffle
    by_class = np.argsort(of_class, kind="stable")
    place = np.empty_like(by_class)
    place[by_class] = np.arange(len(by_class)) - np.repeat(np.cumsum(counts) - counts, counts)
    # classes in random order, as long as they fit
    order = permutation(len(known), seed, 3)
    kept = np.zeros(len(known), bool)
    kept[order[np.cumsum(np.minimum(counts, cap)[order]) <= most]] = True
    own = labelled[kept[of_class] & (place < cap)]
    chosen = np.sort(np.concatenate([own, shuffled[labels < 0][: most - len(own)]]))
    say(f"{len(chosen):,} of {len(rows):,} images; --most takes more")
    return chosen


def _at_sizes(source: str, px: Sequence[int] | None) -> list[str]:
    """Return a source at each size; one that names its own, and a join, as it is."""
    from sslpipe.weights.source import parse_source

    parsed = parse_source(source)
    own = not px or parsed.px is not None or parsed.scheme == "join"
    return [source] if own else [f"{source}@{size}" for size in px or ()]


def _load(source: str, taken: dict[str, Candidate], device: str) -> Candidate:
    """Load a candidate and take its time. Raises: UserError."""
    import torch

    from sslpipe.cli.against import short_name
    from sslpipe.export.load import load_backbone

    model = load_backbone(source)
    if model.whitening is not None:
        raise UserError("it is whitened; name what it was made from")
    name = f"{model.name}@{model.view.crop_px}"
    known = [(c.model.config.weights_sha256, c.model.view.config()) for c in taken.values()]
    if (model.config.weights_sha256, model.view.config()) in known:
        raise UserError(f"it is {name} again: the same weights and view as another candidate")
    name = name if name not in taken else short_name(source, taken)
    images = torch.zeros(8, *model.view.image_shape, device=device).contiguous(
        memory_format=torch.channels_last
    )
    network, times = model.backbone.to(device), []
    for _ in range(3):
        with torch.no_grad():
            started = time.perf_counter()
            float(network(images).sum())
            times.append(time.perf_counter() - started)
    tensors = model.backbone.state_dict().values()
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 1e6
    return Candidate(name, source, model, 1000 * min(times) / len(images), size)


def _embedded(
    one: Candidate,
    view: "EvalView",
    index: "DatasetIndex",
    rows: "Split",
    ids: Any,
    out: Path,
    **options: Any,
) -> "tuple[Embeddings, str]":
    """Embed some images by a candidate, or read the features that an earlier call kept.

    Returns:
        The features, and a hash of all that decides them.
    """
    from sslpipe.evaluation.embed import embed, save_embeddings
    from sslpipe.evaluation.features import data_metadata, saved_embeddings

    identity = {
        "backbone_sha256": one.model.config.weights_sha256,
        "backbone": one.model.config.backbone.model_dump(),
        "view": view.config(),
        "kind": type(view).__name__,
        **data_metadata(index, rows.name),
        "ids": hashlib.sha256(ids.tobytes()).hexdigest(),
    }
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    file = out / "features" / f"{key[:16]}.safetensors"
    try:
        if (known := saved_embeddings(file, identity, rows, whole=False)) is not None:
            return known, key
    except DataError as error:  # damaged: reported, and embedded anew
        say(str(error))
    title = one.name if type(view).__name__ == "EvalView" else f"{one.name}: corners"
    with progress(title, len(ids)) as advance:
        made = embed(
            one.model.backbone,
            view,
            rows,
            ids=ids,
            canvas_px=view.canvas_px,
            progress=advance,
            network=one.name,
            **options,
        )
    save_embeddings(file, made, identity)
    return made, key


def _two(features: Any) -> Any:
    """Take the features of two views apart: (N, 2 F) -> (2, N, F)."""
    import torch

    return torch.stack(features.chunk(2, dim=1))


def _check_same(name: str, rows: "Embeddings", first: "Embeddings") -> None:
    import torch

    if not torch.equal(rows.ids, first.ids):
        raise DataError(f"{name} reads other images than the first candidate; are files changing?")


def _rows(found: dict[str, Candidate]) -> "list[Parts]":
    """Return each candidate, then joins: of two networks at their largest sizes, and of sizes."""
    by_weights: dict[str, list[Candidate]] = {}
    for one in found.values():
        if one.model.config.backbone.kind == "join":  # stands beside no other
            continue
        by_weights.setdefault(one.model.config.weights_sha256, []).append(one)
    sizes = [sorted(own, key=lambda c: c.model.view.crop_px) for own in by_weights.values()]
    joins = [(own[0].name, own[-1].name) for own in sizes if len(own) > 1]
    joins += [(a[-1].name, b[-1].name) for a, b in itertools.combinations(sizes, 2)]
    return [*((name,) for name in found), *joins]


def _kept(file: Path, identity: dict[str, Any]) -> "list[Ranked]":
    """Read the ranking of the same features; [] where there is none."""
    from sslpipe.evaluation.choose import from_json
    from sslpipe.registry import REFUSALS

    try:
        tree = json.loads(file.read_bytes())
        return from_json(tree["rows"]) if tree["identity"] == identity else []
    except (OSError, *REFUSALS):  # none, or not ours any more
        return []


def _costs(row: "Ranked", found: dict[str, Candidate]) -> tuple[str, str, str]:
    """Say what a row takes: ms an image, MB of weights, numbers a feature."""
    parts = [found[name] for name in row.parts]
    networks = {each.model.config.weights_sha256: each.megabytes for each in parts}
    width = sum(each.model.num_features for each in parts)
    return f"{sum(each.ms for each in parts):.1f}", f"{sum(networks.values()):.0f}", f"{width:,}"


def _priced(row: "Ranked", found: dict[str, Candidate]) -> str:
    return "{} ms an image here, {} MB of weights, {} numbers a feature".format(*_costs(row, found))


def _answer(
    ranked: "Sequence[Ranked]", base: "Parts", found: dict[str, Candidate], lacking: str | None
) -> list[str]:
    """Say what to use, what it is worth, what it costs, and how far that can be trusted."""
    best = ranked[0]
    costs = f"It costs {_priced(best, found)}."
    if lacking is not None:
        return [
            f"Without labels, use {best.name}: it finds an image's other corner first in "
            f"{best.score:.1%} of cases.",
            costs,
            f"Ranked without labels, as {lacking}: on the measured sets (docs/graded.md) that was "
            "no better than two sizes of one network side by side at power 0.25.",
        ]
    plain = next(row for row in ranked if row.parts == base and row.power is None)
    if best is plain:
        return [
            f"Use {best.name}: no other row was better on the classes that chose. "
            f"MAP@R {best.values['MAP@R']:.1%}, Recall@1 {best.values['Recall@1']:.1%} on others.",
            costs,
        ]
    gains = []
    for metric, more in best.more.items():
        low, high = (100 * end for end in more.interval95)
        gains.append(
            f"{metric} {best.values[metric]:.1%} against {plain.values[metric]:.1%} "
            f"({100 * more.value:+.1f}, 95 % interval {low:+.1f} to {high:+.1f})"
        )
    classes = best.more["MAP@R"].number
    sentences = [
        f"Use {best.name}: {'; '.join(gains)}, against {plain.name}, on {classes} classes that did "
        "not choose it.",
        costs,
    ]
    if best.more["MAP@R"].interval95[0] <= 0:
        text = f"That is not clearly better than {plain.name}, which costs "
        sentences.append(text + _priced(plain, found) + ".")
    return sentences


def _table(
    ranked: "Sequence[Ranked]", base: "Parts", found: dict[str, Candidate]
) -> tuple[list[str], list[list[str]]]:
    """Return the heads and rows of the table, the best first."""
    if not ranked[0].values:
        heads = ["features", "other corner found", *COSTS]
        return heads, [[row.name, f"{row.score:.1%}", *_costs(row, found)] for row in ranked]
    heads = ["features", "MAP@R, choosing", "MAP@R", "Recall@1", "MAP@R more", *COSTS]
    cells = []
    for row in ranked:
        more = row.more["MAP@R"]
        low, high = (100 * end for end in more.interval95)
        is_base = row.parts == base and row.power is None
        clear = " *" if row.p <= 0.05 and not is_base else ""
        cells.append(
            [
                row.name,
                f"{row.score:.1%}",
                f"{row.values['MAP@R']:.1%}",
                f"{row.values['Recall@1']:.1%}",
                "-" if is_base else f"{100 * more.value:+.1f} ({low:+.1f} to {high:+.1f}){clear}",
                *_costs(row, found),
            ]
        )
    return heads, cells


def _print(
    ranked: "Sequence[Ranked]", heads: Sequence[str], cells: Sequence[Sequence[str]]
) -> None:
    """Print the best form of each row in columns; the page has all."""
    from sslpipe.evaluation.choose import best_forms

    rows = [list(heads), *(list(cells[n]) for n in best_forms(ranked))]
    widths = [max(len(row[n]) for row in rows) for n in range(len(heads))]
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        typer.echo(line.rstrip())
    if any(cell.endswith("*") for row in rows for cell in row):
        typer.echo("* clearly different, all rows taken together (Holm)")
