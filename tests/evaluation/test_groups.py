"""Numbers by a column against loops in float64: who may not find whom."""

from pathlib import Path

import numpy as np
import pytest

from sslpipe.data.index import load_index
from sslpipe.errors import DataError
from sslpipe.evaluation.groups import GroupCodes, group_codes
from sslpipe.evaluation.knn import knn_results
from sslpipe.evaluation.retrieval import retrieval, retrieval_per_query
from tests.evaluation.test_knn import brute_knn, random_rows, rows, tied_rows
from tests.evaluation.test_retrieval import assert_equals_loops
from tests.helpers.columns import add_columns
from tests.helpers.dataset import write_dataset

NAMES = ("a", "b", "c", "d", "e")


def codes_for(bank, queries, values=4, seed=5, missing=0.2):
    """A column of both sides; of some rows the value is missing."""
    rng = np.random.default_rng(seed)
    sides = []
    for side in (bank, queries):
        codes = rng.integers(values, size=len(side.ids))
        sides.append(np.where(rng.random(len(codes)) < missing, -1, codes))
    return GroupCodes("camera", *sides, NAMES[:values])


def pairs_unlike(bank, queries, codes, same_label=False):
    """Loops: (query id, row id) of all pairs of one value, which is known."""
    return [
        (int(queries.ids[q]), int(bank.ids[b]))
        for q in range(len(queries.ids))
        for b in range(len(bank.ids))
        if codes.queries[q] >= 0
        and codes.bank[b] == codes.queries[q]
        and (not same_label or bank.labels[b] == queries.labels[q])
    ]


def brute_accuracy(bank, queries, k, removed):
    return (brute_knn(bank, queries, k, 1, "majority", removed) == queries.labels.numpy()).mean()


@pytest.mark.parametrize("make", [random_rows, tied_rows])
def test_knn_without_rows_of_the_querys_value_equals_loops(make):
    bank, queries = make(120, 5, 4, seed=1), make(40, 5, 4, seed=2, first_id=1000)
    codes = codes_for(bank, queries)
    removed = pairs_unlike(bank, queries, codes)
    for result in knn_results(bank, queries, k=(1, 7), vote="majority", exclude_same=codes):
        k = int(result.protocol.split("k=")[1].split()[0])
        assert result.value == brute_accuracy(bank, queries, k, removed)
        assert result.protocol.endswith("not-same=camera")

    # of one split: a row without a value still does not find itself
    own = codes._replace(queries=codes.bank)
    removed = pairs_unlike(bank, bank, own) + [(i, i) for i in bank.ids.tolist()]
    options = {"exclude_same": own, "exclude_same_id": True}
    (result,) = knn_results(bank, bank, k=(3,), vote="majority", **options)
    assert result.value == brute_accuracy(bank, bank, 3, removed)


def test_more_neighbours_than_other_values_have_rows_are_refused():
    bank, queries = random_rows(30, 4, 3, seed=1), random_rows(5, 4, 3, seed=2)
    codes = GroupCodes("camera", np.repeat([0, 1], [20, 10]), np.zeros(5, np.int64), ("a", "b"))
    with pytest.raises(DataError, match="k = 11 does not fit a bank of 10 rows"):
        knn_results(bank, queries, k=(11,), exclude_same=codes)
    assert knn_results(bank, queries, k=(10,), exclude_same=codes)
    alone = codes._replace(bank=np.zeros(30, np.int64))
    with pytest.raises(DataError, match="k = 1 does not fit a bank of 0 rows"):
        knn_results(bank, queries, k=(1,), exclude_same=alone)


@pytest.mark.parametrize("counted", [0, 10**9], ids=["sorted", "counted"])
@pytest.mark.promise(11)
@pytest.mark.parametrize("make", [random_rows, tied_rows])
@pytest.mark.parametrize("kind", ["exclude_same", "cross", "exclude_same and cross"])
def test_retrieval_across_values_equals_loops(make, kind, counted, monkeypatch):
    monkeypatch.setitem(retrieval_per_query.__globals__, "COUNTED", counted)
    monkeypatch.setitem(retrieval_per_query.__globals__, "TILE_NUMBERS", 90 * 7)  # several tiles
    gallery, queries = make(90, 4, 9, seed=1), make(40, 4, 12, seed=2, first_id=1000)
    codes = codes_for(gallery, queries, values=3)
    rules = dict.fromkeys(kind.split(" and "), codes)
    actual = retrieval_per_query(gallery, queries, k=(1, 5), **rules)
    removed = pairs_unlike(gallery, queries, codes, same_label=kind == "cross")
    assert_equals_loops(actual, gallery, queries, (1, 5), removed=removed)


def test_re_identification_ignores_the_identity_in_its_own_camera_and_keeps_distractors():
    # Market-1501's rules: the larger the value, the less similar to the query at 0
    gallery = rows([[1, 0.1], [1, 0.2], [1, 0.3], [1, 0.4], [1, 0.5]], [7, 3, 7, 9, 7])
    query, options = rows([[1, 0]], [7]), {"k": (1, 2, 3)}
    cameras = GroupCodes("camera", np.array([0, 0, 1, 1, 2]), np.array([0]), NAMES)
    by_name = {r.metric: r for r in retrieval(gallery, query, cross=cameras, **options)}
    # seen: person 3 in the query's camera (a distractor), 7 in 1, 9 in 1, 7 in 2
    assert [by_name[f"Recall@{k}"].value for k in (1, 2, 3)] == [0, 1, 1]
    assert by_name["mAP"].value == pytest.approx((1 / 2 + 2 / 4) / 2)
    assert "cross=camera" in by_name["mAP"].protocol
    # no row of its camera at all: the distractor is gone, too
    by_name = {r.metric: r for r in retrieval(gallery, query, exclude_same=cameras, **options)}
    assert by_name["mAP"].value == pytest.approx((1 / 1 + 2 / 3) / 2)


def test_one_value_for_all_is_one_error_that_names_the_column():
    """Whose images are all of one camera has no query by the rules of re-identification."""
    gallery = rows([[1, 0.1], [1, 0.2]], [7, 7])
    query = rows([[1, 0]], [7])
    one = GroupCodes("camera", np.zeros(2, int), np.zeros(1, int), NAMES)
    for rule in ("cross", "exclude_same"):
        with pytest.raises(DataError, match=r"another value of camera.*--exclude-same.*--cross"):
            retrieval(gallery, query, **{rule: one})


def test_codes_are_the_same_numbers_in_both_splits(tmp_path: Path):
    write_dataset(tmp_path, (4,), split="test")
    manifest = write_dataset(tmp_path, (3, 2))
    add_columns(manifest, "test", camera=["z", None, "b", "y"], dose=[1.0] * 4, age=[3, 9, 3, 1])
    add_columns(manifest, camera=["b", "a", None, "z", "b"], dose=[1.0] * 5, age=[9, None, 3, 3, 8])
    index = load_index(manifest)
    train, test = index.split("train"), index.split("test")
    codes = group_codes("camera", (train, [4, 2, 0, 3]), (test, [0, 1, 2]))
    assert codes.values == ("b", "z")
    assert codes.bank.tolist() == [0, -1, 0, 1]
    assert codes.queries.tolist() == [1, -1, 0]
    ages = group_codes("age", (train, range(5)), (test, range(4)))
    assert ages.values == ("1", "3", "8", "9")
    assert ages.bank.tolist() == [3, -1, 1, 1, 2]
    assert ages.queries.tolist() == [1, 3, 1, 0]
    with pytest.raises(DataError, match="'dose' holds floats"):
        group_codes("dose", (train, [0]), (test, [0]))
    with pytest.raises(DataError, match="did you mean 'camera'"):
        group_codes("camra", (train, [0]), (test, [0]))
