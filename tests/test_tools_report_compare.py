"""Several runs on one page, and the ROC and spectrum of embeddings, against loops."""

from pathlib import Path

import numpy as np
import pytest
import torch

from sslpipe.evaluation.embed import Embeddings
from tests.test_tools_report import row
from tools.report_compare import merged, names_apart
from tools.report_embeddings import separation, spectrum
from tools.report_pictures import unit_rows
from tools.report_results import clear_best, table_lines
from tools.report_run import Run


def evaluation_of(*rows) -> dict:
    facts = {"data_sha256": "d", "split": "test", "train_split": "train"}
    return {"schema_version": 1, "facts": facts, "columns": ["kNN"], "rows": rows, "left_out": []}


def test_a_column_is_split_where_its_protocols_differ_and_a_baseline_where_its_numbers_do():
    a = evaluation_of(row("ssl", 0.8, 0.7, 0.9), row("random", 0.3, 0.2, 0.4))
    b = evaluation_of(row("ssl", 0.6, 0.5, 0.65), row("random", 0.3, 0.2, 0.4))
    together = merged({"a": a, "b": b})
    lines = table_lines(together)
    assert [line.title for line in lines] == ["a", "b", "random weights"]
    assert [line.baseline for line in lines] == [False, False, True]
    assert clear_best(lines, "kNN") == [lines[0]]

    b["rows"][1]["value"] = 0.35
    lines = table_lines(merged({"a": a, "b": b}))
    assert [line.title for line in lines] == [
        "a",
        "b",
        "random weights of a",
        "random weights of b",
    ]
    assert [line.baseline for line in lines] == [False, False, True, True]

    for line in b["rows"]:
        line["protocol"] = "q"
    together = merged({"a": a, "b": b})
    assert together["columns"] == ["kNN: p", "kNN: q"]
    for line in table_lines(together):
        assert len(line.cells) == 1  # nobody stands in a column of another protocol
    assert clear_best(table_lines(together), "kNN: p") == [table_lines(together)[0]]  # above random


def test_names_are_all_different():
    def named(*names: str) -> list[Run]:
        return [Run({}, {"name": name}, *[None] * 8) for name in names]

    folders = [Path("/x/one"), Path("/x/two"), Path("/y/two")]
    assert names_apart(folders[:2], named("a", "b")) == ["a", "b"]
    assert names_apart(folders[:2], named("a", "a")) == ["a (one)", "a (two)"]
    assert names_apart(folders, named("a", "a", "a")) == ["a (one)", "a (two), 2", "a (two), 3"]


@pytest.mark.parametrize("seed", range(5))
def test_the_roc_is_that_of_a_loop_over_all_thresholds_with_ties_together(seed):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randint(-1, 2, (30, 3), generator=generator).float() + 0.5  # many equal rows
    labels = torch.randint(-1, 3, (30,), generator=generator)
    rows = Embeddings(features, labels, torch.arange(30))
    found = separation(rows)
    unit, pairs = unit_rows(rows), []
    for i in range(30):
        for j in range(i):
            if labels[i] >= 0 and labels[j] >= 0:
                pairs.append((float(unit[i] @ unit[j]), bool(labels[i] == labels[j])))
    same = sum(is_same for _, is_same in pairs)
    assert (found.pairs, found.same) == (len(pairs), same)
    wins = 0.0  # the area: a pair of one class above a pair of two, ties half
    positive = [c for c, is_same in pairs if is_same]
    negative = [c for c, is_same in pairs if not is_same]
    for p in positive:
        wins += sum(1.0 if p > n + 1e-9 else 0.5 if abs(p - n) <= 1e-9 else 0.0 for n in negative)
    assert found.area == pytest.approx(wins / (len(positive) * len(negative)), abs=1e-9)
    for threshold in sorted({round(c, 9) for c, _ in pairs}):
        low = sum(n > threshold - 1e-6 for n in negative) / len(negative)
        high = sum(p > threshold - 1e-6 for p in positive) / len(positive)
        gap = abs(found.false_positive_rate - low) + abs(found.true_positive_rate - high)
        on_a_line = np.interp(low, found.false_positive_rate, found.true_positive_rate)
        assert gap.min() < 1e-9 or on_a_line >= high - 1e-9  # collinear points are left out


def test_no_roc_without_pairs_of_both_kinds():
    features = torch.randn(6, 4)
    for labels in (torch.zeros(6), torch.arange(6), torch.full((6,), -1)):
        assert separation(Embeddings(features, labels.long(), torch.arange(6))) is None


def test_the_spectrum_is_that_of_the_covariance():
    torch.manual_seed(0)
    rows = Embeddings(
        torch.randn(40, 6) * torch.tensor([5, 3, 1, 1, 1e-3, 0]), *[torch.arange(40)] * 2
    )
    unit = unit_rows(rows)
    values = np.sort(np.linalg.eigvalsh(np.cov(unit.T)))[::-1]
    shares = spectrum(rows)
    assert shares == pytest.approx(values / values.sum(), abs=1e-12)
    assert shares.sum() == pytest.approx(1)
