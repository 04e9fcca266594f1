import numpy as np
import pytest
from scipy import stats

from sslpipe.random import hash_integers, permutation, uniform

MASK = 2**64 - 1


def mix(x: int) -> int:
    """splitmix64's finaliser on Python's own integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def folded(*words: int) -> int:
    golden, state = 0x9E3779B97F4A7C15, 0
    for word in words:
        state = mix(((state ^ mix((word + golden) & MASK)) + golden) & MASK)
    return state


@pytest.mark.parametrize(
    "words", [(0,), (1, 2), (2, 1), (-1,), (2**62, 7), (0, 0, 0), (3, 1, 4, 1, 5, 9)]
)
def test_a_hash_is_splitmix64_folded_over_the_words(words):
    assert int(hash_integers(words)) == folded(*words)


def test_the_finaliser_is_splitmix64s():
    """Its published stream from seed 0: golden-ratio increments through the finaliser."""
    assert mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF
    assert mix((2 * 0x9E3779B97F4A7C15) & MASK) == 0x6E789E6AA1B965F4


def test_golden_values():
    """Whoever changes these changes the views and the order of every run ever made."""
    assert [int(hash_integers(w)) for w in ((0,), (1, 2, 3))] == [
        0xA706DD2F4D197E6F,
        0x882D1ACC8D6C3B48,
    ]
    assert permutation(8, (0, 1)).tolist() == [4, 3, 5, 6, 1, 7, 0, 2]


def test_broadcasting_equals_one_at_a_time():
    rows, columns = np.arange(5)[:, None], np.arange(-3, 4)[None]
    table = hash_integers((9, rows, columns))
    assert table.shape == (5, 7)
    assert all(int(table[i, j]) == folded(9, i, j - 3) for i in range(5) for j in range(7))


def test_a_row_depends_on_seed_epoch_id_and_view_alone():
    ids = np.array([5, 900, 5, 2**40, 0])
    whole = uniform(1, 2, ids, 0, 34)
    assert whole.shape == (5, 34)
    for row, sample in enumerate(ids):
        assert np.array_equal(uniform(1, 2, [sample], 0, 34)[0], whole[row])
    assert np.array_equal(uniform(1, 2, ids, 0, 10), whole[:, :10])  # more lanes keep the old
    for words in ((2, 2, ids, 0), (1, 3, ids, 0), (1, 2, ids + 1, 0), (1, 2, ids, 1)):
        assert (uniform(*words, 34) != whole).all()


def test_lanes_and_ids_are_uniform():
    """Kolmogorov-Smirnov against U[0, 1) of 8 lanes x 20,000 ids, and of all together."""
    numbers = uniform(2**31, 3, np.arange(20_000), 1, 8)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    for lane in numbers.T:
        assert stats.kstest(lane, "uniform").pvalue > 1e-6
    assert stats.kstest(numbers.ravel(), "uniform").pvalue > 1e-6


def test_consecutive_ids_and_neighbouring_lanes_are_independent():
    """Chi-square on the 16 x 16 table of pairs, refused at p < 1e-6 (3 tests)."""
    numbers = uniform(0, 0, np.arange(50_000), 0, 2)
    other_view = uniform(0, 0, np.arange(50_000), 1, 1)[:, 0]
    pairs = [
        (numbers[:-1, 0], numbers[1:, 0]),
        (numbers[:, 0], numbers[:, 1]),
        (numbers[:, 0], other_view),
    ]
    for a, b in pairs:
        table, _, _ = np.histogram2d(a, b, bins=16, range=[[0, 1], [0, 1]])
        assert stats.chisquare(table.ravel()).pvalue > 1e-6


def test_a_permutation_has_every_number_once_and_depends_on_its_words():
    for n in (0, 1, 2, 1000):
        assert np.array_equal(np.sort(permutation(n, (3, 4))), np.arange(n))
    assert not np.array_equal(permutation(1000, (3, 4)), permutation(1000, (4, 3)))
