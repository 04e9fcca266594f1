"""The table: the same protocols, samples and draws for every set of features."""

import io
import json
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from rich.console import Console

from sslpipe.cli.suite_output import suite_table
from sslpipe.errors import DataError
from sslpipe.evaluation import protocols, table
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.few_shot import few_shot_knn
from sslpipe.evaluation.flatten import choose_power
from sslpipe.evaluation.knn import knn_results
from sslpipe.evaluation.linear_probe import linear_probe
from sslpipe.evaluation.retrieval import retrieval
from sslpipe.evaluation.suite_file import check_report, content_sha256
from sslpipe.evaluation.table import Leaks, Others, run_suite
from sslpipe.evaluation.verdict import leakage_sentence
from sslpipe.evaluation.verification import verification
from sslpipe.evaluation.whiten import whiten
from sslpipe.report.result_tables import leakage, result_table
from tests.evaluation.test_knn import random_rows

pytestmark = pytest.mark.usefixtures("few_resamples")


def pair(width=6, n=400):
    return random_rows(n, width, 4, seed=1), random_rows(100, width, 4, seed=2, first_id=10**6)


def noise_of(rows):
    generator = torch.Generator().manual_seed(0)
    return rows._replace(features=torch.randn(len(rows.ids), 3, generator=generator))


def two_sets():
    train, test = pair()
    return {"ssl": (train, test), "noise": (noise_of(train), noise_of(test))}


@pytest.fixture(scope="module")
def report():
    return run_suite(two_sets(), {"data": "made up"})


@pytest.mark.promise(6)
def test_every_set_has_the_same_protocols_and_one_number_a_cell(report):
    protocols = {}
    for row in report["rows"]:
        protocols.setdefault((row["features"], row["whitened"]), []).append(row["protocol"])
    assert set(protocols) == {("ssl", False), ("ssl", True), ("noise", False), ("noise", True)}
    assert protocols["ssl", False] == protocols["noise", False]
    assert protocols["ssl", True] == protocols["noise", True] == protocols["ssl", False][:-1]
    assert report["columns"][0] == "kNN"
    assert report["columns"][-1] == "linear"
    cells = [(r["features"], r["whitened"], r["column"]) for r in report["rows"] if r["column"]]
    assert len(cells) == len(set(cells))
    in_table = {r["protocol"] for r in report["rows"] if r["column"] == "kNN"}
    assert in_table == {"knn-weighted k=20 T=0.07 cosine"}


def test_each_number_is_that_of_its_own_function(report):
    train, test = pair()
    power = choose_power(train).power
    flat = whiten(train, test, power=power)
    expected = [
        *knn_results(train, test),
        *knn_results(train, test, vote="majority"),
        *linear_probe(train, test),
        *few_shot_knn(train, test, labels_per_class=10, k=[10]),
        *few_shot_knn(train, test, labels_per_class=1, k=[1]),
        *retrieval(test, test, exclude_same_id=True),
        *verification(test, test),
    ]
    rows = {
        (r["features"], r["whitened"], r["protocol"], r["metric"]): r["value"]
        for r in report["rows"]
    }
    for result in expected:
        assert rows["ssl", False, result.protocol, result.metric] == result.value
    for result in [*knn_results(*flat), *retrieval(flat[1], flat[1], exclude_same_id=True)]:
        assert rows["ssl", True, result.protocol, result.metric] == result.value
    assert {r.get("power") for r in report["rows"] if r["features"] == "ssl"} == {None, power}
    assert all(("power" in r) == r["whitened"] for r in report["rows"])


def test_features_that_are_all_zeros_are_said(report):
    assert not any("zeros" in text for text in report["left_out"])
    sets = two_sets()
    _, test = sets["noise"]
    test.features[[3, 5]] = 0
    said = run_suite(sets, {"data": "made up"})["left_out"]
    (one,) = (text for text in said if "zeros" in text)
    assert one.startswith("the direction of 2 of 100 test samples by noise,")


def test_each_set_is_flattened_by_the_power_that_its_own_train_rows_choose():
    """Wide axes that say nothing, and narrow ones of noise: one wants whitening, one little."""
    train, test = pair()
    wide, narrow = (
        [rows._replace(features=torch.cat([rows.features, scale * noise_of(rows).features], 1))
         for rows in (train, test)]
        for scale in (30, 0.1)
    )  # fmt: skip
    sets = {"ssl": tuple(wide), "other": tuple(narrow)}
    report = run_suite(sets, {}, Others(["other"]))
    powers = {name: choose_power(train).power for name, (train, _) in sets.items()}
    assert powers["ssl"] > powers["other"]
    got = {r["features"]: r["power"] for r in report["rows"] if r["whitened"]}
    assert got == powers
    for row in report["against"]:
        assert (row["power"], row["against_power"]) == (powers["ssl"], powers["other"])
        assert row["whitened"] == row["against_whitened"]


def test_sets_of_other_samples_are_refused():
    train, test = pair()
    other = test._replace(ids=test.ids + 1)
    with pytest.raises(DataError, match="test features of 'b' and 'a' are not of the same samples"):
        run_suite({"a": (train, test), "b": (train, other)}, {})
    with pytest.raises(DataError, match="no set"):
        run_suite({}, {})


def with_small_classes():
    """Classes 0 to 3 of about 60 rows, class 4 of 12 rows and class 5 of one row in the bank."""
    train, test = pair(n=240)
    labels = train.labels.clone()
    labels[torch.nonzero(labels == 0).flatten()[:12]] = 4
    labels[torch.nonzero(labels == 1).flatten()[:1]] = 5
    test_labels = test.labels.clone()
    test_labels[:6] = torch.tensor([4, 4, 4, 5, 5, 5])
    return train._replace(labels=labels), test._replace(labels=test_labels)


@pytest.mark.parametrize(
    ("labels", "tested", "reason"),
    [
        ([0] * 40, [0] * 20, "kNN, 10 labels per class: only one train class has 10"),
        ([0] * 30 + [1] * 10, [2] * 20, "kNN and linear probes: no test class occurs in train"),
        (
            [0] * 38 + [1] * 2,
            [0] * 10 + [1] * 10,
            "kNN, 10 labels per class: only one train class has 10",
        ),
        ([0] * 40, [0] * 20, "linear probes: train has one class"),
        (range(20), range(20), "linear probes: no train class has two samples"),
    ],
)
def test_what_is_not_measured_has_its_own_reason(labels, tested, reason):
    bank, queries = (
        Embeddings(torch.randn(len(own), 4), torch.tensor([*own]), torch.arange(len(own)))
        for own in (labels, tested)
    )
    said = run_suite({"ssl": (bank, queries)}, {})["left_out"]
    assert sum(text.startswith(reason) for text in said) == 1


@pytest.mark.parametrize("unseen", [20, 15])
def test_where_train_has_not_the_classes_of_test_the_table_has_what_decides(unseen):
    """20 classes of 5; kNN there would be 0 for every network, or the share that train has."""
    train, test = pair()
    labels = torch.arange(100) // 5
    test = test._replace(labels=torch.where(labels < unseen, labels + 100, labels % 4))
    sets = {"ssl": (train, test), "pixels": (noise_of(train), noise_of(test))}
    leaked = test.ids[:7].numpy()
    report = run_suite(sets, {}, leaks=Leaks(leaked, "by pixels"))
    check_report(json.loads(json.dumps(report)))
    assert report["columns"] == ["Recall@1", "MAP@R"]
    inside = {r.metric: r for r in retrieval(test, test, exclude_same_id=True)}
    cells = {r["column"]: r for r in report["rows"] if r["features"] == "ssl" and r["column"]}
    assert set(cells) == {"Recall@1", "MAP@R"}
    for column in ("Recall@1", "MAP@R"):
        plain = next(r for r in report["rows"] if r["features"] == "ssl" and r["column"] == column)
        assert plain["value"] == inside[column].value
        clean = next(r for r in report["leakage"]["rows"] if r["column"] == column)
        assert clean["clean_value"] == pytest.approx(inside[column].scores[7:].mean())
        assert clean["clean_interval95"][0] <= clean["clean_value"] <= clean["clean_interval95"][1]
    assert report["leakage"]["leaked"] == 7
    measured = any("knn" in r["protocol"] for r in report["rows"])
    assert measured == (unseen < 20)
    assert sum("train" in text for text in report["left_out"]) == 1
    assert report["against"] == []
    assert next(e for e in report["baselines"] if e["primary"])["measure"] == "Recall@1"
    assert {each["measure"] for each in report["baselines"]} == {"Recall@1", "MAP@R"}
    assert "raw pixels: " in report["verdict"]
    assert "kNN" not in report["verdict"]
    for page in (result_table(report), printed(report)):
        assert f"{100 * inside['Recall@1'].value:.1f}" in page


def test_test_samples_that_knn_cannot_get_right_are_counted():
    train, test = pair()
    labels = test.labels.clone()
    labels[:7] = 100
    for queries, expected in ((test, []), (test._replace(labels=labels), ["7 of 100"])):
        report = run_suite({"ssl": (train, queries)}, {})
        lacks = [text for text in report["left_out"] if "train lacks" in text]
        assert [text[len("kNN of ") :][:8] for text in lacks] == expected
        (knn,) = [r for r in report["rows"] if r["column"] == "kNN" and not r["whitened"]]
        assert knn["queries"] == 100, "they are counted all the same"


def printed(report):
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(suite_table(report))
    return console.export_text()


def test_a_small_class_leaves_the_columns_to_the_larger_ones_and_is_named():
    train, test = with_small_classes()
    names = ["ape", "bee", "cat", "dog", "eel", "fox"]
    report = run_suite({"ssl": (train, test)}, {"classes": names})
    assert report["columns"] == ["kNN", "kNN, 10/class", "linear"]
    assert report["baselines"] == []
    assert "not known" in report["verdict"], "alone the features have nothing to beat"
    for start in ("kNN, 100 labels per", "kNN, 10 labels per class for 1 of 6"):
        assert any(text.startswith(start) for text in report["left_out"])
    assert any("fox (1)" in text for text in report["left_out"])
    # the same numbers as of the larger classes alone
    kept = torch.arange(5)
    larger = [
        side.rows(torch.nonzero(torch.isin(side.labels, kept)).flatten()) for side in (train, test)
    ]
    (few,) = few_shot_knn(*larger, labels_per_class=10, k=[10])
    (fitted,) = linear_probe(train, test)
    rows = {row["column"]: row for row in report["rows"] if not row["whitened"]}
    assert rows["kNN, 10/class"]["value"] == few.value
    assert rows["kNN, 10/class"]["protocol"] == f"{few.protocol} classes=5/6"
    assert rows["kNN, 10/class"]["queries"] == 97
    # of all classes
    assert rows["linear"]["value"] == fitted.value
    assert rows["linear"]["protocol"] == fitted.protocol
    assert rows["linear"]["details"]["classes_of_one"] == 1
    assert rows["linear"]["queries"] == rows["kNN"]["queries"] == 100


def test_a_column_of_fewer_than_half_of_the_classes_is_left_out_and_says_why():
    """Two classes of 40 rows in the bank, and others of 2: two of four, then two of five."""
    train, test = pair(n=240)
    for small, shown in ((2, True), (3, False)):
        sizes = torch.tensor([40, 40] + [2] * small)
        labels = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        bank = train.rows(torch.arange(len(labels)))._replace(labels=labels)
        queries = test._replace(labels=torch.arange(100) % len(sizes))
        report = run_suite({"ssl": (bank, queries)}, {})
        assert report["columns"] == ["kNN", "kNN, 10/class", "linear"]
        rows = [row for row in report["rows"] if row["protocol"].startswith("knn-weighted")]
        few = [row for row in rows if f"classes=2/{len(sizes)}" in row["protocol"]]
        assert few
        assert any(row["column"] == "kNN, 10/class" for row in few) == shown
        assert any("too few for the table" in text for text in report["left_out"]) != shown
        head = result_table(report).partition("<tbody>")[0]
        assert ("kNN, 10/class" in printed(report), "kNN, 10/class" in head) == (shown, shown)


def test_samples_without_a_label_are_counted_and_none_with_one_is_an_error():
    train, test = pair()
    labels = train.labels.clone()
    labels[:30] = -1
    partly = train._replace(labels=labels)
    report = run_suite({"ssl": (partly, test), "pixels": (noise_of(partly), noise_of(test))}, {})
    assert report["left_out"][0] == "30 of 400 train samples, which have no label"
    (expected,) = knn_results(train.rows(torch.arange(30, 400)), test, k=(20,))
    assert next(row["value"] for row in report["rows"] if row["column"] == "kNN") == expected.value
    bare = test._replace(labels=torch.full_like(test.labels, -1))
    with pytest.raises(DataError, match="none of the 100 samples of test has a label"):
        run_suite({"ssl": (train, bare)}, {})


def test_features_that_are_made_on_the_way_are_used_up_and_those_of_the_caller_are_not(report):
    sets, made = two_sets(), list(two_sets()["noise"])
    held, (train, _) = sets["noise"], sets["ssl"]
    assert run_suite(sets, {"data": "made up"}) == report
    assert run_suite({**sets, "noise": lambda: tuple(made)}, {"data": "made up"}) == report
    power = choose_power(held[0]).power
    for whole, rows, mine in zip(whiten(*held, power=power), made, held, strict=True):
        assert torch.equal(rows.features, whole.features)  # in their own memory
        assert torch.equal(mine.features, noise_of(mine).features)
    assert torch.equal(train.features, pair()[0].features)


def test_each_set_has_one_bar_that_reaches_its_end_and_no_other_line():
    said = []
    bars: dict[str, list[int]] = {}

    @contextmanager
    def progress(title, total):
        bars[title] = [total, 0]

        def advance(count):
            bars[title][1] += count

        yield advance

    run_suite(two_sets(), {}, say=said.append, progress=progress)
    assert [*bars] == ["evaluate ssl", "evaluate noise"]
    assert all(total == done > 0 for total, done in bars.values())
    assert said == []


def interrupt(*rows, **options):
    raise KeyboardInterrupt


@pytest.mark.parametrize("when", ["embedded", "measured", "compared"])
def test_an_interrupted_suite_keeps_what_is_measured(report, when, monkeypatch):
    ssl, noise = two_sets().values()
    said = []

    def embedded():
        if when == "embedded":
            interrupt()
        if when == "measured":
            monkeypatch.setattr(protocols, "verification", interrupt)
        return noise

    if when == "compared":
        once = iter([interrupt, table.compare_all, table.compare_all])
        monkeypatch.setattr(table, "compare_all", lambda *a, **named: next(once)(*a, **named))
    sets = {"ssl": ssl, "noise": embedded}
    stopped = run_suite(sets, {"data": "made up"}, say=said.append)
    if when == "compared":  # all is measured, and the answers are given
        assert stopped == report
        return
    assert stopped["incomplete"] == {"noise": "interrupted"}
    assert stopped["left_out"][-1] == "noise: interrupted"
    assert stopped["rows"] == [row for row in report["rows"] if row["features"] == "ssl"]
    assert said[-1] == "interrupted; kept: ssl"
    check_report(json.loads(json.dumps(stopped)))
    assert "incomplete" not in report


def many_classes(classes, per_class, width=8):
    labels = torch.arange(classes).repeat_interleave(per_class)
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(classes, width, generator=generator)
    features = centres[labels] + 0.3 * torch.randn(len(labels), width, generator=generator)
    rows = Embeddings(features, labels, torch.arange(len(labels)))
    held = torch.arange(len(labels)) % per_class == per_class - 1
    return rows.rows(~held), rows.rows(held)


@pytest.mark.parametrize(
    ("classes", "per_class", "work", "ks", "said"),
    [
        (1001, 4, 2**36, 4, "linear probes: 1,001 classes have fewer than 10 images"),
        (40, 4, 120 * 8 * 40 - 1, 4, "ssl, linear probes: 120 rows x 8 features x 40 classes"),
        (40, 4, 120 * 8 * 40, 4, "kNN with k = 100: the largest train class has 3 samples"),
        (100, 4, 2**36, 4, "kNN with k = 100 and 200: the largest train class has 3 samples"),
        (30, 11, 2**36, 5, "kNN with k = 200: the largest train class has 10 samples"),
    ],
)
def test_what_takes_hours_or_means_little_is_skipped_by_a_stated_rule(
    classes, per_class, work, ks, said, monkeypatch
):
    """Linear probes, and kNN farther than ten times the largest class."""
    monkeypatch.setattr(protocols, "PROBE_WORK", work)
    report = run_suite({"ssl": many_classes(classes, per_class)}, {})
    words = [row["protocol"].split() for row in report["rows"]]
    probed = "linear-lbfgs" in {each[0] for each in words}
    assert probed != any("linear probes:" in text for text in report["left_out"])
    known = [p[1] for p in words if p[0] == "knn-weighted" and len(p) == 4]
    assert [*dict.fromkeys(known)] == [f"k={k}" for k in (1, 5, 10, 20, 100)[:ks]]
    assert sum(text.startswith(said) for text in report["left_out"]) == 1
    check_report(json.loads(json.dumps(report)))


def test_a_set_that_fails_is_named_and_the_others_are_as_without_it(report):
    (train, test), noise = two_sets().values()

    def fails():
        raise DataError("a shard\nis gone")

    other = train._replace(ids=train.ids + 1), test
    sets = {"ssl": (train, test), "theirs": fails, "noise": lambda: noise, "odd": lambda: other}
    rest = run_suite(sets, {"data": "made up"}, Others(["theirs"], start="theirs"))
    assert rest["rows"] == report["rows"]
    assert rest["incomplete"]["theirs"] == "a shard is gone"
    assert "are not of the same samples" in rest["incomplete"]["odd"]
    assert rest["not_compared"] == ["Not compared with theirs: a shard is gone."]
    assert [text.partition(":")[0] for text in rest["left_out"]][-1] == "odd"
    assert rest["against"] == report["against"] == []
    check_report(json.loads(json.dumps(rest)))
    with pytest.raises(DataError, match="has a label"):  # the first one
        run_suite({"ssl": (train, test._replace(labels=test.labels * 0 - 1))}, {})


LEAKED = 60


@pytest.fixture(scope="module")
def planted():
    """Random features with random labels, but for 60 of 160 test rows, which are rows of train."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(360, 16, generator=generator)
    labels = torch.randint(0, 4, (360,), generator=generator)
    train = Embeddings(features[:200], labels[:200], torch.arange(200))
    copied = torch.arange(LEAKED) * 3
    test_features, test_labels = features[200:].clone(), labels[200:].clone()
    test_features[:LEAKED] = train.features[copied] + 1e-4
    test_labels[:LEAKED] = train.labels[copied]
    test = Embeddings(test_features, test_labels, torch.arange(160))
    return train, test


@pytest.fixture(scope="module")
def reports(planted):
    """The report without, and with, a look for leaks."""
    sets = {"ssl": planted}
    leaked = np.arange(LEAKED)
    return run_suite(sets, {}), run_suite(sets, {}, leaks=Leaks(leaked, "by hand"))


def row_of(report, column):
    rows = report["leakage"]["rows"]
    return next(row for row in rows if (row["column"], row["whitened"]) == (column, False))


def test_without_leaks_knn_falls_by_what_was_planted(planted, reports):
    train, test = planted
    found = reports[1]["leakage"]
    assert (found["samples"], found["leaked"], found["how"]) == (160, LEAKED, "by hand")
    row = row_of(reports[1], "kNN")
    # brute force: similarities, a weighted vote of 20, over the clean rows alone
    unit = [torch.nn.functional.normalize(side.features.double(), dim=1) for side in planted]
    top = (unit[1] @ unit[0].T).topk(20, dim=1)
    votes = torch.zeros(160, 4, dtype=torch.float64)
    votes.scatter_add_(1, train.labels[top.indices], (top.values / 0.07).exp())
    right = votes.argmax(1) == test.labels
    assert row["value"] == pytest.approx(right.double().mean().item(), abs=1e-12)
    assert row["clean_value"] == pytest.approx(right[LEAKED:].double().mean().item(), abs=1e-12)
    assert right[:LEAKED].all(), "what was planted is found"
    lost = row["value"] * 160 - row["clean_value"] * 100
    assert lost == pytest.approx(LEAKED), "exactly the planted ones were right by their copies"
    assert row["clean_value"] < 0.45 < row["value"]


def test_each_number_is_that_of_a_test_without_them(planted, reports):
    train, test = planted
    clean = test.rows(torch.arange(LEAKED, 160))
    (knn,) = [r for r in knn_results(train, clean, k=[20], vote="weighted")]
    (linear,) = linear_probe(train, clean)
    (few,) = few_shot_knn(train, clean, labels_per_class=10, k=[10])
    for column, result in (("kNN", knn), ("linear", linear), ("kNN, 10/class", few)):
        row = row_of(reports[1], column)
        assert row["clean_value"] == pytest.approx(result.value, abs=1e-12)
        assert row["clean_interval95"] == pytest.approx(list(result.interval95), abs=1e-12)
        assert (row["clean_queries"], row["queries"]) == (100, 160)


def test_a_test_that_is_all_leaked_has_no_clean_number(planted):
    report = run_suite({"ssl": planted}, {}, leaks=Leaks(np.arange(160), "by hand"))
    assert all(row["clean_value"] is None for row in report["leakage"]["rows"])
    sentence = leakage_sentence(report["leakage"])
    assert sentence.startswith("160 of 160 test samples (100 %) have")
    assert "nothing is left" in sentence
    assert "none is left" in leakage(report)
    check_report(json.loads(json.dumps(report)))


def test_the_report_is_plain_json_shown_and_otherwise_the_same(reports):
    plain, tree = json.loads(json.dumps(reports))
    assert {key: plain[key] for key in plain if key != "sha256"} == {
        key: tree[key] for key in tree if key not in ("leakage", "sha256")
    }
    check_report(tree)
    assert tree["sha256"] == content_sha256(tree)
    assert leakage(plain) == ""
    assert "<th scope='row'>this run</th>" in leakage(tree)
    assert "ssl" not in leakage(tree)
    row = row_of(tree, "kNN")
    said = f"kNN is {100 * row['value']:.1f} % on all 160, {100 * row['clean_value']:.1f} % on the "
    sentence = leakage_sentence(tree["leakage"])
    assert sentence.startswith("60 of 160 test samples (38 %) have a near-duplicate in train (by ")
    assert sentence.endswith(f"(by hand): {said}other 100. The verdict is on all of them.")
    pixels = leakage_sentence({**tree["leakage"], "how": "by pixels"})
    assert pixels.endswith("; `sslpipe curate duplicates DATA --out DIR` lists the pairs.")
    tree["leakage"]["rows"][0] |= {"features": "mine", "clean_value": 1.5}
    assert ": mine, kNN is" in leakage_sentence(tree["leakage"])
    with pytest.raises(ValueError, match="its sha256 is another one"):
        check_report(tree)
