"""Evaluations of plain arrays against loops and scikit-learn at fixed inputs."""

import re

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import normalized_mutual_info_score, roc_auc_score

import sslpipe
from sslpipe.errors import DataError, UserError
from sslpipe.evaluation.array_rows import embeddings_from_arrays
from sslpipe.evaluation.embed import Embeddings, SplitEmbeddings
from sslpipe.evaluation.few_shot import few_shot_knn


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


def test_queries_that_are_rows_of_the_gallery_would_find_themselves_and_are_refused():
    features, labels = TRAIN
    for part in (slice(None), slice(20, 60)):
        with pytest.raises(DataError, match=r"would find itself; leave these rows out of the bank"):
            sslpipe.retrieval(features, labels, features[part], labels[part])
    others = np.concatenate([features[20:60], TEST[0][:1]])
    sslpipe.retrieval(features, labels, others, np.append(labels[20:60], TEST[1][0]))
    same = np.ones_like(features)  # of a network that collapsed: a number says so
    sslpipe.retrieval(same, labels, same, labels)


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


def test_clusters_are_those_of_scikit_learn_by_every_start():
    features, labels = TEST
    rows = units(features).astype(np.float32)
    scores = [
        normalized_mutual_info_score(
            labels, KMeans(4, n_init=1, random_state=7 + start, max_iter=100).fit_predict(rows)
        )
        for start in range(5)
    ]
    results = sslpipe.clustering(features, np.array(["a", "b", "c", "d"])[labels], seed=7)
    assert results["nmi"].value == pytest.approx(np.mean(scores), abs=1e-6)
    assert 0 < results["ami"].value < results["nmi"].value < 1


def test_few_labels_are_scored_as_of_files():
    train, test = (embeddings_from_arrays(*side, "") for side in (TRAIN, TEST))
    (few,) = few_shot_knn(train, test, labels_per_class=3, k=[2], seed=5)
    assert sslpipe.knn(*TRAIN, *TEST, labels_per_class=3, k=2, seed=5) == few
    assert len(few.details["draws"]) == 5
    with pytest.raises(DataError, match=r"labels_per_class = 900"):
        sslpipe.knn(*TRAIN, *TEST, labels_per_class=900)


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


def test_labels_may_be_names_of_classes():
    names = np.array(["oak", "ash", "étoile", "elm"])
    order = np.argsort(np.argsort(names))  # the number of each name, in their order
    texts = [names[side[1]] for side in (TRAIN, TEST)]
    numbers = [order[side[1]] for side in (TRAIN, TEST)]
    forms = (lambda rows: rows, list, lambda rows: rows.astype(object))
    for measure in (sslpipe.knn, sslpipe.linear_probe):
        expected = measure(TRAIN[0], numbers[0], TEST[0], numbers[1])
        for form in forms:
            found = measure(TRAIN[0], form(texts[0]), TEST[0], form(texts[1]))
            assert found.value == expected.value
    assert found.details["classes"] == sorted(names.tolist())
    assert found.details["per_class"] == expected.details["per_class"]
    for gallery_alone in (sslpipe.retrieval, sslpipe.verification):
        assert gallery_alone(TEST[0], texts[1]) == gallery_alone(TEST[0], numbers[1])
    # a class that one side alone has moves no other's number
    lacking = np.flatnonzero(texts[1] != "ash")
    some = sslpipe.knn(TRAIN[0], texts[0], TEST[0][lacking], texts[1][lacking])
    assert some.value == sslpipe.knn(*TRAIN, TEST[0][lacking], TEST[1][lacking]).value


def test_labels_and_features_may_be_as_pandas_and_hdf5_give_them():
    expected = sslpipe.knn(*TRAIN, *TEST)
    numbers = [side[1].astype(object) for side in (TRAIN, TEST)]  # pandas' Int64
    assert sslpipe.knn(TRAIN[0], numbers[0], TEST[0], numbers[1]) == expected
    texts = [side[1].astype("S") for side in (TRAIN, TEST)]
    assert sslpipe.knn(TRAIN[0], texts[0], TEST[0], texts[1]) == expected
    accented = [np.char.add("é", side[1].astype("U")) for side in (TRAIN, TEST)]
    for kind in ("S", object):
        stored = [np.char.encode(side, "utf-8").astype(kind) for side in accented]
        assert sslpipe.knn(TRAIN[0], stored[0], TEST[0], stored[1]).value == expected.value
    big_endian = [side[0].astype(">f8") for side in (TRAIN, TEST)]
    assert sslpipe.knn(big_endian[0], TRAIN[1], big_endian[1], TEST[1]) == expected
    yes = [side[1] == 0 for side in (TRAIN, TEST)]
    both = [sslpipe.knn(TRAIN[0], yes[0] * n, TEST[0], yes[1] * n).value for n in (True, 1)]
    assert both[0] == both[1]
    numbers[0][7] = 2**63
    with pytest.raises(DataError, match="beyond int64"):
        sslpipe.knn(TRAIN[0], numbers[0], *TEST)
    numbers[0][7] = None
    with pytest.raises(DataError, match=rf"labels\[7\] is None, no integer.* 1 of {len(TRAIN[0])}"):
        sslpipe.knn(TRAIN[0], numbers[0], *TEST)


@pytest.mark.parametrize("missing", [None, float("nan"), 3])
def test_a_row_without_a_text_is_no_class(missing):
    labels = ["a", "b"] * 50 + [missing]
    with pytest.raises(DataError, match=r"labels\[100\] is .*1 of 101"):
        sslpipe.retrieval(TEST[0], labels)


def test_texts_on_one_side_and_numbers_on_the_other_are_refused():
    with pytest.raises(DataError, match=r"train_labels .* test_labels"):
        sslpipe.knn(TRAIN[0], TRAIN[1].astype(str), *TEST)


@pytest.mark.parametrize("call", [sslpipe.knn, sslpipe.linear_probe])
def test_labels_of_which_none_can_be_right_are_refused(call):
    rows = np.eye(6, dtype=np.float32)
    for train, test in (("aabbcc", "ABCABC"), ([0, 0, 1, 1, 2, 2], [3, 4, 5, 3, 4, 5])):
        with pytest.raises(DataError, match=r"no class of the 6 queries .*label both alike"):
            call(rows, [*train], rows, [*test])
        assert 0 <= call(rows, [*train], rows, [*test[:5], train[0]]).value <= 1  # some can


def test_classes_too_small_are_named_by_a_row_as_labels_may_be_texts():
    features = TRAIN[0][:31]
    labels = ["cat", "dog", "emu"] * 10 + ["fox"]
    both = (features, labels, 2 * features, labels)
    assert sslpipe.linear_probe(*both).details["classes_of_one"] == 1  # which can be fitted
    with pytest.raises(DataError, match=r"class of row 30 has 1 rows .*labels_per_class = 5"):
        sslpipe.knn(*both, labels_per_class=5)
    with pytest.raises(DataError, match=r"7 pairs of one label and 21 of two.*give more rows"):
        sslpipe.verification(features[:8], labels[:8], far=[0.1])


def test_one_rank_in_place_of_a_list_is_named():
    with pytest.raises(UserError, match=r"k = 5 .*\[5\]"):
        sslpipe.retrieval(*TEST, k=5)
    with pytest.raises(UserError, match=r"far = 0.1 .*\[0.1\]"):
        sslpipe.verification(*TEST, far=0.1)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"train_features": np.where(np.arange(200)[:, None] == 7, np.nan, TRAIN[0])},
            "features[7]",
        ),
        ({"test_labels": np.where(np.arange(101) == 9, -1, TEST[1])}, "test_labels[9] is -1"),
        ({"train_features": TRAIN[0][:0], "train_labels": []}, "train_features has no rows"),
        ({"test_features": (9 * TEST[0]).astype(np.int16)}, "astype('float32')"),
        ({"train_features": "train.npy"}, "numpy.load(path)"),
        ({"train_labels": [[1], [1, 2]]}, "train_labels = "),
        ({"test_labels": [object()] * 101}, "test_labels[0] is"),
    ],
)
def test_a_row_that_cannot_be_scored_is_named_with_the_remedy(given, words):
    names = ("train_features", "train_labels", "test_features", "test_labels")
    usual = dict(zip(names, (*TRAIN, *TEST), strict=True))
    for measure in (sslpipe.knn, sslpipe.linear_probe):
        with pytest.raises(DataError, match=re.escape(words)) as refused:
            measure(**{**usual, **given})
        assert "\n" not in str(refused.value)


def test_embeddings_bring_their_labels():
    sides = [
        Embeddings(torch.tensor(rows), torch.tensor(labels), torch.arange(len(rows)))
        for rows, labels in (TRAIN, TEST)
    ]
    train, test = sides
    assert sslpipe.knn(train, train, test, test) == sslpipe.knn(*TRAIN, *TEST)
    assert sslpipe.retrieval(test, test) == sslpipe.retrieval(*TEST)


def test_embeddings_of_two_data_sets_are_compared_by_the_names_of_their_classes():
    train, test = (
        Embeddings(torch.tensor(rows), torch.tensor(labels), torch.arange(len(rows)))
        for rows, labels in (TRAIN, TEST)
    )
    names = [f"c{number}" for number in range(4)]
    other = test._replace(labels=len(names) - 1 - test.labels)  # numbered from the other end
    ours = SplitEmbeddings.of(train, {"classes": names})
    theirs = SplitEmbeddings.of(other, {"classes": names[::-1]})
    assert sslpipe.knn(ours, ours, theirs, theirs) == sslpipe.knn(*TRAIN, *TEST)
    with pytest.raises(DataError, match="train_labels have names and those"):
        sslpipe.knn(ours, ours, other, SplitEmbeddings.of(other, {"data_sha256": "of another"}))


def test_several_results_are_shown_a_line_each_and_a_wrong_metric_gives_the_nearest():
    found = sslpipe.retrieval(*TEST)
    first, *lines = repr(found).splitlines()
    assert first == f"{found['mAP'].protocol}: 101 queries, bank of 101"
    assert [line.split(" [")[0].rpartition(" ")[0] for line in lines] == [*found]
    assert all(str(each).startswith(first.split(":")[0]) for each in found.values())
    with pytest.raises(KeyError, match=r"recall@1.*did you mean 'Recall@1'.*MAP@R"):
        found["recall@1"]
    assert found.get("recall@1") is None


def test_none_right_is_an_interval_from_exactly_0():
    none = sslpipe.knn(*TRAIN, TRAIN[0], (TRAIN[1] + 1) % 4, k=1)
    every = sslpipe.knn(*TRAIN, *TRAIN, k=1)
    assert (none.value, none.interval95[0]) == (0, 0)
    assert (every.value, every.interval95[1]) == (1, 1)
    assert 0 < none.interval95[1] < 1 > every.interval95[0] > 0
