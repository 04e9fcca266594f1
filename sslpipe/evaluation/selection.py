"""Choose samples by what their columns say: "theme = papirus and shot_at >= 2024-05-01".

    CONDITION   COLUMN OPERATOR VALUE | COLUMN in VALUE, VALUE, ... ; several joined by `and`
    OPERATOR    = != < <= > >=

A value with spaces, commas or signs stands in quotes. Texts have no order: = != in. A missing
value knows nothing: no condition holds for it, != neither.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sslpipe.data.columns import Column
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
_UNORDERED = ("=", "!=", "in")
_TOKEN = re.compile(
    r"""\s*(?:(?P<quoted>"[^"]*"|'[^']*')|(?P<sign>[=!<>]+)|(?P<comma>,)|(?P<word>[^\s"',=!<>]+))"""
)


class Condition(NamedTuple):
    """One comparison.

    Args:
        column: Its name.
        operator: One of OPERATORS, or "in".
        values: One, or several of "in", as written.
    """

    column: str
    operator: str
    values: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.column} {self.operator} {', '.join(map(_quoted, self.values))}"


def parse_conditions(text: str) -> list[Condition]:
    """Read what stands behind --query or --gallery.

    Raises:
        DataError: It is none; what was expected where is in the message.
    """
    tokens = _tokens(text)
    conditions = []
    while True:
        column = _next(tokens, text, "a column")
        operator = _next(tokens, text, f"an operator behind {column.text!r}")
        if operator.quoted or operator.text not in (*OPERATORS, "in"):
            known = " ".join([*OPERATORS, "in"])
            hint = "; for equality write a single =" if operator.text == "==" else ""
            raise DataError(
                f"{shown(text)}: {operator.text!r} is no operator{hint}; known: {known}"
            )
        values = [_value(tokens, text, operator.text)]
        following = next(tokens, None)
        while operator.text == "in" and following is not None and following.text == ",":
            values.append(_value(tokens, text, "a comma"))
            following = next(tokens, None)
        conditions.append(Condition(column.text, operator.text, tuple(values)))
        if following is None:
            return conditions
        if following.quoted or following.text != "and":
            raise DataError(
                f"{shown(text)}: behind {values[-1]!r} stands {following.text!r}; conditions are "
                "joined by `and`, and a value with spaces or signs stands in quotes"
            )


def select(conditions: list[Condition], split: Split, ids: ArrayLike) -> NDArray[np.bool_]:
    """Say for which samples all conditions hold. (n,) ids -> (n,).

    Raises:
        DataError: There is no such column, or a value is none of it; the nearest is named.
    """
    ids = np.asarray(ids, np.int64)
    chosen = np.ones(len(ids), bool)
    for condition in conditions:
        column = split.column(condition.column)
        if column.kind == "text" and condition.operator not in _UNORDERED:
            raise DataError(
                f"column {column.name!r} holds texts, which have no order: {condition.operator} "
                f"is not for them; use {', '.join(_UNORDERED)}"
            )
        wanted = [_stored(column, value) for value in condition.values]
        values = column.values_of(ids)
        if condition.operator == "in":
            holds = np.isin(values, wanted)
        else:
            holds = OPERATORS[condition.operator](values, wanted[0])
        chosen &= holds & ~column.missing(ids)
    return chosen


def _stored(column: Column, text: str) -> int | float:
    """A value as the column stores it. Raises: DataError."""
    value = column.parse(text)
    if value is None:
        near = did_you_mean(text, column.strings.codes)
        raise DataError(f"no sample has {column.name} = {shown(text)}{near}")
    return value


class _Token(NamedTuple):
    text: str
    quoted: bool = False


def _tokens(text: str) -> Iterator[_Token]:
    end = 0
    for match in _TOKEN.finditer(text):
        if match.start() != end:
            break
        end = match.end()
        quoted = match["quoted"]
        yield _Token(quoted[1:-1], True) if quoted else _Token(match[match.lastgroup or 0])
    if text[end:].strip():
        raise DataError(f"{shown(text)}: cannot read {shown(text[end:].strip())}; a quote is open")


def _next(tokens: Iterator[_Token], text: str, expected: str) -> _Token:
    token = next(tokens, None)
    if token is None:
        raise DataError(
            f"{shown(text)} ends where {expected} is expected; write COLUMN = VALUE, as in "
            "theme = papirus"
        )
    return token


def _value(tokens: Iterator[_Token], text: str, behind: str) -> str:
    token = _next(tokens, text, f"a value behind {behind}")
    if not token.quoted and (token.text == "," or token.text in OPERATORS):
        raise DataError(f"{shown(text)}: behind {behind} stands {token.text!r}, not a value")
    return token.text


def _quoted(value: str) -> str:
    if value and not re.search(r"""[\s"',=!<>]""", value):
        return value
    return f"'{value}'" if '"' in value else f'"{value}"'
