"""Find the samples of a split that resemble no other, and pictures that show nothing.

`far_from_all` looks at features, `bad_pictures` at pixels; both give one `Outlier` a sample and
reason. The blur scores of cleanvision and others rise with contrast, so that most blurred
photographs pass them; `fineness` is a share of the contrast.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from sslpipe.arguments import Advance
from sslpipe.curate.image_scan import each_part
from sslpipe.data.decode import BadSample, decode_picture, header_size
from sslpipe.data.index import Split
from sslpipe.data.reader import Quarantined, Raw
from sslpipe.errors import DataError
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.neighbours import nearest

NO_NEIGHBOUR = "no neighbour"
UNREADABLE = "unreadable"
LEAST_DISTANCE = 2.0**-20  # of equal pictures, so that it has a logarithm
LEAST_SPREAD = 0.01  # of the logarithms, so that a split of equal pictures has a limit
CANVAS_PX = 256  # longer side at which pictures are measured
FINE_PX = 4  # what blur takes first is finer than this
LEAST_CONTRAST = 0.02  # five of 256 levels, several times the noise of a JPEG of one colour
ROUNDING = 1 / 12  # variance of a level's rounding error: no detail


class Outlier(NamedTuple):
    """A sample and a reason to look at it."""

    id: int
    key: str  # of its shard; "" if not known
    reason: str  # `NO_NEIGHBOUR`, `UNREADABLE`, or one of `checks`
    value: float  # NaN of an unreadable one
    limit: float  # that the value is beyond; NaN of an unreadable one
    detail: str  # what the value is, or why a sample is unreadable


def far_from_all(rows: Embeddings, *, neighbours: int = 10, z: float = 3.5) -> list[Outlier]:
    """Find rows whose mean distance to their nearest neighbours is far above what is usual here.

    Args:
        rows: Features of one split, any scale; distances are 1 - cosine.
        neighbours: How many count. A group of up to so many equal pictures that resemble nothing
            else is found, too.
        z: Robust standard deviations above the median of the distances' logarithms, which have a
            shorter right side.

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
    distances = neighbour_distances(rows, neighbours)
    limit = upper_limit(distances, z)
    detail = f"mean distance (1 - cosine) to the {neighbours} nearest"
    ids = rows.ids.cpu().numpy()
    far = np.flatnonzero(distances > limit)
    far = far[np.argsort(-distances[far], kind="stable")]
    return [
        Outlier(
            id=int(ids[row]),
            key="",
            reason=NO_NEIGHBOUR,
            value=float(distances[row]),
            limit=limit,
            detail=detail,
        )
        for row in far.tolist()
    ]


def neighbour_distances(rows: Embeddings, neighbours: int) -> NDArray[np.float64]:
    """Compute each row's mean distance, 1 - cosine, to its nearest other rows, (N,)."""
    if neighbours >= len(rows.ids):
        raise DataError(
            f"k = {neighbours}: each of the {len(rows.ids)} rows has {len(rows.ids) - 1} "
            "others; ask for fewer neighbours, or embed more samples"
        )
    x = rows.features
    ids = rows.ids
    near = nearest(x, x, neighbours, hidden=(ids, ids))
    similar: NDArray[np.float64] = near.similarities.double().mean(dim=1).cpu().numpy()
    return 1 - similar


def upper_limit(values: NDArray[np.float64], z: float) -> float:
    """Compute the value z robust standard deviations (MAD) above the median, of logarithms."""
    logs = np.log(np.maximum(values, LEAST_DISTANCE))
    middle = float(np.median(logs))
    spread = max(float(np.median(np.abs(logs - middle))) / 0.6745, LEAST_SPREAD)
    return float(np.exp(middle + z * spread))


def bad_pictures(
    split: Split,
    *,
    tiny_px: float,
    num_workers: int = 2,
    progress: Advance = lambda count: None,
) -> list[Outlier]:
    """Read every picture of a split and doubt those that can hardly show anything.

    Args:
        split: Where they are.
        tiny_px: Least shorter side.
        num_workers: Threads that decode; 0: the caller does.
        progress: Called with the number of samples of each part that is done.

    Returns:
        Those that cannot be decoded, then by reason as in `checks`, the worst first.
    """
    listed = checks(tiny_px)
    bad: list[Quarantined] = []
    doubted: list[Outlier] = []

    def look(sample_id: int, raw: Raw) -> list[Outlier]:
        if isinstance(raw.image, BadSample):
            raise raw.image
        pixels = decode_picture(raw.image, CANVAS_PX, split.stored_type)  # (h, w, 3)
        width, height = header_size(raw.image)  # before any rotation: no measure tells them apart
        measures = measure(pixels, height, width)
        return [
            Outlier(
                id=sample_id,
                key=raw.key,
                reason=reason,
                value=measures[reason],
                limit=limit,
                detail=says,
            )
            for reason, limit, says in listed
            if measures[reason] < limit
        ]

    for part in each_part(split, look, num_workers=num_workers, on_bad=bad.append):
        doubted += [one for of_sample in part for one in of_sample or ()]
        progress(len(part))
    order = [reason for reason, *_ in listed]
    doubted.sort(key=lambda one: (order.index(one.reason), -abs(one.value - one.limit), one.id))
    nan = float("nan")
    outliers = [
        *(
            Outlier(id=b.id, key=b.key, reason=UNREADABLE, value=nan, limit=nan, detail=b.reason)
            for b in sorted(bad)
        ),
        *doubted,
    ]
    names = split.names_of([one.id for one in outliers])
    if names is None:
        return outliers
    return [one._replace(key=name) for one, name in zip(outliers, names, strict=True)]


def checks(tiny_px: float) -> list[tuple[str, float, str]]:
    """List reasons to doubt a picture: a measure that is below a limit, and what it is."""
    return [
        ("constant", LEAST_CONTRAST, "standard deviation of brightness"),
        ("blurred", 0.025, "share of contrast finer than 4 px"),
        ("tiny", tiny_px, "shorter side in px"),
        ("odd aspect", 0.35, "shorter by longer side"),
    ]


def measure(pixels: NDArray[np.uint8], height: int, width: int) -> dict[str, float]:
    """Measure one picture: reason of a check -> its measure.

    pixels: (h, w, 3) uint8, reduced to CANVAS_PX; height, width: of the stored picture.
    """
    grey = Image.fromarray(pixels).convert("L")
    return {
        "constant": float(np.asarray(grey).std()) / 255,
        "blurred": fineness(grey),
        "tiny": min(height, width),
        "odd aspect": min(height, width) / max(height, width),
    }


def fineness(grey: Image.Image) -> float:
    """Compute the share of a grey picture's deviation that is finer than FINE_PX; 1 if constant."""
    grey = grey.convert("F")
    before = np.asarray(grey, np.float64)
    if before.std() < 255 * LEAST_CONTRAST:
        return 1.0
    width, height = (side / FINE_PX for side in grey.size)  # the last pixels may be narrower
    small = grey.reduce(FINE_PX)
    again = small.resize(grey.size, Image.Resampling.BICUBIC, box=(0, 0, width, height))
    lost = np.square(before - np.asarray(again)).mean() - ROUNDING
    return float(np.sqrt(max(lost, 0.0)) / before.std())
