"""Logistic regression against scikit-learn; C is chosen on train alone; test is read once."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from sslpipe.errors import DataError
from sslpipe.evaluation import logistic
from sslpipe.evaluation.linear_probe import (
    holdout_rows,
    linear_probe,
    standardisation,
)
from sslpipe.evaluation.logistic import fit_logistic, predict
from sslpipe.evaluation.result import caveats
from tests.evaluation.test_knn import random_rows, rows


def sklearns_hits(value, fit, check):
    """Which rows of `check` scikit-learn has right, fitted on standardised features of `fit`."""
    mean, scale = standardisation(fit.features)
    x, asked = (((rows.features - mean) / scale).double().numpy() for rows in (fit, check))
    y = fit.labels.numpy()
    predicted = LogisticRegression(C=value, tol=1e-8, max_iter=5000).fit(x, y).predict(asked)
    return predicted, predicted == check.labels.numpy()


@pytest.mark.parametrize(
    ("c", "n", "width"), [(1e-3, 400, 12), (1.0, 400, 12), (30.0, 400, 12), (1.0, 30, 50)]
)
def test_the_solution_equals_scikit_learns(c, n, width):
    data = random_rows(n, width, 5, seed=1)
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


def test_a_grid_in_parts_is_the_same_search(monkeypatch):
    data = random_rows(300, 8, 4, seed=2)
    whole = linear_probe(data, data)
    monkeypatch.setattr(logistic, "GRID_PARAMETERS", 1)
    parts = linear_probe(data, data)
    assert parts[0].details["holdout_top1"] == whole[0].details["holdout_top1"]
    assert parts == whole


def test_a_search_in_float32_finds_the_solution_of_float64():
    data = random_rows(2000, 12, 5, seed=3)
    grid = [1e-5, 1e-2, 1.0, 1e3]
    options = {"tolerance": 1e-3, "dtype": torch.float32}
    rough = fit_logistic(data.features, data.labels, grid, 5, **options)
    exact = fit_logistic(data.features, data.labels, grid, 5, tolerance=1e-8)
    for a, b in zip(rough, exact, strict=True):  # what is left to gain is half of 1e-6
        torch.testing.assert_close(a.weight, b.weight, rtol=0, atol=5e-3)


@pytest.mark.promise(6)
def test_a_probe_is_scikit_learns_chosen_on_a_held_out_part_alone():
    train, test = random_rows(300, 40, 5, seed=3), random_rows(200, 40, 5, seed=4)
    (result,) = linear_probe(train, test, grid=(1e-4, 1e-2, 1.0), holdout=0.2)
    held = holdout_rows(train, 0.2, 0)
    fit, check = train.rows(~held), train.rows(held)
    scores = {float(each): score for each, score in result.details["holdout_top1"].items()}
    assert list(scores) == [1e-4, 1e-2, 1.0]
    for value, score in scores.items():
        theirs = sklearns_hits(value, fit, check)[1].mean()
        assert score == pytest.approx(theirs, abs=1 / len(check.ids) + 1e-9)  # one borderline row
    best = [value for value in scores if scores[value] == max(scores.values())]
    assert result.details["C"] == min(best)
    predicted, hits = sklearns_hits(result.details["C"], train, test)
    assert result.value == pytest.approx(hits.mean())
    confusion = np.zeros((5, 5), int)
    np.add.at(confusion, (test.labels.numpy(), predicted), 1)
    assert result.details["confusion"] == confusion.tolist()
    per_class = confusion.diagonal() / confusion.sum(1)
    assert result.details["per_class"] == pytest.approx(per_class.tolist())
    assert (result.queries, result.bank) == (200, 300)


def test_many_classes_have_no_confusion_matrix_and_too_many_are_refused():
    train = random_rows(440, 3, 220, seed=3)
    train = train._replace(labels=torch.arange(440) % 220)
    (result,) = linear_probe(train, train, grid=(1.0,))
    assert result.details["confusion"] is None
    assert len(result.details["per_class"]) == 220
    wide = rows(torch.zeros(2, 2000), [0, 60_000])
    with pytest.raises(DataError, match="parameters"):
        linear_probe(wide, wide)


@pytest.mark.promise(6)
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


@pytest.mark.parametrize("scale", [1e3, 1e-9, 1e-30])
def test_constant_features_and_their_scale_do_no_harm(scale):
    train, test = random_rows(300, 6, 3, seed=8), random_rows(100, 6, 3, seed=9)

    def widened(data):
        constant = torch.full((len(data.ids), 1), 10 * scale)
        return data._replace(features=torch.cat([data.features * scale, constant], 1))

    (plain,), (wide,) = linear_probe(train, test), linear_probe(widened(train), widened(test))
    assert plain.value == wide.value


def test_a_c_at_the_edge_and_a_fit_that_was_cut_short_are_reported(monkeypatch):
    train, test = random_rows(300, 6, 3, seed=8), random_rows(100, 6, 3, seed=9)

    def details(grid):
        return linear_probe(train, test, grid=grid)[0].details

    assert details((1e-7, 1e-1))["C_at_edge"]
    whole = details((1e-9, 1e-1, 1e-8, 1e9))
    assert (whole["C_at_edge"], whole["converged"], caveats(whole)) == (False, True, [])
    monkeypatch.setattr(logistic, "MAX_ITERATIONS", 2)
    cut = details((1.0, 10.0, 1e3))
    assert not cut["converged"]
    assert "the fit did not converge" in caveats(cut)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"holdout": 1.0}, "between 0 and 1"), ({"grid": ()}, "C > 0"), ({"grid": (0,)}, "C > 0")],
)
def test_wrong_options_are_one_clear_error(options, message):
    data = random_rows(30, 4, 3, seed=1)
    with pytest.raises(DataError, match=message):
        linear_probe(data, data, **options)


def test_classes_of_one_row_alone_choose_nothing():
    """Of none a row can be held out."""
    wrong = rows(np.eye(3), [0, 1, 2])
    with pytest.raises(DataError, match=r"each of the 3 classes of train has one row.*kNN"):
        linear_probe(wrong, wrong)


def test_the_only_row_of_a_class_is_fitted_and_never_held_out():
    """As in a long tail, of which a command line can leave no row out."""
    train, test = random_rows(60, 4, 3, seed=1), random_rows(40, 4, 3, seed=2)
    few = rows(np.eye(4)[:2] * 9, [3, 4])

    def with_few(data):
        return data._replace(
            features=torch.cat([data.features, few.features]),
            ids=torch.cat([data.ids, 1000 + few.ids]),
            labels=torch.cat([data.labels, few.labels]),
        )

    longer = with_few(train)
    assert not holdout_rows(longer, 0.2, 0)[-2:].any()
    assert torch.bincount(longer.labels[holdout_rows(longer, 0.2, 0)]).min() > 0
    (result,) = linear_probe(longer, with_few(test))
    assert result.details["per_class"][3:] == [1.0, 1.0]  # far from all others
    assert any("2 classes of one train row" in text for text in caveats(result.details))
    (plain,) = linear_probe(train, test)
    assert "classes_of_one" not in plain.details


def test_numbers_of_products_are_classes_that_are_counted():
    train, test = (random_rows(60, 4, 3, seed=seed) for seed in (1, 2))
    numbers = torch.tensor([10**9, 10**12 + 7, 2**62])
    (near,) = linear_probe(train, test)
    (far,) = linear_probe(*(own._replace(labels=numbers[own.labels]) for own in (train, test)))
    assert (far.value, far.interval95) == (near.value, near.interval95)
    assert far.details.pop("numbers") == numbers.tolist()
    assert far.details == near.details
