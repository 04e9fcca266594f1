"""Find the samples of a split that resemble no other, and pictures that show nothing.

`far_from_all` looks at features, `bad_pictures` at pixels; both give one `Outlier` a sample and
reason, with the value and the limit that it is beyond.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sslpipe.curate.quality import CANVAS_PX, checks, measure
from sslpipe.curate.scan import each_part
from sslpipe.data.decode import BadSample, decode, header_size
from sslpipe.data.index import Split
from sslpipe.data.reader import Raw
from sslpipe.data.store import Quarantined
from sslpipe.errors import DataError
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.neighbours import Search, nearest

NO_NEIGHBOUR = "no neighbour"
UNREADABLE = "unreadable"
LEAST_DISTANCE = 2.0**-20  # of equal pictures, so that it has a logarithm
LEAST_SPREAD = 0.01  # of the logarithms, so that a split of equal pictures has a limit


class Outlier(NamedTuple):
    """A sample and a reason to look at it.

    Args:
        id: Its place in the split.
        key: Of its shard; "" where it is not known.
        reason: `NO_NEIGHBOUR`, `UNREADABLE`, or that of a `quality.Check`.
        value: What was measured; NaN of an unreadable one.
        limit: That the value is beyond; NaN of an unreadable one.
        detail: What the value is, or why a sample is unreadable.
    """

    id: int
    key: str
    reason: str
    value: float
    limit: float
    detail: str

    @property
    def doubt(self) -> float:
        """How far beyond the limit the value is, relative to it; of an unreadable one, infinite."""
        if self.reason == UNREADABLE:
            return float("inf")
        return abs(self.value - self.limit) / max(abs(self.limit), 1e-12)


def far_from_all(
    rows: Embeddings, *, neighbours: int = 10, z: float = 3.5, search: Search = "torch"
) -> list[Outlier]:
    """Find rows whose mean distance to their nearest neighbours is far above what is usual here.

    Args:
        rows: Features of one split, any scale; distances are 1 - cosine.
        neighbours: How many count. A group of up to so many equal pictures that resemble nothing
            else is found, too.
        z: The limit: so many robust standard deviations above the median of the distances'
            logarithms; their distribution has a long right side, that of the logarithms much less.
        search: "torch" or "faiss"; both find the same neighbours.

    Returns:
        The farthest first; the key is "".

    Raises:
        DataError: There are no more rows than neighbours.

    Source:
        Mean distance to k neighbours as a score: Angiulli and Pizzuti 2002, PKDD; of learned
        features with k = 10: Kuan and Mueller 2022, arXiv:2207.03061. The limit: Iglewicz and
        Hoaglin 1993, How to Detect and Handle Outliers, section 3.3: 0.6745 |x - median| / MAD
        above 3.5.
    """
    distances = neighbour_distances(rows, neighbours, search)
    limit = upper_limit(distances, z)
    detail = f"mean distance (1 - cosine) to the {neighbours} nearest"
    ids = rows.ids.cpu().numpy()
    far = np.flatnonzero(distances > limit)
    far = far[np.argsort(-distances[far], kind="stable")]
    return [
        Outlier(int(ids[row]), "", NO_NEIGHBOUR, float(distances[row]), limit, detail)
        for row in far.tolist()
    ]


def neighbour_distances(
    rows: Embeddings, neighbours: int, search: Search = "torch"
) -> NDArray[np.float64]:
    """Compute each row's mean distance, 1 - cosine, to its nearest other rows, (N,).

    Raises:
        DataError: There are no more rows than neighbours.
    """
    if neighbours >= len(rows.ids):
        raise DataError(
            f"--neighbours {neighbours}: each of the {len(rows.ids)} rows has {len(rows.ids) - 1} "
            "others; ask for fewer neighbours, or embed more samples"
        )
    near = nearest(
        rows.features,
        rows.features,
        neighbours,
        search=search,
        bank_ids=rows.ids,
        query_ids=rows.ids,
    )
    similar: NDArray[np.float64] = near.similarities.double().mean(dim=1).cpu().numpy()
    return 1 - similar


def upper_limit(values: NDArray[np.float64], z: float) -> float:
    """Compute the value that lies z robust standard deviations above the median, of logarithms.

    Args:
        values: (N,), at least 0.
        z: Standard deviations of a normal distribution, by the median absolute deviation.
    """
    logs = np.log(np.maximum(values, LEAST_DISTANCE))
    middle = float(np.median(logs))
    spread = max(float(np.median(np.abs(logs - middle))) / 0.6745, LEAST_SPREAD)
    return float(np.exp(middle + z * spread))


def bad_pictures(
    split: Split,
    *,
    tiny_px: float,
    num_workers: int = 2,
    progress: Callable[[int], None] | None = None,
) -> list[Outlier]:
    """Read every picture of a split and doubt those that can hardly show anything.

    Args:
        split: Where they are.
        tiny_px: See `quality.checks`.
        num_workers: Threads that decode; 0: the caller does.
        progress: Called with the number of samples of each part that is done.

    Returns:
        By reason as in `quality.checks`, the worst first; those that cannot be decoded come first.

    Raises:
        DataError: A shard cannot be read.
    """
    unreadable: list[Outlier] = []
    listed = checks(tiny_px)
    doubted: dict[str, list[Outlier]] = {check.reason: [] for check in listed}

    def on_bad(bad: Quarantined) -> None:
        nothing = float("nan")
        unreadable.append(Outlier(bad.id, bad.key, UNREADABLE, nothing, nothing, bad.reason))

    for part in each_part(split, _look, list, num_workers=num_workers, on_bad=on_bad):
        for sample, key, measured in (seen for seen in part if seen is not None):
            for check in listed:
                value = measured[check.reason]
                if check.doubts(value):
                    doubted[check.reason].append(
                        Outlier(sample, key, check.reason, value, check.limit, check.says)
                    )
        if progress is not None:
            progress(len(part))
    worst = [sorted(found, key=lambda one: (-one.doubt, one.id)) for found in doubted.values()]
    return [*sorted(unreadable), *(one for found in worst for one in found)]


def _look(sample_id: int, raw: Raw) -> tuple[int, str, dict[str, float]]:
    """Measure one sample: its id, its key, its measures. Raises: BadSample."""
    if isinstance(raw.image, BadSample):
        raise raw.image
    pixels = decode(raw.image, CANVAS_PX).transpose(1, 2, 0)  # (h, w, 3)
    width, height = header_size(raw.image)  # before any rotation: no measure tells them apart
    return sample_id, raw.key, measure(pixels, height, width)
