"""What else the features know: a probe of a column against scikit-learn, chance and baselines."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from sklearn.preprocessing import StandardScaler

from sslpipe.errors import DataError
from sslpipe.evaluation.groups import GroupCodes
from sslpipe.evaluation.nuisance import choose_columns, nuisance, nuisance_rows
from tests.evaluation.test_knn import random_rows
from tests.helpers.columns import add_columns
from tests.helpers.dataset import write_dataset


def with_scanner(n, seed, first_id=0, strength=1.0):
    """Rows in two of whose features the scanner shows, and its codes; a fifth are missing."""
    rows = random_rows(n, 6, 4, seed, first_id)
    rng = np.random.default_rng(seed + 100)
    codes = rng.choice(3, size=n, p=[0.5, 0.3, 0.2])
    features = rows.features.clone()
    features[:, :2] += strength * torch.tensor([[3.0, 0.0], [0.0, 3.0], [-3.0, -3.0]])[codes]
    return rows._replace(features=features), np.where(rng.random(n) < 0.2, -1, codes)


def scanner(strength=1.0):
    train, bank = with_scanner(400, 1, strength=strength)
    test, queries = with_scanner(150, 2, first_id=1000, strength=strength)
    return train, test, GroupCodes("scanner", bank, queries, ("A", "B", "C"))


def test_the_probe_is_scikit_learns_ridge_on_the_rows_that_have_a_value():
    train, test, column = scanner()
    unlabelled = [rows._replace(labels=torch.full_like(rows.labels, -1)) for rows in (train, test)]
    (result,) = nuisance(*unlabelled, column=column)
    fit, ask = column.bank >= 0, column.queries >= 0
    scaler = StandardScaler().fit(train.features[fit].numpy())
    ridge = Ridge(alpha=result.details["penalty"] * fit.sum())
    ridge.fit(scaler.transform(train.features[fit].numpy()), np.eye(3)[column.bank[fit]])
    predicted = ridge.predict(scaler.transform(test.features[ask].numpy())).argmax(1)
    truth = column.queries[ask]
    assert result.value == (predicted == truth).mean()
    assert (result.queries, result.bank) == (ask.sum(), fit.sum())
    details = result.details
    assert details["chance"] == np.bincount(truth).max() / len(truth)
    share = (result.value - details["chance"]) / (1 - details["chance"])
    assert details["above_chance"] == pytest.approx(share)
    assert share > 0.5
    assert (details["column"], details["values"]) == ("scanner", 3)
    assert details["left_out"] == (~ask).sum()


def test_a_value_that_train_hardly_has_is_left_out():
    train, test, column = scanner()
    bank, queries = column.bank.copy(), column.queries.copy()
    bank[bank == 2] = 1
    bank[7] = 2
    (result,) = nuisance(train, test, column=column._replace(bank=bank))
    assert result.details["values"] == 2
    assert result.details["left_out"] == np.isin(queries, [-1, 2]).sum()
    with pytest.raises(DataError, match="1 of its values have 2 rows"):
        nuisance(train, test, column=column._replace(bank=0 * bank))
    with pytest.raises(DataError, match="no test row has a value that train has"):
        nuisance(train, test, column=column._replace(queries=0 * queries - 1))


def test_of_many_rows_the_same_few_are_fitted_on_whatever_their_order():
    train, test, column = scanner()
    (cut,) = nuisance(train, test, column=column, most_rows=60)
    assert cut.bank == 60
    assert "rows=60" in cut.protocol
    order = np.random.default_rng(0).permutation(400)
    shuffled = train.rows(torch.from_numpy(order))
    codes = column._replace(bank=column.bank[order])
    (again,) = nuisance(shuffled, test, column=codes, most_rows=60)
    assert again.value == cut.value
    rare = column.bank.copy()
    rare[rare == 2] = -1
    rare[[3, 390]] = 2
    (kept,) = nuisance(train, test, column=column._replace(bank=rare), most_rows=8)
    assert kept.details["values"] == 3
    with pytest.raises(DataError, match="most_rows = 5 is below 2 for each of 3 values"):
        nuisance(train, test, column=column, most_rows=5)


def test_a_suite_probes_text_columns_of_few_values_or_those_asked_for(tmp_path):
    write_dataset(tmp_path, (6,), split="test")
    manifest = write_dataset(tmp_path, (60,))
    texts = {f"t{at}": ["a", "b"] * 30 for at in range(9)}
    add_columns(
        manifest, one=["a"] * 60, many=[f"v{at}" for at in range(60)], count=[1, 2] * 30, **texts
    )
    index = add_columns(manifest, "test", t0=["b"] * 6)
    train, test = index.split("train"), index.split("test")
    left_out: list[str] = []
    chosen = choose_columns(train, test, None, left_out)
    assert [codes.name for codes in chosen] == [f"t{at}" for at in range(8)]
    assert left_out == ["how well columns t8 are predicted: name them with --columns"]
    assert chosen[0].queries.tolist() == [1] * 6
    assert chosen[1].queries.tolist() == [-1] * 6
    asked = choose_columns(train, test, ["count", "many"], left_out)
    assert [codes.name for codes in asked] == ["count", "many"]
    with pytest.raises(DataError, match="'one' has fewer than 2 values in split 'train'"):
        choose_columns(train, test, ["one"], left_out)
    with pytest.raises(DataError, match="no column 'cuont'; did you mean 'count'"):
        choose_columns(train, test, ["cuont"], left_out)


def test_values_are_found_by_the_ids_of_rows():
    train, test, column = scanner()
    test = test._replace(ids=torch.arange(len(test.ids)))
    blank = column._replace(name="blank", queries=0 * column.queries - 1)
    # some samples could not be decoded: the others keep their values
    kept, asked = torch.arange(400) % 7 != 0, torch.arange(150) % 5 != 0
    pair = train.rows(kept), test.rows(asked)
    left_out: list[str] = []
    found = nuisance_rows(pair, [column, blank], left_out)
    own = column._replace(bank=column.bank[kept.numpy()], queries=column.queries[asked.numpy()])
    assert found == nuisance(*pair, column=own)
    assert len(left_out) == 1
    assert "'blank': no test row" in left_out[0]
