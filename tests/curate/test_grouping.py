"""Groups around centres, against loops over sets."""

import numpy as np
import pytest

from sslpipe.curate.grouping import Pairs, group, joined


def pairs_of(edges, scores=None, equal=False):
    edges = np.array(sorted(edges), np.int64).reshape(-1, 2)
    scores = np.ones(len(edges)) if scores is None else scores
    return Pairs(edges[:, 0], edges[:, 1], np.full(len(edges), equal), np.float32(scores))


def by_loops(edges, rows):
    """Sets of rows: again and again the free row of most free neighbours, and these."""
    near = {
        row: {b for a, b in edges if a == row} | {a for a, b in edges if b == row}
        for row in range(rows)
    }
    free, groups = set(range(rows)), []
    while True:
        counts = {row: len(near[row] & free) for row in sorted(free)}
        centre = max(counts, key=lambda row: (counts[row], -row), default=None)
        if centre is None or not counts[centre]:
            return sorted(map(sorted, groups))
        groups.append({centre} | (near[centre] & free))
        free -= groups[-1]


@pytest.mark.parametrize("seed", range(20))
def test_groups_are_the_stars_that_loops_find(seed):
    rng = np.random.default_rng(seed)
    rows = 40
    edges = {
        tuple(sorted(map(int, rng.choice(rows, 2, replace=False)))) for _ in range(5 + 2 * seed)
    }
    found = group(pairs_of(edges), rows)
    members = [np.flatnonzero(found.group == k).tolist() for k in range(found.group.max() + 1)]
    assert sorted(members) == by_loops(edges, rows)
    assert [own[0] for own in members] == sorted(own[0] for own in members), (
        "numbered by first rows"
    )
    np.testing.assert_array_equal(found.sizes(), [len(own) for own in members])


def test_what_is_equal_to_a_member_is_a_member():
    # 0 is the centre of 1 to 5; 6, 7 and 8 equal 5, which alone of the four was compared, and of
    # which 7 and 8 are equal in bytes, too
    near = pairs_of([(0, k) for k in range(1, 6)])
    found = group(joined([pairs_of([(5, 6), (5, 7), (5, 8), (7, 8)], equal=True), near]), 9)
    assert found.group.tolist() == [0] * 9
    assert found.nearest[5:].tolist() == [6, 5, 5, 5]


def test_a_chain_is_no_group_and_the_nearest_is_of_the_highest_score():
    found = group(pairs_of([(0, 1), (0, 2), (1, 2)], [0.9, 0.95, 0.99]), 4)
    assert found.nearest.tolist() == [2, 2, 1, -1]
    np.testing.assert_allclose(found.score, [0.95, 0.99, 0.99, 0], rtol=1e-6)
    found = group(pairs_of([(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]), 6)
    assert max(found.sizes()) <= 3
    for row, near in enumerate(found.nearest.tolist()):
        assert near < 0 or abs(row - near) == 1


def test_a_pair_that_occurs_twice_counts_once_as_its_first():
    exact, near = pairs_of([(0, 1)]), pairs_of([(0, 1), (1, 2)], [0.5, 0.6])
    both = joined([exact, near])
    assert both.first.tolist() == [0, 1]
    np.testing.assert_allclose(both.score, [1, 0.6])
