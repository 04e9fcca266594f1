"""Evaluations of plain arrays against loops and scikit-learn at fixed inputs."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

import sslpipe
from sslpipe.errors import DataError


def blobs(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of four classes that overlap."""
    rng = np.random.default_rng(seed)
    labels = np.arange(rows) % 4
    centres = np.eye(4, 8) * 2.0
    return centres[labels] + rng.normal(size=(rows, 8)), labels


TRAIN = blobs(200, 0)
TEST = blobs(101, 1)


def units(features: np.ndarray) -> np.ndarray:
    return features / np.linalg.norm(features, axis=1, keepdims=True)


def test_a_linear_probe_is_scikit_learns_at_the_chosen_c():
    result = sslpipe.linear_probe(*TRAIN, *TEST)
    mean, std = TRAIN[0].mean(0), TRAIN[0].std(0)
    fit = LogisticRegression(C=result.details["C"], max_iter=10_000, tol=1e-8)
    fit.fit((TRAIN[0] - mean) / std, TRAIN[1])
    expected = (fit.predict((TEST[0] - mean) / std) == TEST[1]).mean()
    assert result.value == pytest.approx(expected, abs=1e-9)
    assert result.queries == 101


def test_retrieval_is_that_of_a_loop():
    results = sslpipe.retrieval(*TRAIN, *TEST, k=(1, 5))
    cosines = units(TEST[0]) @ units(TRAIN[0]).T
    order = np.argsort(-cosines, axis=1)
    hits = TRAIN[1][order] == TEST[1][:, None]
    assert results["Recall@1"].value == pytest.approx(hits[:, 0].mean())
    assert results["Recall@5"].value == pytest.approx(hits[:, :5].any(1).mean())


def test_a_gallery_alone_is_searched_without_the_query():
    results = sslpipe.retrieval(torch.tensor(TEST[0]), list(TEST[1]), k=(1,))
    cosines = units(TEST[0]) @ units(TEST[0]).T
    np.fill_diagonal(cosines, -2)
    hits = TEST[1][cosines.argmax(1)] == TEST[1]
    assert results["Recall@1"].value == pytest.approx(hits.mean())
    assert results["Recall@1"].value < 1


def test_verification_is_scikit_learns_auc_over_all_pairs():
    features, labels = blobs(30, 2)
    rows, columns = np.triu_indices(30, 1)
    cosines = (units(features) @ units(features).T)[rows, columns]
    same = labels[rows] == labels[columns]
    results = sslpipe.verification(features, labels, pairs=1000, far=(0.1,))
    assert results["auc"].value == pytest.approx(roc_auc_score(same, cosines), abs=1e-6)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: sslpipe.retrieval(*TRAIN, TEST[0]), "query_labels"),
        (lambda: sslpipe.retrieval(*TRAIN, TEST[0], TEST[1][:-1]), "query_features"),
        (lambda: sslpipe.linear_probe(*TRAIN, TEST[0][:, :3], TEST[1]), "test_features"),
        (lambda: sslpipe.verification(TRAIN[0], TRAIN[1] * 0.5), "labels"),
    ],
)
def test_an_error_names_the_argument(call, name):
    with pytest.raises(DataError, match=name):
        call()
