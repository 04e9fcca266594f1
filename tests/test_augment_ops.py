"""sslpipe.augment.ops: each op equals torchvision.transforms.v2 on float images, one at a time.

The images are white noise, the worst case of every tolerance below (in units of [0, 1]).
"""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as reference
from torch import Tensor
from torchvision.transforms import InterpolationMode

from sslpipe.augment import ops
from sslpipe.augment.parameters import Draws, ViewSpec, draws

COUNT = 12
SIDES = (32, 96, 224)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def noise(side: int, count: int = COUNT) -> Tensor:
    return torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(side))


def canvas(height: int, width: int, count: int = COUNT) -> Tensor:
    generator = torch.Generator().manual_seed(height)
    return torch.randint(0, 256, (count, 3, height, width), dtype=torch.uint8, generator=generator)


def parameters(side: int, height: int = 50, width: int = 60) -> Draws:
    sizes = [[height - row % 4, width - row % 7] for row in range(COUNT)]
    return draws(0, 0, np.arange(COUNT), sizes, (ViewSpec(crop_px=side),))


def gap(ours: Tensor, expected: list[Tensor]) -> float:
    return float((ours - torch.stack(expected)).abs().max())


@pytest.mark.parametrize("crop", [ops.crop_by_matrices, ops.crop_by_resampling])
@pytest.mark.parametrize(
    ("height", "width", "side"),
    [(32, 32, 32), (28, 40, 32), (150, 90, 32), (70, 60, 96), (96, 96, 96), (375, 300, 224)],
)
def test_crop_and_flip_equal_torchvisions(
    height: int, width: int, side: int, crop: Callable[..., Tensor]
) -> None:
    images, drawn = canvas(height, width), parameters(side, height, width)
    # a box of every kind: all of the image, one pixel, one line
    drawn.boxes[:3] = torch.tensor([[0, 0, height, width], [3, 5, 1, 1], [2, 0, 1, width]])
    source = torch.arange(COUNT).flip(0)
    ours = crop(images, source, drawn.boxes, drawn.flip, side)
    expected = []
    for row in range(COUNT):
        pixels = images[source[row]].float() / 255
        box = drawn.boxes[row].tolist()
        view = reference.resized_crop(pixels, *box, size=[side, side], antialias=True)
        expected.append(reference.horizontal_flip(view) if drawn.flip[row] else view)
    assert drawn.flip.any()
    assert not drawn.flip.all()
    assert gap(ours, expected) <= (2e-6 if side <= 96 else 2e-5)


@pytest.mark.parametrize("crop", [ops.crop_by_matrices, ops.crop_by_resampling])
def test_a_crop_of_the_whole_image_at_its_own_size_is_the_image(
    crop: Callable[..., Tensor],
) -> None:
    images, boxes = canvas(32, 32), torch.tensor([[0, 0, 32, 32]] * COUNT)
    ours = crop(images, torch.arange(COUNT), boxes, torch.zeros(COUNT, dtype=torch.bool), 32)
    assert (ours - images / 255).abs().max() <= 2e-7


@pytest.mark.parametrize("side", SIDES)
def test_rotation_equals_torchvisions(side: int) -> None:
    images, angles = noise(side), torch.linspace(-170, 175, COUNT)
    angles[:3] = torch.tensor([0.0, 90.0, 180.0])
    expected = [
        reference.rotate(image, float(angle), interpolation=InterpolationMode.BILINEAR)
        for image, angle in zip(images, angles, strict=True)
    ]
    # a coordinate near S carries S times float32's 6e-8, and neighbours differ by up to 1
    assert gap(ops.rotate(images, angles), expected) <= 4e-7 * side


@pytest.mark.parametrize("side", SIDES)
def test_hue_equals_torchvisions(side: int) -> None:
    images, turns = noise(side), torch.linspace(-0.5, 0.5, COUNT)
    images[0] = images[0, :1]  # gray
    images[1] = 0.0
    images[2] = (images[2] > 0.5).float()  # ties everywhere
    images[3] = images[3] * 1e-3 + 0.5  # almost gray
    expected = [
        reference.adjust_hue(image, float(turn)) for image, turn in zip(images, turns, strict=True)
    ]
    ops.shift_hue_(images, turns)
    assert gap(images, expected) <= 3e-6


def torchvision_jitter(image: Tensor, factors: list[float], order: list[int]) -> Tensor:
    adjust = (
        reference.adjust_brightness,
        reference.adjust_contrast,
        reference.adjust_saturation,
        reference.adjust_hue,
    )
    for op in order:
        image = adjust[op](image, factors[op])
    return image


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("hue_step", [0, 1, 2, 3])
def test_colour_jitter_equals_torchvisions_in_every_order(hue_step: int, side: int) -> None:
    orders = [o for o in itertools.permutations(range(4)) if o[hue_step] == 3]
    images = noise(side, len(orders))
    spec = ViewSpec(crop_px=side)
    factors = draws(1, 0, np.arange(len(orders)), [[64, 64]] * len(orders), (spec,)).factors
    expected = [
        torchvision_jitter(image, row.tolist(), list(order))
        for image, row, order in zip(images, factors, orders, strict=True)
    ]
    ops.color_jitter_(images, factors, torch.tensor(orders), hue_step)
    assert gap(images, expected) <= 1e-5  # hue's 1e-6 times the gains 1.8 of the three ops after it


def test_jitter_without_colour_equals_torchvisions() -> None:
    images, orders = noise(32), [[0, 1], [1, 0]] * (COUNT // 2)
    factors = parameters(32).factors
    expected = [
        torchvision_jitter(image, row.tolist(), order)
        for image, row, order in zip(images, factors, orders, strict=True)
    ]
    ops.color_jitter_(images, factors, torch.tensor(orders), None, saturation=False)
    assert gap(images, expected) <= 1e-6


@pytest.mark.parametrize("side", SIDES)
def test_gray_equals_torchvisions(side: int) -> None:
    expected = [reference.rgb_to_grayscale(image) for image in noise(side)]
    assert gap(ops.gray_of(noise(side)), expected) <= 2e-7


@pytest.mark.parametrize(("side", "kernel_px"), [(32, 3), (33, 9), (96, 9), (100, 41), (224, 23)])
def test_blur_equals_torchvisions(side: int, kernel_px: int) -> None:
    images, sigma = noise(side), torch.linspace(0.1, 2.0, COUNT)
    expected = [
        reference.gaussian_blur(image, [kernel_px] * 2, [float(s)] * 2)
        for image, s in zip(images, sigma, strict=True)
    ]
    assert gap(ops.gaussian_blur(images, sigma, kernel_px), expected) <= 4e-6


def test_blur_refuses_a_kernel_wider_than_the_image() -> None:
    with pytest.raises(ValueError, match="41 px does not fit an image of 20 px"):
        ops.gaussian_blur(noise(20), torch.ones(COUNT), 41)


def test_solarize_and_normalize_equal_torchvisions() -> None:
    images, threshold = noise(32), torch.linspace(0, 1, COUNT)
    expected = [
        reference.solarize(image, float(t)) for image, t in zip(images, threshold, strict=True)
    ]
    assert gap(ops.solarize(images, threshold), expected) == 0
    mean, std = [0.48, 0.45, 0.4], [0.22, 0.23, 0.25]
    expected = [reference.normalize(image, mean, std) for image in images]
    assert gap(ops.normalize_(images, torch.tensor(mean), torch.tensor(std)), expected) <= 1e-6


def test_views_stay_exact_where_training_allows_low_precision_products() -> None:
    drawn = parameters(32)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        source = torch.arange(COUNT)
        low = ops.crop_by_matrices(canvas(50, 60), source, drawn.boxes, drawn.flip, 32)
        low_blur = ops.gaussian_blur(noise(96), drawn.sigma, 9)
        with ops.full_float32():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(
        low, ops.crop_by_matrices(canvas(50, 60), source, drawn.boxes, drawn.flip, 32)
    )
    assert torch.equal(low_blur, ops.gaussian_blur(noise(96), drawn.sigma, 9))
