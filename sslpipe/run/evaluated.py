"""RUN/eval.json, what `sslpipe evaluate suite` left in a run: read whole, or named as damaged."""

from pathlib import Path
from typing import Any

from sslpipe.errors import UserError
from sslpipe.evaluation.suite_file import SCHEMA_VERSION, check_report
from sslpipe.files import Tree, read_json

_AGAIN = "write it again with `sslpipe evaluate suite`"


def read_suite(path: Path) -> dict[str, Any]:
    """Read an eval.json.

    Raises:
        UserError: It is damaged, or of another version; names the file and the remedy.
    """
    suite = read_json(path, Tree, remedy=_AGAIN)
    version = suite.get("schema_version")
    if version != SCHEMA_VERSION:
        raise UserError(
            f"{path}: schema_version = {version!r:.40}, this program reads {SCHEMA_VERSION}; "
            f"{_AGAIN}"
        )
    try:
        check_report(suite)
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); {_AGAIN}") from None
    return suite
