"""Which features to use: networks, joins and powers of flattening, ranked with labels or without.

With labels the classes are cut in two: one half chooses, by MAP@R, the other half says what the
choice is worth. Without labels the ranking is by `view_recall`. Both rules were chosen on two of
the sets of docs/graded.md, which says how often they were right on the others.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from sslpipe.augment.eval_view import EvalView
from sslpipe.data.subsets import with_a_partner
from sslpipe.errors import DataError, UserError
from sslpipe.evaluation.difference import Difference, excludes_zero, holm, paired_means
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.flatten import (
    CHOSEN_BY,
    METRICS,
    POWERS,
    UNLABELLED_POWER,
    halves_of,
    score_forms,
    why_unlabelled,
)
from sslpipe.evaluation.label_free import view_recall
from sslpipe.evaluation.whiten import fit_whitening
from sslpipe.files import Stored, json_text, parse_object, read_json

FEW_LABELLED = 200  # of fewer the choice was not trustworthy, docs/graded.md
SEEN = -2  # label of images of classes that a candidate was trained by: they are searched alone
LEAST_IMAGES = 20
ROUNDING = 1e-4  # of the largest feature: equal images in batches of other sizes differ by less
MOST_COMPARED = 2000  # images whose views are searched among each other

Names = tuple[str, ...]  # names of the candidates that stand side by side


class Ranked(NamedTuple):
    """A row of the ranking: one candidate or the parts of a join.

    `power` is that of the flattening, None: as they are. `score` ranks: MAP@R of the choosing half,
    or view recall. `values` are metrics of the reporting half, {} without labels, and `more` their
    differences to the base; `p` is of no difference of MAP@R, adjusted for all rows.
    """

    parts: Names
    power: float | None
    score: float
    values: dict[str, float]
    more: dict[str, Difference]
    p: float

    @property
    def name(self) -> str:
        """For tables."""
        form = "as it is" if self.power is None else f"power {self.power:g}"
        return f"{' + '.join(self.parts)}, {form}"

    def __repr__(self) -> str:
        metrics = [f"{metric} {value:.1%}" for metric, value in self.values.items()]
        return ", ".join([f"{self.name}: score {self.score:.1%}", *metrics])


class _Ranking(Stored):
    """choice.json; also the answer in words."""

    identity: dict[str, Any]  # all that decided the rows
    rows: list[Ranked]


class CornerViews(EvalView):
    """Two views of an image: its top-left corner, and its bottom-right one, mirrored.

    Each has half of the area that the given view sees, whose size, mean and std it keeps. Features
    are those of both, (B, 2 F). The view of a join is a DataError.
    """

    views_per_image = 2

    def __init__(self, view: EvalView) -> None:
        if len(view.sides) > 1:
            raise DataError(
                "without labels a join is no candidate; name its parts, which are joined here"
            )
        resize_px = round(view.resize_px * math.sqrt(2))
        super().__init__(**view.config() | {"resize_px": resize_px})
        self._config["crops"] = "corners"  # no other view has this config

    def reduced(self, features: Tensor) -> Tensor:
        """Join the features of an image's views: (2B, F) -> (B, 2F)."""
        return torch.cat([*features.chunk(2)], dim=1)

    def _crops(self, pixels: Tensor) -> list[Tensor]:
        first = pixels[:, :, : self.crop_px, : self.crop_px]
        last = pixels[:, :, -self.crop_px :, -self.crop_px :]
        return [first, last.flip(3)]


def side_by_side(features: Mapping[str, Embeddings], parts: Names) -> Embeddings:
    """Take a candidate's features, or unit rows of several, one after the other."""
    first = features[parts[0]]
    if len(parts) == 1:
        return first
    units = [F.normalize(features[name].features, dim=1) for name in parts]
    return first._replace(features=torch.cat(units, dim=1))


def check_features(name: str, rows: Embeddings, first: Embeddings) -> None:
    """Raise DataError where features are too few, all equal, or other images' than the first's."""
    if not torch.equal(rows.ids, first.ids):
        raise DataError(f"{name} reads other images than the first candidate; are files changing?")
    few = f"{len(rows.ids)} images are too few to compare features on"
    if len(rows.ids) < LEAST_IMAGES:
        raise DataError(f"{few}; give {LEAST_IMAGES} or more")
    spread = (rows.features - rows.features[:1]).abs().max()
    if float(spread) <= ROUNDING * float(rows.features.abs().max()):
        same = f"all {len(rows.ids)} images the same features"
        raise DataError(f"{name} gives {same}: are they equal?")


def few_labelled(labels: NDArray[np.int64]) -> int | None:
    """Count the labelled images that choose; None where they are enough, or choose nothing."""
    count = with_a_partner(labels)
    few = why_unlabelled(labels) is None and count < FEW_LABELLED
    return count if few else None


def rank_with_labels(
    features: Mapping[str, Embeddings], rows: Sequence[Names], seed: int = 0
) -> list[Ranked]:
    """Rank rows, each as it is and flattened by POWERS, by the labels of half the classes.

    Each half is searched in itself and among the images of SEEN classes; its spectrum is that of
    all images that are not in it. Images without a label, or alone in their class, are in neither.
    The others are compared with the best single network as it is (`best_single`); `seed` cuts the
    halves.
    """
    labels = next(iter(features.values())).labels.cpu().numpy()
    halves = [torch.from_numpy(np.isin(labels, classes)) for classes in halves_of(labels, seed)]
    seen = torch.from_numpy(np.flatnonzero(labels == SEEN))
    scores_of: dict[tuple[Names, float | None], list[dict[str, Any]]] = {}
    for parts in rows:
        together = side_by_side(features, parts)
        for half in halves:
            rest = (~half).nonzero()[:, 0]
            forms = score_forms(together, half=half, others=rest, distractors=seen)
            for power, scores in forms:
                scores_of.setdefault((parts, power), []).append(scores)
    singles = [(parts, power) for parts, power in scores_of if len(parts) == 1 and power is None]
    base_row = max(singles, key=lambda row: float(scores_of[row][0][CHOSEN_BY].mean()))
    base = scores_of[base_row][1]
    ranked = []
    for row, (chooses, reports) in scores_of.items():
        more = {m: paired_means(reports[m], base[m], reports["class"]) for m in METRICS}
        values = {m: float(reports[m].mean()) for m in METRICS}
        score = float(chooses[CHOSEN_BY].mean())
        parts, power = row
        ranked.append(
            Ranked(
                parts=parts,
                power=power,
                score=score,
                values=values,
                more=more,
                p=more[CHOSEN_BY].p,
            )
        )
    # the base itself is no comparison
    others = [n for n, each in enumerate(ranked) if each[:2] != base_row]
    for n, p in zip(others, holm([ranked[n].p for n in others]), strict=True):
        ranked[n] = ranked[n]._replace(p=p)
    return sorted(ranked, key=lambda each: -each.score)


def rank_without_labels(
    features: Mapping[str, Embeddings], corners: Mapping[str, Embeddings], rows: Sequence[Names]
) -> list[Ranked]:
    """Rank rows, flattened by UNLABELLED_POWER, by how well they know an image's other corner.

    `corners` has each candidate's features (N, 2 F) by its `CornerViews`.
    """
    ranked = []
    for parts in rows:
        fitted = fit_whitening(side_by_side(features, parts), power=UNLABELLED_POWER)
        views = [torch.stack(corners[name].features.chunk(2, dim=1)) for name in parts]
        if len(parts) > 1:
            views = [F.normalize(each, dim=2) for each in views]
        both = torch.stack([fitted.apply(view) for view in torch.cat(views, dim=2)])
        some = torch.arange(min(both.shape[1], MOST_COMPARED)) * both.shape[1]
        some = some // min(both.shape[1], MOST_COMPARED)
        score = view_recall(both[:, some])
        ranked.append(
            Ranked(parts=parts, power=UNLABELLED_POWER, score=score, values={}, more={}, p=1.0)
        )
    return sorted(ranked, key=lambda row: -row.score)


def for_these_images(ranked: Sequence[Ranked], features: Mapping[str, Embeddings]) -> list[Ranked]:
    """Omit flattenings that these very images, which fit them, are not to be searched by.

    Those are powers above UNLABELLED_POWER of no more images than features. Images that fit a full
    whitening are then orthogonal to each other, whatever they show: no image has a neighbour. The
    score does not say so, as each half of the classes is flattened by the other images' spectrum.
    """
    kept = []
    for row in ranked:
        count = len(features[row.parts[0]].ids)
        width = sum(features[name].features.shape[1] for name in row.parts)
        if row.power is None or row.power <= UNLABELLED_POWER or count > width:
            kept.append(row)
    return kept


def best_single(ranked: Sequence[Ranked]) -> Ranked:
    """Return the best row of one network as it is: what one would use without a ranking."""
    return next(row for row in ranked if len(row.parts) == 1 and row.power is None)


def is_better(row: Ranked) -> bool:
    """Return whether a row is better than the best single network, as it is printed: in points."""
    return round(100 * row.more[CHOSEN_BY].value, 1) > 0


def is_clear(row: Ranked) -> bool:
    """Return whether a row differs clearly from the best single network, all rows considered."""
    return row.p <= 0.05 and excludes_zero(row.more[CHOSEN_BY].interval95)


def to_use(ranked: Sequence[Ranked], two_sizes: Collection[Names] = ()) -> Ranked:
    """Return the row to use.

    That is the first one, where it is clearly better than the best single network as it is. Else
    that network at two sizes, flattened by UNLABELLED_POWER, where labels are few: then that was
    the better guess (docs/graded.md); without labels it is the first network at two sizes. Else
    the first one, where it was better on the classes that did not choose, or the single network,
    which costs less.

    Args:
        ranked: The rows, the first one first.
        two_sizes: Where labels are few or none, the joins of one network at two sizes.
    """
    first = ranked[0]
    usual = [r for r in ranked if r.parts in two_sizes and r.power == UNLABELLED_POWER]
    if not first.values:
        return usual[0] if usual else first
    if is_better(first) and is_clear(first):
        return first
    (single,) = best_single(ranked).parts
    for row in usual:
        if single in row.parts:
            return row
    return first if is_better(first) else best_single(ranked)


def best_forms(ranked: Sequence[Ranked]) -> list[int]:
    """Return the places of each row's best form, the best first."""
    first = {row.parts: place for place, row in reversed([*enumerate(ranked)])}
    return sorted(first.values())


def to_json(ranked: Sequence[Ranked], identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain values: the rows, and all that decided them."""
    more = ({m: each._asdict() for m, each in row.more.items()} for row in ranked)
    rows = [{**row._asdict(), "more": extra} for row, extra in zip(ranked, more, strict=True)]
    return {"identity": _identity(identity), "rows": rows}


def ranking_from(file: Path, identity: Mapping[str, Any]) -> list[Ranked]:
    """Read a ranking that `to_json` made of the same things; [] where there is none."""
    try:
        ranking = read_json(file, _Ranking)
    except UserError:  # none, or somebody changed it
        return []
    return ranking.rows if ranking.identity == _identity(identity) else []


def best_first(parts: Names, ranked: Sequence[Ranked]) -> Names:
    """Order the parts of a row, the one that is best alone first: training takes that one."""
    places = {row.parts: place for place, row in reversed([*enumerate(ranked)])}
    return tuple(sorted(parts, key=lambda name: places[name,]))


def _identity(ranked: Mapping[str, Any]) -> Any:
    """Add the rules to what is ranked, and write it as JSON has it."""
    rules = {"powers": POWERS, "unlabelled": UNLABELLED_POWER, "by": CHOSEN_BY}
    return parse_object(json_text({**ranked, **rules}))
