"""Each promise of the design has tests that are marked with its number."""

import re
from pathlib import Path

TESTS = Path(__file__).parent
PROMISES = range(1, 18)


def test_each_promise_has_a_marked_test():
    marked = {
        int(number)
        for path in TESTS.rglob("test_*.py")
        for number in re.findall(
            r"^@pytest\.mark\.promise\((\d+)\)$", path.read_text(), re.MULTILINE
        )
    }
    assert set(PROMISES) <= marked, set(PROMISES) - marked
