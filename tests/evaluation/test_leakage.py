"""Numbers without leaked test samples: as if these had never been in the test."""

import json

import numpy as np
import pytest
import torch

from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.knn import few_shot_knn, knn_results
from sslpipe.evaluation.linear_probe import linear_probe
from sslpipe.evaluation.suite import run_suite
from sslpipe.evaluation.suite_file import check_report, content_sha256
from sslpipe.evaluation.verdict import leakage_sentence
from sslpipe.report.results import leakage

pytestmark = pytest.mark.usefixtures("few_resamples")
LEAKED = 60


@pytest.fixture(scope="module")
def planted():
    """Random features with random labels, but for 60 of 160 test rows, which are rows of train."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(360, 16, generator=generator)
    labels = torch.randint(0, 4, (360,), generator=generator)
    train = Embeddings(features[:200], labels[:200], torch.arange(200))
    copied = torch.arange(LEAKED) * 3
    test_features, test_labels = features[200:].clone(), labels[200:].clone()
    test_features[:LEAKED] = train.features[copied] + 1e-4
    test_labels[:LEAKED] = train.labels[copied]
    test = Embeddings(test_features, test_labels, torch.arange(160))
    return train, test


@pytest.fixture(scope="module")
def reports(planted):
    """The report without, and with, a look for leaks."""
    sets = {"ssl": planted}
    leaked = np.arange(LEAKED)
    return run_suite(sets, {}), run_suite(sets, {}, leaked=leaked, leaked_by="by hand")


def row_of(report, column):
    rows = report["leakage"]["rows"]
    return next(row for row in rows if (row["column"], row["whitened"]) == (column, False))


def test_without_leaks_knn_falls_by_what_was_planted(planted, reports):
    train, test = planted
    found = reports[1]["leakage"]
    assert (found["samples"], found["leaked"], found["how"]) == (160, LEAKED, "by hand")
    row = row_of(reports[1], "kNN")
    # brute force: similarities, a weighted vote of 20, over the clean rows alone
    unit = [torch.nn.functional.normalize(side.features.double(), dim=1) for side in planted]
    top = (unit[1] @ unit[0].T).topk(20, dim=1)
    votes = torch.zeros(160, 4, dtype=torch.float64)
    votes.scatter_add_(1, train.labels[top.indices], (top.values / 0.07).exp())
    right = votes.argmax(1) == test.labels
    assert row["value"] == pytest.approx(right.double().mean().item(), abs=1e-12)
    assert row["clean_value"] == pytest.approx(right[LEAKED:].double().mean().item(), abs=1e-12)
    assert right[:LEAKED].all(), "what was planted is found"
    lost = row["value"] * 160 - row["clean_value"] * 100
    assert lost == pytest.approx(LEAKED), "exactly the planted ones were right by their copies"
    assert row["clean_value"] < 0.45 < row["value"]


def test_each_number_is_that_of_a_test_without_them(planted, reports):
    train, test = planted
    clean = test.rows(torch.arange(LEAKED, 160))
    (knn,) = [r for r in knn_results(train, clean, k=[20], vote="weighted")]
    (linear,) = linear_probe(train, clean)
    (few,) = few_shot_knn(train, clean, labels_per_class=10, k=[10])
    for column, result in (("kNN", knn), ("linear", linear), ("kNN, 10/class", few)):
        row = row_of(reports[1], column)
        assert row["clean_value"] == pytest.approx(result.value, abs=1e-12)
        assert row["clean_interval95"] == pytest.approx(list(result.interval95), abs=1e-12)
        assert (row["clean_queries"], row["queries"]) == (100, 160)


def test_a_test_that_is_all_leaked_has_no_clean_number(planted):
    report = run_suite({"ssl": planted}, {}, leaked=np.arange(160), leaked_by="by hand")
    assert all(row["clean_value"] is None for row in report["leakage"]["rows"])
    sentence = leakage_sentence(report["leakage"])
    assert sentence.startswith("160 of 160 test samples (100 %) have")
    assert "nothing is left" in sentence
    assert "none is left" in leakage(report)
    check_report(json.loads(json.dumps(report)))


def test_the_report_is_plain_json_shown_and_otherwise_the_same(reports):
    plain, tree = json.loads(json.dumps(reports))
    assert {key: plain[key] for key in plain if key != "sha256"} == {
        key: tree[key] for key in tree if key not in ("leakage", "sha256")
    }
    check_report(tree)
    assert tree["sha256"] == content_sha256(tree)
    assert leakage(plain) == ""
    assert "<th scope='row'>this run</th>" in leakage(tree)
    assert "ssl" not in leakage(tree)
    row = row_of(tree, "kNN")
    said = f"kNN is {100 * row['value']:.1f} % on all 160, {100 * row['clean_value']:.1f} % on the "
    sentence = leakage_sentence(tree["leakage"])
    assert sentence.startswith("60 of 160 test samples (38 %) have a near-duplicate in train (by ")
    assert sentence.endswith(f"(by hand): {said}other 100. The verdict is on all of them.")
    pixels = leakage_sentence({**tree["leakage"], "how": "by pixels"})
    assert pixels.endswith("; `sslpipe curate duplicates DATA --out DIR` lists the pairs.")
    tree["leakage"]["rows"][0] |= {"features": "mine", "clean_value": 1.5}
    assert ": mine, kNN is" in leakage_sentence(tree["leakage"])
    del tree["sha256"]
    with pytest.raises(ValueError, match=r"leakage.rows.0.clean_value"):
        check_report(tree)
