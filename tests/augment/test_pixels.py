"""sslpipe.augment.pixels: each op equals torchvision.transforms.v2 on float images, one at a time.

The images are white noise, the worst case of every tolerance below (in units of [0, 1]).
"""

import itertools

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as reference
from torchvision.transforms import InterpolationMode

from sslpipe.augment import pixels
from sslpipe.augment.ops import draws
from sslpipe.augment.pixels import HUE
from sslpipe.augment.spec import ViewSpec
from tests.augment.test_two_views import torchvision_jitter

COUNT = 12
SIDES = (32, 96, 224)


def noise(side, count=COUNT):
    return torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(side))


def parameters(side, height=50, width=60):
    sizes = [[height - row % 4, width - row % 7] for row in range(COUNT)]
    return draws(0, 0, np.arange(COUNT), sizes, (ViewSpec(crop_px=side),))


def gap(ours, expected):
    return float((ours - torch.stack(expected)).abs().max())


@pytest.mark.promise(5)
@pytest.mark.parametrize("side", SIDES)
def test_rotation_equals_torchvisions(side):
    images, angles = noise(side), torch.linspace(-170, 175, COUNT)
    angles[:3] = torch.tensor([0.0, 90.0, 180.0])
    expected = [
        reference.rotate(image, float(angle), interpolation=InterpolationMode.BILINEAR)
        for image, angle in zip(images, angles, strict=True)
    ]
    # a coordinate near S carries S times float32's 6e-8, and neighbours differ by up to 1
    assert gap(pixels.rotate(images, angles), expected) <= 4e-7 * side


@pytest.mark.promise(5)
@pytest.mark.parametrize("side", SIDES)
def test_hue_equals_torchvisions(side):
    images, hue_shift = noise(side), torch.linspace(-0.5, 0.5, COUNT)
    images[0] = images[0, :1]  # gray
    images[1] = 0.0
    images[2] = (images[2] > 0.5).float()  # ties everywhere
    images[3] = images[3] * 1e-3 + 0.5  # almost gray
    expected = [
        reference.adjust_hue(image, float(shift))
        for image, shift in zip(images, hue_shift, strict=True)
    ]
    images = pixels.shift_hue_(images, hue_shift)
    assert gap(images, expected) <= 2e-6
    assert float(images.min()) >= 0.0
    assert float(images.max()) <= 1.0 + 1e-6


def change_colours(images, factors, order, hue_step, jitter=None):
    """The op as FusedViews calls it; jitter: (n,) bool, all by default."""
    jitter = torch.ones(len(images), dtype=torch.bool) if jitter is None else jitter
    blends = pixels.make_blends(order, factors, jitter)
    needs = (torch.stack(tuple(blends), dim=2) != torch.tensor([1, 0, 0])).any(0).tolist()
    return pixels.change_colours(images, blends, factors[:, HUE], hue_step, needs, pixels.blend_)


@pytest.mark.promise(5)
@pytest.mark.parametrize("hue_step", [0, 1, 2, 3])
@pytest.mark.parametrize("side", SIDES)
def test_colour_jitter_equals_torchvisions_in_every_order(hue_step, side):
    orders = [o for o in itertools.permutations(range(4)) if o[hue_step] == 3]
    images = noise(side, len(orders))
    spec = ViewSpec(crop_px=side)
    factors = draws(1, 0, np.arange(len(orders)), [[64, 64]] * len(orders), (spec,)).factors
    expected = [
        torchvision_jitter(image, row.tolist(), list(order))
        for image, row, order in zip(images, factors, orders, strict=True)
    ]
    changed = change_colours(images, factors, torch.tensor(orders), hue_step)
    # hue's 1e-6 times the gains 1.8 of the three ops after it
    assert gap(changed, expected) <= 5e-6


@pytest.mark.promise(5)
@pytest.mark.parametrize("orders", [[[0, 1], [1, 0]], [[0, 1, 2]] * 2])
def test_jitter_without_hue_equals_torchvisions_and_rows_without_jitter_keep_their_colours(orders):
    orders = orders * (COUNT // 2)
    images, factors, jitter = noise(32), parameters(32).factors, torch.arange(COUNT) % 3 > 0
    changed = change_colours(images.clone(), factors, torch.tensor(orders), None, jitter=jitter)
    expected = [
        torchvision_jitter(image, row.tolist(), order) if done else image
        for image, row, order, done in zip(images, factors, orders, jitter, strict=True)
    ]
    assert gap(changed, expected) <= 1e-6
    assert torch.equal(changed[~jitter], images[~jitter])


@pytest.mark.parametrize("brightness", [0, 1, 2])
def test_a_step_that_one_image_does_leaves_the_others_as_they_are(brightness):
    images, factors = noise(32, 3), torch.tensor([[1.7, 0.4, 1.6, 0.1]] * 3)
    jitter = torch.arange(3) == brightness
    orders = torch.tensor([[0, 1, 2]] * 3)
    changed = change_colours(images.clone(), factors, orders, None, jitter=jitter)
    assert [not torch.equal(a, b) for a, b in zip(images, changed, strict=True)] == jitter.tolist()


@pytest.mark.promise(5)
@pytest.mark.parametrize("side", SIDES)
def test_gray_equals_torchvisions(side):
    expected = [reference.rgb_to_grayscale(image) for image in noise(side)]
    assert gap(pixels.to_gray(noise(side)), expected) <= 2e-7
    images = noise(side).clone()
    pixels.grayscale_(images)
    assert gap(images, [gray.expand(3, -1, -1) for gray in expected]) <= 2e-7


@pytest.mark.promise(5)
def test_solarize_and_normalize_equal_torchvisions():
    images, threshold = noise(32), torch.linspace(0, 1, COUNT)
    expected = [
        reference.solarize(image, float(t)) for image, t in zip(images, threshold, strict=True)
    ]
    assert gap(pixels.solarize(images, threshold), expected) == 0
    mean, std = [0.48, 0.45, 0.4], [0.22, 0.23, 0.25]
    expected = [reference.normalize(image, mean, std) for image in images]
    assert gap(pixels.normalize_(images, torch.tensor(mean), torch.tensor(std)), expected) <= 1e-6
