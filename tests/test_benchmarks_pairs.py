"""What the table of pairs is made of: one drawing under one thing, things in one split."""

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.pairs import data, table
from benchmarks.trainings import Found, side_by_side
from sslpipe.evaluation.embed import Embeddings


@pytest.fixture
def icons(tmp_path: Path) -> Path:
    """Three themes: drawings of several sizes, links of all kinds, copies, symbolic ones."""
    for path, content in {
        "one/48x48/apps/mail.png": "1 mail 48",
        "one/96x96/apps/mail.png": "1 mail 96",
        "one/32x32/apps/mail.png": "1 mail 32",
        "one/16x16/apps/mail.png": "1 mail 16",
        "one/64x64/apps/chess.png": "1 chess",
        "one/64x64/apps/any.png": "any app",
        "one/64x64/apps/web.svg": "shared",
        "one/96x96/symbolic/lock.svg": "not this",
        "one/96x96/apps/lock-symbolic.svg": "nor this",
        "two/apps/scalable/envelope.svg": "2 mail",
        "two/apps/32@2x/chess.png": "2 chess",
        "two/apps/48/globe.png": "shared",
        "three/apps/48/web.png": "3 web",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(content)
    apps = tmp_path / "one" / "64x64" / "apps"
    for name in "abcd":
        (apps / f"app-{name}.png").symlink_to("any.png")
    (tmp_path / "two/apps/scalable/mail.svg").symlink_to("envelope.svg")
    (tmp_path / "two/apps/48/broken.svg").symlink_to("nowhere.svg")
    (tmp_path / "one/all").symlink_to("96x96")
    (tmp_path / "three/apps/48/globe.png").symlink_to("web.png")
    return tmp_path


def test_the_nearest_file_of_each_size_is_found_and_links_are_resolved(icons: Path) -> None:
    found = data.files_of(icons / "one")
    mail = {size: found["mail", size].relative_to(icons / "one").parts[0] for size in data.SIDES_PX}
    assert mail == {"large": "96x96", "small": "32x32"}
    assert found["app-a", "large"] == (icons / "one/64x64/apps/any.png").resolve()
    assert {name for name, size in found if size == "small"} == {"mail"}  # the others: one file
    assert not {name for name, _ in found} & {"lock", "lock-symbolic"}
    assert ("broken", "large") not in data.files_of(icons / "two")


def test_a_drawing_stands_under_one_thing_and_synonyms_are_one_thing(icons: Path) -> None:
    rows = data.drawings({theme: data.files_of(icons / theme) for theme in ("one", "two", "three")})
    assert [(row.thing, row.theme, row.size) for row in rows] == [
        ("chess", "one", "large"),
        ("chess", "two", "large"),
        ("mail", "one", "large"),
        ("mail", "one", "small"),
        ("mail", "two", "large"),  # where it is called envelope, too
    ]  # web is of one theme only, as two themes' copies of one file are left out
    assert len({row.path for row in rows}) == len(rows)


def test_rows_of_a_table_differ_by_their_columns_alone() -> None:
    runs = [table.Training(kind, 2, seed=1) for kind in table.SHORT_ROWS]
    shared = set.intersection(*(set(run.overrides) for run in runs))
    assert [set(run.overrides) - shared for run in runs] == [
        set(r) for r in table.SHORT_ROWS.values()
    ]
    assert len({run.folder(Path("out")) for run in runs}) == len(runs)


@pytest.mark.skipif(not hasattr(os, "wait4"), reason="this system does not tell a child's seconds")
def test_a_training_is_waited_for_once_and_its_seconds_are_added_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that nobody has waited for is a ResourceWarning, which is an error here."""
    run = table.Training(table.CROPS, 2, seed=1)
    monkeypatch.setattr(sys, "executable", shutil.which("true"))
    for _ in range(2):
        table.train(run, tmp_path)
    assert json.loads(table.cpu_file(run, tmp_path).read_text()) > 0
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(SystemExit, match="says why this run failed"):
        table.train(run, tmp_path)


def test_a_difference_is_of_the_means_over_the_seeds() -> None:
    things = np.arange(40) // 2
    rng = torch.Generator().manual_seed(0)

    def scores(share: float) -> Found:
        hits = (torch.rand(40, generator=rng) < share).double().numpy()
        return Found(things, {"Recall@1": hits}, 0)

    found = {
        "ours": {0: scores(0.9), 1: scores(0.9)},
        "theirs": {0: scores(0.3), 1: scores(0.3)},
    }
    tree = table.difference("ours", "theirs", found)
    assert tree["seeds"] == [0, 1]
    ours, theirs = ([table.hits_of(run).mean() for run in found[row].values()] for row in found)
    assert tree["Recall@1"]["value"] == pytest.approx(np.mean(ours) - np.mean(theirs))
    assert tree["Recall@1"]["classes"] == 20


def test_three_sizes_stand_side_by_side_and_are_flattened_as_train_says() -> None:
    ids = torch.arange(900)
    rng = torch.Generator().manual_seed(0)
    near, far = (
        Embeddings(scale * torch.randn(900, 3, generator=rng).cumsum(1), ids // 5, ids)
        for scale in (1.0, 40.0)
    )
    both = side_by_side((near, far))
    parts = [rows.features.double().numpy() for rows in (near, far)]
    wide = np.hstack([x / np.linalg.norm(x, axis=1, keepdims=True) for x in parts])  # (900, 6)
    np.testing.assert_allclose(both.features, wide, rtol=1e-6, atol=1e-7)
    train, test = table.flattened(both, both.rows(ids[:7]))
    covariance = np.cov(wide.T, bias=True)
    ridge = covariance + 0.1 * np.trace(covariance) / 6 * np.eye(6)
    centred = wide - wide.mean(0)
    cosines = centred @ np.linalg.inv(ridge) @ centred.T  # products of whitened rows
    np.testing.assert_allclose(train.features @ train.features.T, cosines, rtol=1e-3, atol=1e-3)
    assert torch.equal(test.features, train.features[:7])
