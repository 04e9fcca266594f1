"""TwoViews, in one line: the views that training makes of the same pixels, seed, epoch and ids."""

import re

import numpy as np
import pytest
import torch

from sslpipe.augment.two_views import FusedViews, TwoViews
from tests.augment.test_two_views import MEAN, STD, batch_of, params_for

SIZES = [(40, 52), (33, 33), (120, 64), (7, 100)]


def images_of(sizes):
    batch = batch_of(sizes)
    return [image[:, :h, :w] for image, (h, w) in zip(batch.images, sizes, strict=True)]


def test_a_list_of_sizes_gives_the_views_of_training():
    batch = batch_of(SIZES, first_id=0, epoch=3)
    images = batch.images.contiguous(memory_format=torch.channels_last)
    augment = FusedViews("byol", 32, MEAN, STD)
    expected = augment(batch._replace(images=images), params_for(batch, augment, seed=5))
    views = TwoViews("byol", crop_px=32, mean=MEAN, std=STD)
    first, second = views(images_of(SIZES), seed=5, epoch=3, ids=[0, 1, 2, 3])
    assert first.shape == second.shape == (4, 3, 32, 32)
    assert first.dtype == torch.float32
    assert torch.equal(torch.cat([first, second]), expected)


def test_a_tensor_and_a_list_of_one_size_give_the_same_views():
    images = batch_of([(40, 50)] * 4).images
    views = TwoViews(crop_px=48)
    for a, b in zip(views(images, ids=range(4)), views([*images], ids=np.arange(4)), strict=True):
        assert torch.equal(a, b)
        assert a.min() >= 0
        assert a.max() <= 1


def test_without_ids_two_calls_differ_and_a_new_object_starts_again():
    images = batch_of([(40, 50)] * 3).images
    views = TwoViews(crop_px=32)
    one, two = views(images)[0], views(images)[0]
    assert ((one - two).abs().amax((1, 2, 3)) > 0.05).all()
    assert torch.equal(two, views(images, ids=[3, 4, 5])[0])
    assert torch.equal(one, TwoViews(crop_px=32)(images)[0])
    assert not torch.equal(one, views(images, ids=[0, 1, 2], seed=1)[0])
    assert not torch.equal(one, views(images, ids=[0, 1, 2], epoch=1)[0])


U8 = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("images", "words"),
    [
        (U8 + 0.9, "images are float32 of at most 1; give values of 0..255, as images * 255"),
        ([U8[0], U8[0].float()], "images are float32; give uint8 in 0..255, or float32 in the"),
        (U8.long(), "images are int64; give uint8 in 0..255"),
        (U8[0], "images has shape (3, 8, 8); give (B, 3, H, W) or a list of (3, H, W)"),
        (U8[:, :1], "images[0] has shape (1, 8, 8); give RGB, channels first: (3, H, W)"),
        (U8.movedim(1, 3), "images[0] has shape (8, 8, 3); give RGB, channels first"),
        ([U8[0], U8[0, 0]], "images[1] has shape (8, 8); give RGB"),
        ([U8[0].numpy()], "images[0] is a ndarray; give uint8 tensors (3, H, W)"),
        ([], "images is empty; give at least one"),
        (U8[:, :, :0], "images[0] has shape (3, 0, 8)"),
    ],
)
def test_wrong_images_are_one_line(images, words):
    with pytest.raises(ValueError, match="^" + re.escape(words)) as caught:
        TwoViews(crop_px=16)(images)
    assert "\n" not in str(caught.value)


def test_as_many_ids_as_images():
    with pytest.raises(ValueError, match=r"ids has shape \(3,\); give 2 integers"):
        TwoViews(crop_px=16)(U8, ids=[1, 2, 3])
