"""What `sslpipe curate` does, a call each, on what a notebook has: features, images, a data set."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from sslpipe.arguments import Progress, checked, silent
from sslpipe.curate import clusters, duplicate_files, duplicates, outliers
from sslpipe.curate.grouping import Groups, group
from sslpipe.curate.image_scan import Samples, decoded, scan, scan_pictures
from sslpipe.data.decode import MAX_PIXELS, BadSample
from sslpipe.data.image_type import RGB8
from sslpipe.data.index import DatasetIndex, Split, load_index
from sslpipe.data.reader import OnBad, Quarantined, keys_of
from sslpipe.errors import DataError, UserError, check_count, counted
from sslpipe.evaluation.vectors import Vectors, open_features
from sslpipe.export.model import decode_image
from sslpipe.portable import keep_freed_memory
from sslpipe.sharding.in_memory import Rows, are_rows, encoded_image

TRIES = 4  # of k-means, for clusters that are looked at
Integers = NDArray[np.int64]


class Duplicates(NamedTuple):
    """Samples that were searched, and the groups of those that are one picture."""

    samples: Samples
    groups: Groups
    doubt: duplicates.Doubt
    pictures: Callable[[Integers], dict[int, NDArray[np.uint8]]]  # of rows, to draw them

    def __repr__(self) -> str:
        return f"Duplicates({self.summary()})"

    def summary(self) -> str:
        """Return how many samples are in groups, in words."""
        count = int((self.groups.group >= 0).sum())
        groups = counted(len(self.groups.sizes()), "group")
        in_groups = f"{count:,} are in {groups} of duplicates" if count else "no duplicates"
        return f"{len(self.samples):,} samples: {in_groups}"

    def table(self) -> list[dict[str, Any]]:
        """Return the rows of groups.csv: a sample of a group each, by group."""
        return duplicate_files.group_rows(self.samples, self.groups)

    def sheet(self) -> Image.Image | None:
        """Draw the most doubtful pairs; None where no pair is doubtful."""
        return duplicate_files.doubt_sheet(self.samples, self.doubt, self.pictures)


@checked
def find_duplicates(
    data: DatasetIndex | str | Path | Rows,
    splits: Sequence[str] | None = None,
    *,
    column: bool = False,
    num_workers: int = 2,
    on_bad: OnBad | None = None,
    progress: Progress | None = None,
) -> Duplicates:
    """Find near-duplicate images, as `sslpipe curate duplicates` does.

    >>> found = sslpipe.find_duplicates(sorted(Path("MY_PHOTOS").rglob("*.jpg")))
    >>> pandas.DataFrame(found.table())

    Args:
        data: The data set's index, or the path or URL of its dataset.json. Or a list of images:
            paths, bytes of files, PIL images or uint8 arrays.
        splits: Of the data set, which; None: all.
        column: Write the column duplicate_group beside the data set.
        num_workers: Threads that decode samples of a data set.
        on_bad: Called for what cannot be decoded, which is skipped; None: a warning.
        progress: Makes the progress bars.

    Returns:
        `table()` has a row each sample of a group; `groups.group` (N,) the number of each sample's
        group, -1 for none.

    Raises:
        UserError: There is no such data set or split, or the column cannot be written.
    """
    check_count(num_workers, "num_workers", least=0)
    bar = progress or silent

    def warn(bad: Quarantined) -> None:
        warnings.warn(f"skipped: {bad.key!r}: {bad.reason}", stacklevel=2)

    skipped = on_bad or warn
    index = None
    if not isinstance(data, DatasetIndex) and are_rows(data):
        if splits is not None or column:
            raise UserError("splits and column are of a data set, and these are images; omit them")
        samples, pictures = _scan_images(data, skipped, bar)
    else:
        index = load_index(data)  # type: ignore[arg-type]
        names = list(index.manifest.splits) if splits is None else list(splits)
        if not names:
            raise UserError(f"{index.folder} has no split; build one with `sslpipe shards build`")
        if len({*names}) < len(names):
            raise UserError(f"splits = {names} names a split twice; name each once")
        opened = [index.split(name) for name in names]
        if column:
            duplicate_files.check_place(index)
        keep_freed_memory()
        with bar("read", sum(map(len, opened))) as advance:
            samples = scan(opened, num_workers=num_workers, on_bad=skipped, progress=advance)
        pictures = _pictures_of(samples, opened)
    duplicate_pairs = duplicates.find_duplicates(samples, progress=bar)
    groups = group(duplicate_pairs.pairs, len(samples))
    if column and index is not None:
        duplicate_files.write_column(index.folder, samples, groups)
    return Duplicates(samples, groups, duplicate_pairs.doubt, pictures)


def _pictures_of(
    samples: Samples, splits: Sequence[Split]
) -> Callable[[Integers], dict[int, NDArray[np.uint8]]]:
    """Return what decodes the images of some rows, by row."""

    def pictures(rows: Integers) -> dict[int, NDArray[np.uint8]]:
        images: dict[int, NDArray[np.uint8]] = {}
        for number, split in enumerate(splits):
            of_split = rows[samples.split[rows] == number]
            by_id = decoded(split, samples.ids[of_split])
            images |= {row: by_id[int(samples.ids[row])] for row in of_split.tolist()}
        return images

    return pictures


def _scan_images(
    images: Rows, on_bad: OnBad, bar: Progress
) -> tuple[Samples, Callable[[Integers], dict[int, NDArray[np.uint8]]]]:
    """Read images in memory, numbered by their places; and return what decodes some of them."""

    def pixels_of(number: int) -> NDArray[np.uint8]:
        raw = encoded_image(images[number], f"images[{number}]")
        return np.ascontiguousarray(decode_image(raw, RGB8, MAX_PIXELS).transpose(1, 2, 0))

    readable: list[int] = []

    def read() -> Iterator[NDArray[np.uint8]]:
        for number in range(len(images)):
            try:
                pixels = pixels_of(number)
            except (BadSample, DataError) as error:
                if not isinstance(error, BadSample) and not isinstance(error.__cause__, OSError):
                    raise  # it is no image, nor the place of one
                on_bad(Quarantined(number, "", f"images[{number}]", str(error)))
            else:
                readable.append(number)
                yield pixels
            advance(1)

    with bar("read", len(images)) as advance:
        samples = scan_pictures(read())
    if not readable:
        raise DataError("images holds no image that can be decoded; give two or more")
    pictures = [images[number] for number in readable]
    keys = [
        str(each) if isinstance(each, str | Path) else f"images[{number}]"
        for number, each in zip(readable, pictures, strict=True)
    ]
    ids = np.array(readable, np.int64)
    samples = replace(samples, splits=("images",), ids=ids, keys=keys)
    return samples, lambda rows: {row: pixels_of(readable[row]) for row in rows.tolist()}


@checked
def find_outliers(
    features: Vectors,
    data: DatasetIndex | str | Path | None = None,
    *,
    k: int = 10,
    z: float = 3.5,
    tiny_px: float | None = None,
    num_workers: int = 2,
    progress: Progress | None = None,
) -> list[outliers.Outlier]:
    """List images that resemble no other, are constant, blurred or tiny, as `curate outliers`.

    >>> for one in sslpipe.find_outliers("train.safetensors", "out/photos"):
    ...     print(one.key, one.reason)

    Args:
        features: A file of features, (N, F) floats, or a result of `sslpipe.embed`.
        data: The data set that a file was embedded from: its images are looked at, too.
        k: Nearest neighbours whose distance counts.
        z: Robust standard deviations above the usual distance.
        tiny_px: Shorter side of a tiny image; None: half of what the view of the file resizes to.
        num_workers: Threads that decode.
        progress: Makes the progress bar.

    Returns:
        A row a sample and reason; those that resemble no other first, the farthest of all first.

    Raises:
        UserError: There are no more rows than neighbours, or the file is of another data set.
    """
    check_count(k, "k")
    opened = open_features(features, data)
    split = opened.split
    far = outliers.far_from_all(opened.rows, neighbours=k, z=z)
    if split is None:
        return [one._replace(key=opened.sample_name(one.id)) for one in far]
    if tiny_px is None:
        view = opened.facts.get("view")
        if not isinstance(view, dict) or not isinstance(view.get("resize_px"), int):
            raise DataError("the features do not say what their view resizes to; give tiny_px")
        tiny_px = view["resize_px"] / 2
    bar = progress or silent
    with bar("read", len(split)) as advance:
        bad = outliers.bad_pictures(
            split, tiny_px=tiny_px, num_workers=num_workers, progress=advance
        )
    keys = keys_of(split, [one.id for one in far])
    return [*(one._replace(key=keys[one.id]) for one in far), *bad]


@checked
def cluster(features: Vectors, count: int = 50, *, seed: int = 0) -> clusters.Clusters:
    """Cluster features by k-means, as `sslpipe curate clusters` does: the kinds of images.

    >>> sslpipe.cluster(features, 20).of_row  # (N,), 0 is the largest cluster

    Args:
        features: As in `find_outliers`.
        count: How many clusters.
        seed: Of the first centres.

    Raises:
        UserError: There are fewer distinct rows than clusters.
    """
    return clusters.cluster(open_features(features).rows, count, seed=seed, tries=TRIES)


@checked
def select_to_label(
    features: Vectors,
    count: int,
    data: DatasetIndex | str | Path | None = None,
    *,
    labelled: Sequence[int] | None = None,
    say: Callable[[str], None] | None = None,
) -> list[clusters.Chosen]:
    """Choose the samples most worth labelling, as `sslpipe curate select` does.

    >>> [one.id for one in sslpipe.select_to_label(features, 100)]

    Args:
        features: As in `find_outliers`.
        count: How many to choose.
        data: The data set that a file was embedded from: of a group of its column duplicate_group
            one is chosen, and none of a labelled group.
        labelled: Ids of samples that have a label, [] for none; None: those with one in `features`.
        say: Called with how many copies are skipped; None: nobody is.

    Returns:
        In the order to label: a typical sample of each cluster without a label, the largest first.

    Raises:
        UserError: Fewer samples than `count` have no label.
    """
    opened = open_features(features, data)
    rows = opened.rows
    known = (rows.labels >= 0).numpy()
    if labelled is not None:
        known = np.isin(rows.ids.numpy(), [*labelled])
    elif known.all():
        where = "in the data set" if opened.split is None else f"of split {opened.split.name!r}"
        raise DataError(
            f"all {len(known)} samples {where} have a label: say which of them count with "
            "labelled, or choose as if there were none with labelled=[]"
        )
    split = opened.split
    if split is not None and split.has_values(duplicate_files.COLUMN):
        copies = split.column(duplicate_files.COLUMN).groups.code_of(rows.ids.numpy())
        kept = clusters.one_of_each(copies, known)
        if not kept.all() and say is not None:
            say(f"{(~kept).sum()} copies of other samples are skipped, by {duplicate_files.COLUMN}")
        rows = rows.rows(torch.from_numpy(kept))
        known = known[kept]
    return clusters.by_coverage(rows, count, labelled=known)
