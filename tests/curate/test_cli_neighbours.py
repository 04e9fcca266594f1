"""sslpipe.curate.groups: groups and their precision against loops over single pairs."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sslpipe.curate.groups import estimate_precision, mutual_groups
from sslpipe.data.index import load_index
from sslpipe.data.order import Order
from sslpipe.data.pairing import plan_pairs
from sslpipe.errors import DataError
from sslpipe.evaluation.embed import Embeddings, save_embeddings
from sslpipe.evaluation.intervals import wilson95
from sslpipe.evaluation.whiten import FLOOR, fit_whitening
from sslpipe.recipe.pretrain import Pairs
from tests.helpers.columns import as_built
from tests.helpers.dataset import write_dataset


def features_of(count: int, seed: int = 0) -> Embeddings:
    """Kinds of samples with noise; their ids are not their rows."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, count // 4, count)
    features = 2 * rng.normal(size=(count // 4, 6))[labels] + rng.normal(size=(count, 6))
    ids = torch.from_numpy(rng.permutation(count))
    return Embeddings(torch.from_numpy(features).float(), torch.from_numpy(labels), ids)


def mutual_pairs(rows: Embeddings, k: int) -> set[tuple[int, int]]:
    units = torch.nn.functional.normalize(rows.features.double())
    near = []
    for i in range(len(units)):
        cosines = [(-float(units[i] @ units[j]), j) for j in range(len(units)) if j != i]
        near.append({j for _, j in sorted(cosines)[:k]})
    pairs = itertools.combinations(range(len(units)), 2)
    return {(i, j) for i, j in pairs if j in near[i] and i in near[j]}


def test_with_one_neighbour_groups_are_the_mutual_pairs() -> None:
    rows = features_of(60)
    pairs, found = mutual_pairs(rows, 1), mutual_groups(rows).group
    assert 10 < len(pairs) < 30
    same = {(i, j) for i, j in itertools.combinations(range(60), 2) if found[i] == found[j] >= 0}
    assert same == pairs


@pytest.mark.parametrize("k", [3, 8])
def test_with_more_each_member_is_a_mutual_neighbour_of_its_groups_centre(k: int) -> None:
    rows = features_of(60)
    pairs, found = mutual_pairs(rows, k), mutual_groups(rows, k).group
    for number in range(found.max() + 1):
        members = np.flatnonzero(found == number).tolist()
        assert any(all((min(i, j), max(i, j)) in pairs for j in members if j != i) for i in members)
    # who is left has no mutual neighbour that is left, too
    left = set(np.flatnonzero(found < 0).tolist())
    assert not any(i in left and j in left for i, j in pairs)
    assert max(np.bincount(found[found >= 0])) > 2


@pytest.mark.parametrize("unlabelled", [0, 20])
def test_precision_is_that_of_loops_over_pairs(unlabelled: int) -> None:
    rows = features_of(60)
    labels = rows.labels.numpy().copy()
    labels[:unlabelled] = -1
    group_of = mutual_groups(rows, 3).group
    inside, everywhere = [], []
    for i, j in itertools.combinations(range(60), 2):
        if min(labels[i], labels[j]) >= 0:
            everywhere.append(labels[i] == labels[j])
            if group_of[i] == group_of[j] >= 0:
                inside.append(labels[i] == labels[j])
    found = estimate_precision(group_of, labels)
    assert found is not None
    assert (found.right, found.pairs) == (sum(inside), len(inside))
    assert found.chance == pytest.approx(np.mean(everywhere))
    assert found.interval95 == wilson95(sum(inside), len(inside))
    assert found.right / found.pairs > 2 * found.chance
    assert estimate_precision(group_of, np.full(60, -1)) is None
    assert estimate_precision(np.full(60, -1), labels) is None


def test_a_split_of_no_more_samples_than_neighbours_is_refused() -> None:
    with pytest.raises(DataError, match="3"):
        mutual_groups(features_of(4).rows(torch.arange(3)), 3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    index = load_index(as_built(write_dataset(tmp_path / "data", (30, 30))))
    rows = features_of(60)
    rows = rows._replace(labels=torch.from_numpy(index.split("train").labels_of(rows.ids.numpy())))
    facts = {"data_sha256": index.sha256, "split": "train"}
    save_embeddings(tmp_path / "train.safetensors", rows, facts)
    return tmp_path


@pytest.mark.parametrize(("k", "power"), [(1, 0.0), (4, 0.5)])
def test_the_command_writes_a_column_that_pairs_take(
    call: Any, folder: Path, k: int, power: float
) -> None:
    before = load_index(folder / "data").sha256
    words = ("--data", folder / "data", "--k", k, "--power", power)
    shown, _ = call("curate", "neighbours", folder / "train.safetensors", *words)
    rows = features_of(60)
    if power:
        rows = fit_whitening(rows, FLOOR, power=power)(rows)
    expected = mutual_groups(rows, k).group
    index = load_index(folder / "data")
    assert index.sha256 == before  # features and runs stay valid
    assert index.sha256_for("neighbour_group") != before
    column = index.split("train").column("neighbour_group")
    missing = column.missing(rows.ids.numpy())
    np.testing.assert_array_equal(missing, expected < 0)
    values = column.values_of(rows.ids.numpy()[~missing])
    np.testing.assert_array_equal(values, expected[expected >= 0])
    labels = index.split("train").labels_of(rows.ids.numpy())
    precision = estimate_precision(expected, labels)
    assert precision is not None
    assert f"{(~missing).sum()} of 60 samples in {expected.max() + 1} groups" in shown
    assert f"precision {100 * precision.right / precision.pairs:.1f} %" in shown
    # every partner of a training is of the sample's group
    split = index.split("train")
    order = Order(split.starts, batch_size=12, num_streams=2, window=6, seed=0)
    pairing = plan_pairs(Pairs(positive=("neighbour_group",)), split, order)
    assert pairing is not None
    own, shown_ids = order.ids(0, range(2))[1], pairing.partners_of_step(0, range(2))
    assert shown_ids is not None
    of_id = dict(zip(rows.ids.tolist(), expected.tolist(), strict=True))
    for one, other in zip(own.tolist(), shown_ids.tolist(), strict=True):
        assert one == other or of_id[one] == of_id[other] >= 0
        assert (one == other) == (of_id[one] < 0)
    # again, with the file of before the column: it is written anew
    call("curate", "neighbours", folder / "train.safetensors", *words)
    assert load_index(folder / "data").manifest == index.manifest


def test_what_it_cannot_pair_is_one_line(call: Any, folder: Path, tmp_path: Path) -> None:
    other = load_index(write_dataset(tmp_path / "other", (30, 31))).folder
    words = ("curate", "neighbours", folder / "train.safetensors", "--data")
    for data, *more, message in (
        (other, "was not embedded from"),
        (folder / "data", "--k", "60", "60"),
        (folder / "data", "--power", "2", "--power"),
    ):
        _, error = call(*words, data, *more, status=2)
        assert message in error
