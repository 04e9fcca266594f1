"""The table: the same protocols, samples and draws for every set of features."""

import json

import pytest
import torch

from sslpipe.errors import DataError
from sslpipe.evaluation import EVALS
from sslpipe.evaluation.knn import few_shot_knn, knn_results
from sslpipe.evaluation.linear_probe import linear_probe, ridge_probe
from sslpipe.evaluation.retrieval import retrieval
from sslpipe.evaluation.suite import run_suite
from sslpipe.evaluation.verification import verification
from sslpipe.evaluation.whiten import whiten
from tests.evaluation.test_knn import random_rows


def pair(width=6, n=400):
    return random_rows(n, width, 4, seed=1), random_rows(100, width, 4, seed=2, first_id=10**6)


def noise_of(rows):
    generator = torch.Generator().manual_seed(0)
    return rows._replace(features=torch.randn(len(rows.ids), 3, generator=generator))


@pytest.fixture(scope="module")
def report():
    train, test = pair()
    sets = {"ssl": (train, test), "noise": (noise_of(train), noise_of(test))}
    return run_suite(sets, {"data": "made up"})


def test_every_set_has_the_same_protocols_plain_and_whitened(report):
    protocols = {}
    for row in report["rows"]:
        protocols.setdefault((row["features"], row["whitened"]), []).append(row["protocol"])
    assert set(protocols) == {("ssl", False), ("ssl", True), ("noise", False), ("noise", True)}
    assert protocols["ssl", False] == protocols["noise", False]
    assert protocols["ssl", True] == protocols["noise", True] == protocols["ssl", False][:-2]
    shapes = [(row["features"], row["whitened"], row["metric"]) for row in report["geometry"]]
    assert len(shapes) == len(set(shapes)) == 2 * 2 * 4


def test_each_number_is_that_of_its_own_function(report):
    train, test = pair()
    white = whiten(train, test)
    expected = [
        *knn_results(train, test),
        *knn_results(train, test, vote="majority"),
        *linear_probe(train, test),
        *few_shot_knn(train, test, labels_per_class=10, k=[10]),
        *few_shot_knn(train, test, labels_per_class=1, k=[1]),
        *ridge_probe(train, test),
        *retrieval(test, test, exclude_same_id=True),
        *verification(test, test),
    ]
    rows = {
        (r["features"], r["whitened"], r["protocol"], r["metric"]): r["value"]
        for r in report["rows"]
    }
    for result in expected:
        assert rows["ssl", False, result.protocol, result.metric] == result.value
    for result in knn_results(*white):
        assert rows["ssl", True, result.protocol, result.metric] == result.value


def test_the_table_has_one_number_a_cell_and_knn_there_has_k_20(report):
    assert report["columns"][0] == "kNN"
    assert report["columns"][-1] == "linear"
    cells = [(r["features"], r["whitened"], r["column"]) for r in report["rows"] if r["column"]]
    assert len(cells) == len(set(cells))
    in_table = {r["protocol"] for r in report["rows"] if r["column"] == "kNN"}
    assert in_table == {"knn-weighted k=20 T=0.07 cosine"}


def test_what_cannot_be_measured_is_reported():
    train, test = pair(n=80)
    report = run_suite({"ssl": (train, test)}, {})
    assert report["columns"] == ["kNN", "kNN, 10/class", "linear"]
    assert len(report["left_out"]) == 1
    assert report["left_out"][0].startswith("kNN with 100 labels a class: the smallest class")


def test_the_report_is_plain_json(report):
    assert json.loads(json.dumps(report)) == json.loads(json.dumps(report, allow_nan=False))
    assert report["schema_version"] == 1


def test_sets_of_other_samples_are_refused():
    train, test = pair()
    other = test._replace(ids=test.ids + 1)
    with pytest.raises(DataError, match="test features of 'b' and 'a' are not of the same samples"):
        run_suite({"a": (train, test), "b": (train, other)}, {})
    with pytest.raises(DataError, match="no set"):
        run_suite({}, {})


@pytest.mark.parametrize("name", EVALS)
def test_every_eval_takes_a_bank_and_queries_and_gives_results_in_zero_to_one(name):
    options = {
        "few-shot": {"labels_per_class": 5},
        "knn": {"k": (5,)},
        "sgd": {"epochs": 5},
        "verification": {"pairs": 500, "far": (0.1,)},
    }
    bank, queries = pair()
    if name == "stability":  # two checkpoints, one split
        bank = noise_of(queries)
    results = EVALS[name](bank, queries, **options.get(name, {}))
    assert len({(result.protocol, result.metric) for result in results}) == len(results) > 0
    if name in ("geometry", "stability"):  # not accuracies: tests of their own
        return
    for result in results:
        assert 0 <= result.interval95[0] <= result.value <= result.interval95[1] <= 1
    assert results[0].interval95[0] > 0.25
