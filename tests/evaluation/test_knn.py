"""kNN against brute force in float64, with ties, missing classes and every kind of array."""

import numpy as np
import pytest
import torch

from sslpipe.errors import DataError
from sslpipe.evaluation.arrays import knn
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.few_shot import few_rows, few_shot_knn
from sslpipe.evaluation.intervals import wilson95
from sslpipe.evaluation.knn import knn_results
from sslpipe.evaluation.neighbours import nearest


def rows(features, labels, first_id=0):
    features = torch.as_tensor(np.asarray(features, np.float32))
    labels = torch.as_tensor(np.asarray(labels, np.int64))
    return Embeddings(features, labels, torch.arange(first_id, first_id + len(labels)))


def random_rows(n, width, classes, seed, first_id=0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(classes, size=n)
    centres = np.random.default_rng(99).normal(size=(classes, width))
    return rows(centres[labels] + 2 * rng.normal(size=(n, width)), labels, first_id)


def tied_rows(n, width, classes, seed, first_id=0):
    """Few different vectors, so that nearly every similarity is shared by many rows."""
    rng = np.random.default_rng(seed)
    return rows(rng.integers(1, 3, (n, width)), rng.integers(classes, size=n), first_id)


def collapsed_rows(n, width, classes, seed, first_id=0):
    """All cosines within 1e-7, where a float32 product alone is noise."""
    data = random_rows(n, width, classes, seed, first_id)
    return data._replace(features=1 + 1e-4 * data.features)


def brute_similarities(bank, queries, removed=()):
    """(Q, N) float32 from integers: components in 2^-24, one exact dot product a pair.

    -inf for the removed pairs of a query's id and a row's.
    """

    def unit(x):
        lengths = [max(float(np.sqrt((row.astype(np.float64) ** 2).sum())), 1e-300) for row in x]
        return np.rint(x.astype(np.float64) / np.array(lengths)[:, None] * 2**24).astype(np.int64)

    b, q = unit(bank.features.numpy()), unit(queries.features.numpy())
    table = np.array([[np.float32(int(np.dot(u, v)) / 2**48) for v in b] for u in q])
    for query, row in set(removed):
        table[np.ix_(queries.ids.numpy() == query, bank.ids.numpy() == row)] = -np.inf
    return table


def brute_knn(bank, queries, k, temperature, vote, removed=()):
    """Loops: nearest first, ties by row; the class with most votes, among equals the first met."""
    predicted = []
    for similarities in brute_similarities(bank, queries, removed):
        order = sorted(range(len(similarities)), key=lambda j: (-similarities[j], j))[:k]
        votes, first = {}, {}
        for rank, j in enumerate(order):
            label = int(bank.labels[j])
            s = float(similarities[j]) - float(similarities[order[0]])
            votes[label] = votes.get(label, 0.0) + (
                np.exp(s / temperature) if vote == "weighted" else 1
            )
            first.setdefault(label, rank)
        most = max(votes.values())
        predicted.append(min((first[c], c) for c in votes if votes[c] == most)[1])
    return np.array(predicted)


@pytest.mark.promise(6)
@pytest.mark.parametrize("vote", ["weighted", "majority"])
@pytest.mark.parametrize("make", [random_rows, tied_rows, collapsed_rows])
def test_knn_equals_brute_force_in_float64(make, vote):
    bank, queries = make(150, 6, 5, seed=1), make(40, 6, 5, seed=2, first_id=1000)
    # labels that floats do not tell apart
    bank, queries = (each._replace(labels=each.labels + 2**62) for each in (bank, queries))
    ks, labels = (1, 4, 20, 150), queries.labels.numpy()
    for k, result in zip(ks, knn_results(bank, queries, k=ks, vote=vote), strict=True):
        hits = brute_knn(bank, queries, k, 0.07, vote) == labels
        np.testing.assert_array_equal(result.scores, hits)
    both = [knn_results(bank, queries, k=ks, vote=one) for one in ("weighted", "majority")]
    assert knn_results(bank, queries, k=ks, vote="both") == both[0] + both[1]


def test_the_order_of_the_features_changes_no_bit_of_a_similarity():
    bank, queries = random_rows(500, 96, 5, seed=3).features, random_rows(20, 96, 5, 4).features
    other = torch.randperm(96, generator=torch.Generator().manual_seed(0))
    actual = nearest(bank, queries, 50)
    again = nearest(bank[:, other], queries[:, other], 50)
    assert torch.equal(actual.indices, again.indices)
    assert torch.equal(actual.similarities, again.similarities)


def test_leave_one_out_removes_a_query_by_its_id_and_nothing_else():
    bank = random_rows(120, 6, 4, seed=6)
    shuffled = bank.rows(torch.randperm(120, generator=torch.Generator().manual_seed(0)))
    (found,) = knn_results(bank, shuffled, k=(5,), exclude_same_id=True)
    expected = brute_knn(bank, shuffled, 5, 0.07, "weighted", [(i, i) for i in range(120)])
    np.testing.assert_array_equal(found.scores, expected == shuffled.labels.numpy())
    (with_itself,) = knn_results(bank, bank, k=(1,))
    assert with_itself.value == 1.0
    (without,) = knn_results(bank, bank, k=(1,), exclude_same_id=True)
    assert without.value < 1.0


def test_classes_missing_on_either_side_do_not_shift_the_others():
    bank = rows([[1, 0], [0.9, 0.1], [0, 1]], [2, 2, 7])
    queries = rows([[1, 0.05], [0.1, 1], [1, 0]], [2, 7, 5], first_id=10)
    for result in knn_results(bank, queries, k=(1,), vote="both"):
        assert result.scores.tolist() == [True, True, False]  # the third as a 2


def test_the_scale_of_features_does_not_matter_and_a_small_temperature_stays_finite():
    bank, queries = random_rows(200, 6, 5, seed=9), random_rows(50, 6, 5, seed=10)
    scaled = Embeddings(queries.features * 1e-6, queries.labels, queries.ids)
    assert knn_results(bank, queries, k=(20,)) == knn_results(bank, scaled, k=(20,))
    (sharp,) = knn_results(bank, queries, k=(20,), temperature=1e-5)
    (first,) = knn_results(bank, queries, k=(1,))
    assert sharp.scores.tolist() == first.scores.tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: (b, {"k": (10, 51)}), "k = 51 does not fit a bank of 50 rows"),
        (lambda b: (b, {"k": (50,), "exclude_same_id": True}), "use 1 <= k <= 49"),
        (lambda b: (b, {"k": (0,)}), "k = 0"),
        (lambda b: (b, {"temperature": 0.0}), "must be > 0"),
        (lambda b: (b._replace(labels=0 * b.labels - 1), {}), "50 of 50 rows have no label"),
        (lambda b: (b._replace(labels=b.labels.int()), {}), "not int64"),
        (lambda b: (b._replace(features=b.features.double()), {}), "not float32"),
        (lambda b: (b._replace(features=b.features * torch.nan), {}), "50 of"),
        (lambda b: (b._replace(features=b.features[:, :3]), {}), "different backbones"),
        (lambda b: (b.rows(torch.arange(0)), {}), "no rows"),
    ],
)
def test_wrong_input_is_one_clear_error(change, message):
    full = random_rows(50, 4, 3, 1)
    bank, options = change(full)
    with pytest.raises(DataError) as error:
        knn_results(bank, full, **{"k": (5,), **options})
    assert message in str(error.value)


def test_few_shot_takes_n_rows_of_each_class_and_other_rows_in_each_draw():
    bank = random_rows(300, 6, 5, seed=11)
    draws = [few_rows(bank, 7, 0, draw) for draw in range(3)]
    assert all(torch.bincount(bank.labels[rows]).tolist() == [7] * 5 for rows in draws)
    assert not torch.equal(draws[0], draws[1])
    backwards = bank.rows(torch.arange(299, -1, -1))
    again = backwards.ids[few_rows(backwards, 7, 0, 0)]
    assert sorted(again.tolist()) == sorted(bank.ids[draws[0]].tolist())


def test_few_shot_is_the_mean_over_its_draws():
    bank, queries = random_rows(300, 6, 5, seed=11), random_rows(80, 6, 5, seed=12)
    (result,) = few_shot_knn(bank, queries, labels_per_class=7, k=(5,))
    labels, banks = queries.labels.numpy(), [bank.rows(few_rows(bank, 7, 0, d)) for d in range(5)]
    expected = [(brute_knn(few, queries, 5, 0.07, "weighted") == labels).mean() for few in banks]
    assert result.details["draws"] == pytest.approx(expected)
    assert result.value == pytest.approx(np.mean(expected))
    assert result.details["spread"] == pytest.approx(np.std(expected, ddof=1))
    assert (result.bank, result.queries) == (35, 80)
    assert result.interval95[0] < result.value < result.interval95[1]
    with pytest.raises(DataError, match="labels_per_class = 100; ask for fewer"):
        few_shot_knn(bank, queries, labels_per_class=100)


def test_the_matmul_precision_of_training_is_restored():
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        nearest(torch.randn(50, 4), torch.randn(5, 4), 3)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


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
        (
            {"train_features": np.zeros((0, 4)), "train_labels": []},
            r"train_features has no rows.* \(0, 4\)",
        ),
        (
            {"train_labels": ["ape"] * 60},
            "train_labels are <U3 and test_labels int64; give both as",
        ),
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
