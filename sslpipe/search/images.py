"""Search by image: the nearest images of what `sslpipe embed` has written.

A features file is the index: rows of one network, with the ids of their samples. New images are a
features file of their own, searched together with the others.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sslpipe.arguments import checked
from sslpipe.data.index import Split
from sslpipe.data.reader import Reader
from sslpipe.errors import DataError, UserError, shown
from sslpipe.evaluation.array_rows import as_tensor, refuse_zeros
from sslpipe.evaluation.embed import Embeddings, check_finite_rows
from sslpipe.evaluation.feature_files import COMPARED, check_comparable
from sslpipe.evaluation.neighbours import fixed_point_units, nearest
from sslpipe.evaluation.vectors import Features, alike, open_features
from sslpipe.evaluation.whiten import Whitening
from sslpipe.search.flattening import fit_flattening
from sslpipe.search.selection import parse_conditions, select

KEY_WINDOW_BYTES = 2**20  # read of a shard for a sample's key
MOST_FITTED = 20_000  # rows, evenly spaced, that the spectrum is learned on


# a features file and its data set, features in memory, or a file of features alone
Searched = (
    tuple[str | Path | Embeddings, str | Path]
    | Features
    | Embeddings
    | Tensor
    | NDArray[Any]
    | str
    | Path
)


class Hit(NamedTuple):
    """An image that was found.

    Args:
        score: Cosine with the query in [-1, 1].
        part: Place of its features file.
        id: Of the sample in its split.
        label: Of the sample; -1 for none.
    """

    score: float
    part: int
    id: int
    label: int


def _open(source: Searched) -> Features:
    if isinstance(source, Features | str | Path):
        return open_features(source)
    if isinstance(source, Tensor | np.ndarray | Embeddings):
        return open_features(source)._replace(facts={})  # beside rows that say nothing
    if isinstance(source, tuple) and len(source) == 2:
        rows_of, data = source
        return open_features(rows_of, data)
    raise UserError(
        f"ImageSearch takes (features, dataset.json) pairs, features (N, F), or a file of "
        f"them (.safetensors, .npz, .npy), not a {type(source).__name__}"
    )


class ImageSearch:
    """Search features files together; the answers are exact, ties by file, then row.

    >>> search = sslpipe.ImageSearch(backbone.encode(paths))
    >>> for hit in search.find(backbone.encode("query.jpg"), top=5)[0]:
    ...     print(f"{hit.score:.3f} {paths[hit.id]}")

    Args:
        files: Each a file or a result of `embed`, with the data set that it was embedded from, a
            path or a URL: (file, data). Or vectors alone: (N, F) floats, whose ids are 0, 1, ...,
            `Embeddings`, or a file of them.
        flatten: Flatten the spectrum of the features, as `sslpipe whiten` does, with the power that
            needs no labels, learned on the images searched among. No effect where the files are
            flattened, or have too few rows.

    Attributes:
        facts: What the files say of their network and view.
        flattening: What flattens the features and the queries; None: they are as they are.
        form: The same in words.

    Raises:
        DataError: A file is damaged, of another data set, or of another network or view than the
            first.
    """

    def __init__(
        self,
        *files: Searched,
        flatten: bool = True,
    ) -> None:
        if not files:
            raise UserError("no features file to search; write one with `sslpipe embed`")
        parts = alike([_open(each) for each in files], [f"file {k + 1}" for k in range(len(files))])
        self.facts = parts[0].facts
        for part in parts:
            check_comparable(self.facts, part.facts)
            if part.rows.features.shape[1] != parts[0].rows.features.shape[1]:
                raise DataError("features have different widths; take all from one backbone")
        # the rows of all files, one behind the other: a copy, which is flattened in place
        rows = Embeddings.joined([part.rows for part in parts])
        self._starts = [0, *accumulate(len(part.rows.ids) for part in parts)]
        parts = [part._replace(rows=rows.rows(torch.arange(0))) for part in parts]  # freed
        self._parts = parts
        self.flattening, self.form = self._fit(rows, flatten)
        # made once: a search is then one product
        units = fixed_point_units(self._flattened(rows.features, in_place=True))
        self._rows = rows._replace(features=units)

    @property
    def has_splits(self) -> bool:
        """Return whether the data set of each file is known."""
        return all(part.split is not None for part in self._parts)

    @property
    def splits(self) -> list[Split]:
        """The split of each file. Raises: UserError for features in memory, which have none."""
        known = [part.split for part in self._parts if part.split is not None]
        if len(known) < len(self._parts):
            raise UserError(
                "vectors alone are of no data set; give the file that `sslpipe embed` wrote, "
                "and its dataset.json"
            )
        return known

    def _fit(self, rows: Embeddings, flatten: bool) -> tuple[Whitening | None, str]:
        """Learn what flattens the features on the rows of all files; and say it in words."""
        if "whitening_sha256" in self.facts:
            return None, "as their export flattened them"
        if not flatten:
            return None, "as they are"
        step = max(1, math.ceil(len(rows.ids) / MOST_FITTED))
        some = torch.cat(
            [torch.arange(start, stop, step) for start, stop in pairwise(self._starts)]
        )
        remarks: list[str] = []
        fitted, words = fit_flattening(rows.rows(some), by_labels=False, say=remarks.append)
        return fitted, "; ".join([words, *remarks])

    def check_network(self, facts: Mapping[str, Any]) -> None:
        """Raise DataError where these facts of the queries' network and view are others."""
        if "backbone_sha256" not in self.facts:
            raise DataError(
                "the vectors searched do not say which network made them, so that the queries' may "
                "be another; embed with `sslpipe embed`, or search by vectors: in the terminal a "
                "file of them and no --model, in Python ImageSearch(vectors).find(queries)"
            )
        for key in COMPARED:
            if facts.get(key) != self.facts.get(key):
                raise DataError(
                    f"the features differ from the queries' in {key}: {self.facts.get(key)} and "
                    f"{facts.get(key)}; name the model that they were embedded with, or embed again"
                )
        background = (self.facts.get("image") or {}).get("background")
        query_background = (facts.get("image") or {}).get("background")
        if query_background != background:
            raise DataError(
                f"the features are of images on background {background}, and queries would be on "
                f"{query_background}: backbone, _ = backbone.matched(*search.splits)"
            )

    def __repr__(self) -> str:
        width = self._rows.features.shape[1]
        return f"ImageSearch({len(self):,} images of {width} features, {self.form})"

    def __len__(self) -> int:
        return len(self._rows.ids)

    def rows(self, part: int) -> Embeddings:
        """Return a file's rows as they are searched: flattened, of length 1.

        Raises:
            UserError: There are fewer files.
        """
        if not 0 <= part < len(self._parts):
            raise UserError(f"rows({shown(part)}): there are {len(self._parts)} files, from 0 on")
        return self._rows.rows(slice(self._starts[part], self._starts[part + 1]))

    def prepare(self, queries: Tensor | NDArray[Any]) -> Tensor:
        """Return queries (Q, F) as the rows are: flattened, of length 1.

        Raises:
            UserError: They do not fit.
        """
        if isinstance(queries, np.ndarray):
            queries = as_tensor(queries)
        if not isinstance(queries, Tensor):
            raise UserError(
                f"queries are a {type(queries).__name__}, not features (Q, F): of images they are "
                "backbone.encode(images)"
            )
        width = self._rows.features.shape[1]
        if queries.ndim != 2 or queries.shape[1] != width:
            raise UserError(
                f"queries are {tuple(queries.shape)}, not rows (Q, {width}); one alone is "
                "features[None]"
            )
        check_finite_rows(queries, "queries")
        refuse_zeros(queries, "query")
        return fixed_point_units(self._flattened(queries.cpu().float()))

    @checked
    def find(
        self, queries: Tensor | NDArray[Any], top: int = 10, *, where: str = ""
    ) -> list[list[Hit]]:
        """Return the nearest images of each query, best first.

        Args:
            queries: (Q, F), of the network and the view of the files, any scale.
            top: How many images, or all where there are fewer.
            where: Only these, by their columns: "vendor = A and shot_at >= 2024-05-01".

        Raises:
            UserError: The queries do not fit, or no image does.
        """
        if top < 1:
            raise UserError(f"top = {top} is not 1 or more")
        chosen = self._where(where)
        bank = self._rows.features if chosen is None else self._rows.features[chosen]
        near = nearest(bank, self.prepare(queries), min(top, len(bank)), units=True)
        rows = near.indices if chosen is None else chosen[near.indices]
        hits = zip(near.similarities.tolist(), rows.tolist(), strict=True)
        return [list(map(self._hit, scores, of_query)) for scores, of_query in hits]

    def key(self, hit: Hit) -> str:
        """Return the path that the image was built from where it is known, else its shard's key.

        Of vectors alone: the id of the row, a text where the file has texts.
        """
        part = self._parts[hit.part]
        if part.split is None:
            return part.sample_name(hit.id)
        names = part.split.names_of([hit.id])
        if names is not None:
            return names[0]
        return Reader(part.split, window_bytes=KEY_WINDOW_BYTES).one(hit.id).key

    def queries_of(self, files: Sequence[str | Path]) -> tuple[list[str], Tensor]:
        """Read files of vectors to search for: FILE:ID of each row, and the rows, (Q, F).

        Raises:
            DataError: They are of another network than the vectors searched, or another width.
        """
        names: list[str] = []
        parts = []
        for file in files:
            opened = open_features(file)
            if "backbone_sha256" in opened.facts and "backbone_sha256" in self.facts:
                self.check_network(opened.facts)
            parts.append(opened.rows.features)
            names += [f"{file}:{opened.sample_name(each)}" for each in opened.rows.ids.tolist()]
            width = opened.rows.features.shape[1]
            if width != self._rows.features.shape[1]:
                raise DataError(
                    f"{file} has {width} features a row, and what is searched "
                    f"{self._rows.features.shape[1]}; take both from one network"
                )
        return names, torch.cat(parts)

    def split_name(self, hit: Hit) -> str | None:
        """Name the split of an image that was found; None where its file does not say."""
        return self._parts[hit.part].split_name

    def class_name(self, hit: Hit) -> str | None:
        """Name the class of an image that was found; None where it has none."""
        return self._parts[hit.part].class_name(hit.label)

    def _flattened(self, features: Tensor, *, in_place: bool = False) -> Tensor:
        if self.flattening is None:
            return features
        return self.flattening.apply(features, in_place=in_place)

    def _where(self, text: str) -> Tensor | None:
        """Return the rows that fit the conditions, (n,) ascending; None: all."""
        if not text:
            return None
        conditions = parse_conditions(text)
        fit = [
            select(conditions, split, self.rows(part).ids.numpy())
            for part, split in enumerate(self.splits)
        ]
        chosen = np.flatnonzero(np.concatenate(fit))
        if not len(chosen):
            raise DataError(f"no image fits {text!r}; leave a condition out")
        return torch.from_numpy(chosen)

    def _hit(self, score: float, row: int) -> Hit:
        part = bisect_right(self._starts, row) - 1
        label = int(self._rows.labels[row])
        return Hit(min(score, 1.0), part, int(self._rows.ids[row]), label)
