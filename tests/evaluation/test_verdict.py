"""The first sentence: better than random weights or not, by how much, and how sure that is."""

import pytest

from sslpipe.evaluation.difference import wilson95
from sslpipe.evaluation.suite import run_suite
from sslpipe.evaluation.verdict import comparisons, verdict
from tests.evaluation.test_suite import two_sets

pytestmark = pytest.mark.usefixtures("few_resamples")
CELLS = (("kNN", False), ("linear", False), ("kNN", True))  # column, whitened


def row(features, right, column="kNN", *, whitened=False, total=1000):
    low, high = wilson95(right, total)
    return {
        "features": features, "whitened": whitened, "column": column, "value": right / total,
        "interval95": [low, high],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("ours", "begins"),
    [
        ((600, 700, 650), "Better than random weights: kNN 60.0 against 50.0 % (+10.0 points, "),
        ((505, 510, 490), "Not clearly better than random weights: kNN 50.5 against 50.0 % (+0.5 "),
        ((505, 700, 510), "Better than random weights only by linear: kNN "),
        ((300, 300, 300), "Worse than random weights: "),
        ((505, 700, 300), "Better than random weights only by linear, worse by whitened kNN: "),
        ((505, 510, 300), "Not clearly better than random weights, worse by whitened kNN: "),
    ],
)
def test_the_sentence_begins_with_the_answer(ours, begins):
    rows = []
    for (column, whitened), right in zip(CELLS, ours, strict=True):
        rows += [row("ssl", right, column, whitened=whitened)]
        rows += [row(name, 500, column, whitened=whitened) for name in ("random", "pixels")]
    said = verdict({"rows": rows})
    assert said.startswith(begins)
    assert "; " + begins.partition(" random")[0].lower() + " raw pixels" in said
    assert said.count("95 % interval") == 1
    assert said.count(" against ") == 6
    assert said.endswith(".")


@pytest.mark.parametrize(
    ("p_values", "begins"),
    [
        ((0.03, 0.5, 0.6), "Not clearly better than random weights: "),
        ((0.01, 0.5, 0.6), "Better than random weights only by kNN: "),
        ((0.03, 0.03, 0.03), "Better than random weights: "),
    ],
)
def test_one_of_three_measures_must_be_clear_among_three(p_values, begins):
    compared = [
        {
            "features": "ssl", "baseline": "random", "column": column, "whitened": whitened, "p": p,
            "value": 0.6, "baseline_value": 0.56, "difference": 0.04,
            "interval95": [0.001 if p < 0.05 else -0.001, 0.08],
        }
        for (column, whitened), p in zip(CELLS, p_values, strict=True)
    ]  # fmt: skip
    assert verdict({"rows": [row("ssl", 600)], "comparisons": compared}).startswith(begins)


def test_what_was_not_measured_is_said_and_several_features_are_named():
    assert "not known: that baseline was not measured" in verdict({"rows": [row("ssl", 600)]})
    said = verdict({"rows": [row("ssl", 600), row("pixels", 400)]})
    assert "random weights is not known" in said
    assert "Better than raw pixels: kNN 60.0 against 40.0 %" in said
    for rows in ([row("ssl", 6, None)], []):
        assert verdict({"rows": rows}).startswith("No accuracy was measured")
    said = verdict({"rows": [row("ssl", 600), row("other", 500), row("random", 500)]})
    assert said.startswith("ssl: better than random weights: kNN")
    assert "other: not clearly better than random weights: kNN" in said


def test_the_suite_compares_sample_by_sample_and_an_older_file_by_its_intervals():
    ssl, noise = two_sets().values()
    report = run_suite({"ssl": ssl, "random": noise}, {})
    assert report["verdict"].startswith("Better than random weights")
    assert [c["paired"] for c in report["comparisons"]] == [True] * 3
    table = {(r["features"], r["whitened"], r["column"]): r["value"] for r in report["rows"]}
    older = {key: value for key, value in report.items() if key != "comparisons"}
    for c in report["comparisons"]:
        values = [table[name, c["whitened"], c["column"]] for name in ("ssl", "random")]
        assert c["difference"] == pytest.approx(values[0] - values[1])
        assert c["interval95"][0] < c["difference"] < c["interval95"][1]
        said = "{:.1f} against {:.1f} %".format(*(100 * value for value in values))
        assert said in verdict(older)
        assert said in report["verdict"]
    assert [c["paired"] for c in comparisons(older["rows"])] == [False] * 3
