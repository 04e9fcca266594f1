from itertools import islice

import pytest
import torch

from sslpipe.data.index import load_index
from sslpipe.data.loader import batches
from sslpipe.data.order import Order, held_out
from sslpipe.data.resident import resident_batches
from sslpipe.distributed import Rank
from sslpipe.errors import DataError
from sslpipe.recipe.base import RunConfig
from sslpipe.recipe.pretrain import Data
from tests.helpers.dataset import picture, png, write_dataset

DATA = Data(batch_size=16, num_streams=4, shuffle_window=6, canvas_px=32)
SIZES = (40, 3, 60, 25)
CPU = torch.device("cpu")


def take(source, index, steps, *, process=Rank(), holdout=0, bad=None, **keywords):  # noqa: B008
    split = index.split("train")
    without = held_out(split.labels, holdout)
    order = Order(split.starts, seed=1, batch_size=16, num_streams=4, window=6, without=without)
    on_bad = ([] if bad is None else bad).append
    return list(
        islice(source(split, order, DATA, RunConfig(), process, on_bad=on_bad, **keywords), steps)
    )


@pytest.mark.parametrize("holdout", [0, 16])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("first_step", [0, 5])
@pytest.mark.parametrize("broken", [{}, {5: b"", 17: b"<html>", 90: png(picture(90, 24)[:10])}])
def test_batches_from_the_devices_memory_are_those_that_are_streamed(
    tmp_path, holdout, world, first_step, broken
):
    index = load_index(write_dataset(tmp_path, SIZES, broken=broken))
    for rank in range(world):
        settings = {"process": Rank(rank, world), "holdout": holdout, "first_step": first_step}
        streamed = take(batches, index, 20, **settings)
        held = take(resident_batches, index, 20, device=CPU, **settings)
        for a, b in zip(streamed, held, strict=True):
            height, width = a.images.shape[2:]
            assert torch.equal(a.images, b.images[:, :, :height, :width])  # canvases may be larger
            assert not b.images[:, :, height:].any()
            assert not b.images[:, :, :, width:].any()
            assert all(torch.equal(x, y) for x, y in zip(a[1:5], b[1:5], strict=True))
            assert a.epoch == b.epoch


def test_bad_samples_are_reported_before_the_first_batch(tmp_path):
    index = load_index(write_dataset(tmp_path, SIZES, broken={5: b"", 17: b"<html>"}))
    bad = []
    take(resident_batches, index, 1, device=CPU, bad=bad)
    assert sorted(record.id for record in bad) == [5, 17]


def test_images_that_do_not_fit_are_one_clear_error(tmp_path, monkeypatch):
    index = load_index(write_dataset(tmp_path, SIZES))
    needed = 128 * 16 * 16 * 3
    monkeypatch.setattr("sslpipe.data.resident.free_bytes", lambda device: 2 * needed - 1)
    with pytest.raises(DataError, match=r'run.cache = "device": 128 images of 16 x 16 px are'):
        take(resident_batches, index, 1, device=CPU)
    monkeypatch.setattr("sslpipe.data.resident.free_bytes", lambda device: 2 * needed)
    take(resident_batches, index, 1, device=CPU)


def test_nothing_but_bad_samples_is_one_clear_error(tmp_path):
    index = load_index(write_dataset(tmp_path, SIZES, broken=dict.fromkeys(range(128), b"junk")))
    with pytest.raises(DataError, match="none of the 128 samples can be decoded"):
        take(resident_batches, index, 1, device=CPU)
