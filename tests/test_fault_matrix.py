"""tests/faults.md promises nothing without a test."""

import re
from pathlib import Path

TESTS = Path(__file__).parent
ROWS = [
    line.split("|")[1:-1]
    for line in (TESTS / "faults.md").read_text().splitlines()
    if re.match(r"\| \d+ \|", line)
]
UNTESTED = {30}  # needs several machines


def test_rows_are_numbered_without_gaps():
    assert [int(row[0]) for row in ROWS] == list(range(1, len(ROWS) + 1))
    assert len(ROWS) >= 50  # a row may be added, never lost


def test_every_row_names_tests_that_exist():
    functions = {
        f"{path.relative_to(TESTS).as_posix()}::{name}"
        for path in TESTS.rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    for number, *_, named in ROWS:
        actual = re.findall(r"[\w/]*test_\w+\.py::test_\w+", named)
        assert actual or int(number) in UNTESTED, number
        assert set(actual) <= functions, set(actual) - functions
