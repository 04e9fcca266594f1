"""Make the pages of `sslpipe curate`: outliers by reason, clusters on a map, what is chosen."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from markupsafe import Markup

from sslpipe.curate.clusters import Clusters
from sslpipe.curate.outliers import Outlier
from sslpipe.data.index import Split
from sslpipe.evaluation.embed import Embeddings
from sslpipe.random import permutation
from sslpipe.report.charts import apart, scatter
from sslpipe.report.embeddings import MOST_MAPPED, unit_rows
from sslpipe.report.page import html_page, number, render
from sslpipe.report.pictures import thumbnails

MOST_SHOWN = 100  # pictures of a reason; the table has them all
SHOWN_CLUSTERS = 100  # largest ones with a row of pictures
MEMBERS = 8  # pictures of a cluster: the one nearest to its centre, then members at random


def outlier_page(split: Split, outliers: Sequence[Outlier]) -> str:
    """Show the outliers of a split under their reasons, the most doubtful first."""
    reasons: dict[str, list[Outlier]] = {}
    for one in outliers:
        reasons.setdefault(one.reason, []).append(one)
    shown = {reason: own[:MOST_SHOWN] for reason, own in reasons.items()}
    pictures = thumbnails(split, [one.id for own in shown.values() for one in own])
    sections = {}
    for reason, own in reasons.items():
        captions = {
            one.id: one.detail if np.isnan(one.value) else number(one.value)
            for one in shown[reason]
        }
        sections[reason[0].upper() + reason[1:]] = render(
            "curated.outliers",
            own=own,
            most=MOST_SHOWN,
            total=len(split),
            limited=bool(np.isfinite(own[0].limit)),
            captions=captions,
            pictures=pictures,
        )
    sections = sections or {"None": Markup("<p>No sample is beyond a limit.</p>")}
    listed = len({one.id for one in outliers})
    text = f"{listed:,} of {len(split):,} samples have a reason to be looked at."
    return _page(f"Outliers of {split.name}", text, sections)


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
    from sklearn.decomposition import PCA

    ids, labels, count = rows.ids.cpu().numpy(), rows.labels.cpu().numpy(), len(clusters.sizes)
    shown = range(min(SHOWN_CLUSTERS, count))
    # of each cluster: its most frequent classes, the central row, then others at random
    table = []
    for k in shown:
        own = clusters.members(k)
        classes, counts = np.unique(labels[own][labels[own] >= 0], return_counts=True)
        most = np.argsort(-counts, kind="stable")[:2]
        known = [(classes[n], 100 * counts[n] / counts.sum()) for n in most]
        held = [(names[at] if at < len(names) else str(at), share) for at, share in known]
        others = own[permutation(len(own), seed, k)][:MEMBERS]
        members = [clusters.central[k], *others[others != clusters.central[k]]][:MEMBERS]
        table.append((int(clusters.sizes[k]), held, ids[members].tolist()))
    pictures = thumbnails(split, [one for *_, members in table for one in members])
    # the map
    mapped = permutation(len(ids), seed)[:MOST_MAPPED]
    some = np.unique(np.concatenate([clusters.central, mapped]))
    pca = PCA(2, svd_solver="full")
    places = pca.fit_transform(unit_rows(rows.rows(torch.from_numpy(some)).to("cpu")))
    share = float(pca.explained_variance_ratio_.sum())
    at = np.searchsorted(some, clusters.central[list(shown)])  # the largest cluster's first
    kept = at[apart(places[at])] if len(at) else at
    uris = {int(p): pictures[i] for p in kept if (i := int(ids[some[p]])) in pictures}
    alt = f"PCA of {len(some):,} samples of {split.name}, coloured by cluster"
    titles = [f"cluster {k}" for k in range(count)]
    title = (
        f"PCA of features of length 1, {100 * share:.0f} % of their variance; {len(some):,} dots."
    )
    chart = scatter(title, alt, places, clusters.of_row[some], titles, uris, uris)
    more = f" The {len(shown)} largest are shown." if len(shown) < count else ""
    text = (
        f"{count:,} clusters of {len(ids):,} samples; the largest has {clusters.sizes[0]:,}, the "
        f"smallest {clusters.sizes[-1]:,}.{more}"
    )
    sections = {
        "Map": Markup("<div class='maps pixels'>{}</div>").format(chart),
        "Clusters": render("curated.clusters", clusters=table, pictures=pictures),
    }
    return _page(f"Clusters of {split.name}", text, sections)


def chosen_page(split: Split, captions: Mapping[int, str]) -> str:
    """Show chosen samples in their order. captions: sample id -> why, in that order."""
    shown = dict(list(captions.items())[: 10 * MOST_SHOWN])
    more = f" The first {len(shown):,} are shown." if len(shown) < len(captions) else ""
    text = f"{len(captions):,} of {len(split):,} samples to label.{more}"
    sheet = render("curated.contacts", captions=shown, pictures=thumbnails(split, shown))
    return _page(f"Samples of {split.name} to label", text, {"Chosen": sheet})


def _page(title: str, text: str, sections: Mapping[str, Markup]) -> str:
    head = render("choice.header", title=title, sentences=text)
    footer = Markup("Written by <code>sslpipe curate</code>.")
    return html_page(title, head, sections, footer=footer)
