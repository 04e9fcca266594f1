"""Search over features files against a float64 loop: scores, order, conditions."""

import json
import re

import numpy as np
import pytest
import torch

from sslpipe.curate.image_scan import scan
from sslpipe.data.reader import keys_of
from sslpipe.errors import DataError, UserError
from sslpipe.evaluation.embed import Embeddings, SplitEmbeddings
from sslpipe.evaluation.feature_files import load_embeddings, save_embeddings
from sslpipe.evaluation.features import data_metadata
from sslpipe.evaluation.whiten import fit_whitening
from sslpipe.search.images import ImageSearch
from tests.helpers.columns import add_columns
from tests.helpers.dataset import write_dataset

CHOOSE = "sslpipe.search.flattening"
THEMES = ["a", "b", None, "a", "b", "c", "a"]
FACTS = {"backbone_sha256": "0" * 64, "view": {"crop_px": 16}}


def write_part(folder, seed, themes=THEMES, **facts):
    """A data set of seven samples with a column, and a features file; the rows as float64."""
    index = add_columns(write_dataset(folder, (3, 4)), theme=themes)
    draws = np.random.default_rng(seed)
    features = torch.from_numpy(draws.normal(size=(7, 6)) + 1).float()
    order = torch.from_numpy(draws.permutation(7))  # rows may stand in any order of ids
    rows = Embeddings(features, torch.arange(7)[order] % 2, order)
    path = folder / "features.safetensors"
    save_embeddings(path, rows, {**FACTS, **data_metadata(index.split("train")), **facts})
    return path, str(folder / "dataset.json"), rows


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    return [write_part(tmp_path_factory.mktemp("data"), seed) for seed in (0, 1)]


def by_loops(parts, query, top, kept=lambda theme: True):
    """All cosines one by one, sorted: the oracle."""
    found = []
    for part, (_, _, rows) in enumerate(parts):
        for row, sample in enumerate(rows.ids.tolist()):
            if not kept(THEMES[sample]):
                continue
            other = rows.features[row].double()
            cosine = float(query @ other / (query.norm() * other.norm()))
            found.append((cosine, part, sample, int(rows.labels[row])))
    return sorted(found, key=lambda hit: -hit[0])[:top]


def test_a_hit_is_named_by_its_path_where_that_is_known(tmp_path):
    path, data, _ = write_part(tmp_path, 0)
    search = ImageSearch((path, data))
    (hits,) = search.find(torch.ones(1, 6), 7)
    assert all(re.fullmatch(r"[ -~]+", search.key(hit)) for hit in hits)  # the shards' keys
    names = [f"земля/{k} ä.png" for k in range(7)]
    split = add_columns(tmp_path / "dataset.json", theme=THEMES, path=names).split("train")
    search = ImageSearch((path, data))
    assert [search.key(hit) for hit in hits] == [names[hit.id] for hit in hits]
    assert keys_of(split, [6, 2]) == {6: names[6], 2: names[2]}
    assert scan([split]).keys == names


def test_a_result_of_embed_is_searched_as_its_file(tmp_path):
    path, data, _ = write_part(tmp_path, 0)
    rows = SplitEmbeddings.of(*load_embeddings(path))
    query = torch.ones(1, 6)
    of_file = ImageSearch((path, data))
    for search in (ImageSearch((rows, data)), ImageSearch(rows)):
        assert search.find(query, 3) == of_file.find(query, 3)
    assert ImageSearch((rows, data)).splits[0].name == "train"
    assert ImageSearch((rows, data)).facts == of_file.facts
    ImageSearch(rows, torch.ones(2, 6))  # beside vectors that say nothing of themselves


@pytest.mark.parametrize("top", [1, 5, 14, 99])
@pytest.mark.parametrize("where", ["", "theme = a", "theme in b, c"])
def test_the_nearest_of_all_files_are_those_of_a_loop_over_all_cosines(parts, top, where):
    search = ImageSearch(*(part[:2] for part in parts))
    assert len(search) == 14
    queries = torch.randn(4, 6, generator=torch.Generator().manual_seed(2)) + 1
    allowed = {"": THEMES, "theme = a": ["a"], "theme in b, c": ["b", "c"]}[where]
    for query, hits in zip(queries, search.find(queries, top, where=where), strict=True):
        expected = by_loops(parts, query.double(), top, lambda theme: theme in allowed)
        assert_found(hits, expected)


def assert_found(hits, expected):
    assert [hit[1:] for hit in hits] == [hit[1:] for hit in expected]
    np.testing.assert_allclose([h.score for h in hits], [h[0] for h in expected], atol=1e-6)


def test_a_flattened_search_is_that_of_rows_flattened_before(parts, monkeypatch):
    """The spectrum is learned on the rows of all files, and queries are mapped as they are."""
    monkeypatch.setattr(f"{CHOOSE}.LEAST_FLATTENED", 14)
    monkeypatch.setattr("sslpipe.search.images.MOST_FITTED", 14)
    search = ImageSearch(*(part[:2] for part in parts))
    assert search.form.startswith("flattened, fitted on 14 images (power 0.25)")
    assert "14 rows are few for 6 features" in search.form
    both = Embeddings(*map(torch.cat, zip(*(rows for *_, rows in parts), strict=True)))
    space = fit_whitening(both, power=0.25)
    flat = [(*place, space(rows)) for *place, rows in parts]
    query = torch.randn(1, 6, generator=torch.Generator().manual_seed(2)) + 1
    (hits,) = search.find(query, 9)
    assert_found(hits, by_loops(flat, space.apply(query)[0].double(), 9))
    plain = ImageSearch(*(part[:2] for part in parts), flatten=False)
    (hits,) = plain.find(query, 9)
    assert_found(hits, by_loops(parts, query[0].double(), 9))


def test_rows_of_a_whitened_export_are_not_flattened_again(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{CHOOSE}.LEAST_FLATTENED", 7)
    part = write_part(tmp_path, 5, whitening_sha256="w")
    search = ImageSearch(part[:2])
    assert (search.flattening, search.form) == (None, "as their export flattened them")


def test_what_does_not_fit_is_named(parts, tmp_path):
    search = ImageSearch(parts[0][:2])
    query = torch.ones(1, 6)
    with pytest.raises(DataError, match=r"theme.*'zebra'"):
        search.find(query, where="theme = zebra")
    with pytest.raises(DataError, match="no image fits"):
        search.find(query, where="theme = a and theme = b")
    with pytest.raises(DataError, match="no column 'colour'"):
        search.find(query, where="colour = red")
    for wrong in (torch.ones(1, 5), torch.ones(6)):
        with pytest.raises(UserError, match="queries are"):
            search.find(wrong)
    with pytest.raises(DataError, match=r"queries\[0\] is not finite"):
        search.find(torch.full((1, 6), torch.nan))
    with pytest.raises(UserError, match="query 1 is all zeros"):
        search.find(torch.eye(2, 6) * torch.tensor([[1], [0]]))
    with pytest.raises(UserError, match=r"rows\(1\): there are 1 files"):
        search.rows(1)
    with pytest.raises(UserError, match="no features file"):
        ImageSearch()
    other = write_part(tmp_path, 3, [None, *THEMES[1:]], backbone_sha256="1" * 64)
    with pytest.raises(DataError, match="differ in backbone_sha256"):
        ImageSearch(parts[0][:2], other[:2])
    with pytest.raises(DataError, match="was not embedded from"):
        ImageSearch((parts[0][0], other[1]))
    search.check_network(json.loads(json.dumps(FACTS)))
    for key in FACTS:
        with pytest.raises(DataError, match=f"differ from the queries' in {key}"):
            search.check_network({**FACTS, key: None})


def test_features_in_memory_are_searched_by_the_numbers_of_their_rows():
    rows = np.random.default_rng(0).normal(size=(30, 6))
    search = ImageSearch(rows, flatten=False)
    units = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    found = search.find(torch.tensor(rows[:4] * 3), top=3)
    for number, hits in enumerate(found):
        expected = np.argsort(-units @ units[number])[:3]
        assert [hit.id for hit in hits] == expected.tolist()
        assert hits[0].score == pytest.approx(1, abs=1e-6)
        assert search.key(hits[0]) == str(number)
    features = torch.tensor(rows).float()
    given = features.repeat(10, 1)
    assert ImageSearch(given).flattening is not None
    assert torch.equal(given, features.repeat(10, 1))
    labelled = Embeddings(torch.tensor(rows).float(), torch.arange(30) % 4, torch.arange(30) + 100)
    ((hit,),) = ImageSearch(labelled, flatten=False).find(torch.tensor(rows[5:6]), top=1)
    assert (hit.id, hit.label) == (105, 1)


@pytest.mark.parametrize("given", [np.ones(3), np.ones((3, 2)) * np.nan, "features.npz"])
def test_what_is_no_features_is_one_clear_error(given):
    with pytest.raises(UserError, match="features"):
        ImageSearch(given)


def test_features_in_memory_have_no_data_set():
    search = ImageSearch(np.ones((3, 2)), np.ones((2, 2)), flatten=False)
    with pytest.raises(UserError, match=r"dataset\.json"):
        search.find(torch.ones(1, 2), where="vendor = A")
    with pytest.raises(UserError, match="widths"):
        ImageSearch(np.ones((3, 2)), np.ones((3, 3)))


def test_vectors_made_elsewhere_are_searched_from_arrays_and_files(tmp_path):
    rows = np.random.default_rng(0).normal(size=(12, 6)).astype(np.float32)
    np.save(tmp_path / "rows.npy", rows)
    np.savez(tmp_path / "rows.npz", features=rows)
    queries = rows[:3] + np.float32(0.1)
    expected = ImageSearch(torch.from_numpy(rows)).find(torch.from_numpy(queries), 4)
    for given in (rows, tmp_path / "rows.npy", str(tmp_path / "rows.npz")):
        search = ImageSearch(given)
        assert search.find(queries, 4) == expected
        assert [search.key(hit) for hit in expected[0]] == [str(hit.id) for hit in expected[0]]
    for wrong in (rows[0], rows[:, :3], rows.tolist(), "query.jpg"):
        with pytest.raises(UserError, match="queries are"):
            ImageSearch(rows).find(wrong)
    with pytest.raises(UserError, match="not a list"):
        ImageSearch(rows.tolist())
