"""Parameters of views and presets, against torchvision's own samplers.

Kolmogorov-Smirnov and binomial tests under fixed seeds, p > 1e-4: 20,000 draws of ours, 5,000 of
torchvision's, which takes one at a time.
"""

import dataclasses
import hashlib
import json
import re

import numpy as np
import pytest
import torch
import torchvision.transforms.v2 as transforms
from scipy import stats

from sslpipe.augment.ops import draws
from sslpipe.augment.pixels import HUE
from sslpipe.augment.presets import PRESETS, view_specs
from sslpipe.augment.spec import ViewSpec
from sslpipe.augment.two_views import build_augment
from sslpipe.errors import RecipeError
from sslpipe.recipe.reading import load_recipe
from tests.helpers.runs import write_recipe

COUNT, THEIRS = 20_000, 5_000
P_VALUE = 1e-4
SIMCLR = ViewSpec()
GOLDEN_BOXES = [[6, 35, 73, 89], [0, 41, 100, 133]]
GOLDEN_ORDERS = [[3, 2, 1, 0], [1, 2, 3, 0]]
GOLDEN_HUES = [0.16725275, 0.12976809]


def draw_params(spec=SIMCLR, size=(375, 500), count=COUNT):
    return draws(3, 1, np.arange(count), np.tile(size, (count, 1)), (spec,))


def same_distribution(ours, theirs):
    return bool(stats.ks_2samp(ours, theirs).pvalue > P_VALUE)


@pytest.mark.promise(5)
@pytest.mark.parametrize("size", [(375, 500), (32, 32), (50, 400)])
def test_crop_boxes_follow_torchvisions_distribution(size):
    torch.manual_seed(0)
    crop = transforms.RandomResizedCrop(224)
    image = torch.empty(3, *size, device="meta")
    params = [crop.make_params([image]) for _ in range(THEIRS)]
    theirs = np.array([[p["top"], p["left"], p["height"], p["width"]] for p in params], float)
    ours = draw_params(size=size).boxes.numpy().astype(float)
    for column in range(4):
        assert same_distribution(ours[:, column], theirs[:, column])
    assert same_distribution(ours[:, 2] * ours[:, 3], theirs[:, 2] * theirs[:, 3])
    assert same_distribution(ours[:, 3] / ours[:, 2], theirs[:, 3] / theirs[:, 2])


def test_boxes_lie_inside_the_image_and_reach_its_last_pixel():
    top, left, height, width = draw_params(size=(20, 31)).boxes.unbind(1)
    assert (torch.stack([top, left]) >= 0).all()
    assert (torch.stack([height, width]) >= 1).all()
    assert (top + height).max() == 20
    assert (left + width).max() == 31


@pytest.mark.promise(5)
@pytest.mark.parametrize("size", [(4, 900), (900, 40), (7, 9), (100_000, 95_000)])
def test_the_central_fallback_is_torchvisions(size):
    spec = dataclasses.replace(SIMCLR, crop_area=(1 - 1e-6, 1.0), crop_ratio=(0.9, 1.1))
    torch.manual_seed(0)
    crop = transforms.RandomResizedCrop(224, scale=spec.crop_area, ratio=spec.crop_ratio)
    expected = crop.make_params([torch.empty(3, *size, device="meta")])
    ours = draw_params(spec, size, count=5).boxes
    assert ours.tolist() == [[expected[k] for k in ("top", "left", "height", "width")]] * 5


@pytest.mark.promise(5)
def test_jitter_factors_follow_torchvisions_distribution():
    torch.manual_seed(0)
    # 1.4: the interval is cut at 0
    spec = dataclasses.replace(SIMCLR, contrast=1.4, saturation=0.3)
    jitter = transforms.ColorJitter(*spec.jitter_strengths)
    params = [jitter.make_params([]) for _ in range(THEIRS)]
    ours = draw_params(spec).factors.numpy()
    for column, name in enumerate(("brightness", "contrast", "saturation", "hue")):
        theirs = np.array([p[f"{name}_factor"] for p in params])
        assert same_distribution(ours[:, column], theirs), name


@pytest.mark.promise(5)
def test_every_op_order_is_equally_frequent():
    orders, counts = draw_params().order.unique(dim=0, return_counts=True)
    assert orders.sort(dim=1).values.tolist() == [[0, 1, 2, 3]] * 24
    assert stats.chisquare(counts.numpy()).pvalue > P_VALUE


@pytest.mark.promise(5)
def test_blur_sigma_and_rotation_follow_torchvisions_distribution():
    torch.manual_seed(0)
    blur, rotation = transforms.GaussianBlur(23, (0.1, 2.0)), transforms.RandomRotation(20)
    ours = draw_params(dataclasses.replace(SIMCLR, rotation_deg=20))
    sigma = np.array([blur.make_params([])["sigma"][0] for _ in range(THEIRS)])
    angle = np.array([rotation.make_params([])["angle"] for _ in range(THEIRS)])
    assert same_distribution(ours.sigma.numpy(), sigma)
    assert same_distribution(ours.angle_deg.numpy(), angle)


@pytest.mark.promise(5)
def test_ops_are_done_as_often_as_the_spec_says():
    spec = dataclasses.replace(SIMCLR, solarize_prob=0.2, flip_prob=0.35)
    ours = draw_params(spec)
    for name in ("flip", "jitter", "grayscale", "blur", "solarize"):
        done, prob = int(getattr(ours, name).sum()), getattr(spec, f"{name}_prob")
        assert stats.binomtest(done, COUNT, prob).pvalue > P_VALUE, name


def test_no_two_parameters_of_a_view_are_correlated():
    ours = draw_params(dataclasses.replace(SIMCLR, rotation_deg=20, solarize_prob=0.5))
    room = torch.tensor([375, 500]) - ours.boxes[:, 2:]
    place = ours.boxes[:, :2] / room.clamp_min(1)  # where the box lies in the room it has
    sides = ours.boxes[:, 2:].log()
    shape = torch.stack([sides.sum(1), sides[:, 0] - sides[:, 1]], dim=1)  # area, aspect
    columns = [
        place,
        shape,
        *(field.reshape(COUNT, -1) for field in list(ours.params.values())[1:]),
    ]
    assert torch.equal(columns[6], ours.order)  # its entries are related to each other, no more
    start = sum(column.shape[1] for column in columns[:6])
    order = range(start, start + 4)
    correlations = torch.corrcoef(torch.cat([c.double() for c in columns], dim=1).T)
    for a in range(len(correlations)):
        for b in range(a):
            # 5 standard errors: p < 6e-7 for each of ~130 pairs
            if not (a in order and b in order) and a >= 4:
                assert abs(correlations[a, b]) < 5 / COUNT**0.5, (a, b)
    assert abs(correlations[0, 1]) < 5 / COUNT**0.5  # top and left


def tensors(params):
    return [params.ids, params.views, *params.params.values()]


def test_a_row_depends_on_its_own_image_only():
    specs = view_specs("byol", 96)
    ids, sizes = np.array([7, 3, 90, 11]), np.array([[40, 50], [90, 33], [224, 224], [8, 8]])
    whole = draws(5, 2, ids, sizes, specs)
    for row in range(4):
        alone = draws(5, 2, ids[row : row + 1], sizes[row : row + 1], specs)
        for part, one in zip(tensors(whole), tensors(alone), strict=True):
            assert torch.equal(part[[row, row + 4]], one)
    backwards = draws(5, 2, ids[::-1], sizes[::-1], specs)
    for part, other in zip(tensors(whole), tensors(backwards), strict=True):
        assert torch.equal(part.view(2, 4, -1).flip(1), other.view(2, 4, -1))


@pytest.mark.parametrize("change", ["seed", "epoch", "id", "view"])
def test_another_seed_epoch_id_or_view_gives_other_numbers(change):
    specs, sizes = view_specs("simclr", 96), np.array([[100, 100]])
    seed, epoch, sample, view = (int(change == name) for name in ("seed", "epoch", "id", "view"))
    a = draws(0, 0, [0], sizes, specs).rows(slice(0, 1))
    b = draws(seed, epoch, [sample], sizes, specs).rows(slice(view, view + 1))
    assert not torch.equal(a.boxes, b.boxes)
    assert (a.factors != b.factors).all()
    assert a.sigma != b.sigma


def test_parameters_are_those_of_the_first_release():
    """Golden numbers: a change here changes every run, and must change the digest."""
    row = draws(0, 0, [123], [[100, 200]], view_specs("simclr", 96))
    assert row.boxes.tolist() == GOLDEN_BOXES
    assert row.order.tolist() == GOLDEN_ORDERS
    torch.testing.assert_close(row.factors[:, HUE], torch.tensor(GOLDEN_HUES), atol=1e-7, rtol=0)


def test_presets_are_those_that_runs_were_made_with():
    """Golden, of all numbers: a change here changes every run, and is part of no digest."""
    specs = [[dataclasses.asdict(spec) for spec in view_specs(name, 224)] for name in PRESETS]
    sha256 = hashlib.sha256(json.dumps([list(PRESETS), specs], sort_keys=True).encode())
    assert sha256.hexdigest()[:16] == "9b7be79a218186af"
    for name in set(PRESETS) - {"byol"}:
        assert len(set(view_specs(name, 224))) == 1, name


@pytest.mark.parametrize(("crop_px", "kernel_px"), [(224, 23), (96, 9), (128, 13), (32, 3)])
def test_the_blur_kernel_is_simclrs(crop_px, kernel_px):
    radius = int((crop_px // 10) / 2)  # google-research/simclr data_util.py, gaussian_blur
    assert ViewSpec(crop_px=crop_px).blur_kernel_px == kernel_px == 2 * radius + 1


def test_overrides_serve_both_views_or_each_its_own():
    settings = {"crop_area": [0.2, 1.0], "crop_ratio": [[0.5, 2.0], [1.0, 1.0]]}
    settings |= {"blur_prob": [0.9, 0.1], "jitter_strength": 0.5, "hue": 0.05}
    first, second = view_specs("simclr", 64, settings)
    assert first.crop_area == second.crop_area == (0.2, 1.0)
    assert (first.blur_prob, second.blur_prob) == (0.9, 0.1)
    assert (first.crop_ratio, second.crop_ratio) == ((0.5, 2.0), (1.0, 1.0))
    assert first.jitter_strengths == (0.4, 0.4, 0.4, 0.05)
    gray, _ = view_specs("grayscale", 28, {"jitter_strength": 1.0})
    assert gray.jitter_strengths == (0.8, 0.8, 0.0, 0.0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("crop_area", value) for value in ([1.0, 0.2], [0.2, 1.5], [0.0, 1.0], 0.5)),
        *(("flip_prob", value) for value in (2, -0.1, "0.5")),
        *(("blur_prob", [0.1, 0.2, 0.3]), ("hue", 0.6), ("brightness", float("nan"))),
        *(("blur_sigma", [0, 2]), ("solarize_threshold", 128), ("jitter_strength", -1)),
    ],
)
def test_a_bad_value_is_named(key, value):
    with pytest.raises(ValueError, match="^" + re.escape(f"{key} = {value!r}")):
        view_specs("simclr", 96, {key: value})


def test_an_unknown_preset_or_key_names_the_nearest():
    with pytest.raises(RecipeError, match=r"'simcrl' is unknown; did you mean 'simclr'"):
        view_specs("simcrl", 96)
    with pytest.raises(RecipeError, match=r"'SimCLR' is unknown; did you mean 'simclr'"):
        view_specs("SimCLR", 96)
    with pytest.raises(RecipeError, match=r"augment\.crop_aera .* did you mean 'crop_area'"):
        view_specs("simclr", 96, {"crop_aera": [0.2, 1.0]})


@pytest.mark.parametrize(
    "override",
    [
        *("mean=[1, 2]", "mean=[0.5, 0.5, 0.5, 0.5]", "mean=0.5", "mean=[true, 0, 0]"),
        *("std=[0.5, 0.5, 0]", "std=[0.5, 0.5, -1]", "std=[0.5, 0.5, 1e9]", "normalize=3"),
        *("crop_px=65536", "crop_px=true", "contrast=1e300", "crop_ratio=[1e-3, 1e300]"),
        *("crop_ratio=[1e-300, 0.1]", "crop_area=[1e-9, 1.0]"),
        *("crop_area=[true, true]", "blur_sigma=[1, 1e9]", "preset=7"),
    ],
)
def test_a_value_that_gives_no_views_is_one_line_that_names_the_key(tmp_path, index, override):
    path = write_recipe(tmp_path)
    with pytest.raises(RecipeError, match=override.partition("=")[0]):
        build_augment(load_recipe(path, [f"augment.{override}"]), index)


@pytest.mark.parametrize("override", ["augment.mean=[nan, 0, 0]", "augment.std=[1, 1, inf]"])
def test_what_is_not_finite_is_refused_when_the_recipe_is_read(tmp_path, override):
    with pytest.raises(RecipeError, match=r"augment\.(mean|std)\.\d = (nan|inf): .*finite number"):
        load_recipe(write_recipe(tmp_path), [override])
