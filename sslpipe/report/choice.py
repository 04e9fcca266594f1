"""Make the page of `sslpipe choose`: the answer, the ranking, and the same queries under each."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from markupsafe import Markup

from sslpipe.data.index import Split
from sslpipe.evaluation.choose import Parts, Ranked, best_forms, side_by_side
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.neighbours import nearest
from sslpipe.evaluation.whiten import fit_powers
from sslpipe.export.candidates import Candidate
from sslpipe.random import permutation
from sslpipe.report.page import html, html_page, joined, render, table
from sslpipe.report.pictures import NEIGHBOURS, thumbnails

Candidates = Mapping[str, Candidate]
COSTS = ("ms an image", "MB", "numbers")
QUERIES = 8
NOTE = (
    "The best form of each row. With labels, half the classes choose a row, and all other numbers "
    "are of the other half; * is clearly different, all rows taken together (Holm). Milliseconds "
    "are of this machine; numbers are those of one feature."
)
MOST_ROWS = 5  # of the ranking that the queries are shown under


def _costs(row: Ranked, found: Candidates) -> tuple[str, str, str]:
    """Say what a row takes: ms an image, MB of weights, numbers a feature."""
    parts = [found[name] for name in row.parts]
    networks = {each.model.config.weights_sha256: each.megabytes for each in parts}
    width = sum(each.model.num_features for each in parts)
    return f"{sum(each.ms for each in parts):.1f}", f"{sum(networks.values()):.0f}", f"{width:,}"


def _priced(row: Ranked, found: Candidates) -> str:
    return "{} ms an image here, {} MB of weights, {} numbers a feature".format(*_costs(row, found))


def answer(
    ranked: Sequence[Ranked], base: Parts, found: Candidates, lacking: str | None
) -> list[str]:
    """Say what to use, what it is worth, what it costs, and how far that can be trusted.

    Args:
        ranked: The rows, the best first.
        base: The row that the others are compared with, as it is.
        found: Name -> candidate.
        lacking: Why labels did not choose; None: they did.
    """
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


def table_cells(
    ranked: Sequence[Ranked], base: Parts, found: Candidates
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


def choice_page(
    split: Split,
    sentences: Sequence[str],
    heads: Sequence[str],
    cells: Sequence[Sequence[str]],
    ranked: Sequence[Ranked],
    features: Mapping[str, Embeddings],
    names: Sequence[str],
    seed: int = 0,
) -> str:
    """Show the answer, the ranking as a table, and neighbours of the same queries side by side.

    Args:
        split: Of the images.
        sentences: The answer; the first is the heading's.
        heads: Of the table's columns.
        cells: Its rows, the best first.
        ranked: The same rows.
        features: Candidate -> features.
        names: Classes by label.
        seed: Of the queries.
    """
    best = best_forms(ranked)
    shown = [ranked[place] for place in best[:MOST_ROWS]]
    rows = next(iter(features.values()))
    some = torch.from_numpy(permutation(len(rows.ids), seed, 1)[:QUERIES])
    found = {row.name: _neighbours(features, row.parts, row.power, some) for row in shown}
    wanted = {int(rows.ids[n]) for near, _ in found.values() for n in near.flatten().tolist()}
    pictures = thumbnails(split, wanted | {*rows.ids[some].tolist()})

    def cell(number: int, cosine: float | None, query: int) -> dict[str, Any]:
        label, sample = int(rows.labels[number]), int(rows.ids[number])
        known = label >= 0 and int(rows.labels[query]) >= 0 and cosine is not None
        same = label == int(rows.labels[query])
        return {
            "uri": pictures.get(sample),
            "alt": f"sample {sample}",
            "name": names[label] if 0 <= label < len(names) else "",
            "word": ("right" if same else "wrong") if known else "",
            "sign": ("✓" if same else "✗") if known else "",
            "cosine": "" if cosine is None else f"{cosine:.2f}",
        }

    tables = []
    for place, query in enumerate(some.tolist()):
        lines = []
        for name, (near, cosines) in found.items():
            pairs = zip(near[place].tolist(), cosines[place].tolist(), strict=True)
            head = {**cell(query, None, query), "name": name}
            lines.append((head, [cell(n, cosine, query) for n, cosine in pairs]))
        of_class = cell(query, None, query)["name"]
        title = html("<h3>{} {}</h3>", f"sample {int(rows.ids[query])}", of_class)
        sheet = render(
            "neighbours", rows=lines, heads=[f"{n}." for n in range(1, near.shape[1] + 1)]
        )
        tables.append(title + sheet)
    ranking = table(heads, [cells[place] for place in best])
    sections = {"Ranking": html("{}<p class='note'>{}</p>", ranking, NOTE)}
    sections["Neighbours"] = html(
        "<p>{}</p>{}",
        f"The {near.shape[1]} nearest images of {len(some)} queries, chosen at random, under each "
        "of the best rows; the number is the cosine.",
        joined(tables),
    )
    sections["All rows"] = table(heads, cells)
    heading = html(
        "<h1>{}</h1><p class='verdict'>{}</p>",
        f"Features for {split.name}: {len(rows.ids):,} images",
        " ".join(sentences),
    )
    footer = Markup("Written by <code>sslpipe choose</code>.")
    return html_page(
        "Which features", heading, sections, footer=footer, opened=("Ranking", "Neighbours")
    )


def _neighbours(
    features: Mapping[str, Embeddings], parts: Parts, power: float | None, queries: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Search the nearest rows of some, (Q, k), and their cosines, by features of a row."""
    rows = side_by_side(features, parts)
    if power is not None:
        rows = fit_powers(rows, (power,))[0](rows)
    k = min(NEIGHBOURS, len(rows.ids) - 1)
    own = rows.rows(queries)
    near, cosines = nearest(rows.features, own.features, k, bank_ids=rows.ids, query_ids=own.ids)
    return near, cosines
