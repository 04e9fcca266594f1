"""Logistic regression against scikit-learn; C is chosen on train alone; test is read once."""

import inspect

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from sslpipe.errors import DataError
from sslpipe.evaluation.linear_probe import (
    choose_c,
    fit_logistic,
    holdout_rows,
    linear_probe,
    predict,
    standardisation,
)
from tests.test_evaluation_knn import random_rows, rows


@pytest.mark.parametrize("c", [1e-3, 1.0, 30.0])
def test_the_solution_equals_scikit_learns(c):
    data = random_rows(400, 12, 5, seed=1)
    mean, scale = standardisation(data.features)
    x = (data.features - mean) / scale
    (ours,) = fit_logistic(x, data.labels, [c], 5, tolerance=1e-9)
    theirs = LogisticRegression(C=c, tol=1e-10, max_iter=10000)
    theirs.fit(x.double().numpy(), data.labels.numpy())  # in float32 it stops at 1e-4
    # both tend to the one minimiser (the penalty is strictly convex in the weight)
    np.testing.assert_allclose(ours.weight.numpy().T, theirs.coef_, atol=2e-5)
    bias = ours.bias.numpy() - ours.bias.numpy().mean()  # adding a number to all changes nothing
    np.testing.assert_allclose(bias, theirs.intercept_ - theirs.intercept_.mean(), atol=2e-5)
    np.testing.assert_array_equal(predict(ours, x).numpy(), theirs.predict(x.numpy()))


def test_a_path_of_penalties_ends_where_each_fit_alone_does():
    data = random_rows(300, 8, 4, seed=2)
    x = data.features.double()
    path = list(fit_logistic(x, data.labels, [1e-3, 0.1, 10.0], 4, tolerance=1e-8))
    (alone,) = fit_logistic(x, data.labels, [10.0], 4, tolerance=1e-8)
    torch.testing.assert_close(path[2].weight, alone.weight, rtol=0, atol=1e-5)


def test_the_probe_equals_scikit_learn_at_the_chosen_c():
    train, test = random_rows(600, 10, 5, seed=3), random_rows(200, 10, 5, seed=4)
    (result,) = linear_probe(train, test)
    mean, scale = standardisation(train.features)
    model = LogisticRegression(C=result.details["C"], tol=1e-8, max_iter=5000)
    model.fit(((train.features - mean) / scale).numpy(), train.labels.numpy())
    predicted = model.predict(((test.features - mean) / scale).numpy())
    assert result.value == pytest.approx((predicted == test.labels.numpy()).mean())
    confusion = np.zeros((5, 5), int)
    np.add.at(confusion, (test.labels.numpy(), predicted), 1)
    assert result.details["confusion"] == confusion.tolist()
    assert result.details["per_class"] == pytest.approx(
        (confusion.diagonal() / confusion.sum(1)).tolist()
    )
    assert (result.queries, result.bank) == (200, 600)


def test_c_is_the_best_on_the_held_out_part_and_test_is_never_seen():
    assert "test" not in inspect.signature(choose_c).parameters
    train = random_rows(200, 60, 3, seed=5)  # few rows, many features: C matters
    chosen, scores = choose_c(train, grid=(1e-4, 1e-2, 1.0), holdout=0.2, seed=0, num_classes=3)
    held = holdout_rows(train, 0.2, 0)
    fit, check = train.rows(~held), train.rows(held)
    mean, scale = standardisation(fit.features)
    for c, score in scores.items():
        model = LogisticRegression(C=c, tol=1e-8, max_iter=5000)
        model.fit(((fit.features - mean) / scale).numpy(), fit.labels.numpy())
        theirs = model.score(((check.features - mean) / scale).numpy(), check.labels.numpy())
        assert score == pytest.approx(theirs, abs=1 / len(check.ids) + 1e-9)  # one borderline row
    assert chosen == min(c for c in scores if scores[c] == max(scores.values()))


def test_test_labels_change_the_score_and_nothing_else():
    train, test = random_rows(300, 6, 3, seed=6), random_rows(100, 6, 3, seed=7)
    wrong = test._replace(labels=(test.labels + 1) % 3)
    (a,), (b,) = linear_probe(train, test), linear_probe(train, wrong)
    assert a.details["C"] == b.details["C"]
    assert a.details["holdout_top1"] == b.details["holdout_top1"]
    columns = [np.array(r.details["confusion"]).sum(0).tolist() for r in (a, b)]
    assert columns[0] == columns[1]  # the same predictions
    assert a.value > b.value


def test_the_held_out_part_is_stratified_and_the_same_for_every_order_of_rows():
    train = rows(np.zeros((103, 1)), [0] * 50 + [1] * 50 + [2] * 3)
    held = holdout_rows(train, 0.2, seed=1)
    assert torch.bincount(train.labels[held]).tolist() == [10, 10, 1]
    shuffled = train.rows(torch.randperm(103, generator=torch.Generator().manual_seed(0)))
    again = shuffled.ids[holdout_rows(shuffled, 0.2, seed=1)]
    assert sorted(again.tolist()) == train.ids[held].tolist()
    assert not torch.equal(held, holdout_rows(train, 0.2, seed=2))


def test_constant_features_and_their_scale_do_no_harm():
    train, test = random_rows(300, 6, 3, seed=8), random_rows(100, 6, 3, seed=9)

    def widened(data):
        constant = torch.full((len(data.ids), 1), 1e4)
        return data._replace(features=torch.cat([data.features * 1e3, constant], 1))

    (plain,), (wide,) = linear_probe(train, test), linear_probe(widened(train), widened(test))
    assert plain.value == wide.value


def test_a_c_at_the_edge_of_the_grid_is_said():
    train, test = random_rows(300, 6, 3, seed=8), random_rows(100, 6, 3, seed=9)
    assert linear_probe(train, test, grid=(1e-7, 1e-1))[0].details["C_at_edge"]
    assert not linear_probe(train, test, grid=(1e-9, 1e-1, 1e-8, 1e9))[0].details["C_at_edge"]


@pytest.mark.parametrize(
    ("options", "told"),
    [({"holdout": 1.0}, "between 0 and 1"), ({"grid": ()}, "C > 0"), ({"grid": (0,)}, "C > 0")],
)
def test_wrong_options_are_one_clear_error(options, told):
    data = random_rows(30, 4, 3, seed=1)
    with pytest.raises(DataError, match=told):
        linear_probe(data, data, **options)


def test_a_class_with_a_single_row_cannot_be_held_out():
    data = rows(np.eye(3), [0, 0, 1])
    with pytest.raises(DataError, match="class 1 has one train row"):
        linear_probe(data, data)
