"""Errors that a user can mend: raised with the key, file or sample, its value, and the remedy."""

import difflib
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_MOST_CHARACTERS = 4000  # of a message: an input may be megabytes
# control characters, line ends, marks that turn the direction of text, halves of characters
_UNPRINTABLE = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


_OPTION = re.compile(
    r"""
    (?<![^\s(]) --(?P<no>no-)? (?P<name>[a-z][a-z-]*[a-z]|k|z)
    (?: = (?P<value> '[^']*' | "[^"]*" | [^\s;,)]*[^\s;,):.] )          # --root=photos
      | [ ] (?P<placeholder> '[^']*' | [A-Z][A-Z,.]*(?!\w) | \d[\d.]*\b )  # --split NAME, --k 5
    )?
    """,
    re.VERBOSE,
)
# s3:/bucket: the path that pathlib makes of s3://bucket, which the user typed
_URL_OF_A_PATH = re.compile(
    r"(?<![\w/.+-])((?:https?|ftp|s3a?|gs|gcs|hdfs|abfss?|az|hf):)/(?=[^/\s])"
)
_NUMBER = re.compile(r"-?\d+(\.\d*)?(e-?\d+)?")
# options that take no value, but for --no-NAME
FLAGS = frozenset(
    {
        "all_channels",
        "download",
        "overwrite",
        "skip_bad",
        "skip_missing",
        "with_preprocessing",
    }
)


class UserError(ValueError):
    """A mistake in the input, not in the program; printed in one line, without a stack trace.

    A message names options as they are typed: `--skip-bad`. In Python it then has the argument.

    Attributes:
        settings: Overrides of a recipe that mend it, as the message names them; "": none are known.
    """

    def __init__(self, message: str, settings: str = "") -> None:
        message = _URL_OF_A_PATH.sub(r"\1//", message)
        super().__init__(for_caller(one_line(message)))
        self.settings = settings


class RecipeError(UserError):
    """A recipe or an override is wrong."""


class DataError(UserError):
    """An index, a shard or a source of images is missing, damaged or not what it says."""


class _Caller:
    """Who reads the messages of this process."""

    commands = 0  # that run


@contextmanager
def naming_options() -> Iterator[None]:
    """Leave options in messages as they are typed, while a command runs."""
    _Caller.commands += 1
    try:
        yield
    finally:
        _Caller.commands -= 1


def for_caller(text: str) -> str:
    """Return a message with the arguments of a Python call in place of a command's options.

    "give --skip-bad" becomes "give skip_bad=True", and "--split NAME" "split=NAME". While a command
    runs, and in a command line between backticks, options stay.
    """
    if _Caller.commands:
        return text
    parts = text.split("`")
    parts[::2] = [_OPTION.sub(_as_argument, part) for part in parts[::2]]
    return "`".join(parts)


def _as_argument(option: re.Match[str]) -> str:
    """Return an option, with the value behind it if any, as the argument of a call."""
    name = option["name"].replace("-", "_")
    value = option["value"] or ""
    if value and value[0] not in "'\"" and not _NUMBER.fullmatch(value):
        value = repr(value)
    value = value or option["placeholder"] or ""
    if name == "plugin":
        return f"sslpipe.load_plugins({value})" if value else "sslpipe.load_plugins"
    if name == "format":
        name = "formats"
        value = f"[{value}]" if value else ""
    if option["no"] or name in FLAGS:
        return f"{name}={not option['no']}" + (f" {value}" if value else "")
    return f"{name}={value}" if value else name


@contextmanager
def naming(setting: str) -> Iterator[None]:
    """Put a setting's key in front of what is wrong with the data that it names."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{setting}: {error}") from error


class CheckpointError(UserError):
    """A run directory cannot be resumed."""


class WeightsError(UserError):
    """Weights from elsewhere cannot be read safely, or do not fit the whole backbone."""


class ExportError(UserError):
    """An export could not be proved equal to the trained backbone."""


def as_path(value: object, argument: str, error: type[UserError] = UserError) -> Path:
    """Return an argument as a path, or raise an error that names it."""
    if not isinstance(value, str | Path) or value == "":
        raise error(f"{argument} = {shown(value)} is no path; give a str or a pathlib.Path")
    return Path(value)


def as_output(value: object, argument: str, error: type[UserError] = UserError) -> Path:
    """Return an argument as the path of what is to be written; else as `as_path`."""
    path = as_path(value, argument, error)
    check_local(path, argument, error)
    return path


def check_local(path: Path, argument: str, error: type[UserError] = UserError) -> None:
    """Raise an error where a path was a URL, of which a folder such as "s3:" would be made."""
    if re.match(r"[A-Za-z][\w+.-]+:/", str(path)) and not Path(path.parts[0]).exists():
        raise error(
            f"{argument} = {str(path)!r} is a URL, and results are written to files of this "
            "machine; name a folder, and copy from there"
        )


def check_list(values: object, argument: str, error: type[UserError] = UserError) -> None:
    """Raise an error that names an argument, where it is one value instead of a list of them."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise error(f"{argument} = {shown(values)} is not a list; give [{shown(values)}]")


def check_count(
    value: int, argument: str, least: int = 1, error: type[UserError] = UserError
) -> None:
    """Raise an error that names an argument, where it is no whole number of `least` or more."""
    if not isinstance(value, int) or value < least:
        raise error(f"{argument} = {shown(value)} is not a whole number of {least} or more")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return '; did you mean X?' for the nearest known name, or '' where none is near."""
    by_lower = {each.lower(): each for each in reversed([*known])}
    near = difflib.get_close_matches(name[:100].lower(), by_lower, n=1, cutoff=0.6)
    return f"; did you mean {by_lower[near[0]]!r}?" if near else ""


def did_you_mean_key(key: str, known: Iterable[str], most: int = 3, cutoff: float = 0.4) -> str:
    """Return "; did you mean 'a.x', 'a.y' or 'b.x'?" for the nearest known keys, or ''.

    Args:
        key: "section.name"; or a section, a name or a word of one, compared with those too.
        known: Whole keys, and sections.
        most: Keys that are named, at most.
        cutoff: Likeness, in [0, 1], that a key needs.
    """
    whole = "." in key

    def likeness(other: str) -> float:
        name = other.rpartition(".")[2]
        texts = [other] if whole else [other, name, *name.split("_")]
        return max(difflib.SequenceMatcher(None, text, key[:100]).ratio() for text in texts)

    scores = {other: likeness(other) for other in known if not whole or "." in other}
    # of equal ones the shorter name, of which a word is more: out_dim before decay_one_dim
    near = sorted(scores, key=lambda k: (-scores[k], len(k.rpartition(".")[2]), k))[:most]
    names = [repr(other) for other in near if scores[other] >= cutoff]
    if len(names) > 1:
        names[-2:] = [f"{names[-2]} or {names[-1]}"]
    return f"; did you mean {', '.join(names)}?" if names else ""


def install(extra: str) -> str:
    """Return the command that installs an extra, of the clone that this package is in, if any."""
    clone = Path(__file__).parents[1]
    if (clone / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{clone}[{extra}]')}"
    return f"pip install 'sslpipe[{extra}]'"


def counted(number: int, what: str) -> str:
    """Return a number of things in words: "1 image", "1,024 images", "2 classes"."""
    plural = "es" if what.endswith("s") else "s"
    return f"{number:,} {what}{plural * (number != 1)}"


def duration(seconds: float) -> str:
    """Return a time in words: "43 s", "3 min 5 s", "2 h 10 min"."""
    whole = round(seconds)
    for size, unit, smaller, small_unit in ((3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit}" + (f" {rest} {small_unit}" if rest else "")
    return f"{whole} s"


def listed(texts: Sequence[str], most: int, between: str = ", ") -> str:
    """Return some texts in a line, and the number of the others: "a, b and 1,024 more"."""
    more = f" and {len(texts) - most:,} more" if len(texts) > most else ""
    return between.join(texts[:most]) + more


def one_line(text: str, most: int = _MOST_CHARACTERS) -> str:
    """Return a text as one line: breaks become spaces, a long one is cut in the middle."""
    if len(text) > most:
        text = f"{text[: most // 2]} ... {text[-most // 2 :]}"
    return _UNPRINTABLE.sub(_escaped, re.sub(r"\s*[\r\n]\s*", " ", text))


def printable(text: str) -> str:
    """Return a text, tabs and line ends as they are, without what a terminal takes for a command.

    Everything that names of files, classes or samples reach is printed through this.
    """
    return _UNPRINTABLE.sub(lambda match: match[0] if match[0] in "\t\n" else _escaped(match), text)


def _escaped(match: re.Match[str]) -> str:
    return repr(match[0])[1:-1]


def lost_quotes(value: object) -> str:
    """Return a hint where a text looks like a list whose quotes a shell took; "" of others."""
    if not (isinstance(value, str) and value.startswith(("[", "{"))):
        return ""
    return "; a shell takes quotes away: put the whole setting in single ones, 'key=[\"a\"]'"


def shown(value: object) -> str:
    """Return a value as a message quotes it: its repr, short whatever it holds."""
    most = 80  # letters, or things
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"  # Python refuses to print the longest
    if isinstance(value, dict | set):
        value = value if len(value) <= most else list(value)[:most]
    elif isinstance(value, str | bytes | list | tuple):
        value = value[:most]
    try:
        text = repr(value)
    except ValueError:  # a list of such integers
        return f"a {type(value).__name__}"
    return text if len(text) <= most else f"{text[: most - 3]}..."
