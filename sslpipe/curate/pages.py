"""Pages of what `sslpipe curate` lists: outliers, clusters, samples to label."""

from collections import Counter
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
from sslpipe.report.page import command_page, number, render
from sslpipe.report.pictures import thumbnails

MOST_SHOWN = 100  # pictures of a reason; the table has them all
SHOWN_CLUSTERS = 100  # largest ones with a row of pictures
SEED = 0  # of what is drawn
MEMBERS = 8  # pictures of a cluster: the one nearest to its centre, then members at random


def outlier_page(split: Split, outliers: Sequence[Outlier]) -> str:
    """Show the outliers of a split under their reasons, the most doubtful first."""
    reasons: dict[str, list[Outlier]] = {}
    for one in outliers:
        reasons.setdefault(one.reason, []).append(one)
    shown = {one.id for of_reason in reasons.values() for one in of_reason[:MOST_SHOWN]}
    pictures = thumbnails(split, shown)
    sections = {
        reason[0].upper() + reason[1:]: render(
            "sslpipe.curate/curated.outliers",
            of_reason=of_reason,
            most=MOST_SHOWN,
            total=len(split),
            limited=bool(np.isfinite(of_reason[0].limit)),
            captions={
                one.id: one.detail if np.isnan(one.value) else number(one.value)
                for one in of_reason[:MOST_SHOWN]
            },
            pictures=pictures,
        )
        for reason, of_reason in reasons.items()
    }
    sections = sections or {"None": Markup("<p>No sample is beyond a limit.</p>")}
    listed = len({one.id for one in outliers})
    text = f"{listed:,} of {len(split):,} samples have a reason to be looked at."
    return command_page(
        command="curate", title=f"Outliers of {split.name}", text=text, sections=sections
    )


def cluster_page(split: Split, rows: Embeddings, clusters: Clusters) -> str:
    """Show clusters of `rows` as a map, and each with its size, classes and some pictures."""
    from sklearn.decomposition import PCA

    ids = rows.ids.cpu().numpy()
    labels = rows.labels.cpu().numpy()
    count = len(clusters.sizes)
    # of each cluster: its most frequent classes, the central row, then others at random
    table = []
    for k in range(min(SHOWN_CLUSTERS, count)):
        inside = clusters.members(k)
        classes = Counter(labels[inside][labels[inside] >= 0].tolist())
        most = [
            (split.class_name(at), 100 * held / classes.total())
            for at, held in sorted(classes.items(), key=lambda each: (-each[1], each[0]))[:2]
        ]
        others = inside[permutation(len(inside), (SEED, k))][:MEMBERS]
        members = [clusters.central[k], *others[others != clusters.central[k]]][:MEMBERS]
        table.append((int(clusters.sizes[k]), most, ids[members].tolist()))
    pictures = thumbnails(split, [one for *_, members in table for one in members])
    # the map
    mapped = permutation(len(ids), (SEED,))[:MOST_MAPPED]
    some = np.unique(np.concatenate([clusters.central, mapped]))
    pca = PCA(2, svd_solver="full")
    places = pca.fit_transform(unit_rows(rows.rows(torch.from_numpy(some)).to("cpu")))
    at = np.searchsorted(some, clusters.central[: len(table)])  # the largest cluster's first
    kept = {int(row): int(ids[some[row]]) for row in at[apart(places[at])]}
    uris = {row: pictures[sample] for row, sample in kept.items() if sample in pictures}
    share = 100 * pca.explained_variance_ratio_.sum()
    chart = scatter(
        title=f"PCA of features of length 1, {share:.0f} % of their variance; {len(some):,} dots.",
        alt=f"PCA of {len(some):,} samples of {split.name}, coloured by cluster",
        places=places,
        labels=clusters.of_row[some],
        names=[f"cluster {k}" for k in range(count)],
        hovered=uris,
        pictures=uris,
    )
    more = f" The {len(table)} largest are shown." if len(table) < count else ""
    text = (
        f"{count:,} clusters of {len(ids):,} samples; the largest has {clusters.sizes[0]:,}, the "
        f"smallest {clusters.sizes[-1]:,}.{more}"
    )
    sections = {
        "Map": Markup("<div class='maps pixels'>{}</div>").format(chart),
        "Clusters": render("sslpipe.curate/curated.clusters", clusters=table, pictures=pictures),
    }
    return command_page(
        command="curate", title=f"Clusters of {split.name}", text=text, sections=sections
    )


def chosen_page(split: Split, captions: Mapping[int, str]) -> str:
    """Show chosen samples in their order. captions: sample id -> why, in that order."""
    shown = dict(list(captions.items())[: 10 * MOST_SHOWN])
    more = f" The first {len(shown):,} are shown." if len(shown) < len(captions) else ""
    text = f"{len(captions):,} of {len(split):,} samples to label.{more}"
    sheet = render(
        "sslpipe.curate/curated.contacts", captions=shown, pictures=thumbnails(split, shown)
    )
    return command_page(
        command="curate",
        title=f"Samples of {split.name} to label",
        text=text,
        sections={"Chosen": sheet},
    )
