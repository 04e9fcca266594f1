"""Columns of the data set in evaluations: who may not find whom.

A missing value knows nothing: it equals no other, so it excludes no row.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike

from sslpipe.data.columns import Groups
from sslpipe.data.index import Split
from sslpipe.errors import DataError
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.intervals import Integers
from sslpipe.evaluation.neighbours import Hidden


class GroupCodes(NamedTuple):
    """The value of one column that each row has.

    `bank` (N,) and `queries` (Q,) are codes by row, -1 where the value is missing; `values` says
    what each code stands for.
    """

    name: str
    bank: Integers
    queries: Integers
    values: tuple[str, ...]


def group_codes(
    name: str, bank: tuple[Split, ArrayLike], queries: tuple[Split, ArrayLike]
) -> GroupCodes:
    """Look up a text, integer or time column for some ids of one or two splits of a data set.

    Raises:
        DataError: There is no such column, or it holds floats.
    """
    column = bank[0].column(name)
    if column.kind == "float":
        raise DataError(
            f"column {name!r} holds floats, which make no groups; give a text, integer or time"
        )
    import pyarrow as pa

    sides = [
        split.column(name).cells.take(np.asarray(ids, np.int64)) for split, ids in (bank, queries)
    ]
    groups = Groups(pa.chunked_array([chunk for side in sides for chunk in side.chunks]))
    first, second = np.split(groups.codes.astype(np.int64), [len(sides[0])])
    return GroupCodes(name, first, second, tuple(groups.show()))


def hidden_ids(
    bank: Embeddings, queries: Embeddings, *, same_id: bool, same: GroupCodes | None
) -> Hidden:
    """Number the rows, (N,) and (Q,), so that a query finds none of its own number.

    That is the row of its own id with `same_id`, and all rows of its value of `same`.
    """
    if same is None:
        return (bank.ids, queries.ids) if same_id else None
    sides = []
    for side, (rows, codes) in enumerate(((bank, same.bank), (queries, same.queries))):
        numbers = torch.from_numpy(codes).to(rows.ids.device)
        # without a value: nothing is excluded (two numbers), or the row itself (its id's number)
        unlike = -2 - rows.ids if same_id else torch.full_like(numbers, -1 - side)
        sides.append(torch.where(numbers < 0, unlike, numbers))
    return sides[0], sides[1]
