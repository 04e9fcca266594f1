"""Columns that do not keep a split apart from the others: one patient in train and in test."""

import numpy as np

from sslpipe.data.index import DatasetIndex

MOST_NAMED = 6


def straddle_warning(index: DatasetIndex, split_name: str) -> str | None:
    """Say which columns have values both in a split and in others of its data set.

    Args:
        index: The data set.
        split_name: The split that is trained on.

    Returns:
        One sentence, None where there is no such value. Only texts and integers are looked at:
        times and floats name nothing.
    """
    found = []
    for name, entry in index.manifest.columns.items():
        if entry.kind not in ("text", "integer") or split_name not in entry.splits:
            continue
        own = index.split(split_name).column(name).groups.values
        for other in sorted(set(entry.splits) - {split_name}):
            theirs = index.split(other).column(name).groups.values
            shared = len(np.intersect1d(own, theirs, assume_unique=True))
            if shared:
                found.append(f"{shared:,} of {len(theirs):,} values of {name} in {other}")
    if not found:
        return None
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return (
        f"groups straddle splits: {', '.join(found[:MOST_NAMED])}{more} are in {split_name}, too; "
        "where a column names what must not be shared, such as a patient, build with --split-by"
    )
