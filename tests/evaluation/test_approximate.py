"""Approximate search against all cosines in float64: recall, scores, what may be found, damage."""

import json

import numpy as np
import pytest
import torch

from sslpipe.data.index import load_index
from sslpipe.errors import DataError, UserError
from sslpipe.evaluation import neighbours, search_index
from sslpipe.evaluation.embed import Embeddings, save_embeddings
from sslpipe.evaluation.features import data_metadata
from sslpipe.evaluation.neighbours import Approximate, fixed_point_units, write_approximate
from sslpipe.portable import sha256_of
from tests.evaluation.test_search import FACTS
from tests.helpers.dataset import write_dataset


def clustered(count, groups=40, width=16, seed=0):
    draws = torch.Generator().manual_seed(seed)
    centres = torch.randn(groups, width, generator=draws)
    near = torch.randint(groups, (count,), generator=draws)
    return centres[near] + 0.3 * torch.randn(count, width, generator=draws)


def by_cosines(rows, queries, k, allowed=None):
    """Every cosine in float64, sorted: the oracle."""
    units, others = (x.double() / x.double().norm(dim=1, keepdim=True) for x in (rows, queries))
    cosines = (others @ units.T).numpy()
    if allowed is not None:
        cosines[:, ~allowed.numpy()] = -np.inf
    order = np.argsort(-cosines, axis=1, kind="stable")[:, :k]
    return order, np.take_along_axis(cosines, order, 1)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    rows = clustered(4000)
    path = tmp_path_factory.mktemp("near") / "a.faiss"
    return rows, path, write_approximate(fixed_point_units(rows), path)


def opened(made, lists=None):
    rows, path, stated = made
    return Approximate.read(path, sha256_of(path), lists or stated[0], rows.shape)


def test_the_stated_recall_is_that_of_all_cosines(made):
    rows, _, stated = made
    places = torch.arange(neighbours.MEASURED) * len(rows) // neighbours.MEASURED
    true, _ = by_cosines(rows, rows[places], 11)
    near = opened(made).nearest(fixed_point_units(rows), fixed_point_units(rows[places]), 11)
    hits = [
        len(({*one.tolist()} - {own}) & {*found.tolist()}) / 10
        for one, found, own in zip(true, near.indices, places.tolist(), strict=True)
    ]
    assert stated[1] == pytest.approx(np.mean(hits), abs=1e-6)
    assert stated[1] >= 0.95
    assert 1 <= stated[0] <= 64 // neighbours.MOST_LOOKED


def test_where_it_looks_into_all_lists_it_finds_what_exact_search_does(made):
    rows, queries = made[0], clustered(50, seed=1)
    units, own = fixed_point_units(rows), fixed_point_units(queries)
    allowed = torch.rand(len(rows), generator=torch.Generator().manual_seed(2)) < 0.5
    for some in (None, allowed):
        near = opened(made, lists=64).nearest(units, own, 5, some)
        order, cosines = by_cosines(rows, queries, 5, some)
        np.testing.assert_array_equal(near.indices, order)
        np.testing.assert_allclose(near.similarities, cosines, atol=1e-6)
    few = torch.zeros(len(rows), dtype=torch.bool)
    few[[7, 9]] = True
    near = opened(made, lists=64).nearest(units, own, 5, few)
    assert {*near.indices[:, :2].ravel().tolist()} == {7, 9}
    assert bool((near.similarities[:, 2:] == -torch.inf).all())


def test_rows_without_neighbours_in_few_lists_are_refused(tmp_path):
    rows = fixed_point_units(torch.randn(3000, 64, generator=torch.Generator().manual_seed(0)))
    with pytest.raises(DataError, match=r"finds \d\d\.\d% of the 10 nearest .* under 95%"):
        write_approximate(rows, tmp_path / "a.faiss")
    assert not list(tmp_path.iterdir())


def test_another_file_is_refused(made, tmp_path):
    rows, path, _ = made
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    (tmp_path / "b.faiss").write_bytes(raw)
    sha256 = sha256_of(path)
    for file, shape, reason in (
        (tmp_path / "b.faiss", rows.shape, "is damaged: its sha256"),
        (tmp_path / "c.faiss", rows.shape, "cannot read .*No such file"),
        (path, torch.Size((4000, 8)), "is of other features"),
    ):
        with pytest.raises(DataError, match=reason):
            Approximate.read(file, sha256, 4, shape)


def test_an_index_is_approximate_where_asked_and_large_enough(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(search_index, "LEAST_ROWS", 300)
    index, parts = tmp_path / "index.json", []
    for number, count in enumerate((400, 60)):
        data = load_index(write_dataset(tmp_path / f"data{number}", (count,), px=2))
        features = clustered(count, width=8, seed=3)
        rows = Embeddings(features, torch.zeros(count).long(), torch.arange(count))
        path = tmp_path / f"{number}.safetensors"
        save_embeddings(path, rows, {**FACTS, **data_metadata(data.split("train"))})
        search_index.add_to_index(index, path, str(tmp_path / f"data{number}"))
        parts.append(rows.features)
    search = search_index.build_index(index, flatten=False, approximate=True)
    tree = json.loads(index.read_text())
    assert ["near" in part for part in tree["parts"]] == [True, False]
    recall = tree["parts"][0]["near"]["recall"]
    assert search.form == f"as they are; approximate, recall {recall:.1%} (--exact: all compared)"
    queries = parts[0][:40] + 0.1 * torch.randn(40, 8, generator=torch.Generator().manual_seed(4))
    exact, _ = search_index.open_index(index, exact=True)
    assert exact.form == "as they are"
    order, _ = by_cosines(torch.cat(parts), queries, 10)
    places = [[hit.part * 400 + hit.id for hit in hits] for hits in exact.find(queries, 10)]
    np.testing.assert_array_equal(places, order)
    shared = [
        len({*true.tolist()} & {hit.part * 400 + hit.id for hit in hits}) / 10
        for true, hits in zip(order, search.find(queries, 10), strict=True)
    ]
    assert np.mean(shared) > 0.85
    # what is removed is not found, and what fits no condition of few is looked up exactly
    gone = [hit.id for hit in search.find(queries[:1], 5)[0] if hit.part == 0]
    search_index.remove_from_index(index, tmp_path / "0.safetensors", gone)
    after = search_index.open_index(index)[0].find(queries[:1], 5)[0]
    assert after
    assert not {hit.id for hit in after if hit.part == 0} & {*gone}
    monkeypatch.setattr(search_index, "LEAST_ROWS", 100_000)
    with pytest.raises(UserError, match=r"is for 100,000 images .* and 39\d are the most"):
        search_index.build_index(index, approximate=True)
    assert json.loads(index.read_text())["parts"][0]["near"] == tree["parts"][0]["near"]
    capfd.readouterr()  # faiss says that the rows are few
