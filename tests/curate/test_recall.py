"""The promised kinds of copies of small garments are found, and no others."""

import pytest

from benchmarks.curate import KINDS, fashion_mnist, found_pairs, measure

PROMISED = list(KINDS)[:4]


@pytest.fixture(scope="module")
def measured():
    pictures = fashion_mnist(300)
    return measure(pictures, 60, found_pairs(pictures))["kinds"]


@pytest.mark.parametrize("kind", PROMISED)
def test_copies_are_found_at_the_promised_recall_and_precision(measured, kind):
    found, wrong = measured[kind]["found"], measured[kind]["wrong"]
    assert found >= 0.95 * measured[kind]["planted"]
    assert found >= 0.98 * (found + wrong)
