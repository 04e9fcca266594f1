"""A gallery of identities that nothing was trained on: enrol, remove, identify, verify.

A person or a product is a name with one or more embeddings; its score for a query is the highest
cosine of any of them. A score depends on the query and on that name's embeddings only: adding or
removing another name changes no bit of it, and nothing is ever trained.
"""

from __future__ import annotations

import os
import unicodedata
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import safetensors
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from sslpipe.arguments import checked
from sslpipe.errors import DataError, UserError, did_you_mean
from sslpipe.evaluation.array_rows import as_tensor, refuse_zeros
from sslpipe.evaluation.feature_files import CHECKSUM, UNREADABLE, checksum_of
from sslpipe.evaluation.neighbours import exact_cosines, fixed_point_units, nearest
from sslpipe.evaluation.whiten import Whitening
from sslpipe.files import Finite, Stored, json_text, parse_json
from sslpipe.portable import open_regular, replacing

SAME = 1 - 1e-6  # the cosine of an image with itself, in batches of other sizes
NO_THRESHOLD = "no threshold is set: every image gets the nearest name, a stranger's too"


class _About(Stored):
    """What a gallery's file says beside its tensors."""

    format_version: Literal[1] = 1
    names: tuple[str, ...]
    threshold: Finite
    facts: dict[str, Any]  # which model made the embeddings


Rows = Tensor | NDArray[Any]  # (n, D) or (D,) floats


class Match(NamedTuple):
    """Hold a name and its score, a cosine in [-1, 1]."""

    name: str
    score: float


class Gallery:
    """Keep names and their embeddings, on the CPU.

    >>> gallery = sslpipe.Gallery(backbone.num_features)
    >>> gallery.add("Ada", backbone.encode(["ada/1.jpg", "ada/2.jpg"]))
    >>> gallery.calibrate(backbone.encode(strangers), far=0.01)
    >>> print(gallery.identify(backbone.encode("new.jpg")))  # a name and a score, or None

    A query scoring below `threshold` is a stranger to the gallery. Until `calibrate` sets it, it is
    -1, and whoever is asked about gets the nearest name: `identify` warns of it.

    Args:
        dim: D of the embeddings; their length means nothing, but it may not be 0.
        metadata: Plain values kept with the file (which model made the embeddings).
        flattening: Applied to all embeddings given later, those of queries, too; kept in the file
            and never fitted anew, so that a score stays what it is. None: none.
    """

    @checked
    def __init__(
        self,
        dim: int,
        *,
        metadata: dict[str, Any] | None = None,
        flattening: Whitening | None = None,
    ) -> None:
        if dim < 1:
            raise UserError(f"dim = {dim} must be at least 1")
        self.dim = dim
        self.metadata = dict(metadata or {})
        self.threshold = -1.0
        self.flattening = flattening
        self._names: dict[str, int] = {}  # name -> its place
        kept = dim if flattening is None else flattening.projection.shape[1]
        self._embeddings = torch.zeros(0, kept)  # (R, D), of one name together
        self._owner = torch.zeros(0, dtype=torch.int64)  # (R,) place of its name

    @property
    def names(self) -> tuple[str, ...]:
        """The names in the order in which they came."""
        return tuple(self._names)

    def __repr__(self) -> str:
        flat = "" if self.flattening is None else ", flattened"
        limit = f"threshold {self.threshold:.4f}" if self.calibrated else "no threshold"
        rows = len(self._embeddings)
        return f"Gallery({len(self)} names of {rows} embeddings ({self.dim},){flat}; {limit})"

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: str) -> bool:
        return _composed(name) in self._names

    @property
    def calibrated(self) -> bool:
        """Whether a threshold is set, so that a stranger is recognised as one."""
        return self.threshold > -1

    @checked
    def embeddings(self, name: str) -> Tensor:
        """Return a name's embeddings (n, D), of length 1, flattened where the gallery is."""
        return self._embeddings[self._owner == self._place(name)]

    @checked
    def add(self, name: str, embeddings: Rows) -> None:
        """Enrol a name, or give one that is there more embeddings. (n, D) or (D,)."""
        rows = as_rows(embeddings, "embeddings")
        self.enrol([name] * len(rows), rows)

    @checked
    def enrol(self, names: Sequence[str], embeddings: Rows) -> None:
        """Add one row a name, of as many names as there are rows; a name may come again.

        Names that differ by the Unicode form of an accent alone are one.
        """
        rows = self._checked(embeddings, names)
        if len(rows) != len(names):
            raise UserError(f"{len(names)} names for {len(rows)} embeddings")
        for name in names:
            if not name.strip():
                raise UserError(f"name {name!r} is blank: who is it?")
            if name.encode(errors="replace").decode() != name:  # the file would have question marks
                raise UserError(f"name {name!r} is not UTF-8; write it in UTF-8")
        places = [self._names.setdefault(_composed(name), len(self._names)) for name in names]
        self._embeddings = torch.cat([self._embeddings, rows])
        self._owner = torch.cat([self._owner, torch.tensor(places)])

    @checked
    def holds(self, names: Sequence[str], embeddings: Rows) -> Tensor:
        """Return which rows are enrolled under their names already, as of the same images.

        Args:
            names: One a row; they need not be there.
            embeddings: (n, D).

        Returns:
            (n,) bool.
        """
        rows = self._checked(embeddings, names)
        held = torch.zeros(len(rows), dtype=torch.bool)
        for name in {name for name in names if name in self}:
            is_of_name = torch.tensor([other == name for other in names])
            best = nearest(self.embeddings(name), rows[is_of_name], 1, units=True)
            held[is_of_name] = best.similarities[:, 0] >= SAME
        return held

    @checked
    def remove(self, name: str) -> None:
        """Forget a name and its embeddings."""
        place = self._place(name)
        kept = self._owner != place
        self._embeddings = self._embeddings[kept]
        owner = self._owner[kept]
        self._owner = owner - (owner > place).long()
        self._names.pop(_composed(name))
        self._names = {other: n for n, other in enumerate(self._names)}

    @checked
    def rank(self, queries: Rows, top: int = 1) -> list[list[Match]]:
        """Return the `top` best names of each query, best first, whatever the threshold.

        Args:
            queries: (Q, D) or (D,).
            top: How many names. Of equal scores the embedding enrolled first counts.
        """
        rows = self._checked(queries)
        if not self._names:
            raise UserError("the gallery is empty; enrol somebody first")
        if not 1 <= top <= len(self._names):
            raise UserError(f"top = {top} does not fit {len(self._names)} names")
        largest = int(self._owner.bincount().max())
        # top - 1 names cannot fill more rows than this, so the next row has another name
        k = min(len(self._owner), (top - 1) * largest + 1)
        neighbours = nearest(self._embeddings, rows, k)
        names = self.names
        ranked = []
        for places, scores in zip(
            self._owner[neighbours.indices].tolist(), neighbours.cosines.tolist(), strict=True
        ):
            best: dict[int, float] = {}
            for place, score in zip(places, scores, strict=True):
                best.setdefault(place, score)
            ranked.append([Match(names[p], s) for p, s in list(best.items())[:top]])
        return ranked

    @checked
    def nearest_others(self, names: Sequence[str], queries: Rows) -> list[Match]:
        """Return the best name of each query but its own, of `names`; of two names at least."""
        rows = self._checked(queries, names)
        owners = torch.tensor([self._place(name) for name in names])
        neighbours = nearest(self._embeddings, rows, 1, hidden=(self._owner, owners))
        places = self._owner[neighbours.indices[:, 0]].tolist()
        scores = neighbours.cosines[:, 0].tolist()
        known = self.names
        return [Match(known[p], score) for p, score in zip(places, scores, strict=True)]

    def identify(self, queries: Rows) -> list[Match | None]:
        """Return who each query is: the best name, or None where it scores below the threshold.

        Warns:
            UserWarning: No threshold is set: every query gets the nearest name, a stranger's too.
        """
        if not self.calibrated:
            warnings.warn(f"{NO_THRESHOLD}; Gallery.calibrate sets one", stacklevel=2)
        best = [matches[0] for matches in self.rank(queries)]
        return [match if match.score >= self.threshold else None for match in best]

    @checked
    def calibrate(self, strangers: Rows, far: float, *, names: Sequence[str] = ()) -> float:
        """Set the threshold at which at most the share `far` of strangers is taken for somebody.

        This share grows with the number of names: calibrate again after the gallery has grown much.
        `metadata["calibration"]` keeps the numbers of names and strangers, and the rate.

        Args:
            strangers: (Q, D) embeddings of identities that are not in the gallery.
            far: False accept rate, in 0..1.
            names: Of the strangers' images, for messages; (): they are numbered.
        """
        nearest_names = [matches[0] for matches in self.rank(strangers)]
        scores = torch.tensor([match.score for match in nearest_names])
        place = int(scores.argmax())
        if scores[place] >= SAME:
            stranger = names[place] if names else f"strangers[{place}]"
            raise UserError(
                f"{stranger} is an enrolled image of {nearest_names[place].name!r}, or a "
                "copy: give images of people who are not enrolled"
            )
        self.threshold = threshold_at(scores, far)
        self.metadata["calibration"] = {"names": len(self), "strangers": len(scores), "far": far}
        return self.threshold

    @checked
    def save(self, path: str | Path) -> None:
        """Write one safetensors file: tensors; names, threshold, metadata as JSON.

        Of a link the file that it leads to: who was removed is in no file any more.
        """
        path = Path(os.path.realpath(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        about = _About(
            names=self.names,
            threshold=self.threshold,
            facts=self.metadata,
        )
        tensors = {"embeddings": self._embeddings, "owner": self._owner}
        text = json_text(about)
        tensors |= {} if self.flattening is None else self.flattening._asdict()
        tensors[CHECKSUM] = checksum_of(tensors, text)
        with replacing(path) as temporary:
            save_file(tensors, temporary, metadata={"gallery": text})

    @classmethod
    @checked
    def load(cls, path: str | Path) -> Gallery:
        """Read a gallery as it was saved.

        Raises:
            DataError: the file holds no gallery, or a damaged one.
        """
        try:
            open_regular(path).close()
            with safetensors.safe_open(str(path), framework="pt") as file:
                text = (file.metadata() or {})["gallery"]
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            stored = tensors.pop(CHECKSUM)
            if stored.tolist() != checksum_of(tensors, text).tolist():
                raise DataError(
                    f"{path} is damaged: its sha256 is another one; copy it again, or enrol anew"
                )
            about = parse_json(text, _About)
            embeddings = tensors["embeddings"]
            flattening = None
            if "mean" in tensors:
                flattening = Whitening(tensors["mean"], tensors["projection"])
            dim = embeddings.shape[1] if flattening is None else len(flattening.mean)
            gallery = cls(dim, metadata=about.facts, flattening=flattening)
            gallery._names = {name: place for place, name in enumerate(about.names)}
            gallery.threshold = about.threshold
            gallery._embeddings = embeddings
            gallery._owner = tensors["owner"]
        except DataError:
            raise
        except UNREADABLE as error:
            raise DataError(
                f"{path} holds no gallery, or a damaged one ({error}); restore a copy, or enrol "
                "into a new file"
            ) from error
        return gallery

    def _place(self, name: str) -> int:
        name = _composed(name)
        if name not in self._names:
            hint = did_you_mean(name, self._names)
            raise UserError(f"{name!r} is not in the gallery{hint}")
        return self._names[name]

    def _checked(self, embeddings: Rows, names: Sequence[str] = ()) -> Tensor:
        """(n, D) of length 1, in the fixed point in which they are compared."""
        rows = as_rows(embeddings, "embeddings")
        if rows.shape[1] != self.dim:
            raise UserError(f"embeddings have {rows.shape[1]} features, the gallery {self.dim}")
        if not len(rows) or not bool(rows.isfinite().all()):
            raise UserError("embeddings must be finite, and at least one")
        if self.flattening is not None:
            rows = self.flattening.apply(rows)
        refuse_zeros(rows, "embedding", names)
        return fixed_point_units(rows)


def _composed(name: str) -> str:
    """Return a name in one form of its accents: folders of a Mac have another than keyboards."""
    return unicodedata.normalize("NFC", name)


def as_rows(embeddings: object, name: str) -> Tensor:
    """Take (n, D) or (D,) floats, of torch or numpy, as rows (n, D) float32 on the CPU.

    Raises:
        UserError: They are something else.
    """
    rows = embeddings
    if isinstance(rows, np.ndarray):
        rows = as_tensor(rows)
    if not isinstance(rows, Tensor) or not rows.is_floating_point() or rows.ndim not in (1, 2):
        kind = type(embeddings).__name__
        has = f" {rows.dtype} {tuple(rows.shape)}" if isinstance(rows, Tensor) else ""
        raise UserError(
            f"{name} are a {kind}{has}, not floats (n, D) or (D,); of images they are "
            "backbone.encode(images)"
        )
    return rows.detach().cpu().float().reshape(-1, rows.shape[-1])


def similarity(first: Tensor, second: Tensor) -> float:
    """Return the cosine of two embeddings (D,), to the bit what a gallery would score."""
    one = first.reshape(1, -1)
    other = second.reshape(1, -1)
    refuse_zeros(torch.cat([one, other]), "embedding", ("first", "second"))
    return float(nearest(one, other, 1).cosines[0, 0])


def threshold_at(scores: Tensor, far: float) -> float:
    """Return the lowest threshold that at most the share `far` of impostors' scores reaches.

    Ties are accepted together.

    Args:
        scores: (n,). To compare two images those of pairs of two identities; with fewer than
            1 / far of them, the threshold lies just above the highest.
        far: False accept rate, in 0..1.
    """
    if not 0 <= far <= 1 or not len(scores):
        raise UserError(f"far = {far} must be in [0, 1], and there must be a score to set it by")
    falling = scores.float().sort(descending=True).values
    allowed = int(far * len(falling) + 1e-9)  # impostors that may pass
    if allowed == len(falling):
        return float(falling[-1])
    refused = falling[allowed]  # and with it all of its ties
    return float(torch.nextafter(refused, torch.tensor(torch.inf)))


def different_pairs(embeddings: Tensor, labels: Sequence[int] | Tensor) -> Tensor:
    """Return similarities of all pairs of two labels: impostors' scores for `threshold_at`."""
    labels = torch.as_tensor(labels)
    units = fixed_point_units(embeddings)
    first, second = torch.triu_indices(len(units), len(units), 1)
    different = labels[first] != labels[second]
    cosines = exact_cosines(units, first[different], units, second[different])
    return cosines.clamp(-1, 1)
