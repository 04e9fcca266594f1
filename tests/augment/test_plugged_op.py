"""An augmentation added by one entry: views, reference, preview and recipe keys follow."""

from typing import ClassVar

import numpy as np
import pytest
import torch

from sslpipe.augment.op import MaskedOp, Op, named_lanes
from sslpipe.augment.ops import OPS, draws, register_op
from sslpipe.augment.presets import PRESETS, setting_docs, view_specs
from sslpipe.augment.preview import preview_grid
from sslpipe.augment.spec import ViewSpec, setting
from sslpipe.augment.two_views import AUGMENTS, FusedViews, TwoViews, build_augment
from sslpipe.data.index import load_index
from sslpipe.errors import RecipeError
from sslpipe.random import uniform
from sslpipe.recipe.reading import load_recipe
from tests.augment.test_two_views import SIZES, batch_of, params_for
from tests.helpers.dataset import write_dataset
from tests.helpers.runs import write_recipe


class Posterize(MaskedOp):
    name = "posterize"
    label = "posterized"
    settings: ClassVar = {
        "posterize_prob": setting(0.0, "probability of few levels"),
        "posterize_levels": setting((2.0, 6.0), "number of levels, uniform", most=256),
    }
    params = ("posterize", "levels")
    lanes = named_lanes("posterize", 2)

    def draw_params(self, u, spec):
        low, high = spec.posterize_levels
        return ((low + (high - low) * u[:, 0]).round().astype(np.float32),)

    def change(self, views, chunk):
        levels = chunk.draws.levels[:, None, None, None]
        return (views * levels).round() / levels

    def change_one(self, view, draw, spec):
        return (view * float(draw.levels)).round() / float(draw.levels)


@pytest.fixture
def ops():
    """OPS, which are afterwards what they were before."""
    before = list(OPS)
    yield before
    OPS[:] = before


@pytest.fixture
def posterize(ops):
    op = Posterize()
    register_op(op)
    return op


@pytest.mark.parametrize("preset", PRESETS)
def test_a_new_op_leaves_every_number_of_the_others_as_it_was(preset, request):
    batch = batch_of(SIZES)
    plain = FusedViews(preset, 32)
    before = params_for(batch, plain)
    views = plain(batch, before)
    request.getfixturevalue("posterize")
    augment = FusedViews(preset, 32, posterize_prob=0.4)
    params = params_for(batch, augment)
    assert list(params.params) == [*before.params, "posterize", "levels"]
    for name, values in before.params.items():
        assert torch.equal(values, params.params[name]), name
    done = params.posterize
    assert 0 < done.sum() < len(done)
    changed = augment(batch, params)
    assert torch.equal(changed[~done], views[~done])
    levels = params.levels[:, None, None, None]
    assert torch.equal(changed[done], ((views * levels).round() / levels)[done])
    # views built before do not have it
    assert torch.equal(plain(batch, params_for(batch, plain)), views)


def test_the_numbers_of_a_new_op_are_those_of_its_lanes(posterize):
    specs = view_specs("simclr", 32, {"posterize_prob": [0.3, 0.8]})
    ids = np.arange(500)
    params = draws(3, 4, ids, np.full((500, 2), 40), specs)
    for view, prob in enumerate((0.3, 0.8)):
        u = uniform(3, 4, ids, view, np.asarray(posterize.lanes))
        rows = slice(500 * view, 500 * (view + 1))
        assert params.posterize[rows].tolist() == (u[:, 0] < prob).tolist()
        assert params.levels[rows].tolist() == (2 + 4 * u[:, 1]).round().tolist()


@pytest.mark.usefixtures("posterize")
def test_kornias_reference_does_a_new_op():
    fused, kornia = (AUGMENTS[kind].views("grayscale", 32, posterize_prob=0.5) for kind in AUGMENTS)
    batch = batch_of(SIZES)
    params = params_for(batch, fused)
    ours, theirs = fused(batch, params), kornia(batch, params)
    off = (ours - theirs).abs() > 1e-3  # a value between two levels may fall on either side
    assert off.float().mean() < 2e-3
    done = params.posterize
    assert all(len(view.unique()) <= 7 for view in theirs[done])
    assert all(len(view.unique()) > 7 for view in theirs[~done])


@pytest.mark.usefixtures("posterize")
def test_the_preview_describes_a_new_op(tmp_path, monkeypatch):
    index = load_index(write_dataset(tmp_path / "data", (4, 4)))
    lines = []
    monkeypatch.setattr(
        "sslpipe.augment.preview._wrap", lambda words, width: lines.append(words) or words
    )
    for prob in (0, 1):
        lines.clear()
        augment = AUGMENTS["fused"].views("simclr", 16, posterize_prob=prob)
        preview_grid(index, index.split("train"), augment, seed=0, epoch=0, ids=[0], canvas_px=64)
        assert lines
        assert all(("posterized" in words) == prob for words in lines)


@pytest.mark.usefixtures("posterize")
def test_a_recipe_sets_a_new_op_with_the_checks_of_every_setting(tmp_path, index):
    path = write_recipe(tmp_path)

    def views(**settings):
        words = (f"augment.{key}={value}" for key, value in settings.items())
        return build_augment(load_recipe(path, ["augment.preset=byol", *words]), index)

    first, second = views(posterize_prob=[0.1, 0.2], posterize_levels=[3, 4]).specs
    assert (first.posterize_prob, second.posterize_prob) == (0.1, 0.2)
    assert first.posterize_levels == second.posterize_levels == (3.0, 4.0)
    assert "number of levels" in setting_docs()["posterize_levels"]
    for settings, words in (
        ({"posterize_levels": [2, 300]}, r"posterize_levels = \[2, 300\] is more than 256 \("),
        ({"posterise_prob": 0.1}, "did you mean 'posterize_prob'"),
    ):
        with pytest.raises(RecipeError, match=words):
            views(**settings)


class _Clash(Op):
    name = "clash"
    params = ("clash",)
    lanes = named_lanes("clash", 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "blur"}, "there is an op 'blur' already"),
        ({"params": ("sigma",)}, r"params \['sigma'\] belong to op 'blur'"),
        ({"lanes": range(33, 35)}, r"lanes \[33\] belong to op 'solarize'; use named_lanes"),
        ({"settings": {"hue": setting(1.0, "")}}, "setting 'hue' is a field of ViewSpec already"),
    ],
)
def test_an_op_that_takes_what_belongs_to_another_is_refused(changes, words, ops):
    with pytest.raises(ValueError, match=words):
        register_op(type("Clash", (_Clash,), changes)())
    with pytest.raises(ValueError, match="no op 'crop' to come before"):
        register_op(_Clash(), before="crop")
    assert ops == OPS
    register_op(_Clash(), before="blur")
    names = [op.name for op in OPS]
    assert names[names.index("blur") - 2 :][:3] == ["grayscale", "clash", "blur"]


OTHER = {  # another value of each setting
    "crop_px": 24, "crop_area": (0.8, 1.0), "crop_ratio": (0.4, 0.5), "rotation_deg": 30.0,
    "flip_prob": 1.0, "jitter_prob": 0.0, "brightness": 0.1, "contrast": 0.1, "saturation": 0.1,
    "hue": 0.01, "grayscale_prob": 1.0, "blur_prob": 0.0, "blur_sigma": (3.0, 4.0),
    "solarize_prob": 0.0, "solarize_threshold": 0.9,
}  # fmt: skip


def test_every_setting_of_views_changes_them():
    assert OTHER.keys() == vars(ViewSpec()).keys()
    images = [torch.randint(0, 256, (3, 40, 40), dtype=torch.uint8)]
    always = {"jitter_prob": 1.0, "blur_prob": 1.0, "solarize_prob": 1.0, "grayscale_prob": 0.0}
    settings = {"crop_px": 32, "flip_prob": 0.0, **always}
    for name, value in OTHER.items():
        both = settings, {**settings, name: value}
        first, other = (torch.cat(TwoViews("simclr", **given)(images)) for given in both)
        assert not torch.equal(first, other), name


def test_lanes_0_to_33_keep_their_meaning():
    assert {op.name: (op.lanes[0], op.lanes[-1]) for op in OPS if not op.optional} == {
        "crop": (0, 22), "rotation": (23, 23), "jitter": (24, 29), "grayscale": (30, 30),
        "blur": (31, 32), "solarize": (33, 33),
    }  # fmt: skip
