"""`sslpipe.knn` on plain arrays: every dtype gives one answer, every mismatch one clear error."""

import numpy as np
import pytest
import torch

from sslpipe.errors import DataError
from sslpipe.evaluation.difference import wilson95
from sslpipe.evaluation.knn import knn

CLASSES = 3


def clusters(rows, seed):
    """Features (rows, 4) in multiples of 1/8, exact in bfloat16 too, and their labels."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(CLASSES, size=rows)
    noise = rng.integers(-8, 9, (rows, 4)) / 8
    return 1.5 * np.eye(CLASSES, 4)[labels] + noise, labels


TRAIN, TEST = clusters(60, 0), clusters(50, 1)


def by_loops(train, test, k):
    """Share of queries whose k nearest, weighted by exp(cosine / 0.07), vote for their label."""
    right = 0
    for query, label in zip(*test, strict=True):
        cosines = train[0] @ query / np.linalg.norm(train[0], axis=1) / np.linalg.norm(query)
        votes = np.zeros(CLASSES)
        for row in np.argsort(-cosines, kind="stable")[:k]:
            votes[train[1][row]] += np.exp(cosines[row] / 0.07)
        right += votes.argmax() == label
    return right


FEATURES = {
    "numpy float16": lambda x: x.astype(np.float16),
    "numpy float32": lambda x: x.astype(np.float32),
    "numpy float64, strided": lambda x: np.repeat(x, 2, axis=1)[:, ::2],
    "torch float16": lambda x: torch.tensor(x, dtype=torch.float16),
    "torch bfloat16": lambda x: torch.tensor(x, dtype=torch.bfloat16),
    "torch float32 with gradient": lambda x: torch.tensor(x).float().requires_grad_(),
    "torch float64": lambda x: torch.tensor(x),
    "lists": lambda x: x.tolist(),
}
LABELS = {
    "list": lambda y: y.tolist(),
    "numpy uint8": lambda y: y.astype(np.uint8),
    "numpy uint64": lambda y: y.astype(np.uint64),
    "torch int32": lambda y: torch.tensor(y, dtype=torch.int32),
    "torch int64": lambda y: torch.tensor(y),
}


@pytest.mark.parametrize(
    ("features", "labels"),
    [(name, "torch int64") for name in FEATURES]
    + [("torch float32 with gradient", n) for n in LABELS],
)
def test_every_kind_of_array_gives_the_accuracy_of_plain_loops(features, labels):
    changes = (FEATURES[features], LABELS[labels]) * 2
    arrays = [change(each) for each, change in zip((*TRAIN, *TEST), changes, strict=True)]
    before = [np.array(each) for each in (*TRAIN, *TEST)]
    right = by_loops(TRAIN, TEST, k=5)
    assert 0.5 < right / 50 < 1
    result = knn(*arrays, k=5)
    assert result.value == right / 50
    assert result.interval95 == wilson95(right, 50)
    assert (result.queries, result.bank) == (50, 60)
    low, high = result.interval95
    assert str(result) == (
        f"knn-weighted k=5 T=0.07 cosine: top1 {right / 50:.4g} [{low:.4g}, {high:.4g}], "
        "50 queries, bank of 60"
    )
    assert all((a == b).all() for a, b in zip(before, (*TRAIN, *TEST), strict=True)), "changed"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_labels": [0] * 59}, "train_features has 60 rows and train_labels 59; each row"),
        ({"test_labels": np.zeros(51, int)}, "test_features has 50 rows and test_labels 51"),
        ({"test_features": TEST[0][:, :3]}, "train_features have 4 columns and test_features 3"),
        ({"test_features": TEST[0][0]}, r"test_features must be floats .* not float64 \(4,\)"),
        ({"train_features": np.zeros((60, 4), int)}, "train_features must be floats .* not int64"),
        ({"train_features": np.zeros((0, 4)), "train_labels": []}, r"not float64 \(0, 4\)"),
        ({"train_labels": ["ape"] * 60}, "train_labels must be integers .* number the classes"),
        ({"test_labels": TEST[1] * 1.0}, r"test_labels must be integers .* not float64 \(50,\)"),
        ({"train_labels": np.full(60, 2**63, np.uint64)}, "beyond int64"),
        ({"train_labels": TRAIN[1] - 5}, "label"),
        ({"test_features": TEST[0] + np.inf}, "finite"),
        ({"train_features": TRAIN[0] * 1e300}, "finite"),
        ({"k": 61}, "k = 61 does not fit a bank of 60 rows; use 1 <= k <= 60"),
    ],
)
def test_a_mismatch_is_one_clear_error(change, message):
    names = ("train_features", "train_labels", "test_features", "test_labels")
    arguments = dict(zip(names, (*TRAIN, *TEST), strict=True)) | {"k": 5} | change
    k = arguments.pop("k")
    with pytest.raises(DataError, match=message):
        knn(*arguments.values(), k=k)
