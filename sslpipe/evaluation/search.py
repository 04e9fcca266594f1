"""Search by image: the nearest images of what `sslpipe embed` has written.

A features file is the index: rows of one network, with the ids of their samples. New images are a
features file of their own, searched together with the others.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sslpipe.data.index import Split
from sslpipe.data.reader import Reader
from sslpipe.errors import DataError, UserError
from sslpipe.evaluation.approximate import Approximate
from sslpipe.evaluation.choose import fit_flattening
from sslpipe.evaluation.embed import COMPARED, Embeddings, check_comparable, load_embeddings
from sslpipe.evaluation.features import split_of_file
from sslpipe.evaluation.neighbours import Hidden, fixed_point_units, nearest
from sslpipe.evaluation.rerank import augmented, check_reranked, k_reciprocal_order
from sslpipe.evaluation.selection import parse_conditions, select
from sslpipe.evaluation.whiten import Whitening

KEY_WINDOW_BYTES = 2**20  # read of a shard for a sample's key
COPIED = 0.25  # of a file's rows: fewer that fit a condition are copied, of more the others hidden
MOST_FITTED = 20_000  # rows, evenly spaced, that the spectrum is learned on


class Hit(NamedTuple):
    """An image that was found.

    Args:
        score: Cosine with the query in [-1, 1]; with `expand`, with the expanded query.
        part: Place of its features file.
        id: Of the sample in its split.
        label: Of the sample; -1 for none.
    """

    score: float
    part: int
    id: int
    label: int


class Prepared(NamedTuple):
    """Rows that `search_index.build_index` has written, as they are searched.

    Args:
        rows: For each file its rows of length 1 and its facts; None: they are read from the file.
        flattening: What the rows were flattened by, and queries are; None: nothing.
        form: The same in words.
        near: For each file what finds its nearest rows approximately, or None: all are compared.
    """

    rows: Sequence[tuple[Embeddings, dict[str, Any]] | None]
    flattening: Whitening | None
    form: str
    near: Sequence[Approximate | None]


class ImageSearch:
    """Search features files together; the answers are exact, ties by file, then row.

    Args:
        files: Each with the data set that it was embedded from, a path or a URL.
        flatten: Flatten the spectrum of the features, as `sslpipe whiten` does, with the power that
            needs no labels, learned on the images searched among. No effect where the files are
            whitened, or have too few rows.
        augment: Mix each image with its nearest ones of all files, so many, itself among them, at
            the cost of comparing every image with every other. 0: do not.
        removed: Ids of each file that are not found; none by default.
        prepared: What has been prepared before; then `flatten` has no effect.

    Attributes:
        facts: What the files say of their network and view.
        all_facts: What each file says.
        flattening: What flattens the features and the queries; None: they are as they are.
        form: The same in words.
        splits: The split of each file.

    Raises:
        DataError: A file is damaged, of another data set, or of another network or view than the
            first.
    """

    def __init__(
        self,
        *files: tuple[str | Path, str],
        flatten: bool = True,
        augment: int = 0,
        removed: Sequence[Sequence[int]] = (),
        prepared: Prepared | None = None,
    ) -> None:
        self.splits: list[Split] = []
        self.all_facts: list[dict[str, Any]] = []
        self._rows: list[Embeddings] = []
        self._kept: list[Tensor | None] = []  # (N,) bool, of rows that are mapped; None: all
        ready = [None] * len(files) if prepared is None else prepared.rows
        self._near = [None] * len(files) if prepared is None else prepared.near
        for number, ((path, data), own) in enumerate(zip(files, ready, strict=True)):
            rows, facts = load_embeddings(path) if own is None else own
            self.all_facts.append(facts)
            check_comparable(self.all_facts[0], facts)
            self.splits.append(split_of_file(data, Path(path), rows, facts))
            kept = None
            if removed and len(removed[number]):
                kept = ~torch.isin(rows.ids, torch.tensor(removed[number], dtype=torch.int64))
                if own is None:  # else the rows are not copied
                    rows, kept = rows.rows(kept), None
            self._rows.append(rows)
            self._kept.append(kept)
        if not self.splits:
            raise UserError("no features file to search; write one with `sslpipe embed`")
        self.facts = self.all_facts[0]
        self.flattening, self.form = self._fit(flatten) if prepared is None else prepared[1:3]
        # made once: a search is then one product
        for part, rows in enumerate(self._rows):
            if ready[part] is None:
                units = fixed_point_units(self._flattened(rows.features, in_place=True))
                self._rows[part] = rows._replace(features=units)
        if augment:
            mixed = augmented(torch.cat([rows.features for rows in self._rows]), augment)
            parts = torch.split(mixed, [len(rows.ids) for rows in self._rows])
            both = zip(self._rows, parts, strict=True)
            self._rows = [rows._replace(features=part) for rows, part in both]

    def _fit(self, flatten: bool) -> tuple[Whitening | None, str]:
        """Learn what flattens the features on the rows of all files; and say it in words."""
        if "whitening_sha256" in self.facts:
            return None, "as their export whitened them"
        if not flatten:
            return None, "as they are"
        step = len(self) // MOST_FITTED + 1
        some = [rows.rows(torch.arange(0, len(rows.ids), step)) for rows in self._rows]
        fit_on = Embeddings(*map(torch.cat, zip(*some, strict=True)))
        said: list[str] = []
        fitted, words = fit_flattening(fit_on, by_labels=False, say=said.append)
        return fitted, "; ".join([words, *said])

    def check_network(self, facts: Mapping[str, Any]) -> None:
        """Raise DataError where these facts of the queries' network and view are others."""
        for key in COMPARED[:-1]:  # the dtype of the file may differ
            if facts.get(key) != self.facts.get(key):
                raise DataError(
                    f"the features differ from the queries' in {key}: {self.facts.get(key)} and "
                    f"{facts.get(key)}; name the model that they were embedded with, or embed again"
                )

    def __len__(self) -> int:
        return sum(map(len, map(self.ids, range(len(self._rows)))))

    def ids(self, part: int) -> Tensor:
        """Return the ids of a file's images that can be found, (n,) int64."""
        ids, kept = self._rows[part].ids, self._kept[part]
        return ids if kept is None else ids[kept]

    def rows(self, part: int) -> Embeddings:
        """Return a file's rows as they are searched: flattened, of length 1."""
        return self._rows[part]

    def find(
        self,
        queries: Tensor,
        top: int = 10,
        *,
        where: str = "",
        expand: int = 0,
        alpha: float = 3,
        rerank: int = 0,
    ) -> list[list[Hit]]:
        """Return the nearest images of each query, best first.

        Args:
            queries: (Q, F), of the network and the view of the files, any scale.
            top: How many images, or all where there are fewer.
            where: Only these, by their columns: "vendor = A and shot_at >= 2024-05-01".
            expand: Search again for the sum of the query and this many of its first neighbours,
                each weighted by its cosine to the power `alpha` (0 where it is negative). 0: do
                not.
            alpha: At least 0.
            rerank: Order this many of the nearest by the neighbours that they share with the query
                (k-reciprocal re-ranking); the scores stay cosines. 0: do not.

        Raises:
            UserError: The queries do not fit, or no image does.

        Source:
            Alpha query expansion: Radenovic, Tolias and Chum 2018, arXiv:1711.02512, section 3.2.
        """
        width = self._rows[0].features.shape[1]
        if queries.ndim != 2 or queries.shape[1] != width or not bool(queries.isfinite().all()):
            raise UserError(f"queries are {tuple(queries.shape)}, not finite rows of {width}")
        if top < 1 or expand < 0 or alpha < 0:
            raise UserError(f"top = {top}, expand = {expand}, alpha = {alpha}: negative, or no row")
        check_reranked(rerank)
        queries, kept = self._flattened(queries.cpu().float()), self._where(where)
        if expand:
            pairs = zip(queries, self._nearest(queries, expand, kept), strict=True)
            queries = torch.stack([self._expanded(*each, alpha) for each in pairs])
        found = self._nearest(queries, max(top, rerank), kept)
        if rerank:
            for query, near in zip(queries, found, strict=True):
                rows = torch.stack([self._rows[part].features[row] for _, part, row in near])
                order = k_reciprocal_order(query, rows[:rerank])
                near[:rerank] = [near[place] for place in order]
        return [[self._hit(*each) for each in near[:top]] for near in found]

    def key(self, hit: Hit) -> str:
        """Read the name that the image has in its shard."""
        return Reader(self.splits[hit.part], window_bytes=KEY_WINDOW_BYTES).one(hit.id).key

    def _flattened(self, features: Tensor, *, in_place: bool = False) -> Tensor:
        if self.flattening is None:
            return features
        return self.flattening.apply(features, in_place=in_place)

    def _where(self, text: str) -> list[Tensor | None]:
        """Say which rows of each file can be found and fit the conditions, (N,) bool; None: all."""
        if not text:
            return self._kept
        conditions = parse_conditions(text)
        chosen: list[Tensor | None] = []
        for split, rows, kept in zip(self.splits, self._rows, self._kept, strict=True):
            fit = torch.from_numpy(select(conditions, split, rows.ids.numpy()))
            chosen.append(fit if kept is None else fit & kept)
        if not any(bool(each.any()) for each in chosen if each is not None):
            raise DataError(f"no image fits {text!r}; leave a condition out")
        return chosen

    def _nearest(
        self, queries: Tensor, top: int, chosen: Sequence[Tensor | None]
    ) -> list[list[tuple[float, int, int]]]:
        """(score, file, row) of the best of all files, for each query."""
        found: list[list[tuple[float, int, int]]] = [[] for _ in queries]
        units = fixed_point_units(queries)
        for part, (rows, some) in enumerate(zip(self._rows, chosen, strict=True)):
            bank, places = rows.features, None
            hidden: Hidden = None
            count = len(bank) if some is None else int(some.sum())
            if not count:
                continue
            if some is not None and count < COPIED * len(bank):
                places = some.nonzero()[:, 0]
                bank = bank[places]
            elif some is not None and count < len(bank):
                # each query has number 1, and so have rows that it shall not find
                hidden = (~some).long(), torch.ones(len(units), dtype=torch.int64)
            by, k = self._near[part], min(top, count)
            if by is not None and places is None:
                near = by.nearest(bank, units, k, some)
            else:
                near = nearest(bank, units, k, units=True, hidden=hidden)
            if not bool((near.similarities <= 1.001).all()):  # of rows that are mapped unchecked
                raise DataError(
                    "the index is damaged: rows are not of length 1; make it anew with `sslpipe "
                    "index build`"
                )
            indices = near.indices if places is None else places[near.indices]
            both = zip(near.similarities.tolist(), indices.tolist(), strict=True)
            for own, pairs in zip(found, both, strict=True):
                hits = zip(*pairs, strict=True)  # -inf where fewer were found
                own += [(score, part, row) for score, row in hits if score > -math.inf]
        return [sorted(each, key=lambda hit: (-hit[0], *hit[1:]))[:top] for each in found]

    def _expanded(self, query: Tensor, near: list[tuple[float, int, int]], alpha: float) -> Tensor:
        """The query and its neighbours as one row (F,), each of length 1 and weighted."""
        total = F.normalize(query.double(), dim=0)
        for score, part, row in near:
            weight = max(score, 0.0) ** alpha
            total = total + weight * self._rows[part].features[row].double()
        return total.float()

    def _hit(self, score: float, part: int, row: int) -> Hit:
        rows = self._rows[part]
        return Hit(score, part, int(rows.ids[row]), int(rows.labels[row]))
