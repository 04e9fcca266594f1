"""Headline numbers without the test samples that train has, too, as near-duplicates."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sslpipe.evaluation.against import KNN, PER_QUERY
from sslpipe.evaluation.difference import bootstrap95, means95, wilson95
from sslpipe.evaluation.result import Measured, Result


def leakage_of(
    measured: Iterable[Measured],
    leaked: NDArray[np.int64],
    how: str,
    scored: Mapping[str, NDArray[np.int64]],
    classes: NDArray[np.int64],
) -> dict[str, Any]:
    """Return what eval.json holds, see `suite_file`: numbers with and without leaked samples.

    `scored` maps a column to the (Q,) ids of the test samples that it scores; `classes` are the
    (q,) labels of those that retrieval inside test scores.
    """
    clean = {column: ~np.isin(ids, leaked) for column, ids in scored.items()}
    rows: list[dict[str, Any]] = []
    for features, power, column, result in measured:
        if column is None:
            continue
        kept = clean[column]
        value, interval = _restricted(result, kept, classes if result.metric in PER_QUERY else None)
        row = {"features": features, "whitened": power is not None, "column": column}
        row |= {key: getattr(result, key) for key in ("protocol", "value", "queries")}
        row |= {"interval95": list(result.interval95), "clean_interval95": interval}
        row |= {"clean_value": value, "clean_queries": int(kept.sum())}
        rows.append(row if power is None else {**row, "power": power})
    leaked_here = int((~clean[KNN]).sum())
    return {"samples": len(clean[KNN]), "leaked": leaked_here, "how": how, "rows": rows}


def leakage_sentence(leakage: dict[str, Any]) -> str:
    """Say how many test samples are in train, what that does to the first number, what to do."""
    total, leaked = leakage["samples"], leakage["leaked"]
    percent = 100 * leaked / total
    share = f"{percent:.0f}" if percent >= 10 else f"{percent:.2g}"
    found = f"{leaked:,} of {total:,} test samples ({share} %)"
    if not leaked:
        return f"None of {total:,} test samples has a near-duplicate in train ({leakage['how']})."
    text = f"{found} have a near-duplicate in train ({leakage['how']})"
    row = next((row for row in leakage["rows"] if row["clean_value"] is not None), None)
    if row is None:
        return f"{text}; without them nothing is left to score."
    whose = "" if row["features"] == "ssl" else f"{row['features']}, "
    listed = "; `sslpipe curate duplicates DATA --out DIR` lists the pairs"
    return (
        f"{text}: {whose}{row['column']} is {100 * row['value']:.1f} % on all {total:,}, "
        f"{100 * row['clean_value']:.1f} % on the other {row['clean_queries']:,}. The verdict is "
        f"on all of them{listed if leakage['how'] == 'by pixels' else ''}."
    )


def _restricted(
    result: Result, kept: NDArray[np.bool_], classes: NDArray[np.int64] | None
) -> tuple[float | None, list[float] | None]:
    """The number over some of its queries, and its interval as in `result`."""
    if not kept.any():
        return None, None
    assert result.scores is not None
    scores = result.scores[..., kept]
    if scores.ndim > 1:  # of several draws
        return float(scores.mean(axis=1).mean()), list(bootstrap95(scores))
    if classes is not None:  # of retrieval
        (interval,), _ = means95(scores[:, None], classes[kept])
        return float(scores.mean()), list(interval)
    right, total = int(scores.sum()), len(scores)
    return right / total, list(wilson95(right, total))
