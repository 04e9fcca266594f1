"""sslpipe.augment.preview: the picture shows training's own views."""

import numpy as np
import pytest
import torch
from PIL import Image

from sslpipe.augment.ops import draws
from sslpipe.augment.preview import preview_grid
from sslpipe.augment.two_views import AUGMENTS
from sslpipe.data.index import load_index
from sslpipe.data.loader import one_pass
from tests.helpers.dataset import write_dataset


@pytest.mark.parametrize("kind", AUGMENTS)
def test_the_picture_contains_every_view_that_training_would_see(kind, tmp_path):
    index = load_index(write_dataset(tmp_path / "data", (4, 4)))
    split, ids = index.split("train"), [1, 2, 6]
    augment = AUGMENTS[kind].views("byol", 16, (0.4, 0.5, 0.6), (0.2, 0.3, 0.2))
    arguments = {"seed": 3, "epoch": 5, "ids": ids, "canvas_px": 64}
    page = preview_grid(index, split, augment, **arguments)
    pixels = np.asarray(page)

    batch = next(one_pass(split, ids=ids, canvas_px=64, num_workers=0))
    plain = AUGMENTS[kind].views("byol", 16, normalize=False)
    for epoch in (5, 6):
        views = plain(batch, draws(3, epoch, batch.ids, batch.sizes, plain.specs))
        for view in views.permute(0, 2, 3, 1).numpy():
            assert _contains(pixels, np.rint(np.clip(view, 0, 1) * 255))
    other = plain(batch, draws(3, 7, batch.ids, batch.sizes, plain.specs))
    assert not _contains(pixels, np.rint(other[0].permute(1, 2, 0).numpy() * 255))
    assert preview_grid(index, split, augment, **arguments).tobytes() == page.tobytes()


def test_many_samples_stand_in_blocks_side_by_side(tmp_path):
    index = load_index(write_dataset(tmp_path / "data", (40,)))
    augment = AUGMENTS["fused"].views("byol", 16, normalize=False)

    def page(ids):
        arguments = {"seed": 3, "epoch": 5, "ids": ids, "canvas_px": 64, "num_epochs": 1}
        return np.asarray(preview_grid(index, index.split("train"), augment, **arguments))

    ids = list(range(1, 38))
    together, parts = page(ids), [page(ids[k : k + 16]) for k in (0, 16, 32)]
    assert together.shape[:2] == (max(len(part) for part in parts), 3 * parts[0].shape[1])
    for number, part in enumerate(parts):
        block = together[: len(part), number * part.shape[1] : (number + 1) * part.shape[1]]
        np.testing.assert_array_equal(block, part)


def test_second_views_are_of_the_partners(tmp_path):
    """Of each sample in its first epoch, and of another one in the second."""
    index = load_index(write_dataset(tmp_path / "data", (4, 4)))
    split, ids = index.split("train"), np.array([1, 2, 6])
    augment = AUGMENTS["fused"].views("byol", 16, (0.4, 0.5, 0.6), (0.2, 0.3, 0.2))
    shown = {5: np.array([1, 2, 6]), 6: np.array([7, 2, 0])}
    arguments = {"seed": 3, "epoch": 5, "ids": ids, "canvas_px": 64}
    drawn = preview_grid(index, split, augment, **arguments, partners=lambda epoch, _: shown[epoch])
    page = np.asarray(drawn)
    plain = AUGMENTS["fused"].views("byol", 16, normalize=False)
    for epoch in (5, 6):
        for row, sample in enumerate(ids.tolist()):
            for view, image in enumerate((sample, int(shown[epoch][row]))):
                alone = next(one_pass(split, ids=np.array([image]), num_workers=0))
                alone = alone._replace(ids=torch.tensor([sample]))  # names the random numbers
                views = plain(alone, draws(3, epoch, alone.ids, alone.sizes, plain.specs))
                wanted = np.rint(views[view].permute(1, 2, 0).numpy().clip(0, 1) * 255)
                assert _contains(page, wanted), (epoch, sample, view)


def _contains(page, view, scale=11):
    """Whether the view, enlarged by whole pixels, stands somewhere on the page (+-1 level)."""
    height, width = (side * scale for side in view.shape[:2])
    page = page.astype(np.int16)
    image = np.asarray(Image.fromarray(view.astype(np.uint8)).resize((width, height), 0), np.int16)
    probes = [(0, 0), (height - 1, width - 1), (height // 2, width // 3)]
    rows, columns = page.shape[0] - height + 1, page.shape[1] - width + 1
    near = np.ones((rows, columns), bool)
    for y, x in probes:
        near &= (np.abs(page[y : y + rows, x : x + columns] - image[y, x]) <= 1).all(-1)
    return any(
        (np.abs(page[y : y + height, x : x + width] - image) <= 1).all()
        for y, x in np.argwhere(near)
    )


@pytest.mark.parametrize("crop_px", [16, 224])
def test_views_with_all_ops_at_once_can_be_drawn(crop_px, tmp_path):
    index = load_index(write_dataset(tmp_path / "data", (4, 4)))
    names = ("jitter", "blur", "solarize", "grayscale", "flip")
    every = {f"{name}_prob": 1 for name in names} | {"rotation_deg": 30}
    augment = AUGMENTS["fused"].views("byol", crop_px, **every)
    arguments = {"seed": 0, "epoch": 0, "ids": [0, 5], "canvas_px": 64}
    page = preview_grid(index, index.split("train"), augment, **arguments)
    assert page.mode == "RGB"
    assert page.width > 5 * max(176, crop_px)
