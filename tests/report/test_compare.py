"""Several runs on one page; of several seeds how far numbers move, and who is better for all."""

import json
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_1samp, ttest_rel

from sslpipe.evaluation.difference import holm, mean_over_seeds, paired_seeds
from sslpipe.recipe import parse_recipe
from sslpipe.report.compare import (
    build_comparison,
    cautions,
    group_by_recipe,
    lines,
    merged,
    names_apart,
    over_seeds,
    verdicts,
)
from sslpipe.report.results import clear_best, result_table, table_lines, task_tables
from sslpipe.report.run import RunFiles
from sslpipe.run.evaluated import read_suite
from tests.helpers.runs import RECIPE
from tests.report.test_report import evaluation_of, row


def test_a_column_is_split_where_its_protocols_differ_and_a_baseline_where_its_numbers_do():
    a = evaluation_of(row("ssl", 0.8, 0.7, 0.9), row("random", 0.3, 0.2, 0.4))
    b = evaluation_of(row("ssl", 0.6, 0.5, 0.65), row("random", 0.3, 0.2, 0.4))
    together = merged({"a": a, "b": b})
    shown = table_lines(together["rows"])
    assert [line.title for line in shown] == ["a", "b", "random weights"]
    assert [line.baseline for line in shown] == [False, False, True]
    assert clear_best(shown, "kNN") == [shown[0]]

    b["rows"][1]["value"] = 0.35
    shown = table_lines(merged({"a": a, "b": b})["rows"])
    assert [line.title for line in shown] == [
        "a",
        "b",
        "random weights of a",
        "random weights of b",
    ]
    assert [line.baseline for line in shown] == [False, False, True, True]

    for line in b["rows"]:
        line["protocol"] = "q"
    together = merged({"a": a, "b": b})
    assert together["columns"] == ["kNN: p", "kNN: q"]
    for line in table_lines(together["rows"]):
        assert len(line.cells) == 1  # nobody stands in a column of another protocol
    assert clear_best(table_lines(together["rows"]), "kNN: p") == [
        table_lines(together["rows"])[0]
    ]  # above random


def test_an_eval_json_without_the_kind_of_its_intervals_loads_and_stands_apart(tmp_path):
    """Which is better is told by intervals: those over queries are not compared with others."""
    protocol = "retrieval cosine lone=skip self-removed"
    old, new = (
        evaluation_of(row("ssl", 0.5, *ends, column="kNN", metric="map_at_r") | {"protocol": name})
        for name, ends in ((protocol, (0.4, 0.6)), (f"{protocol} interval=classes", (0.3, 0.7)))
    )
    (tmp_path / "eval.json").write_text(json.dumps(old))
    old = read_suite(tmp_path / "eval.json")
    together = merged({"old": old, "new": new})
    assert together["columns"] == [f"kNN: {protocol}", f"kNN: {protocol} interval=classes"]
    assert f"<code>{protocol} interval=classes</code>" in result_table(together)


def test_names_are_all_different():
    def named(*names: str) -> list[RunFiles]:
        return [RunFiles({}, {"name": name}, *[None] * 9, {}) for name in names]

    folders = [Path("/x/one"), Path("/x/two"), Path("/y/two")]
    assert names_apart(folders[:2], named("a", "b")) == ["a", "b"]
    assert names_apart(folders[:2], named("a", "a")) == ["a (one)", "a (two)"]
    assert names_apart(folders, named("a", "a", "a")) == ["a (one)", "a (two), 2", "a (two), 3"]


def test_retrieval_and_verification_have_tables_with_their_better_side():
    rows = [
        row(name, v, v - 0.01, v + 0.01, column=None, metric=metric)
        for name, values in (("ssl", (0.6, 0.9)), ("pixels", (0.4, 0.7)))
        for metric, v in zip(("map_at_r", "fpr@95tpr"), values, strict=True)
    ]
    html = task_tables(evaluation_of(*rows))
    titles = ("Retrieval", "Verification")
    assert [title for title in titles if title in html] == list(titles)
    best = re.findall(r"<b class='best'><data value='([^']*)'", html)
    assert best == ["0.6", "0.7"]  # most MAP@R, fewest errors
    assert "<data value='0.6'>60.0</data></b> <small>59.0–61.0</small>" in html
    assert task_tables(evaluation_of(row("ssl", 0.5, 0.4, 0.6))) == ""


def test_another_network_of_a_runs_name_keeps_rows_of_its_own():
    """Run "lite0" beside run "b", which was compared with weights called "lite0"."""
    trees = {
        "lite0": evaluation_of(row("ssl", 0.5, 0.4, 0.6)),
        "b": evaluation_of(row("ssl", 0.6, 0.5, 0.7), row("lite0", 0.7, 0.6, 0.8)),
    }
    rows = {row["features"]: row["value"] for row in merged(trees)["rows"]}
    assert (rows.pop("lite0"), rows.pop("b")) == (0.5, 0.6)
    ((name, value),) = rows.items()
    assert "lite0" in name
    assert value == 0.7


MACHINE = {
    "device": "cpu",
    "precision": "fp32",
    "world": 1,
    "environment": {"machine": "x86_64", "cuda_device": None},
}
FACTS = {"data_sha256": "d", "split": "test", "train_split": "train"}


def a_run(seed, knn, *, name="tiny", temperature=0.2, facts=FACTS, protocol="p", **run_config):
    """A run as `read_run` gives it, with an eval.json of one or two numbers."""
    tree = tomllib.loads(RECIPE)
    tree |= {"seed": seed, "name": name}
    tree["loss"]["temperature"] = temperature
    tree["run"] |= run_config
    recipe = json.loads(json.dumps(parse_recipe(tree, "r").model_dump(mode="json")))
    rows = [
        row("ssl", knn, 0, 1, protocol=protocol),
        row("ssl", knn + 0.1, 0, 1, protocol=protocol, whitened=True),
        row("random", 0.2, 0, 1, protocol=protocol),
    ]
    evaluation = {"facts": facts, "columns": ["kNN"], "rows": rows, "left_out": []}
    data = {"index_sha256": "x", "name": "photos", "classes": ["a"], "samples": {"train": 128}}
    return RunFiles(recipe, recipe, data, MACHINE, [], [], [], [], evaluation, None, [], {})


A, B = [0.71, 0.69, 0.73, 0.70], [0.66, 0.65, 0.69, 0.67]  # seeds 0 to 3


def values(recipe, measure):
    return {seed: rows[measure]["value"] for seed, rows in recipe.runs.items() if measure in rows}


def two_recipes():
    ours = [a_run(seed, value) for seed, value in enumerate(A)]
    return ours + [a_run(seed, value, temperature=0.5) for seed, value in enumerate(B)]


def test_means_intervals_and_p_values_are_those_of_the_t_test():
    found = paired_seeds(A, B)
    expected = ttest_rel(A, B)
    interval = expected.confidence_interval(0.95)
    assert found.value == pytest.approx(np.mean(A) - np.mean(B))
    assert found.interval95 == pytest.approx((interval.low, interval.high))
    assert found.p == pytest.approx(expected.pvalue)
    assert (found.unit, found.number) == ("seeds", 4)
    assert paired_seeds([0.5, 0.5], [0.4, 0.4]).p == 0
    assert paired_seeds([0.5, 0.5], [0.5, 0.5]).p == 1
    mean, spread, interval = mean_over_seeds(A)
    assert (mean, spread) == pytest.approx((np.mean(A), np.std(A, ddof=1)))
    expected = ttest_1samp(A, 0).confidence_interval(0.95)
    assert interval == pytest.approx((expected.low, expected.high))


def test_runs_belong_together_where_seed_name_and_run_settings_alone_differ():
    runs = [a_run(0, 0.5), a_run(1, 0.6, name="again", log_steps=7), a_run(2, 0.7, temperature=0.5)]
    recipes = group_by_recipe([*runs, a_run(1, 0.9), a_run(3, 0.5)._replace(evaluation=None)])
    assert [sorted(recipe.runs) for recipe in recipes] == [[0, 1], [2]]
    assert values(recipes[0], "kNN") == {0: 0.5, 1: 0.6}  # not 0.9: the first
    other_data = a_run(1, 0.6)._replace(data={"index_sha256": "y", "name": "b", "classes": []})
    assert len(group_by_recipe([runs[0], other_data])) == 2
    other_init = a_run(1, 0.6)
    other_init.given_recipe["init"] = "w"
    assert len(group_by_recipe([runs[0], other_init])) == 2


def test_a_difference_that_all_seeds_show_is_said():
    recipes = group_by_recipe(two_recipes())
    names = [f"tiny (loss.temperature = {value})" for value in (0.2, 0.5)]
    assert [recipe.name for recipe in recipes] == names  # of one name, told apart by what differs
    (found,) = verdicts(recipes)
    assert found.answer == "better"
    assert found.means == pytest.approx((np.mean(A), np.mean(B)))
    (back,) = verdicts(recipes[::-1])
    assert back.answer == "worse"
    assert back.difference.value == pytest.approx(-found.difference.value)
    text = str(found)
    assert "(loss.temperature = 0.2) is better than tiny (loss.temperature = 0.5): kNN 70.8" in text
    assert "+4.0 points over 4 seeds" in text
    html = over_seeds(recipes)
    assert f"<data value='{float(np.mean(A))!r}'>70.8</data> ± 1.7" in html
    assert "0, 1, 2, 3" in html
    assert "whitened kNN" in html  # of a file of an earlier version
    assert "of 4 seeds in %: kNN 70.8 ± 1.7; whitened kNN" in lines(recipes)[0]
    expected = ttest_rel(A, B).confidence_interval(0.95)
    assert f"interval {100 * expected.low:+.1f} to {100 * expected.high:+.1f})" in text


def test_where_train_has_not_the_classes_of_test_recall_decides():
    runs = two_recipes()
    for run in runs:
        run.evaluation["columns"] = ["Recall@1"]
        for each in run.evaluation["rows"]:
            each["column"] = each["metric"] = "Recall@1"
    (found,) = verdicts(group_by_recipe(runs))
    assert (found.measure, found.answer) == ("Recall@1", "better")
    assert found.difference == paired_seeds(A, B)


def test_a_page_on_seeds_begins_with_the_answer_and_gives_a_recipe_one_colour():
    runs = two_recipes()
    names = [f"run {place}" for place in range(len(runs))]
    html = build_comparison(dict(zip(names, runs, strict=True)))
    recipes = group_by_recipe(runs)
    title = f"{recipes[0].name} against {recipes[1].name}"
    assert f"<h1>{title}</h1><ul class='lead runs'><li>{verdicts(recipes)[0]}</li></ul>" in html
    assert html.index("<h2>Over seeds") < html.index("<h2>What differs")
    assert html.index("Each of the 8 runs alone") < html.index("<b>run 0</b>")
    colours = re.findall(r"--c:(var\(--series-\d\))'></i><b>run", html)
    assert colours == ["var(--series-1)"] * 4 + ["var(--series-2)"] * 4
    one = build_comparison(dict(zip(names[:4], runs, strict=False)))
    assert f"<li>{lines(group_by_recipe(runs[:4]))[0]}.</li>" in one

    alone = build_comparison({"a": runs[0], "b": runs[4]})
    assert "<h1>a against b</h1>" in alone
    said = "One training each does not tell which recipe is"
    assert f"<p class='lead'>{said}" in alone
    assert alone.index("<h2>What differs") < alone.index("<h2>Over seeds")


def test_what_counts_for_nothing_or_is_not_of_the_end_is_said():
    runs = dict(zip("abcdefgh", two_recipes(), strict=True))
    assert cautions(runs, group_by_recipe(runs.values())) == []
    runs["j"] = a_run(9, 0.9)._replace(evaluation=None)
    runs["k"] = a_run(4, 0.7, facts={**FACTS, "step": 5})
    runs["l"] = a_run(0, 0.7, temperature=0.9, facts={**FACTS, "weights": "ema"})
    recipes = group_by_recipe(runs.values())
    assert cautions(runs, recipes) == [
        "j has not been evaluated",
        "k: Evaluated at step 5 of 12, unfinished: the train command resumes it",
        "l: Evaluated are the averaged weights (optim.ema)",
        "One seed alone, and so no verdict: tiny (loss.temperature = 0.9)",
    ]
    assert "<p class='missing'>k: Evaluated at" in over_seeds(recipes, cautions(runs, recipes))

    # what an earlier version whitened has no mean with what is flattened by a chosen power
    runs = {"a": a_run(0, 0.5), "b": a_run(1, 0.6)}
    runs["b"].evaluation["rows"][1]["power"] = 0.25
    (recipe,) = group_by_recipe([*runs.values()])
    assert values(recipe, "whitened kNN") == {0: 0.6}
    assert values(recipe, "flattened kNN") == {1: 0.7}
    runs = {"a": a_run(0, 0.5), "b": a_run(1, 0.6, facts={**FACTS, "split": "val"})}
    (said,) = cautions(runs, group_by_recipe(runs.values()))
    assert "not evaluated on the same test data" in said


def test_only_seeds_of_both_are_paired_by_number_and_within_their_spread_nothing_is_clear():
    runs = [a_run(seed, value) for seed, value in enumerate((0.5, 0.6, 0.7))]
    runs += [a_run(s, value, temperature=0.5) for s, value in enumerate((0.62, 0.5, 0.65))]
    (found,) = verdicts(group_by_recipe(runs))
    assert found.answer == "no clear difference"
    assert "is not clearly different from" in str(found)
    runs = [a_run(seed, 0.5 + seed / 100) for seed in (5, 1, 3)]
    runs += [a_run(seed, 0.4 + seed / 100, temperature=0.5) for seed in (3, 7, 5)]
    (found,) = verdicts(group_by_recipe(runs))
    assert (found.difference.number, found.difference.value) == (2, pytest.approx(0.1))


def test_answers_of_several_pairs_hold_together():
    """Three recipes: each pair alone is below 5 %, all together are not."""
    values = {0.1: (0.50, 0.52, 0.51), 0.2: (0.53, 0.56, 0.55), 0.3: (0.51, 0.54, 0.56)}
    runs = [a_run(s, v, temperature=t) for t, each in values.items() for s, v in enumerate(each)]
    found = verdicts(group_by_recipe(runs))
    assert len(found) == 3
    assert min(each.difference.p for each in found) < 0.05
    adjusted = holm([each.difference.p for each in found])
    assert [each.answer != "no clear difference" for each in found] == [p <= 0.05 for p in adjusted]


def test_recipes_are_compared_over_the_seeds_with_one_protocol():
    ours = [a_run(seed, value) for seed, value in enumerate(A)]
    theirs = [a_run(seed, value, temperature=0.5, protocol="q") for seed, value in enumerate(B)]
    apart = group_by_recipe([*ours, *theirs])
    assert verdicts(apart) == []
    theirs[:2] = [a_run(seed, B[seed], temperature=0.5) for seed in (0, 1)]
    (found,) = verdicts(group_by_recipe([*ours, *theirs]))
    assert (found.difference.number, found.difference.value) == (2, pytest.approx(0.045))
    # within a recipe there is no mean of them, nor of other test data
    mixed = group_by_recipe([a_run(0, 0.5), a_run(1, 0.6, protocol="q")])
    assert ">–</td>" in over_seeds(mixed)
    assert lines(mixed) == []
    other = {**FACTS, "split": "val"}
    assert group_by_recipe([a_run(0, 0.5), a_run(1, 0.6, facts=other)]) == []


def test_single_seeds_say_that_nothing_is_known_of_seeds():
    recipes = group_by_recipe([a_run(0, 0.5, name="<b>x"), a_run(0, 0.6, temperature=0.5)])
    assert "is not known" in over_seeds(recipes)
    assert lines(recipes) == []
    assert verdicts(recipes) == []
    runs = [a_run(seed, 0.5, name="<b>x") for seed in (0, 1)]
    assert "<b>x" not in over_seeds(group_by_recipe(runs))
