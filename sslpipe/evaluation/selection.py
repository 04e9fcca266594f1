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
        DataError: It is none; the message says what was expected where.
    """
    tokens, conditions = _tokens(text), list[Condition]()

    def following(expected: str) -> _Token:
        if (token := next(tokens, None)) is None:
            raise DataError(
                f"{shown(text)} ends where {expected} is expected; write COLUMN = VALUE, as in "
                "theme = papirus"
            )
        return token

    def value(behind: str) -> str:
        token = following(f"a value behind {behind}")
        if not token.quoted and (token.text == "," or token.text in OPERATORS):
            raise DataError(f"{shown(text)}: behind {behind} stands {token.text!r}, not a value")
        return token.text

    while True:
        column = following("a column").text
        operator = following(f"an operator behind {column!r}")
        if operator.quoted or operator.text not in (*OPERATORS, "in"):
            hint = "; for equality write a single =" if operator.text == "==" else ""
            raise DataError(
                f"{shown(text)}: {operator.text!r} is no operator{hint}; known: "
                f"{' '.join([*OPERATORS, 'in'])}"
            )
        values = [value(operator.text)]
        while (token := next(tokens, None)) == _Token(",") and operator.text == "in":
            values.append(value("a comma"))
        conditions.append(Condition(column, operator.text, tuple(values)))
        if token is None:
            return conditions
        if token != _Token("and"):
            raise DataError(
                f"{shown(text)}: behind {values[-1]!r} stands {token.text!r}; conditions are "
                "joined by `and`, and a value with spaces or signs stands in quotes"
            )


def select(conditions: list[Condition], split: Split, ids: ArrayLike) -> NDArray[np.bool_]:
    """Say for which samples all conditions hold. (n,) ids -> (n,).

    Raises:
        DataError: There is no such column, or a value is none of it; the nearest is named.
    """
    ids = np.asarray(ids, np.int64)
    chosen = np.ones(len(ids), bool)
    for name, operator, texts in conditions:
        column = split.column(name)
        if column.kind == "text" and operator not in _UNORDERED:
            raise DataError(
                f"column {column.name!r} holds texts, which have no order: {operator} is not for "
                f"them; use {', '.join(_UNORDERED)}"
            )
        wanted = []
        for text in texts:
            if (stored := column.parse(text)) is None:
                near = did_you_mean(text, column.strings.codes)
                raise DataError(f"no sample has {column.name} = {shown(text)}{near}")
            wanted.append(stored)
        values = column.values_of(ids)
        holds = (
            np.isin(values, wanted) if operator == "in" else OPERATORS[operator](values, *wanted)
        )
        chosen &= holds & ~column.missing(ids)
    return chosen


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


def _quoted(value: str) -> str:
    if value and not re.search(r"""[\s"',=!<>]""", value):
        return value
    return f"'{value}'" if '"' in value else f'"{value}"'
