"""A split whose labels are a column's values."""

from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sslpipe.data.columns import Column
from sslpipe.data.index import Split


class RelabelledSplit(Split):
    """The same samples, whose labels number the values that occur, ascending; -1: missing.

    Args:
        split: Where the samples are.
        column: Of that split, of a kind that can be grouped.

    Raises:
        DataError: It is of floats.
    """

    def __init__(self, split: Split, column: Column) -> None:
        shards, columns = split.shards, split.columns
        super().__init__(split.folder, split.name, shards, columns, allow_pipe=split.allow_pipe)
        self.original, self.column_of_labels, self._groups = split, column, column.groups

    @cached_property
    def labels(self) -> NDArray[np.int64]:
        """All labels, (samples,) int64."""
        return self.labels_of(np.arange(len(self)))

    def labels_of(self, ids: ArrayLike) -> NDArray[np.int64]:
        """Look up the labels of some samples. (n,) -> (n,)."""
        return self._groups.code_of(ids)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """What each label stands for, as people write it."""
        return tuple(
            self.column_of_labels.show_value(value) for value in self._groups.values.tolist()
        )


def relabelled(split: Split, column: str | None) -> Split:
    """Return the split with the labels of a column; None: the split itself.

    Raises:
        DataError: There is no such column, or it is of floats.
    """
    return split if column is None else RelabelledSplit(split, split.column(column))
