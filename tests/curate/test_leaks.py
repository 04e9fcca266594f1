"""Test samples that are in train: found by pixels, or by the column that says so."""

from contextlib import nullcontext

import pytest
import torch

from sslpipe.curate.leaks import find_leaks, small_pictures
from sslpipe.data.index import load_index
from sslpipe.evaluation.embed import Embeddings
from tests.curate.test_duplicates import saved, smooth
from tests.helpers.columns import add_columns
from tests.helpers.dataset import png, write_dataset


@pytest.fixture
def index(tmp_path):
    """Test 2 is train's 5 in bytes, 4 is train's 9 mirrored, 6 is train's 1 by JPEG; 7 is bad."""
    pictures = {k: png(smooth(k)) for k in range(12)}
    manifest = write_dataset(tmp_path / "data", (12,), broken=pictures)
    others = {k: png(smooth(100 + k)) for k in range(8)}
    others |= {
        2: pictures[5],
        4: png(smooth(9)[:, ::-1]),
        6: png(saved(smooth(1), 60)),
        7: b"no image",
    }
    write_dataset(tmp_path / "data", (8,), split="test", broken=others)
    return load_index(manifest)


def embeddings(rows):
    ids = torch.arange(len(rows))
    return Embeddings(rows, torch.zeros_like(ids), ids)


def features(near):
    """Train: axes; test: that of `near`, a little off."""
    off = 0.01 * torch.randn(len(near), 12, generator=torch.manual_seed(0))
    return embeddings(torch.eye(12)), embeddings(torch.eye(12)[near] + off)


def pixels(near, mirrored=()):
    """Train: noise of 3 x 4 x 4; test: that of `near`, in a mirror where `mirrored` says so."""
    noise = torch.randn(12, 3, 4, 4, generator=torch.manual_seed(1))
    shown = [noise[row].flip(2) if k in mirrored else noise[row] for k, row in enumerate(near)]
    both = embeddings(noise.flatten(1)), embeddings(torch.stack(shown).flatten(1))
    return lambda: both


NOWHERE = [11, 11, 11, 11, 11, 11, 11]  # a train sample that is no one's duplicate


def test_leaks_are_found_among_the_nearest_by_features(index):
    splits = index.split("train"), index.split("test")
    rows = features([0, 1, 5, 3, 9, 4, 1])
    leaks = find_leaks(splits, rows, pixels(NOWHERE), num_workers=0)
    assert (leaks.ids.tolist(), leaks.how) == ([2, 4, 6], "by pixels")
    planned, done = [], []

    def bar(title, total):
        planned.append(total)
        return nullcontext(done.append)

    threads = find_leaks(splits, rows, pixels(NOWHERE), num_workers=2, progress=bar)
    assert threads.ids.tolist() == [2, 4, 6]
    assert planned == [sum(done)]  # the bar ends where the work does


def test_leaks_are_found_among_the_nearest_by_pixels_and_by_mirrored_ones(index):
    splits = index.split("train"), index.split("test")

    def found(shown):
        return find_leaks(splits, features(NOWHERE), shown, num_workers=0).ids.tolist()

    for mirrored in ((), (4,), (2, 4, 6)):
        shown = pixels([0, 1, 5, 3, 9, 4, 1], mirrored)
        assert found(shown) == [2, 4, 6]
    # where they are like nothing, the samples are not compared
    shown()[1].features[[2, 4, 6]] = torch.randn(3, 48, generator=torch.manual_seed(2))
    assert {*found(shown)} < {2, 4, 6}


@pytest.mark.parametrize("channels", [1, 3])
def test_rows_of_pixels_are_pictures_again_and_small_ones(channels):
    images = torch.randn(5, channels, 28, 28)
    small = images.view(5, channels, 14, 2, 14, 2).mean((3, 5))
    torch.testing.assert_close(small_pictures(images.flatten(1)), small)
    assert torch.equal(small_pictures(small.flatten(1)), small)  # no larger than they are


def test_the_column_says_so_where_both_splits_have_it(index, tmp_path):
    groups = {"train": [7, *[None] * 10, 3], "test": [None, 3, 9, 9, 7, None, None, None]}
    for split, values in groups.items():
        index = add_columns(tmp_path / "data" / "dataset.json", split, duplicate_group=values)
    splits = index.split("train"), index.split("test")
    leaks = find_leaks(splits, features([0] * 8), None, num_workers=0)
    assert (leaks.ids.tolist(), leaks.how) == ([1, 4], "by the column duplicate_group")
