"""Choose samples by what their columns say: "theme = papirus and shot_at >= 2024-05-01".

    CONDITION   COLUMN OPERATOR VALUE | COLUMN in VALUE, VALUE, ... ; several joined by `and`
    OPERATOR    = != < <= > >=

A value with spaces, commas or signs stands in quotes, its own quotes twice: 'it''s 5"'. Texts have
no order: = != in. A missing value knows nothing: no condition holds for it, != neither.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sslpipe.data.holdout import CLASS
from sslpipe.data.index import Split
from sslpipe.errors import DataError, did_you_mean, shown

OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "=": np.equal,
    "!=": np.not_equal,
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
}
_IN_OTHER_SPLITS = -2  # no sample of this one has the text
_UNORDERED = ("=", "!=", "in")
_WORD = r"""(?:"(?:[^"]|"")*"|'(?:[^']|'')*'|[^\s"',=!<>]+)"""
_CONDITION = re.compile(
    rf"""\s*({_WORD})\s*([=!<>]+|(?<=[\s"'])in\b)"""
    rf"""\s*({_WORD}(?:\s*,\s*{_WORD})*)\s*(?:(?<=[\s"'])and\b(?=.*\S)|\Z)""",
    re.DOTALL,
)


class Condition(NamedTuple):
    """One comparison of a column, by one of OPERATORS with a value or by "in" with several."""

    column: str
    operator: str
    values: tuple[str, ...]


def parse_conditions(text: str) -> list[Condition]:
    """Read what stands behind --where; anything else is a DataError."""
    conditions: list[Condition] = []
    end = 0
    while not conditions or end < len(text):
        match = _CONDITION.match(text, end)
        if match is None:
            raise DataError(
                f"{shown(text)}: cannot read {shown(text[end:].strip())}; write COLUMN = VALUE, as "
                "in theme = papirus, joined by `and`; a value with spaces or signs stands in "
                "quotes, its own quotes twice"
            )
        column = _plain(match[1])
        operator = match[2]
        end = match.end()
        values = tuple(map(_plain, re.findall(_WORD, match[3])))
        if operator not in (*OPERATORS, "in") or (operator != "in" and len(values) > 1):
            hint = "; for equality write a single =" if operator == "==" else ""
            raise DataError(
                f"{shown(text)}: {operator!r} is no operator for {len(values)} values{hint}; "
                f"known: {' '.join([*OPERATORS, 'in'])}, of which `in` takes several"
            )
        conditions.append(Condition(column, operator, values))
    return conditions


def select(conditions: list[Condition], split: Split, ids: ArrayLike) -> NDArray[np.bool_]:
    """Return for which samples all conditions hold. (n,) ids -> (n,).

    That there is no such column, or no such value in it, is a DataError that names the nearest.
    """
    ids = np.asarray(ids, np.int64)
    chosen = np.ones(len(ids), bool)
    for name, operator, texts in conditions:
        if name == CLASS and name not in split.columns:
            chosen &= _of_classes(operator, texts, split, ids)
            continue
        column = split.column(name)
        if column.kind == "text" and operator not in _UNORDERED:
            raise DataError(
                f"column {column.name!r} holds texts, which have no order: {operator} is not for "
                f"them; use {', '.join(_UNORDERED)}"
            )
        wanted = []
        for text in texts:
            stored = column.parse(text)
            if stored is None:
                _check_known(text, split, name)
                stored = _IN_OTHER_SPLITS
            wanted.append(stored)
        values = column.values_of(ids)
        if operator == "in":
            holds = np.isin(values, wanted)
        else:
            holds = OPERATORS[operator](values, wanted[0])
        chosen &= holds & ~column.missing(ids)
    return chosen


def _of_classes(
    operator: str, texts: Sequence[str], split: Split, ids: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return which samples are of these classes, or, of "!=", of another one. (n,) ids -> (n,)."""
    if operator not in _UNORDERED:
        raise DataError(f"classes have no order: {operator} is not for them; use =, != or in")
    known = {name: label for label, name in enumerate(split.index.manifest.classes)}
    unnamed = np.unique(split.labels[split.labels >= len(known)])
    known |= {str(label): label for label in unnamed.tolist()}
    for text in texts:
        if text not in known:
            raise DataError(f"no sample has {CLASS} = {shown(text)}{did_you_mean(text, known)}")
    labels = split.labels[ids]
    among = np.isin(labels, [known[text] for text in texts])
    return ~among & (labels >= 0) if operator == "!=" else among


def _check_known(text: str, split: Split, name: str) -> None:
    """Raise DataError where no split of the data set has this text in a column."""
    others = [split.index.split(other) for other in split.index.manifest.splits]
    known = {value for other in others for value in other.column(name).groups.number}
    if text not in known:
        near = did_you_mean(text, known)
        raise DataError(f"no sample has {name} = {shown(text)}{near}")


def _plain(word: str) -> str:
    quote = word[0]
    return word[1:-1].replace(2 * quote, quote) if quote in "\"'" else word
