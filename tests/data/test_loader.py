"""Batches along the planned order: from disk, and from the device's memory."""

import io
from threading import Event

import numpy as np
import pytest
import torch
from PIL import Image

from sslpipe.data import loader
from sslpipe.data.decode import decode
from sslpipe.data.index import load_index
from sslpipe.data.loader import one_pass
from sslpipe.data.pipeline import Batch, Upload, pipelined
from sslpipe.data.reader import Reader
from sslpipe.distributed import Rank
from sslpipe.errors import DataError
from tests.helpers.batches import order_of, same, take, take_all
from tests.helpers.dataset import picture, png, write_dataset

SIZES = (40, 3, 60, 25)
DEVICE = {"cache": "device"}
BROKEN = {5: b"", 17: b"<html>", 40: b"\x89PNG\r\n\x1a\n" + b"\0" * 40}
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return load_index(write_dataset(tmp_path_factory.mktemp("data"), SIZES))


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    return load_index(write_dataset(tmp_path_factory.mktemp("broken"), broken=BROKEN))


def pixels(image):
    return image.permute(1, 2, 0).numpy()


def test_a_batch_holds_the_planned_pictures(index):
    batch = take(index, 1)[0]
    assert batch.images.shape == (16, 3, 16, 16)
    for image, label, sample_id in zip(batch.images, batch.labels, batch.ids, strict=True):
        assert np.array_equal(pixels(image), picture(int(sample_id)))
        assert int(label) == int(sample_id) % 4
    assert torch.equal(batch.ids, batch.source_ids)
    assert (batch.sizes == 16).all()


@pytest.mark.gpu
@needs_cuda
def test_what_computes_waits_for_the_copy_and_the_next_copy_for_it(index):
    """With either stream held up: else uninitialised or later images are read."""
    wanted = take(index, 6, run={"num_workers": 0})
    upload, clones = Upload(torch.device("cuda")), []
    for number, batch in enumerate(wanted):
        with torch.cuda.stream(upload._stream if number % 2 else torch.cuda.current_stream()):
            torch.cuda._sleep(100_000_000)
        moved = upload.end(*upload.begin(batch))
        clones.append(moved.images.clone())
        del moved
    assert all(map(torch.equal, [c.cpu() for c in clones], [b.images for b in wanted]))


@pytest.mark.promise(1)
@pytest.mark.parametrize(
    "run",
    [
        {"num_workers": 1},
        {"num_workers": 9},  # three threads make batches
        {"cache": "memory"},
        {"num_workers": 0, "cache": "memory"},
    ],
)
def test_settings_of_run_change_no_batch(index, run):
    assert all(map(same, take(index, 20, run={"num_workers": 0}), take(index, 20, run=run)))


@pytest.mark.promise(1)
@pytest.mark.parametrize(("workers", "ahead"), [(3, 1), (9, 9)])
def test_neither_the_size_of_a_read_nor_reading_ahead_changes_a_batch(
    index, monkeypatch, workers, ahead
):
    wanted = take(index, 20, run={"num_workers": 0})
    monkeypatch.setattr(loader, "BATCHES_AHEAD", ahead)
    monkeypatch.setitem(Reader.__init__.__kwdefaults__, "window_bytes", 1)
    assert all(map(same, wanted, take(index, 20, run={"num_workers": workers})))


@pytest.mark.promise(1)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("sizes", [(128,), SIZES, (1,) * 128])
def test_the_ranks_batches_put_together_are_the_one_process_batch(tmp_path, world, sizes):
    index = load_index(write_dataset(tmp_path, sizes))
    whole = take(index, 12, run={"num_workers": 0})
    for batch, joined in zip(whole, take_all(index, 12, world), strict=True):
        assert all(torch.equal(part, getattr(batch, name)) for name, part in joined.items())


def test_resuming_at_a_step_equals_having_run_to_it(index):
    straight = take(index, 20)
    for first in (1, 5, 8, 13):
        assert all(map(same, straight[first:], take(index, 20 - first, first=first)))


def test_resuming_seeks_and_does_not_replay(tmp_path, monkeypatch):
    index, rows_read, original = load_index(write_dataset(tmp_path, (128,))), [], Reader.rows
    monkeypatch.setattr(
        Reader, "rows", lambda self, k, rows: rows_read.extend(rows) or original(self, k, rows)
    )
    take(index, 1, first=7, run={"num_workers": 0})
    assert len(rows_read) <= 4 * 6  # at most one window of each stream


def photographs(sizes, form="JPEG", orientation=1, spoil=None):
    """A file's bytes for each size (width, height); the third is rotated, the fourth spoilt."""
    rng, contents = np.random.default_rng(0), {}
    for number, (width, height) in enumerate(sizes):
        content, exif = io.BytesIO(), Image.Exif()
        exif[0x0112] = orientation if number == 2 else 1
        noise = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(noise).save(content, form, exif=exif)
        contents[number] = content.getvalue()
    return {**contents, 3: spoil(contents[3])} if spoil else contents


EQUAL, MIXED = [(200, 150)] * 16, [(200, 150), (90, 170)] * 8


@pytest.mark.parametrize(
    ("files", "canvas_px"),
    [
        ({"sizes": EQUAL}, 256),
        ({"sizes": MIXED}, 160),  # reduced
        ({"sizes": [(900, 600), (200, 150)] * 8}, 256),  # decoded at half the size
        ({"sizes": MIXED, "form": "PNG", "orientation": 8}, 256),
        ({"sizes": MIXED, "orientation": 6}, 256),
        ({"sizes": MIXED, "spoil": lambda content: b"<html>"}, 256),
        ({"sizes": EQUAL, "spoil": lambda content: content[: len(content) // 2]}, 256),
    ],
)
def test_a_batch_is_its_images_in_the_corner_and_zeros(files, canvas_px, tmp_path, monkeypatch):
    contents, empty = photographs(**files), torch.empty
    # memory that held something
    monkeypatch.setattr(torch, "empty", lambda *size, **to: empty(*size, **to).fill_(77))
    index = load_index(write_dataset(tmp_path, (16,), broken=contents))
    (batch,) = take(index, 1, window=4, canvas_px=canvas_px, run={"num_workers": 3})
    images = [decode(contents[i], canvas_px) for i in batch.source_ids.tolist()]
    assert batch.images.shape[2:] == tuple(np.max([image.shape[1:] for image in images], axis=0))
    assert batch.sizes.tolist() == [list(image.shape[1:]) for image in images]
    for row, image in zip(batch.images.numpy(), images, strict=True):
        _, height, width = image.shape
        assert np.array_equal(row[:, :height, :width], image)
        assert not row[:, height:].any()
        assert not row[:, :, width:].any()


def test_batches_are_made_side_by_side_and_come_in_order():
    """Item 0 is made once item 1 has begun: with a single thread neither ever would be."""
    second_begun = Event()

    def collate_parts(item, parts):
        assert item != 0 or second_begun.wait(30)
        if item == 1:
            second_begun.set()
        numbers = torch.tensor(parts)
        return Batch(numbers, numbers, numbers, numbers, numbers, item)

    stages = lambda item: [item], lambda part: part, collate_parts
    made = pipelined(iter(range(6)), *stages, num_workers=4, ahead=3)
    assert [(batch.epoch, batch.ids.tolist()) for batch in made] == [(i, [i]) for i in range(6)]


@pytest.mark.promise(8)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_bad_sample_is_replaced_by_the_same_good_one_everywhere(tmp_path, broken, world):
    clean = take(load_index(write_dataset(tmp_path)), 8)
    bad, replacements, order = [], 0, order_of(broken.split("train"))
    for step, (batch, actual) in enumerate(
        zip(clean, take_all(broken, 8, world, bad=bad), strict=True)
    ):
        ids, source_ids = actual["ids"], actual["source_ids"]
        assert torch.equal(ids, batch.ids)  # the order never shifts
        replaced = torch.tensor([int(i) in BROKEN for i in ids])
        assert torch.equal(source_ids != ids, replaced)
        assert torch.equal(actual["images"][~replaced], batch.images[~replaced])
        assert actual["labels"].tolist() == (source_ids % 4).tolist()
        for row in torch.nonzero(replaced).flatten().tolist():
            source = int(source_ids[row])
            assert np.array_equal(pixels(actual["images"][row]), picture(source))
            of_stream = order.epoch(0).stream(row // 4)  # 4 rows a stream
            place = (step * 4 + row % 4 + of_stream.length // 2) % of_stream.length
            assert source == int(of_stream.ids(place, place + 1)[0])
            replacements += 1
    assert replacements == 3
    by_id = {record.id: record for record in bad}
    assert set(by_id) == set(BROKEN)
    assert (by_id[17].shard, by_id[17].key) == ("train-000001.tar", "train000017")


@pytest.mark.parametrize(("cache", "steps"), [("memory", 24), ("device", 1)])
def test_a_bad_sample_is_reported_once_over_epochs(broken, cache, steps):
    bad = []
    take(broken, steps, bad=bad, run={"cache": cache})
    assert sorted(record.id for record in bad) == sorted(BROKEN)


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        ("none", "32 samples in a row cannot be decoded"),
        ("device", "none of the 128 samples can be decoded"),
    ],
)
def test_nothing_but_bad_samples_ends_with_a_clear_error(tmp_path, cache, message):
    index = load_index(write_dataset(tmp_path, broken=dict.fromkeys(range(128), b"junk")))
    with pytest.raises(DataError, match=message):
        take(index, 1, run={"cache": cache})


def test_one_pass_gives_each_sample_once_over_any_number_of_ranks(index):
    split = index.split("train")
    for world in (1, 2, 3, 5):
        passes = [one_pass(split, process=Rank(r, world), batch_size=7) for r in range(world)]
        ids = [i for each in passes for batch in each for i in batch.ids.tolist()]
        assert ids == list(range(128))
    wanted = np.array([3, 4, 90, 127])
    batch = next(one_pass(split, ids=wanted))
    assert batch.ids.tolist() == wanted.tolist()
    assert np.array_equal(pixels(batch.images[2]), picture(90))


def test_one_pass_skips_and_reports_a_bad_sample_or_refuses_it(broken):
    bad = []
    ids = [i for b in one_pass(broken.split("train"), on_bad=bad.append) for i in b.ids.tolist()]
    assert sorted({*ids, *BROKEN}) == list(range(128))
    assert sorted(record.id for record in bad) == sorted(BROKEN)
    with pytest.raises(DataError, match=r"train-000000.tar, key 'train000005' \(id 5\)"):
        list(one_pass(broken.split("train")))


def test_unlabelled_shards_give_label_minus_one(tmp_path):
    index = load_index(write_dataset(tmp_path, labelled=False))
    assert (take(index, 1)[0].labels == -1).all()


@pytest.mark.parametrize(("holdout", "first"), [(0, 0), (16, 5)])
@pytest.mark.parametrize(("rank", "world"), [(0, 1), (1, 2)])
@pytest.mark.parametrize("broken", [{}, {5: b"", 17: b"<html>", 90: png(picture(90, 24)[:10])}])
def test_batches_from_the_devices_memory_are_those_that_are_streamed(
    tmp_path, holdout, rank, world, first, broken
):
    index = load_index(write_dataset(tmp_path, SIZES, broken=broken))
    settings = {"rank": rank, "world": world, "holdout": holdout, "first": first}
    held = take(index, 20, run=DEVICE, **settings)
    for a, b in zip(take(index, 20, **settings), held, strict=True):
        height, width = a.images.shape[2:]
        assert not b.images[:, :, height:].any()  # canvases may be larger
        assert not b.images[:, :, :, width:].any()
        assert same(a, b._replace(images=b.images[:, :, :height, :width]))


def test_images_that_do_not_fit_the_device_are_one_clear_error(index, monkeypatch):
    needed = 128 * 16 * 16 * 3
    monkeypatch.setattr("sslpipe.data.loader.free_bytes", lambda device: 2 * needed - 1)
    with pytest.raises(DataError, match=r'run.cache = "device": 128 images of 16 x 16 px are'):
        take(index, 1, run=DEVICE)
    monkeypatch.setattr("sslpipe.data.loader.free_bytes", lambda device: 2 * needed)
    take(index, 1, run=DEVICE)
