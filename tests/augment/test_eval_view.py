"""sslpipe.augment.eval_view against torchvision's resize, center_crop and normalize."""

import json

import pytest
import torch
import torchvision.transforms.v2.functional as reference

from sslpipe.augment.eval_view import EvalView, eval_view_for

MEAN, STD = (0.48, 0.45, 0.40), (0.22, 0.23, 0.25)
SIZES = [(40, 52), (33, 33), (20, 64), (64, 20), (33, 33), (64, 64), (31, 30)]


@pytest.mark.parametrize("squash", [False, True])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_other_libraries_resizes_equal_torchvisions(interpolation, squash):
    images = 255 * torch.randint(0, 2, (1, 3, 40, 52), dtype=torch.uint8)  # black and white
    view = EvalView(28, 32, MEAN, STD, interpolation=interpolation, squash=squash)
    assert EvalView(**json.loads(json.dumps(view.config()))).config() == view.config()
    mode = reference.InterpolationMode(interpolation)
    size = [32, 32] if squash else [32]
    pixels = reference.resize(images[0].float() / 255, size, mode, antialias=True)
    assert interpolation == "bilinear" or pixels.min() < 0 or pixels.max() > 1  # it overshoots
    pixels = reference.center_crop(pixels.clamp(0, 1), [28, 28])
    expected = reference.normalize(pixels, list(MEAN), list(STD))
    assert (view(images, torch.tensor([[40, 52]]))[0] - expected).abs().max() <= 1e-6


def test_the_usual_view_only_normalises_images_of_its_size_and_names_no_other_resizes():
    images = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    view = EvalView(32, 32)
    assert torch.equal(view(images, torch.tensor([[32, 32]] * 3)), images / 255)
    assert set(view.config()) == {"crop_px", "resize_px", "mean", "std"}


def test_the_resize_belongs_to_the_crop():
    views = [eval_view_for(crop_px, MEAN, STD) for crop_px in (28, 32, 96, 128, 160, 224)]
    assert [view.resize_px for view in views] == [28, 32, 96, 146, 183, 256]
    assert all(view.config() == EvalView(**view.config()).config() for view in views)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"crop_px": 40}, r"crop_px = 40 is not in 1\.\.resize_px = 32"),
        ({"crop_px": 28, "interpolation": "nearest"}, "known: bilinear, bicubic"),
    ],
)
def test_arguments_that_make_no_view_are_named(arguments, words):
    with pytest.raises(ValueError, match=words):
        EvalView(resize_px=32, **arguments)


@pytest.mark.parametrize(
    ("crop_px", "resize_px"), [(32, 32), (28, 33), (28, 40), (64, 73), (96, 96)]
)
def test_the_view_equals_torchvisions(crop_px, resize_px):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (7, 3, 64, 64), dtype=torch.uint8, generator=generator)
    view = EvalView(crop_px, resize_px, MEAN, STD)
    assert EvalView(**view.config()).config() == view.config()
    ours = view(images, torch.tensor(SIZES))
    assert ours.is_contiguous(memory_format=torch.channels_last)
    assert len(ours) == len(images)
    for row, (height, width) in enumerate(SIZES):
        pixels = images[row, :, :height, :width].float() / 255
        pixels = reference.resize(pixels, [resize_px], antialias=True)
        expected = reference.center_crop(pixels, [crop_px, crop_px])
        expected = reference.normalize(expected, list(MEAN), list(STD))
        assert (ours[row] - expected).abs().max() <= 1e-6
