"""Erasing a column: no linear reader is left, nothing moves more than it must."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from sslpipe.errors import DataError
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.erase import erase, fit_erasure
from sslpipe.evaluation.groups import GroupCodes
from sslpipe.evaluation.nuisance import nuisance
from sslpipe.evaluation.whiten import fit_whitening


def stained(rows, seed, offset=3.0):
    """Rows of 8 correlated features, two columns that move them (4 and 2 values), -1 for some."""
    rng = np.random.default_rng(seed)
    camera, size = rng.choice(4, rows, p=[0.4, 0.3, 0.2, 0.1]), rng.integers(0, 2, rows)
    mix = np.random.default_rng(0)
    features = rng.normal(size=(rows, 8)) @ mix.normal(size=(8, 8))
    features += mix.normal(size=(4, 8))[camera] + mix.normal(size=(2, 8))[size] + offset
    camera[rng.random(rows) < 0.1] = -1
    ids = torch.arange(rows)
    return Embeddings(torch.from_numpy(features).float(), ids % 3, ids), camera, size


def test_the_map_is_the_papers_with_its_matrices_written_out():
    """x - W^+ P W (x - mean), theorem 4.3, by pseudoinverses in numpy."""
    train, camera, _ = stained(500, seed=1)
    train, camera = train.rows(torch.from_numpy(camera >= 0)), camera[camera >= 0]
    x = train.features.double().numpy()
    mean, z = x.mean(0), np.eye(4)[camera]
    covariance = (x - mean).T @ (x - mean) / len(x)
    values, axes = np.linalg.eigh(covariance)
    w = axes @ np.diag(values**-0.5) @ axes.T
    cross = w @ (x - mean).T @ (z - z.mean(0)) / len(x)
    p = cross @ np.linalg.pinv(cross)
    expected = x - (x - mean) @ (np.linalg.pinv(w) @ p @ w).T
    (erased,) = erase(train, columns={"camera": camera})
    np.testing.assert_allclose(erased.features, expected, rtol=1e-5, atol=1e-5)


def test_afterwards_all_values_of_each_column_have_one_mean():
    train, camera, size = stained(400, seed=2)
    erased, plain = erase(train, train, columns={"camera": camera, "size": size})
    assert torch.equal(erased.features, plain.features)
    for codes in (camera, size):
        was, means = (
            [rows.features.double().numpy()[codes == value].mean(0) for value in set(codes) - {-1}]
            for rows in (train, erased)
        )
        assert np.ptp(was, axis=0).max() > 0.5
        assert np.ptp(means, axis=0).max() < 1e-6


def test_linear_probes_are_at_chance_and_a_probe_on_other_rows_nearly():
    (train, camera, _), (test, asked, _) = stained(3000, seed=4), stained(2000, seed=5)
    codes = GroupCodes("camera", camera, asked, tuple("abcd"))
    pair = erase(train, test, columns={"camera": camera})
    (before,) = nuisance(train, test, column=codes)
    (after,) = nuisance(*pair, column=codes)
    assert before.details["above_chance"] > 0.3
    assert after.details["above_chance"] == 0
    # without any penalty: what a constant says, the values' shares
    known = camera >= 0
    fitted = LogisticRegression(C=np.inf, tol=1e-8)
    x = pair[0].features.double().numpy()
    x -= x[known].mean(0)
    fitted.fit(x[known], camera[known])
    shares = np.bincount(camera[known]) / known.sum()
    np.testing.assert_allclose(fitted.predict_proba(x), np.tile(shares, (3000, 1)), atol=1e-5)
    # fitted on rows that the erasure did not see
    swapped = GroupCodes("camera", asked, camera, codes.values)
    (other,) = nuisance(*pair[::-1], column=swapped)
    assert abs(other.details["above_chance"]) < 0.05


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e5])
def test_features_without_variance_or_too_few_rows_stay_finite(scale):
    train, camera, _ = stained(300, seed=6)
    x = train.features
    flat = torch.cat([x, x[:, :3] @ torch.ones(3, 2), torch.full((300, 2), 7.0)], 1) * scale
    erased, few = erase(
        train._replace(features=flat), train._replace(features=flat), columns={"camera": camera}
    )
    assert torch.isfinite(erased.features).all()
    torch.testing.assert_close(erased.features[:, 10:], flat[:, 10:], rtol=1e-6, atol=0)
    means = [erased.features.double()[torch.from_numpy(camera == v)].mean(0) for v in range(4)]
    spread = flat.std()
    assert max(float((m - means[0]).abs().max()) for m in means) < 1e-5 * spread
    # fewer rows than features
    small = fit_erasure(
        Embeddings(flat[:9], few.labels[:9], few.ids[:9]), {"camera": np.arange(9) % 2}
    ).apply(flat)
    assert torch.isfinite(small).all()
    assert float(small.abs().max()) < 100 * float(flat.abs().max())


def test_erasing_and_then_whitening_is_one_map():
    (train, camera, _), (test, _, _) = stained(500, seed=7), stained(50, seed=8)
    erasure = fit_erasure(train, {"camera": camera})
    after = fit_whitening(erasure(train), dims=5)
    both = erasure.then(after)
    expected = after(erasure(test)).features
    torch.testing.assert_close(both(test).features, expected, rtol=1e-4, atol=1e-4)
    assert both.projection.shape == (8, 5)


def test_a_column_that_says_nothing_or_leaves_nothing_is_refused():
    train, camera, _ = stained(40, seed=9)
    with pytest.raises(DataError, match=r"column 'camera' has \(39,\) numbers, .* are 40 rows"):
        fit_erasure(train, {"camera": camera[1:]})
    with pytest.raises(DataError, match="'camera' has 1 values in these rows"):
        fit_erasure(train, {"camera": np.where(camera > 0, -1, camera)})
    with pytest.raises(DataError, match="person: 20 values to erase, and the features have 8 dir"):
        fit_erasure(train, {"person": np.arange(40) // 2})
