"""Was training worth it: useless runs are not called better, useful ones are; how it is said."""

import json
from itertools import product

import numpy as np
import pytest
import torch

from sslpipe.cli.suite_output import suite_table
from sslpipe.data.subsets import has_a_partner
from sslpipe.evaluation.comparison import BASELINES, Scores, compare_all
from sslpipe.evaluation.difference import paired_top1
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.intervals import wilson95
from sslpipe.evaluation.knn import knn_results
from sslpipe.evaluation.label_free import uniformity
from sslpipe.evaluation.result import Measured, Result
from sslpipe.evaluation.suite_file import check_report, content_sha256
from sslpipe.evaluation.table import Others, run_suite
from sslpipe.evaluation.verdict import against_sentences, verdict
from sslpipe.evaluation.whiten import whiten
from sslpipe.report.result_tables import result_table
from tests.evaluation.test_suite import two_sets

pytestmark = pytest.mark.usefixtures("few_resamples")


def row(features, right, column="kNN", *, whitened=False, total=1000):
    low, high = wilson95(right, total)
    return {
        "features": features, "whitened": whitened, "column": column, "value": right / total,
        "interval95": [low, high],
    }  # fmt: skip


def beside_baselines(rows, total=1000):
    """The comparisons of kNN rows, whose samples are right independently of one another.

    A form that is not given is as good as the other one.
    """
    scores = Scores({}, np.zeros(0, np.int64))
    for number, each in enumerate(rows):
        right = np.arange(total) < round(total * each["value"])
        hits = np.random.default_rng(number).permutation(right)
        scores.of[each["features"], each["whitened"], "kNN"] = hits
        scores.of.setdefault((each["features"], not each["whitened"], "kNN"), hits)
    names = list(dict.fromkeys(each["features"] for each in rows))
    ours = [name for name in names if name not in BASELINES]
    theirs = [name for name in BASELINES if name in names]
    return compare_all(ours, theirs, None, scores, known_classes=True)


def judged(rows):
    measured = [each for each in rows if each["column"]]
    return verdict({"rows": rows, "baselines": beside_baselines(measured)})


@pytest.mark.parametrize(
    ("right", "said"),
    [
        (600, "Better than random weights: kNN 60.0 against 50.0 % (+10.0 points, 95 % interval "),
        (505, "Not clearly better than random weights: kNN 50.5 against 50.0 % (+0.5 points, 95 "),
        (300, "Worse than random weights: kNN 30.0 against 50.0 % (-20.0 points, 95 % interval -"),
    ],
)
def test_each_baseline_has_a_sentence_that_begins_with_the_answer(right, said):
    text = judged([row("ssl", right), row("random", 500), row("pixels", 500)])
    assert text.startswith(said)
    first, second = text.removesuffix(").").split("). ")
    assert second.startswith(said.partition(" (")[0].replace("random weights", "raw pixels"))
    assert "use the model" not in text, "nobody would use these"
    assert [part.count(" against ") for part in (first, second)] == [1, 1]


def test_a_baseline_is_beaten_in_both_forms_or_not_clearly():
    """As another network: pixels that are as good once they are flattened are not beaten."""
    rows = [
        row("ssl", 700), row("ssl", 600, whitened=True),
        row("pixels", 600), row("pixels", 695, whitened=True),
    ]  # fmt: skip
    assert "Not clearly better than raw pixels: " in judged(rows)
    assert "Better than raw pixels: " in judged(rows[:3])


def test_what_was_not_measured_is_said_and_several_features_are_named():
    assert "not known: that baseline was not measured" in judged([row("ssl", 600)])
    said = judged([row("ssl", 600), row("pixels", 400)])
    assert "random weights is not known" in said
    assert "Better than raw pixels: kNN 60.0 against 40.0 %" in said
    for rows in ([row("ssl", 6, None)], []):
        assert judged(rows).startswith("No accuracy was measured")
    said = judged([row("ssl", 600), row("other", 500), row("random", 500)])
    assert said.startswith("ssl: better than random weights: kNN")
    assert "other: not clearly better than random weights: kNN" in said


def test_the_suite_compares_on_each_measure_with_random_weights():
    ssl, noise = two_sets().values()
    report = run_suite({"ssl": ssl, "random": noise}, {})
    assert report["verdict"].startswith("Better than random weights: ")
    compared = report["baselines"]
    assert {(each["features"], each["against"]) for each in compared} == {("ssl", "random")}
    measured = {(each["measure"], each["whitened"]) for each in compared}
    both = product(("kNN", "Recall@1", "MAP@R"), (False, True))
    assert measured == {("linear", False), *both}
    table = {(r["features"], r["whitened"], r["column"]): r["value"] for r in report["rows"]}
    for each in compared:
        if each["measure"] not in ("kNN", "linear"):
            continue
        keys = ((name, each["whitened"], each["measure"]) for name in ("ssl", "random"))
        ours, theirs = (table[key] for key in keys)
        assert (each["value"], each["against_value"]) == (ours, theirs)
        assert each["difference"] == pytest.approx(ours - theirs)
        assert each["interval95"][0] < each["difference"] < each["interval95"][1]
        text = f"{100 * ours:.1f} against {100 * theirs:.1f} % ({100 * each['difference']:+.1f} "
        assert each["primary"] is False or text in report["verdict"]


CLASSES, PIXELS, WIDTH = 8, 24, 12
BANK, QUERIES = 240, 300


def images(generator, prototypes):
    """Labels and images: a class's prototype and noise, more of it in the second half of pixels."""
    labels = torch.randint(0, len(prototypes), (BANK + QUERIES,), generator=generator)
    spread = torch.cat([torch.full((PIXELS // 2,), 0.9), torch.full((PIXELS // 2,), 3.0)])
    noise = torch.randn(len(labels), PIXELS, generator=generator) * spread
    return labels, prototypes[labels] + noise


def split(labels, features, bank=BANK):
    ids = torch.arange(len(labels))
    rows = Embeddings(features.float(), labels, ids)
    return rows.rows(ids[:bank]), rows.rows(ids[bank:])


def network(generator):
    """Weights (PIXELS, WIDTH) that look at the pixels with little noise: a good network."""
    weights = torch.zeros(PIXELS, WIDTH)
    square = torch.randn(PIXELS // 2, WIDTH, generator=generator)
    weights[: PIXELS // 2] = torch.linalg.qr(square).Q
    return weights


def shuffled(weights, generator):
    return weights.flatten()[torch.randperm(weights.numel(), generator=generator)].view_as(weights)


def trained_on_noise(weights, generator):
    return weights + 0.5 * torch.randn(weights.shape, generator=generator)


def deciding(ours, theirs, *, known=True):
    """The suite's own comparison by kNN or Recall@1, without what a verdict does not need."""
    labels = ours[1].labels.numpy()
    scores = Scores({}, labels[has_a_partner(labels)])
    for name, pair in {"ssl": ours, "theirs": theirs}.items():
        for whitened in (False, True):
            bank, queries = whiten(*pair) if whitened else pair
            column, result = measured(bank, queries, known)
            scores.take(Measured(name, 1.0 if whitened else None, column, result))
    found = compare_all(["ssl"], ["theirs"], "theirs", scores, known_classes=known)
    assert [each["primary"] for each in found] == [True, False]
    assert all(each["whitened"] == each["against_whitened"] for each in found), "like for like"
    assert {each["whitened"] for each in found} == {False, True}
    return found[0]["answer"]


def measured(bank, queries, known):
    if known:
        return "kNN", knn_results(bank, queries, k=(20,))[0]
    unit = torch.nn.functional.normalize(queries.features, dim=1)
    nearest = (unit @ unit.T).fill_diagonal_(-2).argmax(dim=1)
    hits = (queries.labels[nearest] == queries.labels).double().numpy()
    return None, Result("p", "Recall@1", hits.mean(), (0, 1), len(hits), 0, scores=hits)


def known(generator, kind):
    """Ours and theirs: train has the 8 classes of test."""
    labels, pictures = images(generator, torch.randn(CLASSES, PIXELS, generator=generator))
    start = network(generator)
    ours = theirs = pictures @ start
    if kind == "as good as before":  # both lose as much: the one hard to tell
        noise = torch.randn(2, *theirs.shape, generator=generator)
        ours, theirs = theirs + noise[0], theirs + noise[1]
    elif kind == "useful":
        theirs = pictures @ trained_on_noise(start, generator)
    else:
        change = shuffled if kind == "shuffled" else trained_on_noise
        ours = pictures @ change(start, generator)
    return split(labels, ours), split(labels, theirs)


def unseen(generator, kind, test):
    """Ours and theirs: train has 60 classes of 3, test others of 4; whitening helps them all."""
    sizes = torch.tensor([3] * 60 + [4] * (test // 4))
    labels = torch.arange(len(sizes)).repeat_interleave(sizes)
    pictures = torch.randn(len(sizes), PIXELS, generator=generator)[labels]
    pictures = pictures + torch.randn(pictures.shape, generator=generator)
    pictures[:, -6:] *= 3  # axes that say little and weigh much
    noise = torch.randn(2, *pictures.shape, generator=generator)
    ours, theirs = {
        "8 steps at rate 0": (pictures + 0.1 * noise[0], pictures),
        "other statistics": (pictures * noise[0, 0].mul(0.1).exp(), pictures),
        "as good as before": (pictures + 0.7 * noise[0], pictures + 0.7 * noise[1]),
        "useful": (pictures + 0.1 * noise[0], pictures + noise[1]),
    }[kind]
    return split(labels, ours, 180), split(labels, theirs, 180)


# 100 are drawn by `make test-slow`
@pytest.mark.parametrize("draws", [20, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.promise(12)
@pytest.mark.parametrize(
    ("kind", "test"),  # 0: of known classes
    [
        *product(["shuffled", "trained on noise", "as good as before", "useful"], [0]),
        *product(["8 steps at rate 0", "other statistics"], [100, 500]),
        *product(["as good as before", "useful"], [100, 500]),
    ],
)
def test_of_100_useless_runs_at_least_95_are_not_called_better(kind, test, draws):
    """4 images per class: a form that each network chose by itself was chance, and decided."""
    generators = (torch.Generator().manual_seed(draw) for draw in range(draws))
    if test:
        answers = [deciding(*unseen(each, kind, test), known=False) for each in generators]
    else:
        answers = [deciding(*known(each, kind)) for each in generators]
    if kind == "useful":
        assert answers.count("better") >= (0.8 if test else 0.6) * draws
        assert test or answers.count("worse") == 0
    else:
        assert answers.count("better") <= 0.05 * draws
    if kind in ("shuffled", "trained on noise"):
        assert answers.count("worse") >= 0.6 * draws


def test_better_scaled_features_alone_are_not_called_better():
    """The same network, but one's features drown in an axis that says nothing."""
    generator = torch.Generator().manual_seed(0)
    labels, pictures = images(generator, torch.randn(CLASSES, PIXELS, generator=generator))
    features = torch.cat([pictures @ network(generator), pictures[:, -3:]], dim=1)
    factor = torch.cat([torch.ones(WIDTH), torch.full((3,), 4.0)])
    ours = split(labels, features)
    theirs = tuple(rows._replace(features=rows.features * factor) for rows in ours)
    assert deciding(ours, theirs) == deciding(theirs, ours) == "no clear difference"
    plain = [knn_results(*pair, k=(20,))[0].value for pair in (ours, theirs)]
    assert plain[0] > plain[1] + 0.15, "as they are, the one is far better"


def right(share, of=1000):
    """Which of so many are right, the first ones."""
    return np.arange(of) < share * of


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),  # accuracy as they are, and whitened
    [
        ((0.70, 0.60), (0.60, 0.55), "better"),
        ((0.75, 0.62), (0.60, 0.62), "better"),  # far above both forms of theirs
        ((0.70, 0.60), (0.60, 0.69), "no clear difference"),  # theirs whitened is as good
        ((0.70, 0.50), (0.60, 0.55), "no clear difference"),  # the other way round, whitened
        ((0.60, 0.69), (0.70, 0.60), "no clear difference"),
        ((0.60, 0.55), (0.70, 0.60), "worse"),
    ],
)
def test_an_answer_must_hold_against_the_other_form_too(ours, theirs, expected):
    scores = Scores({}, np.zeros(0, np.int64))
    for name, shares in (("ssl", ours), ("theirs", theirs)):
        for whitened, share in enumerate(shares):
            scores.of[name, bool(whitened), "kNN"] = right(share)
    scores.of["ssl", False, "linear"] = right(0.5)  # of the one network only: no comparison
    first, second = compare_all(["ssl"], ["theirs"], None, scores, known_classes=True)
    assert first["measure"] == second["measure"] == "kNN"
    assert first["answer"] == expected
    form = first["whitened"]
    assert first["value"] + first["against_value"] == max(map(sum, zip(ours, theirs, strict=True)))
    assert first["other_form_difference"] == pytest.approx(ours[not form] - theirs[not form])
    (sentence,) = against_sentences({"against": [first]})
    low, high = first["interval95"]
    if expected == "no clear difference" and not low <= 0 <= high:
        assert sentence.count(";") == 1, "why it is not clear"


@pytest.fixture(scope="module")
def report():
    generator = torch.Generator().manual_seed(0)
    labels, pictures = images(generator, torch.randn(CLASSES, PIXELS, generator=generator))
    weights = network(generator)
    sets = {
        "ssl": split(labels, pictures @ weights),
        "start": split(labels, pictures @ trained_on_noise(weights, generator)),
        "twin": split(labels, pictures @ weights + 0.01),
        "random": split(labels, pictures @ torch.randn(PIXELS, 4, generator=generator)),
    }
    said = ["Not compared with x: no such file."]
    others = Others(["start", "twin"], start="start", missing=said)
    return sets, run_suite(sets, {}, others)


@pytest.mark.promise(12)
def test_the_suite_opens_with_each_other_network_then_the_baselines(report):
    sets, report = report
    text = report["verdict"]
    first = "Better than start, which it started from: "
    assert text.startswith(first)
    assert text.index(first) < text.index("No clear difference from twin: ")
    assert text.index("twin") < text.index("These 2 answers hold together at 5 % (Holm).")
    assert text.index("(Holm)") < text.index("Not compared with x") < text.index("random weights")
    uniform = uniformity(sets["start"][1].features)
    assert report["start_uniformity"] == pytest.approx(uniform)
    assert f" start on test: uniformity {uniform:.2f} (0: all images look alike" in text
    assert text.count("uniformity") == 1  # of the start alone
    assert json.loads(json.dumps(report["against"])) == report["against"]
    assert {c["features"] for c in report["baselines"]} == {"ssl"}
    measures = [each["measure"] for each in report["against"] if each["against"] == "start"]
    assert set(measures) == {"kNN", "linear", "Recall@1", "MAP@R"}


def test_each_difference_is_that_of_the_rows_and_only_one_decides(report):
    _, report = report
    values = {}
    for row, key in product(report["rows"], ("metric", "column")):
        values[row["features"], row["whitened"], row[key]] = row["value"]
    compared = [*report["against"], *report["baselines"]]
    for each in compared:
        name = each["measure"]
        ours = values[each["features"], each["whitened"], name]
        theirs = values[each["against"], each["against_whitened"], name]
        shown = (each["value"], each["against_value"], each["difference"])
        assert shown == pytest.approx((ours, theirs, ours - theirs))
        low, high = each["interval95"]
        assert low <= each["difference"] <= high
        assert ("answer" in each) == each["primary"]
        assert each["unit"] == ("classes" if each["measure"] in ("Recall@1", "MAP@R") else "images")
        assert each["start"] == (each["against"] == "start")
    deciding = [(e["against"], e["measure"], e["of"]) for e in compared if e["primary"]]
    assert deciding == [("start", "kNN", 2), ("twin", "kNN", 2), ("random", "kNN", 1)]


ROWS = torch.arange(BANK + QUERIES)
LABELS = {
    "one of each class": ROWS,
    "one class": 0 * ROWS,
    "one class has pairs": (ROWS - BANK - 20).clamp_min(0),
}


@pytest.mark.parametrize("sizes", LABELS)
def test_where_nothing_can_be_compared_that_is_said(sizes):
    generator = torch.Generator().manual_seed(1)
    labels = torch.where(ROWS < BANK, ROWS % 3, LABELS[sizes] + 100)
    pair = split(labels, torch.randn(len(ROWS), 8, generator=generator))
    report = run_suite(dict.fromkeys(("ssl", "other", "random"), pair), {}, Others(["other"]))
    assert report["against"] == report["baselines"] == []
    assert report["verdict"].startswith("Not compared with other and random weights: train has not")
    assert "better" not in report["verdict"]
    check_report(json.loads(json.dumps(report, allow_nan=False)))
    if sizes == "one class has pairs":  # but no interval over classes
        assert {row["column"] for row in report["rows"]} >= {"Recall@1", "MAP@R"}
        return
    assert report["rows"] == report["columns"] == []
    assert "Not measured" in result_table(report)
    suite_table(report)


def compared(**changed):
    base = {
        "features": "ssl", "against": "lite0", "start": False, "measure": "kNN", "primary": True,
        "whitened": False, "against_whitened": False, "value": 0.7, "against_value": 0.62,
        "difference": 0.08, "interval95": [0.06, 0.1], "p": 0.0, "p_holm": 0.0, "of": 1,
        "unit": "images", "count": 1000, "answer": "better",
    }  # fmt: skip
    return base | changed


POINTS = "(+8.0 points, 95 % interval +6.0 to +10.0"
WHITE = {"whitened": True, "against_whitened": True}
UNCLEAR = {"answer": "no clear difference"}


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({}, f"Better than lite0: kNN 70.0 against 62.0 % {POINTS})."),
        (
            {"answer": "worse", "start": True, **WHITE},
            "Worse than lite0, which it started from: use the model you have: flattened (power 1) "
            f"kNN 70.0 against 62.0 % {POINTS}).",
        ),
        (
            {**WHITE, "power": 0.25, "against_power": 0.25},
            f"Better than lite0: flattened (power 0.25) kNN 70.0 against 62.0 % {POINTS}).",
        ),
        (
            {**WHITE, "power": 0.25, "against_power": 1.0},
            "Better than lite0: kNN 70.0 (flattened power 0.25) against 62.0 % (flattened power 1) "
            f"{POINTS}).",
        ),
        (
            {**UNCLEAR, "against_power": 0.5, "other_form_value": 0.69}
            | {"other_form_difference": 0.02},
            f"No clear difference from lite0: kNN 70.0 against 62.0 % {POINTS}; not clear where "
            "theirs is taken flattened (power 0.5), 69.0 %).",
        ),
        (  # clear among five in its own form: the other one is the reason
            {**UNCLEAR, "of": 5, "p": 0.001, "p_holm": 0.6, "against_power": 0.5}
            | {"other_form_value": 0.69, "other_form_difference": 0.02},
            f"No clear difference from lite0: kNN 70.0 against 62.0 % {POINTS}; not clear where "
            "theirs is taken flattened (power 0.5), 69.0 %).",
        ),
        (
            {**UNCLEAR, "of": 5, "p": 0.02, "p_holm": 0.1, "against_power": 0.5}
            | {"other_form_value": 0.69, "other_form_difference": 0.02},
            f"No clear difference from lite0: kNN 70.0 against 62.0 % {POINTS}; not clear among 5 "
            "comparisons).",
        ),
    ],
)
def test_the_sentences(changed, sentence):
    row = compared(**changed)
    first, *more = against_sentences({"against": [row]})
    assert first == sentence
    assert more == []
    rows = [{"features": "ssl", "column": None}]
    assert verdict({"rows": rows, "against": [row]}).startswith(sentence)


def test_a_file_is_read_with_comparisons_or_without_but_never_unchecked():
    row = {
        "features": "ssl",
        "whitened": False,
        "column": "kNN",
        "protocol": "knn",
        "metric": "top1",
    }
    row |= {"value": 0.5, "interval95": [0.4, 0.6], "queries": 9, "bank": 9, "details": {}}
    older = {"schema_version": 1, "facts": {}, "columns": ["kNN"], "rows": [row], "left_out": []}
    check_report({**older, "sha256": content_sha256(older)})
    assert "No accuracy" not in verdict(older)
    report = {**older, "against": [compared()], "not_compared": ["gone"]}
    check_report({**report, "sha256": content_sha256(report)})
    for damaged, message in (
        ({**report, "sha256": content_sha256(older)}, "its sha256 is another one"),
        ({**report, "schema_version": 99}, "schema_version = 99"),
        ({"sha256": content_sha256({})}, "schema_version = None"),
        (report, "sha256 is missing"),
    ):
        with pytest.raises(ValueError, match=message):
            check_report(damaged)


@pytest.mark.promise(12)
@pytest.mark.parametrize(("more", "clear"), [(6, False), (9, False), (40, True)])
@pytest.mark.parametrize("sign", [1, -1])
def test_better_and_worse_never_stand_beside_an_interval_that_touches_zero_as_printed(
    more, clear, sign
):
    """Of 10,000 images `more` are right under one network alone: p is below 0.05 from 6 on."""
    first, second = np.zeros(10_000, bool), np.zeros(10_000, bool)
    first[: 5000 + more] = True
    second[:5000] = True
    ours, theirs = (first, second) if sign > 0 else (second, first)
    assert paired_top1(ours, theirs).p < 0.05
    scores = Scores({}, np.zeros(0, np.int64))
    for form in (False, True):
        scores.of["ssl", form, "kNN"] = ours
        scores.of["theirs", form, "kNN"] = theirs
    found, _ = compare_all(["ssl"], ["theirs"], None, scores, known_classes=True)
    assert found["answer"] == ({1: "better", -1: "worse"}[sign] if clear else "no clear difference")
    (sentence,) = against_sentences({"against": [found]})
    touches = "interval +0.0 to" in sentence or "to -0.0)" in sentence
    assert touches != clear
    assert ("not clear" in sentence) is False
    for form in (False, True):
        scores.of["random", form, "kNN"] = theirs
    beside = compare_all(["ssl"], ["random"], None, scores, known_classes=True)
    rows = [{"features": name, "column": "kNN"} for name in ("ssl", "random")]
    said = verdict({"rows": rows, "baselines": beside})
    assert said.startswith({1: "Better", -1: "Worse"}[sign] if clear else "Not clearly better")
