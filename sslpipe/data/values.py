"""One value of a column -> an integer, a number or a moment, as columns store them."""

import math
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta

LARGEST_INTEGER = 2**63 - 1  # -2**63 stands for no value
EXACT_FLOAT = 2**53  # integers up to it are floats, too
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST_SECOND, _END_SECOND = -62_135_596_800, 253_402_300_800  # of the years 1 to 9999
_EXIF_DATE = re.compile(r"(\d{4}):(\d\d):(\d\d)(?!\d)")
_INTEGER = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?|nan", re.IGNORECASE)
_SECONDS = re.compile(r"([+-]?)(\d{1,20})(?:\.(\d*))?", re.ASCII)

Value = str | int | float | datetime


def to_integer(value: Value) -> int:
    """Convert to an integer of 64 bits. Raises: ValueError, such as "is not an integer"."""
    if isinstance(value, str) and _INTEGER.fullmatch(value.strip()):
        value = int(value) if len(value) < 100 else LARGEST_INTEGER + 1
    if isinstance(value, float) and value.is_integer() and abs(value) <= EXACT_FLOAT:
        value = int(value)  # pandas makes floats of integers with gaps
    if not isinstance(value, int):
        raise ValueError("is not an integer")
    if abs(value) > LARGEST_INTEGER:
        raise ValueError("does not fit 64 bits")
    return value


def to_float(value: Value) -> float:
    """Convert to a number; "nan" is none. Raises: ValueError, such as "is not finite"."""
    text = isinstance(value, str)
    if isinstance(value, datetime) or (text and not _NUMBER.fullmatch(str(value).strip())):
        raise ValueError("is not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if math.isinf(number):
        raise ValueError("is not finite")
    return number


def to_time(value: Value) -> int:
    """Convert to microseconds since 1970, UTC; what is finer is cut off.

    Args:
        value: Seconds since 1970, ISO 8601 or EXIF's 2024:05:01 12:00:00, with an offset from UTC
            (Z, +02:00), or in UTC where none is written.

    Raises:
        ValueError: Such as "is no time".
    """
    if isinstance(value, int | float):
        to_float(value)  # which is finite
        micros = value * 10**6 if isinstance(value, int) else round(value * 10**6)
    elif isinstance(value, str) and (match := _SECONDS.fullmatch(value.strip())):
        micros = int(match[2]) * 10**6 + int(f"{match[3] or '':0<6.6}")
        micros = -micros if match[1] == "-" else micros
    else:
        moment = _moment(value.strip()) if isinstance(value, str) else value
        aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        return (aware - _EPOCH) // timedelta(microseconds=1)
    if not _FIRST_SECOND * 10**6 <= micros < _END_SECOND * 10**6:
        raise ValueError("is no time of the years 1 to 9999 in seconds since 1970")
    return micros


def has_offset(text: str) -> bool:
    """Say whether a text that `to_time` reads tells its offset from UTC."""
    return bool(_SECONDS.fullmatch(text.strip())) or _moment(text.strip()).tzinfo is not None


def _moment(text: str) -> datetime:
    try:
        return datetime.fromisoformat(_EXIF_DATE.sub(r"\1-\2-\3", text, count=1))
    except ValueError:
        raise ValueError("is no time, such as 2024-05-01T12:00:00+02:00") from None


CONVERT: Mapping[str, Callable[[Value], int | float]] = {
    "integer": to_integer,
    "float": to_float,
    "time": to_time,
}
