"""sslpipe.augment.resample: crops and blurs equal torchvision.transforms.v2 on float images.

The images are white noise, the worst case of every tolerance below (in units of [0, 1]).
"""

import pytest
import torch
import torchvision.transforms.v2.functional as reference

from sslpipe.augment.resample import (
    blur_by_products,
    blur_taps,
    crop_apart,
    crop_gathered,
    crop_together,
    gaussian_blur,
    plan_crops,
)
from sslpipe.precision import full_float32
from tests.augment.test_pixels import COUNT, gap, noise, parameters

CROPS = (crop_together, crop_apart, crop_gathered)


def cropped(by, images, source, boxes, flip, side):
    apart = torch.full_like(flip, by is crop_apart)
    return by(images, plan_crops(source, boxes, flip, apart, side))


def canvas(height, width, count=COUNT):
    generator = torch.Generator().manual_seed(height)
    return torch.randint(0, 256, (count, 3, height, width), dtype=torch.uint8, generator=generator)


@pytest.mark.promise(5)
@pytest.mark.parametrize("crop", CROPS)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize(
    ("height", "width", "side"),
    [(32, 32, 32), (28, 40, 32), (150, 90, 32), (70, 60, 96), (96, 96, 96), (375, 300, 224)],
)
def test_crop_and_flip_equal_torchvisions(height, width, side, dtype, memory_format, crop):
    images, params = canvas(height, width), parameters(side, height, width)
    images = images.to(dtype, memory_format=memory_format)
    # a box of every kind: all of the image, one pixel, one line
    params.boxes[:3] = torch.tensor([[0, 0, height, width], [3, 5, 1, 1], [2, 0, 1, width]])
    source = torch.arange(COUNT).flip(0)
    ours = cropped(crop, images, source, params.boxes, params.flip, side)
    expected = []
    for row in range(COUNT):
        pixels = images[source[row]].float() / 255
        box = params.boxes[row].tolist()
        view = reference.resized_crop(pixels, *box, size=[side, side], antialias=True)
        expected.append(reference.horizontal_flip(view) if params.flip[row] else view)
    assert params.flip.any()
    assert not params.flip.all()
    assert gap(ours, expected) <= (2e-6 if side <= 96 else 2e-5)


@pytest.mark.promise(5)
@pytest.mark.parametrize(
    ("side", "kernel_px"), [(32, 3), (50, 5), (9, 11), (33, 9), (96, 9), (100, 41), (224, 23)]
)
def test_blur_equals_torchvisions(side, kernel_px):
    images, sigma = noise(side), torch.linspace(0.1, 2.0, COUNT)
    expected = [
        reference.gaussian_blur(image, [kernel_px] * 2, [float(s)] * 2)
        for image, s in zip(images, sigma, strict=True)
    ]
    assert gap(gaussian_blur(images, sigma, kernel_px, 2.0), expected) <= 2e-6
    products = blur_by_products(images, blur_taps(sigma, kernel_px, side, 2.0))
    assert gap(products, expected) <= 2e-6
    planes = images.movedim(1, -1).contiguous().movedim(-1, 1)  # of any strides
    assert gap(gaussian_blur(planes, sigma, kernel_px, 2.0), expected) <= 2e-6
    for row in range(COUNT):  # alone, a small sigma has fewer taps
        one = gaussian_blur(images[row : row + 1], sigma[row : row + 1], kernel_px, sigma[row])
        assert gap(one, [expected[row]]) <= 2e-6


def test_blur_refuses_a_kernel_wider_than_the_image():
    with pytest.raises(ValueError, match="41 px does not fit an image of 20 px"):
        gaussian_blur(noise(20), torch.ones(COUNT), 41, 1.0)


def test_views_stay_exact_where_training_allows_low_precision_products():
    taps = blur_taps(parameters(224, 300, 300).sigma, 23, 224, 2.0)

    def products():
        return blur_by_products(noise(224), taps)

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        low = products()
        with full_float32():
            assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(low, products())
