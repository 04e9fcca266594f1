"""Several runs on one page, side by side."""

import json
import re
from pathlib import Path

from sslpipe.evaluation.suite_file import content_sha256, read_suite
from sslpipe.report.compare import merged, names_apart
from sslpipe.report.result_tables import clear_best, result_table, table_lines, task_tables
from sslpipe.report.run_files import RunFiles
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
        evaluation_of(row("ssl", 0.5, *ends, column="kNN", metric="MAP@R") | {"protocol": name})
        for name, ends in ((protocol, (0.4, 0.6)), (f"{protocol} interval=classes", (0.3, 0.7)))
    )
    (tmp_path / "eval.json").write_text(json.dumps({**old, "sha256": content_sha256(old)}))
    old = read_suite(tmp_path / "eval.json")
    together = merged({"old": old, "new": new})
    assert together["columns"] == [f"kNN: {protocol}", f"kNN: {protocol} interval=classes"]
    assert f"<code>{protocol} interval=classes</code>" in result_table(together)


def test_names_are_all_different():
    def named(*names: str) -> list[RunFiles]:
        return [RunFiles({"name": name}, *[None] * 9, {}) for name in names]

    folders = [Path("/x/one"), Path("/x/two"), Path("/y/two")]
    assert names_apart(folders[:2], named("a", "b")) == ["a", "b"]
    assert names_apart(folders[:2], named("a", "a")) == ["a (one)", "a (two)"]
    assert names_apart(folders, named("a", "a", "a")) == ["a (one)", "a (two), 2", "a (two), 3"]


def test_retrieval_and_verification_have_tables_with_their_better_side():
    rows = [
        row(name, v, v - 0.01, v + 0.01, column=None, metric=metric)
        for name, values in (("ssl", (0.6, 0.9)), ("pixels", (0.4, 0.7)))
        for metric, v in zip(("MAP@R", "fpr@95tpr"), values, strict=True)
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
