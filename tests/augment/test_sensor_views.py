"""Views of any channels, in bytes or float32: against torchvision, kornia and the RGB path."""

import re

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as reference

from sslpipe.augment import triton_views
from sslpipe.augment.eval_view import EvalView, JoinedView
from sslpipe.augment.ops import OPS, draws, ops_for
from sslpipe.augment.presets import PRESETS
from sslpipe.augment.preview import _original, _rows
from sslpipe.augment.two_views import AUGMENTS, FusedViews, TwoViews
from sslpipe.data.image_type import RGB8, ImageType
from sslpipe.data.pipeline import Batch
from sslpipe.errors import RecipeError
from tests.augment.test_plans import device_plan
from tests.augment.test_two_views import SIZES, batch_of, params_for, torchvision_view, views_of

NAMES = ("nir", "red", "green", "thermal", "dem")  # of which no three are red, green, blue
SENSORS = ("microscopy", "satellite", "grey", "xray")
DTYPES = (torch.uint8, torch.float32)
FIVE = {"channels": NAMES, "mean": [0.1, 0.2, 0.3, 0.4, 0.5], "std": [0.2, 0.3, 0.2, 0.25, 0.5]}


def settings_of(channels):
    return {key: values[:channels] for key, values in FIVE.items()}


def of_a_gpu(augment, batch, dtype=torch.float32):
    """The views of a GPU's torch path, on the CPU; dtype: of the result."""
    augment.kernels = "torch"
    prepared = augment.prepare(batch, seed=0, number=batch.epoch)
    return augment(device_plan(augment, prepared)[1], dtype=dtype)


@pytest.mark.promise(16)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [1, 3, 5])
@pytest.mark.parametrize("preset", ["simclr", "byol", *SENSORS])
def test_both_paths_equal_torchvision_and_kornia(preset, channels, dtype):
    given = settings_of(channels)
    augment, kornia = (AUGMENTS[kind].views(preset, 32, **given) for kind in ("fused", "kornia"))
    sizes = [*SIZES[:8], (150, 120)]
    batch = batch_of(sizes, first_id=9 * channels, channels=channels, dtype=dtype)
    params = params_for(batch, augment)
    views = augment(batch, params)
    rows = range(2 * len(batch.ids))
    expected = torch.stack([torchvision_view(batch, params, row, augment) for row in rows])
    assert views.shape == (len(rows), channels, 32, 32)
    assert views.is_contiguous(memory_format=torch.channels_last)
    assert (views - expected).abs().max() <= 3e-4
    assert (views - kornia(batch, params)).abs().max() <= 3e-4
    gpu = of_a_gpu(augment, batch)
    assert (gpu - expected).abs().max() <= 3e-4
    if dtype == torch.float32:  # nothing is clamped, or rounded for the sake of a coarse result
        assert torch.equal(of_a_gpu(augment, batch, torch.bfloat16), gpu.bfloat16())
        raw = AUGMENTS["fused"].views(preset, 32, normalize=False, **given)(batch, params)
        assert raw.max() > 1.1


@pytest.mark.parametrize("preset", PRESETS)
def test_rgb_as_float32_has_the_views_of_its_bytes(preset):
    augment, batch = FusedViews(preset, 32), batch_of(SIZES)
    as_float = batch._replace(images=batch.images.float())
    assert torch.equal(views_of(as_float, augment), views_of(batch, augment))
    assert (of_a_gpu(augment, as_float) - of_a_gpu(augment, batch)).abs().max() <= 1e-6


@pytest.mark.parametrize("channels", [("a",), NAMES, RGB8.channels])
@pytest.mark.parametrize("preset", ["simclr", *SENSORS])
def test_one_level_of_16_bits_is_seen(preset, channels):
    count = len(channels)
    kind = ImageType(channels=channels, dtype="uint16", low=(0,) * count, high=(65535,) * count)
    pixels = np.random.default_rng(0).integers(10_000, 40_000, (40, 40, count), dtype=np.uint16)
    images = [torch.from_numpy(kind.in_units(x)).permute(2, 0, 1) for x in (pixels, pixels + 1)]
    off = {"channel_drop_prob": 0} if count > 1 else {}
    a, b = (
        torch.cat(TwoViews(preset, 32, channels=channels, **off)([image] * 8, ids=range(8)))
        for image in images
    )
    assert ((a != b).float().mean((1, 2, 3)) > 0.9).all()
    eval_view = EvalView(32, 36, [0.0] * count, [1.0] * count)
    a, b = (eval_view(image[None], torch.tensor([[40, 40]])) for image in images)
    assert (b > a).float().mean() > 0.99


ALONE = {
    "crop_area": [1, 1],
    "crop_ratio": [1, 1],
    "flip_prob": 0,
    "jitter_prob": 0,
    "blur_prob": 0,
}


def test_what_the_new_ops_draw():
    count = 4000
    settings = {"vertical_flip_prob": [0.3, 0], "quarter_turn_prob": 0.75, "channel_gain": 0.4}
    settings |= {"channel_shift": 0.1, "channel_drop_prob": 1, "gamma": 1, "noise_std": 0.2}
    augment = FusedViews("simclr", 16, channels=NAMES, **settings)
    params = draws(1, 0, np.arange(count), np.full((count, 2), 20), augment.specs)
    first, second = params.rows(slice(0, count)), params.rows(slice(count, None))
    assert abs(first.vertical_flip.float().mean() - 0.3) < 0.03
    assert not second.vertical_flip.any()
    turns = torch.where(params.quarter_turn, params.turns, 0).bincount() / (2 * count)
    assert (turns - 0.25).abs().max() < 0.02
    for values, low, high in ((params.gains, 0.6, 1.4), (params.shifts, -0.1, 0.1)):
        assert values[:, :5].min() >= low
        assert values[:, :5].max() <= high
        assert np.abs(np.corrcoef(values[:, :5].T.numpy()) - np.eye(5)).max() < 0.06
        assert abs(values.mean() - (low + high) / 2) < 0.01
    assert (params.dropped * 5).long().bincount().tolist() == pytest.approx([1600] * 5, rel=0.1)
    logs = params.exponent.log2()
    assert logs.abs().max() <= 1
    assert logs.std() == pytest.approx(2 / 12**0.5, rel=0.05)
    assert params.noise.max() <= 0.2
    assert params.noise.mean() == pytest.approx(0.1, rel=0.05)


def test_noise_is_gaussian_and_of_its_row_alone():
    augment = FusedViews("simclr", 64, channels=NAMES[:2], noise_std=0.2, **ALONE)
    batch = batch_of([(64, 64)] * 3, channels=2)
    params = params_for(batch, augment)
    flat = batch._replace(images=torch.full_like(batch.images, 51))
    noise = (augment(flat, params) - 0.2) / params.noise[:, None, None, None]  # 51 / 255
    assert noise.std().item() == pytest.approx(1, rel=0.02)
    assert noise.pow(4).mean().item() == pytest.approx(3, rel=0.1)
    between = torch.corrcoef(noise.reshape(12, -1)) - torch.eye(12)
    assert between.abs().max() < 0.08  # views and channels
    alone = Batch(*(part[1:2] for part in flat[:5]), flat.epoch)
    assert torch.equal(
        augment(alone, params.rows(torch.tensor([1, 4]))), augment(flat, params)[1::3]
    )


@pytest.mark.parametrize("kind", AUGMENTS)
@pytest.mark.parametrize(
    ("channels", "settings", "words"),
    [
        (NAMES, {"hue": 0.1}, "augment.hue = 0.1 makes no sense: the channels are not red, green"),
        (NAMES, {"saturation": [0, 0.1]}, "augment.saturation = [0, 0.1] makes no sense"),
        (NAMES[:1], {"grayscale_prob": 0.1}, "augment.grayscale_prob = 0.1 makes no sense"),
        (NAMES[:1], {"channel_drop_prob": 0.1}, "augment.channel_drop_prob = 0.1 makes no sense"),
        (NAMES[:2], {"mean": [0.1] * 3}, "mean = [0.1, 0.1, 0.1] is not 2 numbers, one a channel"),
        (NAMES, {"gamma": -1}, "gamma = -1 is negative"),
        (NAMES, {"quarter_turn_prob": 1.5}, "quarter_turn_prob = 1.5 is not a probability"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(kind, channels, settings, words):
    with pytest.raises((RecipeError, ValueError), match="^" + re.escape(words)) as caught:
        AUGMENTS[kind].views("simclr", 32, channels=channels, **settings)
    assert "\n" not in str(caught.value)


def test_other_images_are_refused():
    batch = batch_of(SIZES[:2], channels=5)
    with pytest.raises(ValueError, match=r"^images have 5 channels, and the views 3$"):
        views_of(batch, FusedViews("simclr", 32))
    with pytest.raises(ValueError, match=r"^images have 5 channels, and the views 3$"):
        EvalView(32, 32)(batch.images, batch.sizes)
    wide = batch._replace(images=batch.images.double())
    with pytest.raises(ValueError, match=r"^images are float64; give uint8, or float32"):
        views_of(wide, FusedViews("simclr", 32, channels=NAMES))


def test_triton_takes_8_bit_rgb_only(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(triton_views.importlib.util, "find_spec", lambda name: True)
    cuda, ops = torch.device("cuda"), ops_for(FusedViews("simclr", 32).specs)
    assert triton_views.chosen("auto", cuda, ops, False, rgb8=True)
    assert not triton_views.chosen("auto", cuda, ops, False, rgb8=False)
    other = FusedViews("simclr", 32, channels=NAMES[:3], kernels="triton")
    rgb = FusedViews("simclr", 32, kernels="triton")
    for augment, batch in (
        (other, batch_of(SIZES[:2])),
        (rgb, batch_of(SIZES[:2], dtype=torch.float32)),
    ):
        with pytest.raises(RecipeError, match="no kernel for 'images other than 8-bit RGB'"):
            augment.prepare(batch, seed=0, number=0)


@pytest.mark.parametrize("op", [op for op in OPS if op.optional], ids=lambda op: op.name)
def test_an_optional_op_alone_equals_its_reference(op):
    settings = dict.fromkeys(op.settings, 0.3)
    settings |= {name: 1.0 for name in op.settings if name.endswith("_prob")}
    plain = FusedViews("simclr", 32, **ALONE)
    augment, kornia = (
        AUGMENTS[kind].views("simclr", 32, **ALONE, **settings) for kind in ("fused", "kornia")
    )
    assert op in ops_for(augment.specs)
    batch = batch_of(SIZES)
    params = params_for(batch, augment)
    views = augment(batch, params)
    assert (views - kornia(batch, params)).abs().max() <= 3e-4
    assert (views - views_of(batch, plain)).abs().max() > 0.01


def test_optional_ops_are_not_there_unless_asked_for():
    names = {op.name for op in OPS if op.optional}
    assert not names & {op.name for op in ops_for(FusedViews("simclr", 32, gamma=0).specs)}
    assert {op.name for op in ops_for(FusedViews("simclr", 32, gamma=[0, 1]).specs)} & names == {
        "gamma"
    }
    augment, batch = FusedViews("simclr", 32, gamma=[0, 1]), batch_of(SIZES)
    plain = FusedViews("simclr", 32)
    count = len(SIZES)
    assert torch.equal(views_of(batch, augment)[:count], views_of(batch, plain)[:count])
    assert not torch.equal(views_of(batch, augment)[count:], views_of(batch, plain)[count:])


@pytest.mark.parametrize("channels", [1, 5])
def test_the_view_of_evaluation_equals_torchvision(channels):
    given = settings_of(channels)
    del given["channels"]
    view = EvalView(24, 30, interpolation="bicubic", **given)
    batch = batch_of([(40, 52)], channels=channels, dtype=torch.float32)
    assert view.image_shape == (channels, 24, 24)
    mode = reference.InterpolationMode.BICUBIC
    pixels = reference.resize(batch.images / 255, [30], interpolation=mode, antialias=True)
    expected = reference.normalize(reference.center_crop(pixels, [24]), *given.values())
    assert (view(batch.images, batch.sizes) - expected).abs().max() <= 1e-4
    joined = JoinedView([EvalView(24, 30, **given), EvalView(16, 16, **given)])
    assert joined.image_shape == (channels, 1, 24**2 + 16**2)
    assert joined(batch.images, batch.sizes).shape == (1, *joined.image_shape)
    with pytest.raises(ValueError, match="of the same channels"):
        JoinedView([EvalView(24, 30, **given), EvalView(16, 16)])


@pytest.mark.parametrize("preset", SENSORS)
def test_the_preview_shows_pictures_of_the_image_type(preset):
    names = ("nir", "blue", "green", "red")
    kind = ImageType(channels=names, dtype="uint16", low=(0,) * 4, high=(9000,) * 4)
    batch = batch_of([(40, 40)] * 2, channels=4, dtype=torch.float32)
    augment = FusedViews(preset, 176, channels=names, mean=[0.3] * 4, std=[0.2] * 4)
    original, first, second = _rows({0: batch}, augment, 7, kind)[1]
    raw = FusedViews(preset, 176, channels=names)
    views = raw(batch, draws(7, 0, batch.ids, batch.sizes, raw.specs))[1::2]
    for cell, view in zip((first, second), views, strict=True):
        expected = view[[3, 2, 1]].mul(255).round().clamp(0, 255).permute(1, 2, 0).numpy()
        assert np.abs(np.asarray(cell.pixels).astype(float) - expected).max() <= 1  # by rounding
    params = params_for(batch, augment)
    assert original.pixels.size == _original(batch, 1, params, 176, kind).pixels.size == (176, 176)
