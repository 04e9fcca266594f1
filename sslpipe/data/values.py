"""Read one value of a column from a text: an integer, a number, a moment."""

import math
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

LARGEST_INTEGER = 2**63 - 1  # -2**63 stands for no value
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_FIRST_SECOND, _END_SECOND = -62_135_596_800, 253_402_300_800  # of the years 1 to 9999
_EXIF_DATE = re.compile(r"(\d{4}):(\d\d):(\d\d)(?!\d)")
_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?|nan", re.IGNORECASE)
_SECONDS = re.compile(r"([+-]?)(\d{1,20})(?:\.(\d*))?", re.ASCII)


def parse_integer(text: str) -> int:
    """Read an integer of 64 bits. Raises: ValueError, such as "is not an integer"."""
    if not re.fullmatch(r"[+-]?[0-9]+", text.strip()):
        raise ValueError("is not an integer")
    return fit_integer(int(text) if len(text) < 100 else LARGEST_INTEGER + 1)


def fit_integer(number: int) -> int:
    """Return the same integer. Raises: ValueError where 64 bits do not hold it."""
    if abs(number) > LARGEST_INTEGER:
        raise ValueError("does not fit 64 bits")
    return number


def parse_float(text: str) -> float:
    """Read a number; "nan" is none. Raises: ValueError, such as "is not a number"."""
    if not _NUMBER.fullmatch(text.strip()):
        raise ValueError("is not a number")
    return fit_float(float(text))


def fit_float(number: float) -> float:
    """Return a number as a float. Raises: ValueError for one that is infinite or too large."""
    try:
        if not math.isinf(float(number)):
            return float(number)
    except OverflowError:
        pass
    raise ValueError("is not finite")


def parse_time(text: str) -> int:
    """Read a moment: ISO 8601, EXIF's 2024:05:01 12:00:00, or seconds since 1970.

    Args:
        text: With an offset from UTC (Z, +02:00), or in UTC where none is written.

    Returns:
        Microseconds since 1970, UTC; what is finer is cut off.

    Raises:
        ValueError: Such as "is no time".
    """
    text = text.strip()
    match = _SECONDS.fullmatch(text)
    if match:
        micros = int(match[2]) * 10**6 + int(f"{match[3] or '':0<6.6}")
        return _in_range(-micros if match[1] == "-" else micros)
    return micros_of(_moment(text))


def micros_of(moment: datetime) -> int:
    """Count the microseconds since 1970; a time without an offset is in UTC."""
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return (aware - _EPOCH) // _MICROSECOND


def time_of_seconds(seconds: float) -> int:
    """Convert seconds since 1970 to microseconds. Raises: ValueError for no time."""
    fit_float(seconds)
    return _in_range(seconds * 10**6 if isinstance(seconds, int) else round(seconds * 10**6))


def has_offset(text: str) -> bool:
    """Say whether a text that `parse_time` reads tells its offset from UTC."""
    return bool(_SECONDS.fullmatch(text.strip())) or _moment(text.strip()).tzinfo is not None


def _moment(text: str) -> datetime:
    try:
        return datetime.fromisoformat(_EXIF_DATE.sub(r"\1-\2-\3", text, count=1))
    except ValueError:
        raise ValueError("is no time, such as 2024-05-01T12:00:00+02:00") from None


def _in_range(micros: int) -> int:
    if not _FIRST_SECOND * 10**6 <= micros < _END_SECOND * 10**6:
        raise ValueError("is no time of the years 1 to 9999 in seconds since 1970")
    return micros


PARSERS: dict[str, Callable[[str], int | float]] = {
    "integer": parse_integer,
    "float": parse_float,
    "time": parse_time,
}
