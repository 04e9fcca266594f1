"""`sslpipe choose`: which weights, sizes, joins and flattening suit these images."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sslpipe.cli.inputs import check_folder, check_model, find_images, open_data
from sslpipe.cli.next_step import say_next
from sslpipe.cli.options import SOURCES, Device, NumWorkers, argument, command, option
from sslpipe.cli.terminal import (
    new_app,
    progress,
    report_bad,
    say,
    show,
    text_table,
    working,
)
from sslpipe.errors import UserError
from sslpipe.files import Stored, json_text, read_json, write_json
from sslpipe.portable import return_freed_memory, write_atomically
from sslpipe.recipe.kinds import labelled_recipes
from sslpipe.run.console import SafeConsole
from sslpipe.weights.source import INSIDE

if TYPE_CHECKING:
    from sslpipe.data.index import Split
    from sslpipe.evaluation.embed import Embeddings
    from sslpipe.search.candidates import Candidate

app = new_app()

CHOICE = "choice.json"  # in the folder of a choice
BATCH_SIZE = 16  # images at a time: the candidates may be large
SEED = 0  # of the halves of the classes, and of the images that are taken


@command(
    app,
    examples=[
        "sslpipe choose timm:resnet50 timm:vit_small_patch14_dinov2 --data out/photos/dataset.json "
        "--out out/choice",
        "sslpipe choose timm/resnet50@weights.pth --px 128 --px 224 --data MY_PHOTOS --out "
        "out/choice  # a folder of images, classes by folder",
        "sslpipe choose out/choice runs/tuned --data out/photos/dataset.json --out out/trained  # "
        "the run that was trained from out/choice, and joined anew",
    ],
)
def choose_weights(
    sources: Annotated[
        list[str],
        argument(f"Candidates: a run, {SOURCES}, or those of an earlier choice.", metavar="SOURCE"),
    ],
    data: Annotated[str, option("The data set's dataset.json, or a folder of images.")],
    out: Annotated[Path, option("Folder for the page, the numbers and the kept features.")],
    split: Annotated[str, option("The split to choose on; keep test for the end.")] = "train",
    px: Annotated[
        list[int] | None,
        option(
            "Side of the images, where SOURCE names none; repeatable. Default: the weights'.",
            metavar="N",
        ),
    ] = None,
    most: Annotated[int, option("Images to use at most, of each class alike.", min=20)] = 5000,
    num_workers: NumWorkers = 2,
    device: Device = "auto",
) -> None:
    """Rank pretrained weights on your images, and joins of them.

    Sizes and flattening are tried, too; nothing is trained.

    With labels of two images or more in each of four classes, half the classes choose and the
    others say what it is worth; without, candidates are ranked by how well they recognise an
    image's other corner. Classes by which a candidate was trained rank nothing. A candidate that
    fails is reported and skipped (exit status 2).
    """
    check_folder(out)
    failed: list[str] = []
    wanted = []
    for source in dict.fromkeys(each for text in sources for each in _candidates_of(text)):
        try:
            check_model(source)
            wanted.append(source)
        except UserError as error:
            _skip(failed, source, error)
    if not wanted:
        raise UserError("no candidate can be read")
    data = _shards(data, out)
    index = open_data(data, [split])
    rows = index.split(split)

    import numpy as np
    import torch

    from sslpipe.cli.inputs import start
    from sslpipe.evaluation.flatten import why_unlabelled
    from sslpipe.evaluation.label_free import concentration_text, uniformity
    from sslpipe.search import candidates, choose
    from sslpipe.search.chosen import write_chosen
    from sslpipe.search.pages import answer, choice_page, table_cells

    target, _ = start(device, "choose", small=True)
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

    def embedded(one: "Candidate", view: Any, split: "Split") -> tuple["Embeddings", str]:
        return candidates.embed_kept(
            one,
            view,
            split,
            ids,
            out / "features",
            progress=progress,
            say=say,
            # of the first candidate alone
            on_bad=(lambda bad: None) if features else report_bad,
            batch_size=BATCH_SIZE,
            num_workers=num_workers,
            device=target,
        )

    # features of each candidate, and of two corners of each image where labels cannot choose
    found: dict[str, Candidate] = {}
    features: dict[str, Embeddings] = {}
    corners: dict[str, Embeddings] = {}
    keys = []
    for source in (each for text in wanted for each in candidates.at_sizes(text, px or ())):
        try:
            one = candidates.load_candidate(source, found.values(), target)
            model, (own_rows,) = one.model.matched(rows)
            one = one._replace(model=model)
            made, key = embedded(one, one.model.view, own_rows)
            choose.check_features(one.name, made, next(iter(features.values()), made))
            if lacking is not None:
                views = choose.CornerViews(one.model.view)
                corners[one.name], _ = embedded(one, views, own_rows)
            one.model.backbone.to("meta")  # its weights are not needed again
            features[one.name] = made._replace(labels=torch.from_numpy(labels[made.ids.numpy()]))
            found[one.name] = one
            keys.append(key)
        except UserError as error:
            _skip(failed, source, error)
    if not features:
        raise UserError("no candidate can be ranked")
    # the ranking: read where these features have been ranked before
    sets = candidates.rows_to_rank(found.values())
    identity = {"keys": keys, "sets": sets, "seed": SEED, "labels": lacking is None}
    identity["seen"] = np.unique(rows.labels[seen]).tolist()
    ranked = choose.ranking_from(out / CHOICE, identity)
    if not ranked:
        return_freed_memory()
        say(f"rank {len(sets)} rows of {len(found)} candidates")
        if lacking is None:
            ranked = choose.rank_with_labels(features, sets, SEED)
        else:
            ranked = choose.rank_without_labels(features, corners, sets)
    # the answer, in words, a table and a page
    sentences = answer(ranked, found, lacking)
    heads, cells = table_cells(ranked, found)
    parts = ranked[0].parts
    some = (features[name].features[:: len(ids) // 2000 + 1] for name in parts)
    sentences.append(f"{' and '.join(parts)}: {concentration_text(*map(uniformity, some))}.")
    sentences += filter(None, [choose.too_few(labels[ids])])
    tree = {
        **choose.to_json(ranked, identity),
        "answer": sentences,
        "sources": [one.source for one in found.values()],
        "skipped": failed,
    }
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / CHOICE, tree)
    page = choice_page(rows, sentences, heads, cells, ranked, features, SEED)
    write_atomically(out / "choice.html", page)
    # the best form of each row; a log file gets lines wide enough
    places = {*choose.best_forms(ranked)}
    if lacking is None:  # and what they are compared with
        places.add(ranked.index(choose.best_single(ranked)))
    best = [cells[place] for place in sorted(places)]
    printer = SafeConsole()
    (printer if printer.is_terminal else SafeConsole(width=160)).print(text_table(heads, best))
    if any("*" in cell for row in best for cell in row[1:]):
        typer.echo("* clearly different, all rows taken together (Holm)")
    show("\n".join(sentences))
    say(f"{out / 'choice.html'}: the same queries under each")
    # the best row as a backbone, and how to train it further
    best_row = ranked[0]
    together = choose.best_first(best_row.parts, ranked)
    backbone = out / INSIDE
    with working("choose") as stage:
        doubt = write_chosen(
            backbone,
            source="+".join(found[name].source for name in together),
            rows=choose.side_by_side(features, together),
            split=rows,
            power=best_row.power,
            say=stage,
        )
    say(f"{backbone}: {best_row.name}, for load_backbone, search, export and evaluate")
    if doubt is not None:
        say(f"warning: {doubt}", "yellow")
    say_next(
        ["embed", backbone, "--data", data, "--split", split, "--out", f"{backbone}.safetensors"]
    )
    for recipe in labelled_recipes() if lacking is None else ():
        say_next(
            ["check", recipe, "--init", out, "--data", data],
            when=", to train it with these labels",
        )
    if failed:
        raise typer.Exit(2)


class _Earlier(Stored):
    """What choice.json says of the candidates."""

    sources: list[str]


def _candidates_of(source: str) -> list[str]:
    """Return the candidates of the folder of an earlier choice; else the source itself."""
    file = Path(source) / CHOICE
    return read_json(file, _Earlier).sources if file.is_file() else [source]


def _skip(failed: list[str], source: str, error: Exception) -> None:
    """Report a candidate that cannot be ranked; the others are."""
    failed.append(f"{source}: {error}")
    say(f"skipped: {source}: {error}", "yellow")


def _shards(data: str, out: Path) -> str:
    """Return a data set's dataset.json; a folder of images is written as shards into OUT first."""
    folder = Path(data)
    if not folder.is_dir() or (folder / "dataset.json").is_file():
        return data
    from sslpipe.data.image_type import RGB8
    from sslpipe.sharding.dataset import build_dataset

    stats = [(str(path), path.stat()) for path in find_images(folder, RGB8)]
    listed = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    state = hashlib.sha256(json_text([str(folder.absolute()), listed]).encode()).hexdigest()
    shards = out / f"shards-{state[:8]}"  # of these very files
    if not (shards / "dataset.json").is_file():
        say(f"{folder}: write its images as shards into {shards}")
        build_dataset(shards, root=folder, skip_bad=True)
    return str(shards / "dataset.json")
