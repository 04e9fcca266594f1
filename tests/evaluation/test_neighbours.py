"""One search: whatever its tiles, parts and processes, it finds what loops and comparing all do."""

import json
import math
import sys

import numpy as np
import pytest
import torch

from sslpipe.data.index import load_index
from sslpipe.distributed import Rank
from sslpipe.errors import DataError, UserError
from sslpipe.evaluation import approximate, neighbours, rerank, search_index
from sslpipe.evaluation.approximate import Approximate, write_approximate
from sslpipe.evaluation.embed import Embeddings, save_embeddings
from sslpipe.evaluation.features import data_metadata
from sslpipe.evaluation.knn import few_shot_knn, knn_results
from sslpipe.evaluation.neighbours import among_all, fixed_point_units, nearest, tile_numbers
from sslpipe.evaluation.rerank import augmented, k_reciprocal_order
from sslpipe.evaluation.retrieval import query_metrics, retrieval, retrieval_per_query
from sslpipe.evaluation.search import ImageSearch
from sslpipe.portable import sha256_of
from tests.evaluation.test_knn import collapsed_rows, random_rows, tied_rows
from tests.evaluation.test_search import FACTS, by_loops, write_part
from tests.helpers.dataset import write_dataset
from tests.helpers.processes import run_processes


@pytest.mark.parametrize("search", ["torch", "faiss"])
@pytest.mark.parametrize("leave_out", [False, True])
@pytest.mark.parametrize("k", [1, 40, 1100])
@pytest.mark.parametrize("make", [random_rows, tied_rows, collapsed_rows])
def test_a_search_finds_what_comparing_all_finds(make, k, leave_out, search, monkeypatch):
    bank, queries = make(3000, 8, 5, seed=3), make(70, 8, 5, seed=4)
    bank = bank._replace(ids=bank.ids // 3)  # three rows an id
    hidden = (bank.ids, queries.ids) if leave_out else None
    units = fixed_point_units(bank.features), fixed_point_units(queries.features)
    expected = among_all(*units, k, hidden)
    sizes = ("CPU_NUMBERS", "PAIRED_NUMBERS", "PROPOSED_NUMBERS", "WIDE_NUMBERS", "PART_BYTES")
    # one tile; many, of queries that are proposed to in turns; and the bank part by part
    for numbers in (
        (2**28, 2**24, 2**24, 2**24, 2**27),
        (3000 * 7, 999, 20 * (k + 32), 700 * 8, 2**27),
        (3000 * 7, 2**24, 2**24, 2**24, 7_777),
    ):
        for name, number in zip(sizes, numbers, strict=True):
            monkeypatch.setattr(neighbours, name, number)
        actual = nearest(bank.features, queries.features, k, search=search, hidden=hidden)
        assert torch.equal(actual.indices, expected.indices)
        assert torch.equal(actual.similarities, expected.similarities)


def test_faiss_is_needed_only_where_it_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)  # import faiss now raises ImportError
    bank = random_rows(50, 4, 3, 1).features
    nearest(bank, bank[:3], 5)
    with pytest.raises(DataError, match="pip install faiss"):
        nearest(bank, bank[:3], 5, search="faiss")
    with pytest.raises(DataError, match="known: faiss, torch"):
        nearest(bank, bank[:3], 5, search="annoy")


def test_only_a_query_of_which_a_nearer_row_may_be_left_out_meets_the_whole_bank(monkeypatch):
    met = []
    original = neighbours.among_all

    def counting(bank, queries, *rest):
        met.append(len(queries))
        return original(bank, queries, *rest)

    monkeypatch.setattr(neighbours, "among_all", counting)
    for make, expected in ((random_rows, []), (collapsed_rows, [70])):
        nearest(make(3000, 8, 5, 3).features, make(70, 8, 5, 4).features, 10)
        assert met == expected


def test_only_rows_that_may_be_among_the_nearest_are_compared_exactly(monkeypatch):
    compared, original = [], neighbours.exact_cosines

    def counting(bank, rows, *rest):
        compared.append(len(rows))
        return original(bank, rows, *rest)

    monkeypatch.setattr(neighbours, "exact_cosines", counting)
    bank, queries = random_rows(3000, 8, 5, 3).features, random_rows(70, 8, 5, 4).features
    nearest(bank, queries, 10)
    assert 700 <= sum(compared) <= 710  # 42 are proposed
    monkeypatch.setattr(neighbours, "PART_BYTES", 1000 * 8 * 4)
    compared.clear()
    nearest(bank, queries, 10)
    assert len(compared) == 3
    assert sum(compared[1:]) < 1.5 * compared[0]  # of later parts, what is nearer than those found


def test_without_queries_there_is_nothing_and_a_tile_is_an_eighth_of_the_memory(monkeypatch):
    bank = random_rows(3000, 8, 5, 3).features
    assert nearest(bank, bank[:0], 10).indices.shape == (0, 10)
    memory = {"mem_get_info": 2**30, "memory_reserved": 2**29, "memory_allocated": 2**28}
    for name, value in memory.items():
        answer = (value, 0) if name == "mem_get_info" else value
        monkeypatch.setattr(torch.cuda, name, lambda device, answer=answer: answer)
    assert tile_numbers(torch.device("cuda")) == (2**30 + 2**28) // 32
    memory_of_a_large_card = (2**37, 2**37)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: memory_of_a_large_card)
    assert tile_numbers(torch.device("cuda")) == 2**28


def in_rank(process: Rank):
    found = []
    for make in (random_rows, tied_rows):
        bank, queries = make(103, 4, 5, seed=1), make(31, 4, 5, seed=2)
        bank = bank._replace(ids=bank.ids // 3)  # three rows an id, in two shares
        for k in (1, 9, 100):
            for ids in (None, (bank.ids, queries.ids)):
                near = nearest(bank.features, queries.features, k, hidden=ids, process=process)
                found += [near.indices, near.similarities]
    # groups of a quarter of the bank
    ids = torch.arange(103) % 4, torch.arange(31) % 5
    near = nearest(bank.features, queries.features, 9, hidden=ids, process=process)
    found += [near.indices, near.similarities]
    # more processes than some have rows
    few = random_rows(3, 4, 2, seed=1)
    near = nearest(few.features, few.features, 3, process=process)
    found += [near.indices, near.similarities]
    bank, queries = random_rows(203, 4, 5, seed=1), random_rows(31, 4, 5, seed=2, first_id=999)
    results = knn_results(bank, queries, k=(1, 20), vote="both", process=process)
    results += knn_results(bank, bank, k=(5,), exclude_same_id=True, process=process)
    results += few_shot_knn(bank, queries, labels_per_class=3, k=(3,), process=process)
    with pytest.raises(DataError, match="k = 201 does not fit a bank of 200 rows"):
        nearest(torch.ones(200, 2), torch.ones(1, 2), 201, process=process)
    return found, results


def test_a_bank_split_over_processes_gives_the_neighbours_of_one():
    found, results = in_rank(Rank())
    for theirs, their_results in run_processes(in_rank, 4):
        assert all(torch.equal(a, b) for a, b in zip(theirs, found, strict=True))
        assert their_results == results


def looped_order(query, rows, k1, k2, weight):
    """Zhong et al. with sets and dictionaries, one pair at a time."""
    everything = [query.double(), *rows.double()]
    units = [row / row.norm() for row in everything]
    n = len(units)
    d = [[round(float(1 - units[i] @ units[j]), 6) for j in range(n)] for i in range(n)]
    others = [[j for j in range(n) if j != i] for i in range(n)]
    lists = [[i, *sorted(others[i], key=lambda j: d[i][j])] for i in range(n)]

    def reciprocal(i, k):  # equation 3
        return {j for j in lists[i][: k + 1] if i in lists[j][: k + 1]}

    encoded = []
    for i in range(n):
        expanded = reciprocal(i, k1)
        for j in sorted(reciprocal(i, k1)):  # equation 5
            half = reciprocal(j, round(k1 / 2))
            if 3 * len(reciprocal(i, k1) & half) >= 2 * len(half):
                expanded |= half
        values = {j: math.exp(-d[i][j]) for j in expanded}  # equation 7
        total = sum(values.values())
        encoded.append([values.get(j, 0) / total for j in range(n)])
    means = [[sum(encoded[m][j] for m in lists[i][:k2]) / k2 for j in range(n)] for i in range(n)]
    final = []
    for g in range(1, n):
        smaller = sum(map(min, means[0], means[g]))  # equation 10
        larger = sum(map(max, means[0], means[g]))
        final.append(round((1 - weight) * (1 - smaller / larger) + weight * d[0][g], 6))
    return sorted(range(n - 1), key=lambda g: final[g])


def drawn(n, width=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, width, generator=generator)


@pytest.mark.parametrize(
    ("k1", "k2", "weight"), [(4, 2, 0.3), (3, 1, 0.0), (6, 3, 0.7), (20, 6, 0.3)]
)
def test_re_ranking_is_that_of_loops(k1, k2, weight, monkeypatch):
    for name, value in (("K1", k1), ("K2", k2), ("WEIGHT", weight)):
        monkeypatch.setattr(rerank, name, value)
    changed = 0
    for seed in range(10):
        rows = drawn(18, seed=seed)
        rows[5] = 2 * rows[3]  # a copy
        query = rows[0] + 0.7 * drawn(1, seed=100 + seed)[0]
        rows = rows[(-torch.cosine_similarity(rows, query[None])).argsort(stable=True)]
        actual = k_reciprocal_order(query, rows).tolist()
        assert sorted(actual) == list(range(18))
        assert actual == looped_order(query, rows, k1, k2, weight), seed
        changed += actual != list(range(18))
    assert changed > 5
    monkeypatch.setattr(rerank, "WEIGHT", 1)  # the cosine alone
    assert k_reciprocal_order(query, rows).tolist() == list(range(18))


def test_augmentation_is_that_of_loops_in_any_parts(monkeypatch):
    monkeypatch.setattr(rerank, "PART_ROWS", 4)
    rows = drawn(15)
    actual = augmented(rows, 4)
    units = rows.double() / rows.double().norm(dim=1, keepdim=True)
    for i in range(15):
        near = sorted(range(15), key=lambda j: -float(units[i] @ units[j]))[:4]
        total = sum(max(float(units[i] @ units[j]), 0) ** 3 * units[j] for j in near)
        torch.testing.assert_close(actual[i].double(), total / total.norm(), rtol=0, atol=1e-6)
    torch.testing.assert_close(augmented(rows, 1), units.float(), rtol=0, atol=1e-6)
    assert augmented(torch.zeros(2, 3), 2).tolist() == [[0.0] * 3] * 2
    for count in (0, 16):
        with pytest.raises(DataError, match=r"augment = .* 1\.\.15"):
            augmented(rows, count)


def two_sets():
    gallery = Embeddings(drawn(40), torch.arange(40) % 4, torch.arange(40))
    queries = Embeddings(drawn(9, seed=1), torch.arange(9) % 4, torch.arange(9))
    return gallery, queries


@pytest.mark.parametrize("hide", [False, True])
def test_every_metric_of_a_re_ranked_query_equals_the_loops(hide):
    """The first 12 of what a query sees are ordered anew; what it does not see takes no part."""
    gallery, queries = two_sets()
    scores = retrieval_per_query(gallery, queries, k=(1, 5), exclude_same_id=hide, rerank=12)
    for q in range(9):
        seen = [j for j in range(40) if not (hide and j == q)]
        cosine = torch.cosine_similarity(gallery.features.double(), queries.features[q].double())
        seen.sort(key=lambda j: -float(cosine[j]))
        order = looped_order(queries.features[q], gallery.features[seen[:12]], 20, 6, 0.3)
        ranked = [seen[place] for place in order] + seen[12:]
        good = [int(gallery.labels[j]) == int(queries.labels[q]) for j in ranked]
        ranks = np.flatnonzero(good)[None] + 1.0
        expected = query_metrics(ranks, np.array([sum(good)]), (1, 5))
        np.testing.assert_allclose(scores.values[q], np.ravel([*expected.values()]), rtol=1e-12)


def test_rows_of_retrieval_are_beside_the_plain_ones_and_marked():
    gallery, queries = two_sets()
    plain = retrieval(gallery, queries, k=(1,))
    both = retrieval(gallery, queries, k=(1,), augment=3, rerank=10)
    assert both[: len(plain)] == plain
    marked = both[len(plain) :]
    assert [row.metric for row in marked] == [row.metric for row in plain]
    assert all("transductive augment=3 rerank=10" in row.protocol for row in marked)
    mixed = gallery._replace(features=augmented(gallery.features, 3))
    expected = retrieval_per_query(mixed, queries, k=(1,), rerank=10).values.mean(axis=0)
    np.testing.assert_allclose([row.value for row in marked], expected, rtol=1e-12)
    last = retrieval(gallery, queries, k=(1,), augment=2)[-1].protocol
    assert "transductive augment=2 interval" in last
    for count in (-1, 1, 1001):
        with pytest.raises(DataError, match=f"rerank = {count} is not 0"):
            retrieval(gallery, queries, k=(1,), rerank=count)


def test_a_search_is_re_ranked_and_its_images_mixed_over_all_files(tmp_path):
    parts = [write_part(tmp_path / str(seed), seed) for seed in (0, 1)]
    query = torch.tensor([[-0.5, 2.0, 0.1, 1.0, -1.0, 0.3]])
    places = [(part, row) for part in (0, 1) for row in range(7)]
    features = {(p, int(parts[p][2].ids[r])): parts[p][2].features[r] for p, r in places}
    near = by_loops(parts, query[0].double(), 14)
    search = ImageSearch(*(part[:2] for part in parts))
    (hits,) = search.find(query, 4, rerank=8)
    rows = torch.stack([features[hit[1:3]] for hit in near[:8]])
    order = looped_order(query[0], rows, 20, 6, 0.3)
    assert [hit[1:] for hit in hits] == [near[place][1:] for place in order[:4]]
    (hits,) = search.find(query, 12, rerank=8)  # what lies behind stays
    assert [hit[1:] for hit in hits[8:]] == [hit[1:] for hit in near[8:12]]

    mixed = augmented(torch.stack([parts[p][2].features[r] for p, r in places]), 3)
    (hits,) = ImageSearch(*(part[:2] for part in parts), augment=3).find(query, 14)
    cosine = torch.cosine_similarity(mixed.double(), query.double())
    best = sorted(range(14), key=lambda place: -float(cosine[place]))
    expected = [(places[at][0], int(parts[places[at][0]][2].ids[places[at][1]])) for at in best]
    assert [hit[1:3] for hit in hits] == expected


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
    places = torch.arange(approximate.MEASURED) * len(rows) // approximate.MEASURED
    true, _ = by_cosines(rows, rows[places], 11)
    near = opened(made).nearest(fixed_point_units(rows), fixed_point_units(rows[places]), 11)
    hits = [
        len(({*one.tolist()} - {own}) & {*found.tolist()}) / 10
        for one, found, own in zip(true, near.indices, places.tolist(), strict=True)
    ]
    assert stated[1] == pytest.approx(np.mean(hits), abs=1e-6)
    assert stated[1] >= 0.95
    assert 1 <= stated[0] <= 64 // approximate.MOST_LOOKED


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
