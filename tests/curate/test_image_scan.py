"""What is kept of every sample, against one sample at a time."""

import hashlib

import numpy as np
import pytest

from sslpipe.curate.image_scan import scan
from sslpipe.curate.thumbnails import thumbnail
from sslpipe.data.decode import MAX_PIXELS, decode
from sslpipe.data.index import load_index
from tests.helpers.dataset import png, write_dataset

BAD = 13


def shown_pixels():
    """Pictures by id: grey and coloured, small and large."""
    rng = np.random.default_rng(0)
    shapes = [(28, 28), (28, 28), (16, 40), (90, 70)]
    pictures = {k: rng.integers(0, 256, (*shapes[k % 4], 3), np.uint8) for k in range(30)}
    return {k: each if k % 3 else each[:, :, :1].repeat(3, 2) for k, each in pictures.items()}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("part_bytes", [1, 20_000, 2**23])
def test_parts_and_threads_do_not_change_what_is_kept(
    tmp_path, monkeypatch, part_bytes, num_workers
):
    files = {k: png(pixels) for k, pixels in shown_pixels().items()} | {BAD: b"no image"}
    manifest = write_dataset(tmp_path, (24, 6), broken=files)
    split = load_index(manifest).split("train")
    monkeypatch.setattr("sslpipe.curate.image_scan.PART_BYTES", part_bytes)
    done, bad = [], []
    samples = scan([split], num_workers=num_workers, on_bad=bad.append, progress=done.append)
    assert done[0] == {1: 1, 20_000: done[0], 2**23: 24}[part_bytes]
    assert part_bytes != 20_000 or 1 < done[0] < 24
    assert sum(done) == 30
    assert [each.id for each in bad] == [BAD]
    assert samples.ids.tolist() == [k for k in range(30) if k != BAD]
    for place, number in enumerate(samples.ids.tolist()):
        whole = np.ascontiguousarray(decode(files[number], MAX_PIXELS).transpose(1, 2, 0))
        height, width, _ = whole.shape
        expected = hashlib.sha256(f"{height} {width} ".encode() + whole.tobytes()).digest()
        assert samples.pixels_sha256[place].tobytes() == expected
        assert samples.sizes[place].tolist() == [height, width]
        assert np.array_equal(samples.thumbs[place], thumbnail(whole))
    assert len(samples.thumbs) == 29


def test_a_split_of_which_nothing_can_be_read_has_no_samples(tmp_path):
    manifest = write_dataset(tmp_path, (3,), broken=dict.fromkeys(range(3), b"no image"))
    samples = scan([load_index(manifest).split("train")])
    assert len(samples) == len(samples.sizes) == len(samples.thumbs) == 0
