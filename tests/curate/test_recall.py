"""The promised kinds of copies of small garments are found, and no others."""

import pytest

from benchmarks import curate

PROMISED = dict(list(curate.KINDS.items())[:4])


@pytest.fixture(scope="module")
def measured():
    pictures = curate.fashion_mnist(300)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curate, "KINDS", PROMISED)
        return curate.measure(pictures, 60, curate.found_pairs(pictures))["kinds"]


@pytest.mark.parametrize("kind", PROMISED)
def test_copies_are_found_at_the_promised_recall_and_precision(measured, kind):
    found, wrong = measured[kind]["found"], measured[kind]["wrong"]
    assert found >= 0.95 * measured[kind]["planted"]
    assert found >= 0.98 * (found + wrong)
