import io
from itertools import islice
from threading import Event

import numpy as np
import pytest
import torch
from PIL import Image

from sslpipe.data import loader
from sslpipe.data.decode import decode
from sslpipe.data.index import load_index
from sslpipe.data.loader import batches, collate, one_pass
from sslpipe.data.order import Order
from sslpipe.data.pipeline import Batch, Upload, pipelined
from sslpipe.distributed import Rank
from sslpipe.errors import DataError
from sslpipe.recipe.base import RunConfig
from sslpipe.recipe.pretrain import Data
from tests.helpers.dataset import picture, write_dataset

DATA = Data(batch_size=16, num_streams=4, shuffle_window=6, canvas_px=32)


def an_order(split):
    return Order(split.starts, seed=1, batch_size=16, num_streams=4, window=6)


ONE = Rank()


def take(index, steps, *, first=0, process=ONE, bad=None, **run):
    split = index.split("train")
    stream = batches(
        split,
        an_order(split),
        DATA,
        RunConfig(**run),
        process,
        first_step=first,
        on_bad=(bad if bad is not None else []).append,
    )
    actual = list(islice(stream, steps))
    stream.close()
    return actual


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a[:5], b[:5], strict=True)) and a[5] == b[5]


def test_a_batch_holds_the_planned_pictures(tmp_path):
    index = load_index(write_dataset(tmp_path))
    batch = take(index, 1)[0]
    assert batch.images.shape == (16, 3, 16, 16)
    for image, label, sample_id in zip(batch.images, batch.labels, batch.ids, strict=True):
        assert np.array_equal(image.permute(1, 2, 0).numpy(), picture(int(sample_id)))
        assert int(label) == int(sample_id) % 4
    assert torch.equal(batch.ids, batch.source_ids)
    assert (batch.sizes == 16).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("workers", [0, 2])
def test_images_reach_the_device_in_order(tmp_path, workers):
    index = load_index(write_dataset(tmp_path, (40, 3, 60, 25)))
    split, run = index.split("train"), RunConfig(num_workers=workers)
    device = torch.device("cuda")
    stream = batches(split, an_order(split), DATA, run, ONE, device=device, on_bad=[].append)
    for wanted, batch in zip(take(index, 20, num_workers=0), stream, strict=False):
        assert batch.images.is_cuda
        assert not batch.ids.is_cuda
        assert batch.images.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(batch.images.cpu(), wanted.images)
    stream.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_computes_waits_for_the_copy_and_the_next_copy_for_it(tmp_path):
    """With either stream held up: else uninitialised or later images are read."""
    wanted = take(load_index(write_dataset(tmp_path, (40, 3, 60, 25))), 6, num_workers=0)
    upload, clones = Upload(torch.device("cuda")), []
    for number, batch in enumerate(wanted):
        with torch.cuda.stream(upload._stream if number % 2 else torch.cuda.current_stream()):
            torch.cuda._sleep(100_000_000)
        moved = upload.end(*upload.begin(batch))
        clones.append(moved.images.clone())
        del moved
    assert all(
        torch.equal(clone.cpu(), batch.images) for clone, batch in zip(clones, wanted, strict=True)
    )


@pytest.mark.parametrize(
    "run",
    [
        {"num_workers": 1},
        {"num_workers": 3, "prefetch": 1},
        {"num_workers": 9, "prefetch": 9},  # three threads make batches
        {"cache": "memory"},
        {"num_workers": 0, "cache": "memory"},
        {"window_bytes": 1},
    ],
)
def test_settings_of_run_change_no_batch(tmp_path, run):
    index = load_index(write_dataset(tmp_path, (40, 3, 60, 25)))
    plain = take(index, 20, num_workers=0)
    assert all(same(a, b) for a, b in zip(plain, take(index, 20, **run), strict=True))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("sizes", [(128,), (40, 3, 60, 25), (1,) * 128])
def test_the_ranks_batches_put_together_are_the_one_process_batch(tmp_path, world, sizes):
    index = load_index(write_dataset(tmp_path, sizes))
    whole = take(index, 12, num_workers=0)
    parts = [take(index, 12, process=Rank(rank, world)) for rank in range(world)]
    for step, batch in enumerate(whole):
        for field in ("images", "sizes", "labels", "ids", "source_ids"):
            joined = torch.cat([getattr(part[step], field) for part in parts])
            assert torch.equal(joined, getattr(batch, field))


def test_resuming_at_a_step_equals_having_run_to_it(tmp_path):
    index = load_index(write_dataset(tmp_path, (40, 3, 60, 25)))
    straight = take(index, 20)
    for first in (1, 5, 8, 13):
        assert all(
            same(a, b)
            for a, b in zip(straight[first:], take(index, 20 - first, first=first), strict=True)
        )


def test_resuming_seeks_and_does_not_replay(tmp_path, monkeypatch):
    from sslpipe.data.reader import Reader

    index = load_index(write_dataset(tmp_path, (128,)))
    rows_read = []
    original = Reader.rows
    monkeypatch.setattr(
        Reader, "rows", lambda self, k, rows: rows_read.extend(rows) or original(self, k, rows)
    )
    take(index, 1, first=7, num_workers=0)
    assert len(rows_read) <= 4 * 6  # at most one window of each stream


def test_images_of_different_sizes_lie_in_the_corner_and_the_rest_is_zero(tmp_path):
    from tests.helpers.dataset import png

    wide = picture(0, 24)[:10]
    index = load_index(write_dataset(tmp_path, (8,), broken={3: png(wide)}))
    batch = next(one_pass(index.split("train")))
    assert batch.images.shape == (8, 3, 16, 24)
    assert batch.sizes.tolist() == [[16, 16]] * 3 + [[10, 24]] + [[16, 16]] * 4
    assert np.array_equal(batch.images[3, :, :10].permute(1, 2, 0).numpy(), wide)
    assert not batch.images[3, :, 10:].any()
    assert not batch.images[0, :, :, 16:].any()


def photographs(sizes, form="JPEG", orientation=1, spoil=None):
    """A file's bytes for each size (width, height); the third is rotated, the fourth spoilt."""
    rng, contents = np.random.default_rng(0), {}
    for number, (width, height) in enumerate(sizes):
        content, exif = io.BytesIO(), Image.Exif()
        exif[0x0112] = orientation if number == 2 else 1
        pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(content, form, exif=exif)
        contents[number] = content.getvalue()
    return {**contents, 3: spoil(contents[3])} if spoil else contents


EQUAL, MIXED = [(200, 150)] * 16, [(200, 150), (90, 170)] * 8


@pytest.mark.parametrize("num_workers", [0, 3])
@pytest.mark.parametrize(
    ("files", "canvas_px", "in_place"),
    [
        ({"sizes": EQUAL}, 256, True),
        ({"sizes": MIXED}, 256, True),
        ({"sizes": MIXED}, 160, True),  # reduced
        ({"sizes": [(900, 600), (200, 150)] * 8}, 256, True),  # decoded at half the size
        ({"sizes": MIXED, "form": "PNG"}, 256, True),
        ({"sizes": MIXED, "orientation": 6}, 256, True),
        ({"sizes": [(180, 180)] * 16, "orientation": 8}, 256, True),
        ({"sizes": EQUAL, "orientation": 3}, 256, True),
        ({"sizes": EQUAL, "form": "PNG", "orientation": 8}, 256, False),  # no header tells of it
        ({"sizes": MIXED, "spoil": lambda content: b"<html>"}, 256, False),
        ({"sizes": EQUAL, "spoil": lambda content: content[: len(content) // 2]}, 256, False),
        ({"sizes": MIXED}, 100, False),  # small canvases are copied
    ],
)
def test_images_are_decoded_where_the_batch_holds_them(
    files, canvas_px, in_place, num_workers, tmp_path, monkeypatch
):
    """The batch is that of images decoded one by one, in memory that held something else."""
    contents = photographs(**files)
    split = load_index(write_dataset(tmp_path, (16,), broken=contents)).split("train")
    copied, copy, empty = [], loader._copy, loader._empty_images
    monkeypatch.setattr(loader, "_copy", lambda *given: (copied.append(1), copy(*given)))
    monkeypatch.setattr(loader, "_empty_images", lambda *given: empty(*given).fill_(255))
    order = Order(split.starts, seed=1, batch_size=16, num_streams=4, window=4)
    data = Data(batch_size=16, num_streams=4, shuffle_window=4, canvas_px=canvas_px)
    run = RunConfig(num_workers=num_workers)
    stream = batches(split, order, data, run, ONE, on_bad=lambda bad: None)
    (batch,) = islice(stream, 1)
    stream.close()
    images = [decode(contents[i], canvas_px) for i in batch.source_ids.tolist()]
    assert batch.images.shape[2:] == tuple(np.max([image.shape[1:] for image in images], axis=0))
    assert batch.sizes.tolist() == [list(image.shape[1:]) for image in images]
    for row, image in zip(batch.images.numpy(), images, strict=True):
        _, height, width = image.shape
        assert np.array_equal(row[:, :height, :width], image)
        assert not row[:, height:].any()
        assert not row[:, :, width:].any()
    assert bool(copied) != in_place


BROKEN = {5: b"", 17: b"<html>", 40: b"\x89PNG\r\n\x1a\n" + b"\0" * 40}


def test_the_rest_of_a_canvas_is_zero_in_memory_that_held_something(tmp_path, monkeypatch):
    split = load_index(write_dataset(tmp_path, (40,))).split("train")
    pictures = [np.full((3, *size), 7, np.uint8) for size in ((2, 5), (4, 3), (4, 5))]
    monkeypatch.setattr(torch, "empty", lambda shape, **kwargs: torch.full(shape, 255, **kwargs))
    batch = collate(split, np.arange(3), list(enumerate(pictures)), 0)
    assert batch.images.shape == (3, 3, 4, 5)
    for image, pixels in zip(batch.images.numpy(), pictures, strict=True):
        height, width = pixels.shape[1:]
        assert (image[:, :height, :width] == 7).all()
        assert image.sum() == 7 * pixels.size


def test_batches_are_made_side_by_side_and_come_in_order():
    """Item 0 is made once item 1 has begun: with a single thread neither ever would be."""
    second_begun = Event()

    def collate_parts(item, parts):
        assert item != 0 or second_begun.wait(30)
        if item == 1:
            second_begun.set()
        numbers = torch.tensor(parts)
        return Batch(numbers, numbers, numbers, numbers, numbers, item)

    made = pipelined(iter(range(6)), lambda item: [item], lambda part: part, collate_parts, 4, 3)
    assert [(batch.epoch, batch.ids.tolist()) for batch in made] == [(i, [i]) for i in range(6)]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_bad_sample_is_replaced_by_the_same_good_one_everywhere(tmp_path, world):
    clean = take(load_index(write_dataset(tmp_path / "clean")), 8)
    index = load_index(write_dataset(tmp_path / "bad", broken=BROKEN))
    bad = []
    parts = [take(index, 8, process=Rank(rank, world), bad=bad) for rank in range(world)]
    order, replacements = an_order(index.split("train")), 0
    for step, batch in enumerate(clean):
        ids = torch.cat([part[step].ids for part in parts])
        source_ids = torch.cat([part[step].source_ids for part in parts])
        images = torch.cat([part[step].images for part in parts])
        labels = torch.cat([part[step].labels for part in parts])
        assert torch.equal(ids, batch.ids)  # the order never shifts
        replaced = torch.tensor([int(i) in BROKEN for i in ids])
        assert torch.equal(source_ids != ids, replaced)
        assert torch.equal(images[~replaced], batch.images[~replaced])
        for source, image, label in zip(source_ids, images, labels, strict=True):
            assert np.array_equal(image.permute(1, 2, 0).numpy(), picture(int(source)))
            assert int(label) == int(source) % 4
        for row in torch.nonzero(replaced).flatten().tolist():
            plan = order.epoch(0).stream(row // 4)  # 4 rows a stream
            place = (step * 4 + row % 4 + plan.length // 2) % plan.length
            assert int(source_ids[row]) == int(plan.ids(place, place + 1)[0])
            replacements += 1
    assert replacements == 3
    assert {record.id for record in bad} == set(BROKEN)
    by_id = {record.id: record for record in bad}
    assert by_id[17].shard == "train-000001.tar"
    assert by_id[17].key == "train000017"


def test_a_bad_sample_is_reported_once_over_epochs(tmp_path):
    index = load_index(write_dataset(tmp_path, broken=BROKEN))
    bad = []
    take(index, 24, bad=bad, cache="memory")
    assert sorted(record.id for record in bad) == sorted(BROKEN)


def test_nothing_but_bad_samples_ends_with_a_clear_error(tmp_path):
    broken = dict.fromkeys(range(128), b"junk")
    index = load_index(write_dataset(tmp_path, broken=broken))
    with pytest.raises(DataError, match=r"32 samples in a row cannot be decoded"):
        take(index, 1)


def test_one_pass_gives_each_sample_once_over_any_number_of_ranks(tmp_path):
    index = load_index(write_dataset(tmp_path, (40, 3, 60, 25)))
    split = index.split("train")
    for world in (1, 2, 3, 5):
        ids = [
            i
            for rank in range(world)
            for batch in one_pass(split, process=Rank(rank, world), batch_size=7)
            for i in batch.ids.tolist()
        ]
        assert ids == list(range(128))


def test_one_pass_over_chosen_ids_reads_those(tmp_path):
    index = load_index(write_dataset(tmp_path))
    wanted = np.array([3, 4, 90, 127])
    batch = next(one_pass(index.split("train"), ids=wanted))
    assert batch.ids.tolist() == wanted.tolist()
    assert np.array_equal(batch.images[2].permute(1, 2, 0).numpy(), picture(90))


def test_one_pass_skips_and_reports_a_bad_sample_or_refuses_it(tmp_path):
    index = load_index(write_dataset(tmp_path, broken=BROKEN))
    bad = []
    ids = [i for b in one_pass(index.split("train"), on_bad=bad.append) for i in b.ids.tolist()]
    assert sorted({*ids, *BROKEN}) == list(range(128))
    assert sorted(record.id for record in bad) == sorted(BROKEN)
    with pytest.raises(DataError, match=r"train-000000.tar, key 'train000005' \(id 5\)"):
        list(one_pass(index.split("train")))


def test_unlabelled_shards_give_label_minus_one(tmp_path):
    index = load_index(write_dataset(tmp_path, labelled=False))
    assert (take(index, 1)[0].labels == -1).all()
