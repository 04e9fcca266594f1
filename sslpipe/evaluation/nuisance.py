"""What else the features know: how well a linear probe reads a column of few values from them.

How much of the scanner, the camera or the vendor is in an embedding: against chance, and beside
the same number of the pixels and of random weights.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sslpipe.data.index import Split
from sslpipe.errors import DataError
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.groups import GroupCodes, group_codes
from sslpipe.evaluation.knn import by_class, shuffled
from sslpipe.evaluation.linear_probe import ridge_probe
from sslpipe.evaluation.result import Result

FEWEST_VALUES, MOST_VALUES = 2, 50  # of a text column that is probed unasked
MOST_COLUMNS = 8  # that are probed unasked
MOST_ROWS = 20_000  # train rows of a fit: a column costs the same in a large data set
ROWS_OF_VALUE = 2  # of train: one to fit, one to check


def nuisance(
    train: Embeddings,
    test: Embeddings,
    *,
    column: GroupCodes,
    holdout: float = 0.15,
    seed: int = 0,
    most_rows: int = MOST_ROWS,
) -> list[Result]:
    """Score a ridge probe that predicts a column's value, fitted on train and read on test.

    Labels play no part. Rows without a value, and values with fewer than 2 rows in train, are left
    out on both sides. `holdout` and `seed` as in `ridge_probe`; `seed` also draws the train rows
    where there are more than `most_rows`.

    Returns:
        top1 of the test rows; details: "values", how many; "chance", the share of the most frequent
        value among these test rows; "above_chance", (top1 - chance) / (1 - chance); "left_out",
        test rows that have no value or one that train has not.

    Raises:
        DataError: Fewer than two values are left, or none of test.
    """
    column.check(train, test)
    counts = np.bincount(column.bank[column.bank >= 0], minlength=len(column.values))
    usable = np.flatnonzero(counts >= ROWS_OF_VALUE)
    bank, fitted_on = _rows_of(train, column.bank, usable)
    queries, asked = _rows_of(test, column.queries, usable)
    wrong = ""
    if len(usable) < 2:
        wrong = f"{len(usable)} of its values have {ROWS_OF_VALUE} rows in train; a probe tells two"
        wrong += " or more apart"
    elif most_rows < ROWS_OF_VALUE * len(usable):
        wrong = f"most_rows = {most_rows} is below {ROWS_OF_VALUE} for each of {len(usable)} values"
    elif not len(queries.ids):
        wrong = "no test row has a value that train has; it cannot be probed between these splits"
    if wrong:
        raise DataError(f"column {column.name!r}: {wrong}")
    cut = _few(bank, fitted_on, most_rows, seed)
    (result,) = ridge_probe(cut, queries, holdout=holdout, seed=seed)
    chance = float(np.bincount(asked).max() / len(asked))
    above = (result.value - chance) / (1 - chance) if chance < 1 else 0.0
    rows = f" rows={most_rows}" if len(cut.ids) < len(bank.ids) else ""
    details: dict[str, Any] = {
        **{key: result.details[key] for key in ("penalty", "penalty_at_edge")},
        "column": column.name,
        "values": len(usable),
        "chance": chance,
        "above_chance": above,
        "left_out": len(test.ids) - len(queries.ids),
    }
    protocol = f"nuisance column={column.name} values={len(usable)}{rows} {result.protocol}"
    return [replace(result, protocol=protocol, details=details)]


def choose_columns(
    train: Split, test: Split, names: Sequence[str] | None, left_out: list[str]
) -> list[GroupCodes]:
    """Choose the columns that a suite probes, with the codes of both whole splits.

    Without `names` they are text columns of 2 to 50 values in train, at most 8, and `left_out` gets
    a sentence on others. One that was asked for and cannot be probed is a DataError.
    """
    if names is None:
        few = range(FEWEST_VALUES, MOST_VALUES + 1)
        texts = [name for name, entry in train.columns.items() if entry.kind == "text"]
        chosen = [name for name in texts if len(train.column(name).groups) in few]
        if rest := ", ".join(chosen[MOST_COLUMNS:]):
            left_out.append(f"how well columns {rest} are predicted: name them with --columns")
        chosen = chosen[:MOST_COLUMNS]
    else:
        chosen = list(names)
    sides = [(split, np.arange(len(split))) for split in (train, test)]
    found = [group_codes(name, sides[0], sides[1]) for name in dict.fromkeys(chosen)]
    for codes in found if names is not None else []:
        if len(np.unique(codes.bank[codes.bank >= 0])) < FEWEST_VALUES:
            raise DataError(
                f"column {codes.name!r} has fewer than {FEWEST_VALUES} values in split "
                f"{train.name!r}; leave it out of --columns"
            )
    return found


def nuisance_rows(
    pair: tuple[Embeddings, Embeddings],
    columns: Sequence[GroupCodes],
    left_out: list[str],
    *,
    seed: int = 0,
) -> list[Result]:
    """Probe every column of `choose_columns` on features of train and test.

    `left_out` gets a sentence for each column that cannot be probed.
    """
    found = []
    bank, queries = (rows.ids.cpu().numpy() for rows in pair)
    for codes in columns:
        own = codes._replace(bank=codes.bank[bank], queries=codes.queries[queries])
        try:
            found += nuisance(*pair, column=own, seed=seed)
        except DataError as error:
            left_out.append(str(error))
    return found


def _rows_of(
    rows: Embeddings, codes: NDArray[np.int64], usable: NDArray[np.int64]
) -> tuple[Embeddings, NDArray[np.int64]]:
    """Rows whose value is usable, labelled by its place among these; and these labels."""
    kept = np.flatnonzero(np.isin(codes, usable))
    labels = np.searchsorted(usable, codes[kept])
    chosen = rows.rows(torch.from_numpy(kept).to(rows.ids.device))
    return chosen._replace(labels=torch.from_numpy(labels).to(rows.ids.device)), labels


def _few(rows: Embeddings, labels: NDArray[np.int64], most: int, seed: int) -> Embeddings:
    """At most `most` rows, the same samples for every backbone, and two of each value at least."""
    if len(labels) <= most:
        return rows
    order = shuffled(rows, seed)
    members, places = by_class(order, labels)
    first = np.zeros(len(labels), bool)  # of each value its first two, then whoever comes first
    first[members[places < ROWS_OF_VALUE]] = True
    kept = np.concatenate([order[first[order]], order[~first[order]]])[:most]
    return rows.rows(torch.from_numpy(np.sort(kept)).to(rows.ids.device))
