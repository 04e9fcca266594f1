"""sslpipe.augment.two_views: whole pipelines, fused and by kornia."""

import dataclasses
import itertools
import math
import re

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as reference
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import InterpolationMode

from sslpipe.augment.ops import draws
from sslpipe.augment.presets import PRESETS
from sslpipe.augment.two_views import AUGMENTS, FusedViews, KorniaViews, TwoViews
from sslpipe.data.pipeline import Batch
from sslpipe.errors import RecipeError

MEAN, STD = (0.48, 0.45, 0.40), (0.22, 0.23, 0.25)


def batch_of(sizes, first_id=0, epoch=0, channels=3, dtype=torch.uint8):
    """Noise images in the top-left corner of zero canvases; an image depends on its id only.

    float32 ones have values beyond 0..255, and between whole numbers.
    """
    height, width = max(h for h, _ in sizes), max(w for _, w in sizes)
    images = torch.zeros(len(sizes), channels, height, width, dtype=dtype)
    for row, (h, w) in enumerate(sizes):
        rng = np.random.default_rng(first_id + row)
        pixels = rng.integers(0, 256, (channels, h, w), dtype=np.uint8)
        if dtype == torch.float32:
            pixels = rng.uniform(-60, 320, (channels, h, w)).astype(np.float32)
        images[row, :, :h, :w] = torch.from_numpy(pixels)
    ids = torch.arange(first_id, first_id + len(sizes))
    return Batch(images, torch.tensor(sizes), torch.full_like(ids, -1), ids, ids, epoch)


def params_for(batch, augment, seed=0):
    return draws(seed, batch.epoch, batch.ids, batch.sizes, augment.specs)


def views_of(batch, augment):
    return augment(batch, params_for(batch, augment))


def rows_of(batch, index):
    return Batch(*(part[index] for part in batch[:5]), batch.epoch)


def torchvision_jitter(image, factors, order):
    for op in order:
        name = ("brightness", "contrast", "saturation", "hue")[op]
        image = getattr(reference, f"adjust_{name}")(image, factors[op])
    return image


def plain_jitter(image, factors, order):
    """Brightness and contrast of channels that are no colours: each about its mean, no clamp."""
    for op in order:
        mean = image.mean((1, 2), keepdim=True) if op == 1 else 0.0
        image = mean + factors[op] * (image - mean)
    return image


def noise(place, shape):
    """A piece of the table of normal numbers that the seed 0x7A81E begins."""
    numbers = math.prod(shape)
    table = torch.randn(2**20 + numbers, generator=torch.Generator().manual_seed(0x7A81E))
    return table[place : place + numbers].view(shape)


def torchvision_view(batch, params, row, augment):
    """One view by torchvision's functions, in the documented order of ops; formulas if it has none.

    What is not drawn is not done: the parameters of optional ops are there only where they are.
    """
    source = row % len(batch.ids)
    spec = augment.specs[row // len(batch.ids)]
    size = [augment.crop_px] * 2
    pixels = batch.images[source].float() / 255
    view = reference.resized_crop(pixels, *params.boxes[row].tolist(), size=size, antialias=True)
    if params.flip[row]:
        view = reference.horizontal_flip(view)
    drawn = params.rows(slice(row, row + 1)).params
    if drawn.get("vertical_flip"):
        view = reference.vertical_flip(view)
    if drawn.get("quarter_turn"):
        view = reference.rotate(view, 90.0 * int(drawn["turns"]))
    if spec.rotation_deg:
        angle = float(params.angle_deg[row])
        view = reference.rotate(view, angle, interpolation=InterpolationMode.BILINEAR)
    if params.jitter[row]:
        order = [op for op in params.order[row].tolist() if spec.jitter_strengths[op]]
        jitter = torchvision_jitter if spec.rgb else plain_jitter
        view = jitter(view, params.factors[row].tolist(), order)
    if "gains" in drawn:
        gains, shifts = (drawn[name][0, : len(view), None, None] for name in ("gains", "shifts"))
        view = view * gains + shifts
    if "exponent" in drawn:
        view = view.clamp_min(0) ** drawn["exponent"]
    if params.grayscale[row]:
        view = reference.rgb_to_grayscale(view, 3)
    if params.blur[row]:
        kernel = [spec.blur_kernel_px] * 2
        view = reference.gaussian_blur(view, kernel, [float(params.sigma[row])] * 2)
    if params.solarize[row]:
        view = torch.where(view < spec.solarize_threshold, view, 1 - view)
    if "noise" in drawn:
        view = view + drawn["noise"] * noise(int(drawn["noise_place"]), view.shape)
    if drawn.get("channel_drop"):
        view[int(drawn["dropped"] * len(view))] = 0
    return reference.normalize(view, augment.mean.tolist(), augment.std.tolist())


SIZES = [(40, 52), (33, 33), (20, 64), (64, 20), (50, 50), (28, 41), (64, 64), (30, 31)] * 3


@pytest.mark.promise(5)
@pytest.mark.parametrize(
    ("preset", "crop_px"), [*itertools.product(PRESETS, (32, 96)), ("simclr", 224)]
)
def test_the_fused_pipeline_equals_torchvision_image_by_image(preset, crop_px):
    sizes = [(256, 200), (180, 256)] if crop_px == 224 else SIZES[:12]
    augment, batch = FusedViews(preset, crop_px, MEAN, STD), batch_of(sizes, first_id=crop_px)
    params = params_for(batch, augment)
    views = augment(batch, params)
    assert augment.mean.tolist() == pytest.approx(MEAN)
    assert views.shape == (2 * len(sizes), 3, crop_px, crop_px)
    assert views.dtype == torch.float32
    assert views.is_contiguous(memory_format=torch.channels_last)
    rows = range(len(views))
    expected = torch.stack([torchvision_view(batch, params, row, augment) for row in rows])
    # ops: 1e-5 in [0, 1], 2e-5 at 224 px, rotation 4e-5 at 96 px, with gain 2.6; over std 0.22
    tolerance = 4e-4 if augment.specs[0].rotation_deg else 2e-4 if crop_px == 224 else 5e-5
    assert (views - expected).abs().max() <= tolerance


def test_a_huge_sigma_does_not_mix_up_the_rows():
    """Rows are sorted by it, among other things."""
    augment, batch = FusedViews("simclr", 32), batch_of(SIZES)
    params = params_for(batch, augment)
    sigma = torch.where(torch.arange(48) % 3 == 0, 1e7, params.sigma)
    params = dataclasses.replace(params, params={**params.params, "sigma": sigma})
    expected = torch.stack([torchvision_view(batch, params, row, augment) for row in range(48)])
    assert (augment(batch, params) - expected).abs().max() <= 1e-5


@pytest.mark.promise(5)
@pytest.mark.parametrize("preset", PRESETS)
def test_the_kornia_pipeline_equals_the_fused_one(preset):
    fused, kornia = (AUGMENTS[kind].views(preset, 32) for kind in ("fused", "kornia"))
    batch = batch_of(SIZES)
    params = params_for(batch, fused)
    ours, theirs = fused(batch, params), kornia(batch, params)
    assert ours.stride() == theirs.stride()
    assert (ours - theirs).abs().max() <= 1e-3  # kornia's gray weights sum to 1, not 0.9999
    assert (ours - theirs).abs().mean() <= 5e-5


@pytest.mark.parametrize("kind", AUGMENTS)
def test_strength_zero_is_a_plain_resize(kind):
    names = "flip_prob", "jitter_prob", "grayscale_prob", "blur_prob"
    nothing = {**dict.fromkeys(names, 0), "crop_area": [1.0, 1.0], "crop_ratio": [1.0, 1.0]}
    batch = batch_of([(32, 32)] * 4)
    for crop_px, settings in ((32, {}), (48, {}), (32, {"jitter_prob": 1, "jitter_strength": 0})):
        augment = AUGMENTS[kind].views("simclr", crop_px, **{**nothing, **settings})
        expected = reference.resize(batch.images.float() / 255, [crop_px] * 2, antialias=True)
        assert (views_of(batch, augment) - expected.repeat(2, 1, 1, 1)).abs().max() <= 1e-6


def test_views_of_equal_images_and_of_epochs_differ_and_the_same_epoch_has_the_same():
    augment, batch = FusedViews("simclr", 32), batch_of([(40, 40)] * 24)
    batch = batch._replace(images=batch.images[:1].expand(24, -1, -1, -1))
    views = views_of(batch, augment)
    # crop boxes alone repeat with probability < 1e-4 for a pair; 1128 pairs share a seed
    distances = torch.cdist(views.flatten(1), views.flatten(1)).fill_diagonal_(9.0)
    assert distances.min() > 0.1
    assert torch.equal(views, views_of(batch, augment))
    other = views_of(batch._replace(epoch=1), augment)
    assert ((views - other).abs().amax((1, 2, 3)) > 0.05).all()


MIXED = [*SIZES[:6], (80, 80), (81, 40), (120, 90), (7, 100)]  # both ways to crop


@pytest.mark.promise(1)
@pytest.mark.parametrize("kind", AUGMENTS)
def test_a_row_depends_neither_on_its_batch_nor_on_the_order(kind):
    augment, batch = AUGMENTS[kind].views("byol", 32, rotation_deg=15), batch_of(MIXED)
    whole = views_of(batch, augment)
    backwards = views_of(rows_of(batch, list(range(9, -1, -1))), augment)
    flipped = backwards.unflatten(0, (2, 10)).flip(1).flatten(0, 1)
    assert (flipped - whole).abs().max() <= 1e-6
    for row in range(10):  # alone, and on a canvas of its own size
        height, width = batch.sizes[row].tolist()
        one = rows_of(batch, [row])
        alone = views_of(one._replace(images=one.images[:, :, :height, :width]), augment)
        assert (alone - whole[[row, row + 10]]).abs().max() <= 1e-6


def test_neither_padding_nor_chunks_nor_autocast_change_the_views(monkeypatch):
    augment, batch = FusedViews("byol", 32, rotation_deg=10), batch_of(SIZES)
    bright = batch.images.clone()
    for row, (height, width) in enumerate(batch.sizes.tolist()):
        bright[row, :, height:] = 255
        bright[row, :, :, width:] = 255
    whole = views_of(batch, augment)
    assert not whole.requires_grad
    assert torch.equal(views_of(batch._replace(images=bright), augment), whole)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(views_of(batch, augment), whole)
    monkeypatch.setattr("sslpipe.augment.chunks._CHUNK_BYTES", 3 * 4 * 32 * 32 * 2)
    assert (views_of(batch, augment) - whole).abs().max() <= 1e-6


def test_views_are_float32_or_bfloat16_channels_last_from_either_layout():
    augment, batch = FusedViews("simclr", 32, MEAN, STD), batch_of(MIXED)
    whole = views_of(batch, augment)
    half = augment(batch, params_for(batch, augment), torch.bfloat16)
    assert half.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(half, whole.bfloat16())
    images = batch.images.contiguous(memory_format=torch.channels_last)
    assert (views_of(batch._replace(images=images), augment) - whole).abs().max() <= 1e-6


ERASE = {"name": "RandomErasing", "view": 2, "args": {"p": 1.0, "scale": [0.2, 0.3]}}


@pytest.mark.parametrize("kind", AUGMENTS)
def test_extra_ops_touch_their_view_and_depend_on_the_sample_only(kind):
    batch = batch_of(SIZES[:6])
    plain, extra = (
        AUGMENTS[kind].views("simclr", 32),
        AUGMENTS[kind].views("simclr", 32, extra=[ERASE]),
    )
    params = params_for(batch, plain)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    before, after = plain(batch, params), extra(batch, params)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(before[:6], after[:6])
    erased = ((after[6:] == 0) & (before[6:] != 0)).all(1).flatten(1)  # (6, S S)
    assert (erased.float().mean(1) > 0.1).all()
    assert len(erased.unique(dim=0)) == 6
    torch.manual_seed(99)  # another state of torch's generator, the same boxes
    assert (views_of(rows_of(batch, [4]), extra)[1] - after[10]).abs().max() <= 1e-6


@pytest.mark.parametrize("setting", [{"kernels": "triton"}, {"kernel": "triton"}])
def test_kornias_views_refuse_what_they_would_ignore(setting):
    with pytest.raises(ValueError, match=f"augment.{next(iter(setting))} is not a setting"):
        AUGMENTS["kornia"](crop_px=32, **setting)
    with pytest.raises((ValueError, RecipeError), match=next(iter(setting))):
        KorniaViews("simclr", 32, **setting)
    assert AUGMENTS["kornia"](crop_px=32).build(mean=MEAN, std=STD).crop_px == 32


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"name": "RandomErasin"}, r"extra\[0\]\.name = 'RandomErasin' .*'RandomErasing'"),
        ({"name": "RandomErasing", "view": 3}, r"extra\[0\]\.view = 3; use 1, 2 or 'both'"),
        ({"name": "RandomErasing", "arg": {}}, r"extra\[0\]\.arg is unknown; did you mean 'args'"),
        ({"name": "RandomErasing", "args": {"q": 1}}, r"extra\[0\]\.args = {'q': 1}"),
        ({"name": "CenterCrop", "args": {"size": 16}}, r"\(CenterCrop\) changes \(1, 3, 32, 32\)"),
    ],
)
def test_a_wrong_extra_is_named(entry, words):
    with pytest.raises((RecipeError, ValueError), match=words):
        views_of(batch_of(SIZES[:1]), FusedViews("simclr", 32, extra=[entry]))


# -- TwoViews, in one line: the views that training makes of the same pixels, seed, epoch and ids --

FOUR = [(40, 52), (33, 33), (120, 64), (7, 100)]


def images_of(sizes):
    batch = batch_of(sizes)
    return [image[:, :h, :w] for image, (h, w) in zip(batch.images, sizes, strict=True)]


def test_a_list_of_sizes_gives_the_views_of_training():
    batch = batch_of(FOUR, first_id=0, epoch=3)
    images = batch.images.contiguous(memory_format=torch.channels_last)
    augment = FusedViews("byol", 32, MEAN, STD)
    expected = augment(batch._replace(images=images), params_for(batch, augment, seed=5))
    views = TwoViews("byol", crop_px=32, mean=MEAN, std=STD)
    first, second = views(images_of(FOUR), seed=5, epoch=3, ids=[0, 1, 2, 3])
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


class Viewed(Dataset):
    """One image, of which each item is a view, as a transform makes it."""

    def __init__(self):
        self.views = TwoViews(crop_px=32)
        self.image = batch_of([(40, 50)]).images

    def __len__(self):
        return 8

    def __getitem__(self, place):
        return self.views(self.image)[0][0]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [0, 2])
def test_workers_of_a_loader_and_epochs_have_views_of_their_own(workers):
    """Copies of one object would all begin alike, as NumPy's generator in workers once did."""
    loader = DataLoader(Viewed(), batch_size=1, num_workers=workers)
    torch.manual_seed(0)
    views = [*loader, *loader]
    for one, other in itertools.combinations(views, 2):
        assert (one - other).abs().max() > 0.05
    if workers:  # torch's seed decides
        torch.manual_seed(0)
        assert all(torch.equal(one, other) for one, other in zip(loader, views[:8], strict=True))


def test_ranks_have_views_of_their_own(monkeypatch):
    images = batch_of([(40, 50)]).images
    alone = TwoViews(crop_px=32)(images)[0]
    monkeypatch.setenv("RANK", "1")
    views = TwoViews(crop_px=32)
    assert (views(images)[0] - alone).abs().max() > 0.05
    assert torch.equal(views(images, ids=[0])[0], alone)


U8 = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("images", "words"),
    [
        (U8 + 0.9, "images are float32 of 0.9 to 0.9; give values of 0..255"),
        # resized by bicubic interpolation, which goes beyond white
        (U8 * 0 + 1.04, "images are float32 of 1.04 to 1.04; give values of 0..255"),
        # normalised: by ImageNet's mean and std, or to -1..1; on the first image only
        ((U8 - 0.5) / 0.22, "images are float32 of -2.27 to -2.27; give values of 0..255"),
        ([U8[0] - 1.0, U8[0] + 2.6], "images are float32 of -1 to 2.6; give values of 0..255"),
        ([U8[0], U8[0].float()], "images are float32; give uint8 in 0..255, or float32 in the"),
        (U8.long(), "images are int64; give uint8 in 0..255"),
        (U8[0], "images has shape (3, 8, 8); give (B, 3, H, W) or a list of (3, H, W)"),
        (U8[:, :1], "images[0] has shape (1, 8, 8); give RGB, channels first: (3, H, W)"),
        (U8.movedim(1, 3), "images[0] has shape (8, 8, 3); give RGB, channels first"),
        ([U8[0], U8[0, 0]], "images[1] has shape (8, 8); give RGB"),
        ([U8[0].numpy()], "images[0] is an array of shape (3, 8, 8); arrays have their 3"),
        ([], "images is empty; give at least one"),
        (U8.numpy(), "images is an array of shape (2, 3, 8, 8); arrays have their 3"),
        (Image.new("RGB", (8, 8)), "images has shape (3, 8, 8); give (B, 3, H, W) or a list of"),
        (U8[:, :, :0], "images[0] has shape (3, 0, 8)"),
    ],
)
def test_wrong_images_are_one_line(images, words):
    with pytest.raises(ValueError, match="^" + re.escape(words)) as caught:
        TwoViews(crop_px=16)(images)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("levels", [(0, 0), (0, 5), (-3, 255)])  # black, dark, an overshoot
def test_floats_of_levels_are_views_whatever_the_levels(levels):
    images = torch.linspace(*levels, 2 * 3 * 64).reshape(2, 3, 8, 8)
    assert TwoViews(crop_px=16)(images)[0].isfinite().all()


def test_statistics_in_units_of_bytes_are_refused():
    """As mmcv and Caffe write them: views would be near -2 everywhere."""
    with pytest.raises(ValueError, match=r"mean = .*123.7.* of values in \[0, 1\]; divide"):
        TwoViews(crop_px=16, mean=(123.7, 116.3, 103.5), std=(58.4, 57.1, 57.4))


def test_a_default_device_changes_no_view():
    """As notebooks set it: torch.set_default_device("cuda"); meta is a device of any machine."""
    expected = TwoViews(crop_px=16)(U8)
    with torch.device("meta"):
        views = TwoViews(crop_px=16)(U8)
    for one, other in zip(views, expected, strict=True):
        assert torch.equal(one, other)


def test_as_many_ids_as_images():
    with pytest.raises(ValueError, match=r"ids has shape \(3,\); give 2 integers"):
        TwoViews(crop_px=16)(U8, ids=[1, 2, 3])
