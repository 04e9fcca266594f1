"""Make the pages of `sslpipe curate`: outliers by reason, clusters on a map, what is chosen."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

import numpy as np
import torch

from sslpipe.curate.clusters import Clusters
from sslpipe.curate.outliers import Outlier
from sslpipe.data.index import Split
from sslpipe.evaluation.embed import Embeddings
from sslpipe.random import permutation
from sslpipe.report.charts import apart, number, scatter
from sslpipe.report.page import html_page
from sslpipe.report.pictures import MOST_MAPPED, pca_map, thumbnails

MOST_SHOWN = 100  # pictures of a reason; the table has them all
SHOWN_CLUSTERS = 100  # largest ones with a row of pictures
MEMBERS = 8  # pictures of a cluster: the one nearest to its centre, then members at random
ASPECT = 2.0  # of the map: the page is wider than high


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
        sections[f"{reason[0].upper()}{reason[1:]}"] = (
            f"<p>{len(own):,} of {len(split):,} samples{more}. {escape(head)}{limit}.</p>"
            + contact_sheet(captions, pictures)
        )
    title = f"Outliers of {split.name}"
    listed = {one.id for one in outliers}
    text = f"{len(listed):,} of {len(split):,} samples have a reason to be looked at."
    return _page(title, text, sections or {"None": "<p>No sample is beyond a limit.</p>"})


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
    kept = at[apart(places[at], aspect=ASPECT)] if len(at) else at
    uris = {int(p): pictures[i] for p in kept if (i := int(ids[some[p]])) in pictures}
    alt = f"PCA of {len(some):,} samples of {split.name}, coloured by cluster"
    count = len(clusters.sizes)
    svg = scatter(alt, places, clusters.of_row[some], [""] * count, uris, aspect=ASPECT)
    text = f"PCA of features of length 1, {100 * held:.0f} % of their variance; {len(some):,} dots."
    picture = f"<figure class='wide'><figcaption>{text}</figcaption>{svg}</figure>"
    # each cluster
    labels = rows.labels.cpu().numpy()
    body = ""
    for k in shown:
        held_by = _classes(labels[clusters.members(k)], names)
        cells = "".join(
            f"<td>{_image(pictures.get(int(ids[row])), f'sample {ids[row]}')}</td>"
            for row in members[k]
        )
        body += f"<tr><th scope='row'>{k}</th><td>{clusters.sizes[k]:,}</td><td>{held_by}</td>"
        body += f"{cells}</tr>"
    head = "".join(f"<th scope='col'>{text}</th>" for text in ("cluster", "samples", "classes"))
    table = (
        f"<div class='wide pixels'><table class='sheet'><thead><tr>{head}"
        f"<th scope='col'>centre</th></tr></thead><tbody>{body}</tbody></table></div>"
    )
    more = f" The {len(shown)} largest are shown." if len(shown) < count else ""
    summary = (
        f"{count:,} clusters of {len(ids):,} samples; the largest has {clusters.sizes[0]:,}, the "
        f"smallest {clusters.sizes[-1]:,}.{more}"
    )
    sections = {"Map": f"<div class='maps pixels'>{picture}</div>", "Clusters": table}
    return _page(f"Clusters of {split.name}", summary, sections)


def chosen_page(split: Split, captions: Mapping[int, str], how: str) -> str:
    """Show chosen samples in their order. captions: sample id -> why, in that order."""
    shown = dict(list(captions.items())[: 10 * MOST_SHOWN])
    more = f" The first {len(shown):,} are shown." if len(shown) < len(captions) else ""
    text = f"{len(captions):,} of {len(split):,} samples to label, chosen by {how}.{more}"
    sheet = contact_sheet(shown, thumbnails(split, shown))
    return _page(f"Samples of {split.name} to label", text, {"Chosen": sheet})


def contact_sheet(captions: Mapping[int, str], pictures: Mapping[int, str]) -> str:
    """Lay out pictures with a line below each.

    Args:
        captions: Sample id -> text, in their order.
        pictures: Sample id -> data URI; one that is missing leaves its text alone.
    """
    figures = "".join(
        f"<figure>{_image(pictures.get(one), f'sample {one}')}"
        f"<figcaption>{one}<br><small>{escape(text)}</small></figcaption></figure>"
        for one, text in captions.items()
    )
    return f"<div class='contacts pixels'>{figures}</div>"


def _page(title: str, text: str, sections: Mapping[str, str]) -> str:
    head = f"<h1>{escape(title)}</h1><p class='verdict'>{escape(text)}</p>"
    return html_page(title, head, sections, footer="Written by <code>sslpipe curate</code>.")


def _caption(one: Outlier) -> str:
    return one.detail if np.isnan(one.value) else number(one.value)


def _image(uri: str | None, alt: str) -> str:
    return "" if uri is None else f"<img src='{uri}' alt='{escape(alt, quote=True)}'>"


def _classes(labels: Iterable[int], names: Sequence[str]) -> str:
    """Say which classes a cluster's labelled rows are of, at most two."""
    known, counts = np.unique([label for label in labels if label >= 0], return_counts=True)
    most = np.argsort(-counts, kind="stable")[:2]
    return "<br>".join(
        f"{escape(names[int(known[k])] if known[k] < len(names) else str(known[k]))} "
        f"{100 * counts[k] / counts.sum():.0f} %"
        for k in most.tolist()
    )
