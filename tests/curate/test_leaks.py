"""Test samples that are in train: found by pixels, or by the column that says so."""

import io
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from PIL import Image

from sslpipe.curate.leaks import find_leaks
from sslpipe.data.index import load_index
from sslpipe.evaluation.embed import Embeddings
from tests.curate.test_duplicates import smooth
from tests.helpers.columns import add_columns
from tests.helpers.dataset import png, write_dataset


def jpeg(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=60)
    return png(np.asarray(Image.open(io.BytesIO(file.getvalue()))))


@pytest.fixture
def index(tmp_path):
    """Test 2 is train's 5 in bytes, 4 is train's 9 mirrored, 6 is train's 1 by JPEG; 7 is bad."""
    pictures = {k: png(smooth(k)) for k in range(12)}
    manifest = write_dataset(tmp_path / "data", (12,), broken=pictures)
    others = {k: png(smooth(100 + k)) for k in range(8)}
    others |= {2: pictures[5], 4: png(smooth(9)[:, ::-1]), 6: jpeg(smooth(1)), 7: b"no image"}
    write_dataset(tmp_path / "data", (8,), split="test", broken=others)
    return load_index(manifest)


def features(near):
    """Train: axes; test: that of `near`, a little off."""
    train = Embeddings(torch.eye(12), torch.zeros(12, dtype=torch.int64), torch.arange(12))
    rows = torch.eye(12)[near] + 0.01 * torch.randn(len(near), 12, generator=torch.manual_seed(0))
    return train, Embeddings(
        rows, torch.zeros(len(near), dtype=torch.int64), torch.arange(len(near))
    )


def test_leaks_are_found_by_pixels_among_the_nearest(index):
    splits = index.split("train"), index.split("test")
    leaks = find_leaks(splits, features([0, 1, 5, 3, 9, 4, 1]), num_workers=0)
    assert (leaks.ids.tolist(), leaks.how) == ([2, 4, 6], "by pixels")
    planned, done = [], []

    def bar(title, total):
        planned.append(total)
        return nullcontext(done.append)

    rows = features([0, 1, 5, 3, 9, 4, 1])
    threads = find_leaks(splits, rows, num_workers=2, progress=bar)
    assert threads.ids.tolist() == [2, 4, 6]
    assert planned == [sum(done)]  # the bar ends where the work does


def test_the_column_says_so_where_both_splits_have_it(index, tmp_path):
    groups = {"train": [7, *[None] * 10, 3], "test": [None, 3, 9, 9, 7, None, None, None]}
    for split, values in groups.items():
        index = add_columns(tmp_path / "data" / "dataset.json", split, duplicate_group=values)
    splits = index.split("train"), index.split("test")
    leaks = find_leaks(splits, features([0] * 8), num_workers=0)
    assert (leaks.ids.tolist(), leaks.how) == ([1, 4], "by the column duplicate_group")
