"""Whitening is learned on train, makes its covariance the identity, and treats both sides alike."""

import numpy as np
import pytest
import torch

from sslpipe.errors import DataError
from sslpipe.evaluation.whiten import fit_whitening
from tests.evaluation.test_knn import random_rows


def covariance(features):
    centred = features.double() - features.double().mean(0)
    return centred.T @ centred / len(features)


def test_distances_are_mahalanobis_distances_with_the_floor_as_ridge():
    train, test = random_rows(500, 8, 3, seed=1), random_rows(50, 8, 3, seed=2)
    fitted = fit_whitening(train, 0.3)
    white_train, white = fitted(train), fitted(test)
    c = covariance(train.features)
    inverse = torch.linalg.inv(c + 0.3 * c.diagonal().mean() * torch.eye(8, dtype=torch.float64))
    difference = (test.features[:, None] - train.features[None, :20]).double()
    expected = torch.einsum("qnf,fg,qng->qn", difference, inverse, difference).sqrt()
    actual = torch.cdist(white.features.double(), white_train.features[:20].double())
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_few_wide_rows_give_the_same_distances_without_the_covariances_eigenvectors(monkeypatch):
    """Raw pixels of 50 images have 3,072 columns: their covariance costs many times the rest."""
    train, test = random_rows(20, 60, 3, seed=1), random_rows(30, 60, 3, seed=2)
    c = covariance(train.features)
    ridged = c + 0.3 * c.diagonal().mean() * torch.eye(60, dtype=torch.float64)
    monkeypatch.delattr(torch.linalg, "eigh")
    white = fit_whitening(train, 0.3)(test)
    difference = (test.features[:, None] - test.features[None]).double()
    squared = torch.einsum("qnf,fg,qng->qn", difference, torch.linalg.inv(ridged), difference)
    actual = torch.cdist(*[white.features.double()] * 2)
    torch.testing.assert_close(actual, squared.clamp_min(0).sqrt(), rtol=1e-4, atol=1e-4)
    assert white.features.shape == (30, 60)


@pytest.mark.parametrize("power", [0.0, 0.3, 0.75, 1.0])
def test_a_power_leaves_each_axis_its_variance_to_one_minus_the_power(power):
    train, test = random_rows(500, 8, 3, seed=1), random_rows(50, 8, 3, seed=2)
    rows = [
        each._replace(features=each.features * torch.logspace(-1, 1, 8)) for each in (train, test)
    ]
    fitted = fit_whitening(rows[0], 0, power=power)
    flat_train, flat = map(fitted, rows)
    variances, axes = np.linalg.eigh(covariance(rows[0].features).numpy())
    got = np.linalg.eigvalsh(covariance(flat_train.features).numpy())
    np.testing.assert_allclose(got, np.sort(variances ** (1 - power)), rtol=1e-4)
    # distances: those in the eigenbasis, each axis times its variance to -power / 2
    centred = rows[1].features.double().numpy() @ axes * variances ** (-power / 2)
    expected = torch.cdist(*[torch.from_numpy(centred)] * 2)
    torch.testing.assert_close(
        torch.cdist(*[flat.features.double()] * 2), expected, rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("power", [-0.1, 1.5, float("nan")])
def test_a_power_beyond_its_range_is_one_clear_error(power):
    with pytest.raises(DataError, match=r"power = .* must lie in 0\.\.1"):
        fit_whitening(random_rows(20, 4, 2, seed=1), power=power)


def test_few_rows_raise_the_floor_as_sklearns_shrinkage_does_and_it_is_said():
    """The floor is that of the OAS estimator: (1 - rho) S + rho mean, but for a factor."""
    oas = pytest.importorskip("sklearn.covariance").OAS
    spectrum = torch.logspace(0, -2, 40).sqrt()
    for count in (10, 60, 5000):
        rows = random_rows(count, 40, 3, seed=1)
        rows = rows._replace(features=rows.features * spectrum)
        said = []
        flat = fit_whitening(rows, power=0.5, say=said.append)
        rho = min(oas().fit(rows.features.double().numpy()).shrinkage_, 0.9)
        floor = max(0.1, rho / (1 - rho))
        expected = fit_whitening(rows, floor, power=0.5)
        torch.testing.assert_close(flat.projection.abs(), expected.projection.abs())
        assert (len(said), floor > 0.1) == ((1, True) if count < 5000 else (0, False))
        assert not said or said[0].startswith(f"{count} rows are few for 40 features")
    rows.features[:, 30:] = 1  # constant
    for floor in (None, 0):
        assert torch.isfinite(fit_whitening(rows, floor).apply(rows.features)).all()
    rows.features[:] = 1
    assert torch.isfinite(fit_whitening(rows).apply(rows.features)).all()


def test_the_largest_axes_are_those_of_an_svd_at_variance_1():
    train = random_rows(60, 20, 3, seed=1)
    reduced = fit_whitening(train, floor=0, dims=7)(train).features.double()
    wide = train.features.double()
    axes = torch.linalg.svd(wide - wide.mean(0), full_matrices=False).U[:, :7]
    # products of rows do not see the axes' signs
    torch.testing.assert_close(reduced @ reduced.T, 60 * axes @ axes.T, rtol=0, atol=1e-3)
    assert reduced.shape == (60, 7)
