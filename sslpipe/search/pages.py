"""The pages of what `search` finds and `choose` answers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image

from sslpipe.data.decode import BadSample
from sslpipe.data.image_type import RGB8
from sslpipe.data.index import Split
from sslpipe.data.subsets import has_a_partner
from sslpipe.errors import DataError
from sslpipe.evaluation.difference import excludes_zero
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.flatten import CHOSEN_BY
from sslpipe.evaluation.whiten import fit_whitening
from sslpipe.export.model import read_image
from sslpipe.random import permutation
from sslpipe.report.embeddings import nearest_rows
from sslpipe.report.page import command_page, percent, render
from sslpipe.report.pictures import THUMB_PX, shortest_uri, thumbnails
from sslpipe.search.candidates import Candidate, two_sizes
from sslpipe.search.images import Hit, ImageSearch
from sslpipe.search.ranking import (
    FEW_LABELLED,
    Ranked,
    best_single,
    is_better,
    is_clear,
    side_by_side,
)

CANVAS_PX = 256  # of a query, before it is a thumbnail
Candidates = Mapping[str, Candidate]
COSTS = ("ms an image", "MB", "numbers")
QUERIES = 8
MOST_ROWS = 5  # of the ranking that the queries are shown under


def search_page(
    index: ImageSearch, queries: Sequence[Path], hits_by_query: Sequence[Sequence[Hit]]
) -> str:
    """Show thumbnails of the queries (image files) and of the hits of each, best first."""
    kind = index.splits[0].stored_type if index.splits else RGB8
    pictures = [
        thumbnails(split, {hit.id for hits in hits_by_query for hit in hits if hit.part == part})
        for part, split in enumerate(index.splits)
    ]
    rows = []
    for query, hits in zip(queries, hits_by_query, strict=True):
        try:
            image = Image.fromarray(kind.picture(read_image(query, kind, CANVAS_PX)))
        except BadSample as error:
            raise DataError(f"{query} has no picture for the page: {error}") from error
        image.thumbnail((THUMB_PX, THUMB_PX))
        cells = [(pictures[hit.part].get(hit.id), index.key(hit), hit.score) for hit in hits]
        rows.append(((shortest_uri(image), query.name), cells))
    text = f"Of {len(index):,}; the number is the cosine."
    sheet = render("sslpipe.search/search.found", rows=rows)
    return command_page(
        command="search", title="Nearest images", text=text, sections={"Found": sheet}
    )


def _costs(row: Ranked, candidates: Candidates) -> tuple[str, str, str]:
    """Return what a row takes: ms an image, MB of weights, numbers a feature."""
    parts = [candidates[name] for name in row.parts]
    networks = {each.model.config.weights_sha256: each.megabytes for each in parts}
    width = sum(each.model.num_features for each in parts)
    return f"{sum(each.ms for each in parts):.1f}", f"{sum(networks.values()):.0f}", f"{width:,}"


def _priced(row: Ranked, candidates: Candidates) -> str:
    ms, megabytes, width = _costs(row, candidates)
    return f"{ms} ms an image here, {megabytes} MB of weights, {width} numbers a feature"


def answer(
    ranked: Sequence[Ranked],
    best: Ranked,
    candidates: Candidates,
    *,
    lacking: str | None = None,
    few: int | None = None,
) -> list[str]:
    """Return what to use and why, what it is worth, what it costs, and how far that can be trusted.

    Args:
        ranked: The rows, the first one first.
        best: The one to use, `ranking.to_use`.
        candidates: The candidates.
        lacking: Why labels did not choose; None: they did.
        few: How many labelled images chose, where they are few.
    """
    costs = f"It costs {_priced(best, candidates)}."
    if lacking is not None:
        advice = f"Without labels, use {best.name}"
        if best.parts in two_sizes(candidates.values()):
            advice += ": one network at two sizes has been the better guess, docs/graded.md."
        else:
            advice += (
                f": it finds an image's other corner first in {best.score:.1%} of cases. One "
                "network at two sizes, by --px twice, has been the better guess (docs/graded.md)."
            )
        return [advice, costs, f"Labels did not choose: {lacking}."]
    first = ranked[0]
    plain = best_single(ranked)
    others = f"{first.more['MAP@R'].number} classes that did not choose"
    sentences = [_advice(first=first, best=best, plain=plain, others=others, few=few)]
    if best is plain:
        worth = " and ".join(f"{metric} {value:.1%}" for metric, value in best.values.items())
        sentences.append(f"It has {worth} on {others}.")
    if best is not plain:
        sentences.append(f"On {others}: {_compared(best, plain)}.")
    if first is not plain and first is not best:
        sentences.append(
            f"First on the classes that chose was {first.name}; on the others: "
            f"{_compared(first, plain)}."
        )
    sentences.append(costs)
    other = first if best is plain else plain
    if other.parts != best.parts and not is_clear(best):
        sentences.append(f"{other.name} costs {_priced(other, candidates)}.")
    sentences.append(
        "MAP@R: how much of an image's class is found first among all images; Recall@1: how often "
        "the nearest image is of its class."
    )
    return sentences


def _advice(first: Ranked, best: Ranked, plain: Ranked, others: str, few: int | None) -> str:
    """Return which row to use, and why."""
    if best is not plain and (best is not first or not is_better(best)):
        return (
            f"Use {best.name}: {few} labelled images are too few to choose by, and of fewer than "
            f"{FEW_LABELLED} one network at two sizes has been the better guess, docs/graded.md."
        )
    if best is plain and first is plain:
        advice = f"Use {plain.name}: no join and no flattening was better on the classes that chose"
    elif best is plain:
        advice = (
            f"Use {plain.name}, one network alone: {first.name} was first on the classes that "
            f"chose, but no better than it on {others}"
        )
    elif is_clear(best):
        advice = f"Use {best.name}: clearly better than {plain.name}, the best single network"
    else:
        advice = (
            f"Use {best.name}: better than {plain.name}, the best single network, on {others}, but "
            "not clearly: that may be chance"
        )
        if excludes_zero(best.more[CHOSEN_BY].interval95):
            advice += ", as all rows were compared at once and one may win by luck"
        if best.parts != plain.parts:
            advice += ", and where cost counts the single network will do"
    if few is None:
        return f"{advice}."
    return (
        f"{advice}. Only {few} labelled images chose: of fewer than {FEW_LABELLED} one network at "
        "two sizes side by side, power 0.25, has been the better guess."
    )


def _compared(row: Ranked, plain: Ranked) -> str:
    """Return a row's numbers beside those of the best single network."""
    texts = []
    for metric, each in row.more.items():
        value, low, high = (percent(number, True) for number in (each.value, *each.interval95))
        shares = f"{metric} {row.values[metric]:.1%} against {plain.values[metric]:.1%}"
        texts.append(f"{shares} ({value}, 95 % interval {low} to {high})")
    return f"{', '.join(texts)} of {plain.name}"


class Cells(NamedTuple):
    """The texts of a table."""

    heads: list[str]
    rows: list[list[str]]


def table_cells(ranked: Sequence[Ranked], candidates: Candidates) -> Cells:
    """Return the table of a ranking, the best first."""
    if not ranked[0].values:
        heads = ["features", "other corner found", *COSTS]
        rows = [[row.name, f"{row.score:.1%}", *_costs(row, candidates)] for row in ranked]
        return Cells(heads, rows)
    plain = best_single(ranked)
    heads = [
        "features",
        "MAP@R, classes that chose",
        "MAP@R, other classes",
        "Recall@1, other classes",
        "MAP@R against best single",
        *COSTS,
    ]
    cells = []
    for row in ranked:
        more = row.more["MAP@R"]
        value, low, high = (percent(each, True) for each in (more.value, *more.interval95))
        clear = f"{value} ({low} to {high}){' *' if is_clear(row) else ''}"
        shares = [row.score, row.values["MAP@R"], row.values["Recall@1"]]
        texts = [f"{share:.1%}" for share in shares]
        beside = "best single" if row is plain else clear
        cells.append([row.name, *texts, beside, *_costs(row, candidates)])
    return Cells(heads, cells)


def choice_page(
    split: Split,
    sentences: Sequence[str],
    table: Cells,
    *,
    ranked: Sequence[Ranked],
    places: Sequence[int],
    features: Mapping[str, Embeddings],
    seed: int = 0,
) -> str:
    """Show the answer, the ranking as a table, and neighbours of the same queries side by side.

    `table` is of the rows `ranked`, of which those at `places` stand above; `features` are those of
    each candidate.
    """
    examples = []
    _, labels, ids = next(iter(features.values()))
    order = permutation(len(ids), (seed, 1))
    has_match = has_a_partner(labels.numpy()[order])
    queries = torch.from_numpy((order[has_match] if has_match.any() else order)[:QUERIES])
    shown = [ranked[place] for place in places[:MOST_ROWS]]
    for row in shown:
        rows = side_by_side(features, row.parts)
        if row.power is not None:
            rows = fit_whitening(rows, power=row.power)(rows)
        examples.append(nearest_rows(rows, rows.rows(queries), same_split=True))
    wanted = {near for rows in examples for row in rows for near, *_ in row.near}
    pictures = thumbnails(split, wanted | {row.id for row in examples[0]})
    neighbours = render(
        "sslpipe.search/choice.neighbours",
        each_query=[[rows[k] for rows in examples] for k in range(len(queries))],
        pictures=(pictures, pictures),
        names=split.index.manifest.classes,
        titles=[row.name for row in shown],
    )
    sections = {
        "Ranking": render(
            "sslpipe.search/choice.ranking",
            sentences=sentences[1:],
            heads=table.heads,
            rows=[table.rows[place] for place in places],
        ),
        "Neighbours": neighbours,
        "All rows": render("table", heads=table.heads, rows=table.rows),
    }
    title = f"Features for {split.name}: {len(ids):,} images"
    return command_page(
        command="choose",
        title=title,
        text=sentences[0],
        sections=sections,
        opened=("Ranking", "Neighbours"),
    )
