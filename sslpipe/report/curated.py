"""Make the pages of `sslpipe curate`: outliers by reason, clusters on a map, what is chosen."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from markupsafe import Markup

from sslpipe.curate.clusters import Clusters
from sslpipe.curate.outliers import Outlier
from sslpipe.data.index import Split
from sslpipe.evaluation.embed import Embeddings
from sslpipe.random import permutation
from sslpipe.report.charts import apart, class_colour, map_rows, scatter
from sslpipe.report.page import html, html_page, joined, number, render, table
from sslpipe.report.pictures import MOST_MAPPED, pca_map, thumbnails

MOST_SHOWN = 100  # pictures of a reason; the table has them all
SHOWN_CLUSTERS = 100  # largest ones with a row of pictures
NONE = Markup("<p>No sample is beyond a limit.</p>")
MEMBERS = 8  # pictures of a cluster: the one nearest to its centre, then members at random


def outlier_page(split: Split, outliers: Sequence[Outlier]) -> str:
    """Show the outliers of a split under their reasons, the most doubtful first."""
    reasons: dict[str, list[Outlier]] = {}
    for one in outliers:
        reasons.setdefault(one.reason, []).append(one)
    pictures = thumbnails(split, [o.id for own in reasons.values() for o in own[:MOST_SHOWN]])
    sections = {}
    for reason, own in reasons.items():
        more = f", {MOST_SHOWN} of them shown" if len(own) > MOST_SHOWN else ""
        side = "above" if own[0].value > own[0].limit else "below"
        limit = f" {side} {number(own[0].limit)}" if np.isfinite(own[0].limit) else ""
        head = own[0].detail if limit else "no decoder reads them"
        captions = {one.id: _caption(one) for one in own[:MOST_SHOWN]}
        said = f"{len(own):,} of {len(split):,} samples{more}. {head}{limit}."
        sections[f"{reason[0].upper()}{reason[1:]}"] = html(
            "<p>{}</p>{}", said, contact_sheet(captions, pictures)
        )
    title = f"Outliers of {split.name}"
    listed = {one.id for one in outliers}
    text = f"{len(listed):,} of {len(split):,} samples have a reason to be looked at."
    return _page(title, text, sections or {"None": NONE})


def cluster_page(
    split: Split, rows: Embeddings, clusters: Clusters, names: Sequence[str], seed: int = 0
) -> str:
    """Show clusters as a map, and each with its size and some of its pictures.

    Args:
        split: Their images.
        rows: Their features.
        clusters: Of the rows.
        names: Classes by label; what a cluster holds is said where its rows have labels.
        seed: Of the rows on the map, and of the members shown.
    """
    ids, shown = rows.ids.cpu().numpy(), range(min(SHOWN_CLUSTERS, len(clusters.sizes)))
    # pictures: of each cluster the central row, then others at random
    members = {}
    for k in shown:
        own = clusters.members(k)
        others = own[permutation(len(own), seed, k)][:MEMBERS]
        members[k] = [clusters.central[k], *others[others != clusters.central[k]]][:MEMBERS]
    pictures = thumbnails(split, [int(ids[row]) for own in members.values() for row in own])
    # the map
    mapped = permutation(len(ids), seed)[:MOST_MAPPED]
    some = np.unique(np.concatenate([clusters.central, mapped]))
    places, held = pca_map(rows.rows(torch.from_numpy(some)).to("cpu"))
    at = np.searchsorted(some, clusters.central[list(shown)])  # the largest cluster's first
    kept = at[apart(places[at])] if len(at) else at
    uris = {int(p): pictures[i] for p in kept if (i := int(ids[some[p]])) in pictures}
    alt = f"PCA of {len(some):,} samples of {split.name}, coloured by cluster"
    count = len(clusters.sizes)
    titles = [f"cluster {k}" for k in range(count)]
    shared = {"map": map_rows({"pca": places}, clusters.of_row[some], titles, uris, uris)}
    text = f"PCA of features of length 1, {100 * held:.0f} % of their variance; {len(some):,} dots."
    colours = [class_colour(k, count) for k in range(count)]
    picture = scatter(text, alt, "map", ("pca_x", "pca_y"), colours, pictures=True)
    # each cluster
    labels = rows.labels.cpu().numpy()
    table_rows = [
        [
            k,
            f"{clusters.sizes[k]:,}",
            _classes(labels[clusters.members(k)], names),
            *(
                render("picture", uri=pictures.get(int(ids[row])), alt=f"sample {ids[row]}")
                for row in members[k]
            ),
        ]
        for k in shown
    ]
    heads = ("cluster", "samples", "classes", "centre")
    sheet = html("<div class='pixels'>{}</div>", table(heads, table_rows, "sheet"))
    more = f" The {len(shown)} largest are shown." if len(shown) < count else ""
    summary = (
        f"{count:,} clusters of {len(ids):,} samples; the largest has {clusters.sizes[0]:,}, the "
        f"smallest {clusters.sizes[-1]:,}.{more}"
    )
    sections = {"Map": html("<div class='maps pixels'>{}</div>", picture), "Clusters": sheet}
    return _page(f"Clusters of {split.name}", summary, sections, shared)


def chosen_page(split: Split, captions: Mapping[int, str], how: str) -> str:
    """Show chosen samples in their order. captions: sample id -> why, in that order."""
    shown = dict(list(captions.items())[: 10 * MOST_SHOWN])
    more = f" The first {len(shown):,} are shown." if len(shown) < len(captions) else ""
    text = f"{len(captions):,} of {len(split):,} samples to label, chosen by {how}.{more}"
    sheet = contact_sheet(shown, thumbnails(split, shown))
    return _page(f"Samples of {split.name} to label", text, {"Chosen": sheet})


def contact_sheet(captions: Mapping[int, str], pictures: Mapping[int, str]) -> Markup:
    """Lay out pictures with a line below each.

    Args:
        captions: Sample id -> text, in their order.
        pictures: Sample id -> data URI; one that is missing leaves its text alone.
    """
    return render("contacts", cards=[(pictures.get(k), k, text) for k, text in captions.items()])


def _page(
    title: str, text: str, sections: Mapping[str, Markup], shared: Mapping[str, Any] | None = None
) -> str:
    head = html("<h1>{}</h1><p class='verdict'>{}</p>", title, text)
    footer = Markup("Written by <code>sslpipe curate</code>.")
    return html_page(title, head, sections, footer=footer, shared=shared)


def _caption(one: Outlier) -> str:
    return one.detail if np.isnan(one.value) else number(one.value)


def _classes(labels: Iterable[int], names: Sequence[str]) -> Markup:
    """Say which classes a cluster's labelled rows are of, at most two."""
    known, counts = np.unique([label for label in labels if label >= 0], return_counts=True)
    most = np.argsort(-counts, kind="stable")[:2]
    texts = [
        html(
            "{} {:.0f} %",
            names[int(known[k])] if known[k] < len(names) else str(known[k]),
            100 * counts[k] / counts.sum(),
        )
        for k in most.tolist()
    ]
    return joined(texts, "<br>")
