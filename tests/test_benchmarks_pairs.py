"""What the table of pairs is made of: one drawing under one thing, things in one split."""

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from benchmarks.pairs import data, table
from benchmarks.trainings import Found, side_by_side
from sslpipe.data.index import Split
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.erase import fit_erasure


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

    def scores(share: float, above: float) -> table.Scores:
        hits = (torch.rand(40, generator=rng) < share).double().numpy()
        found = Found(things, {"Recall@1": hits}, 0)
        return table.Scores(found, 0.2, {"above_chance": above})

    found = {
        "ours": {0: scores(0.9, 0.2), 1: scores(0.9, 0.3)},
        "theirs": {0: scores(0.3, 0.4), 1: scores(0.3, 0.6)},
    }
    tree = table.difference("ours", "theirs", found)
    assert tree["seeds"] == [0, 1]
    ours, theirs = ([run.hits.mean() for run in found[row].values()] for row in found)
    assert tree["Recall@1"]["value"] == pytest.approx(np.mean(ours) - np.mean(theirs))
    assert tree["theme above chance, ratio"] == pytest.approx(0.5)
    assert tree["Recall@1"]["classes"] == 20


class Column:
    """A column of texts: sample i has code i, which is shown as the i-th text, from the first on
    again."""

    kind = "text"

    def __init__(self, texts: str) -> None:
        self.texts = texts.split()

    def values_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return ids % len(self.texts)

    def show_value(self, value: int) -> str:
        return self.texts[value]


def split_of(labels: Sequence[int], **columns: str) -> Split:
    """What the table asks of a split."""

    class Fake:
        def __len__(self) -> int:
            return len(labels)

        def column(self, name: str) -> Column:
            return Column(columns[name])

    fake = Fake()
    fake.labels = np.array(labels)  # type: ignore[attr-defined]
    return cast(Split, fake)


def test_what_the_thing_tells_of_the_theme_and_who_drew_the_same_things() -> None:
    sizes = "large large small large large small large"
    split = split_of([5, 5, 5, 6, 6, 7, 7], theme="a b b a c b a", size=sizes)
    assert table.told_by_the_thing(split) == pytest.approx((2 + 1 + 1) / 7)
    rows = Embeddings(torch.eye(7), torch.from_numpy(split.labels), torch.arange(7))
    assert table.drawn_by_all(split, rows, ("a", "b")).tolist() == [0, 1]


def test_an_erasure_learns_from_half_of_the_things_and_changes_the_others() -> None:
    split = split_of([], theme="a b c")
    ids = torch.arange(90)
    features = torch.randn(90, 6, generator=torch.Generator().manual_seed(0))
    rows = Embeddings(features, ids // 5, ids)
    train, test = table.erased((split, split), rows, rows)
    even = ids // 5 % 2 == 0
    fitted = fit_erasure(rows.rows(torch.where(even)[0]), {"theme": ids[even].numpy() % 3})
    assert torch.equal(test.features, fitted.apply(features))
    assert torch.equal(train.features, test.features[~even])
    assert torch.equal(train.ids, ids[~even])


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
