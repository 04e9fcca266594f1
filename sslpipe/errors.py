"""Errors that a user can mend: raised with the key, file or sample, its value, and the remedy."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in the input, not in the program; printed in one line, without a stack trace."""


class RecipeError(UserError):
    """A recipe or an override is wrong."""


class DataError(UserError):
    """An index, a shard or a source of images is missing, damaged or not what it says."""


class CheckpointError(UserError):
    """A run directory cannot be resumed."""


class ExportError(UserError):
    """An export could not be proved equal to the trained backbone."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return '; did you mean X?' for the nearest known name, or '' where none is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""
