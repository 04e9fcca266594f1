"""The Triton kernels: in Triton's interpreter, the views of torch's operations; compiled for cards.

A GPU's own rounding is checked where there is one.
"""

import importlib.util
import os
from pathlib import Path

import pytest
import torch

from sslpipe.augment.ops import draws, ops_for
from sslpipe.augment.presets import PRESETS
from sslpipe.augment.triton_views import COVERED, TritonPlan
from sslpipe.augment.two_views import FusedViews
from sslpipe.errors import RecipeError
from sslpipe.recipe.identity import identity
from sslpipe.recipe.reading import load_recipe
from tests.augment.test_two_views import MEAN, SIZES, STD, batch_of
from tests.helpers.runs import write_recipe
from tests.helpers.triton_views import bytes_moved, in_a_process

TRITON = importlib.util.find_spec("triton")
needs_triton = pytest.mark.skipif(TRITON is None, reason="needs triton")
FULL = int(os.environ.get("FUZZ", "1000")) >= 10000
PTXAS = TRITON and Path(str(TRITON.origin)).parent / "backends" / "nvidia" / "bin" / "ptxas"
needs_ptxas = pytest.mark.skipif(not PTXAS or not PTXAS.exists(), reason="needs triton's ptxas")


COVERED_PRESETS = [
    name
    for name in PRESETS
    if all(op.name in COVERED for op in ops_for(FusedViews(name, 32).specs))
]
KINDS = ["byol", "grayscale"]  # the other presets draw what these do, with other numbers


@pytest.fixture(scope="module")
def interpreted():
    """The results of the helper's functions in Triton's interpreter; views of two programs each."""
    calls = {"whole_views": [KINDS, 16, SIZES[:2], 256]}
    calls |= {"moved": [16, [(110, 45), (50, 70), (30, 24)]]}
    found = in_a_process(calls, TRITON_INTERPRET="1")
    return found


@needs_triton
def test_the_kernels_make_the_views_of_torchs_operations_in_five_launches_at_most(interpreted):
    for preset, (error, launches) in interpreted["whole_views"].items():
        assert error <= 2e-5, preset
        assert launches <= 5, preset


@needs_triton
def test_the_kernels_move_the_bytes_of_their_boxes_and_views(interpreted):
    counted, expected, states = interpreted["moved"]
    assert states == [0, 1, 2]  # not blurred, blurred, blurred alone
    assert expected <= counted <= 1.02 * expected  # a little is tables


def test_two_views_of_256_photographs_move_few_bytes():
    augment, ids = FusedViews("simclr", 224), torch.arange(256)
    sizes = torch.tensor([(375, 500), (500, 375)] * 128)
    params = draws(0, 0, ids, sizes, augment.specs)
    plan = TritonPlan(params, augment.specs, augment.jitter_ops, ids.repeat(2))
    assert sum(bytes_moved(tables, 224, 2) for tables in plan.tables) <= 1.5e9


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(3600)  # FULL: minutes of an interpreter
@pytest.mark.parametrize("crop_px", [28, 64, 96, 224] if FULL else [28])
def test_the_kernels_make_views_of_every_size(crop_px):
    sizes = [(375, 500), (500, 333), (224, 224)] if crop_px == 224 else SIZES[: 6 if FULL else 3]
    calls = {"whole_views": [COVERED_PRESETS, crop_px, sizes, 4096]}
    calls |= {"crops": [crop_px, [*sizes, (150, 61), (9, 70)]], "blurs": [crop_px, sizes]}
    calls |= {"colours": [crop_px]}
    found = in_a_process(calls, TRITON_INTERPRET="1")
    for preset, (error, _) in found.pop("whole_views").items():
        rotates = any(spec.rotation_deg for spec in FusedViews(preset, 32).specs)
        # the place that a pixel comes from is a float32 of up to crop_px; neighbours differ by 1
        assert error <= max(2e-5, 4 * crop_px * 2.0**-23 if rotates else 0.0), preset
    assert max(found.values()) <= 2e-5


@needs_triton
@needs_ptxas
@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_every_kernel_compiles_for_a_card_that_is_not_there(capability, tmp_path):
    sizes = in_a_process({"compiled": [capability]}, TRITON_CACHE_DIR=str(tmp_path))["compiled"]
    assert set(sizes) == {"crop", "rotate", "colour", "blur_down", "blur_across"}
    assert min(sizes.values()) > 1000


@needs_triton
def test_the_kernels_are_refused_where_they_cannot_run(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    batch = batch_of(SIZES[:2])
    with pytest.raises(RecipeError, match=r"kernels = \"triton\", but views are made on the cpu"):
        FusedViews("simclr", 16, kernels="triton").prepare(batch, seed=0, number=0)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    extra = [{"name": "RandomErasing"}]
    with pytest.raises(RecipeError, match=r"it has no kernel for 'extra'; use .* \"auto\""):
        FusedViews("simclr", 16, kernels="triton", extra=extra).prepare(batch, seed=0, number=0)
    with pytest.raises(ValueError, match="kernels = 'cuda' is not 'auto', 'torch' or 'triton'"):
        FusedViews("simclr", 16, kernels="cuda")


def test_the_kernels_are_no_part_of_a_runs_digest(tmp_path):
    recipe = write_recipe(tmp_path)
    plain, torch_way, other = (
        identity(load_recipe(recipe, overrides), "", 1)["digest"]
        for overrides in ([], ["augment.kernels=torch"], ["augment.blur_prob=0"])
    )
    assert plain == torch_way
    assert plain != other


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.promise(1)
@pytest.mark.parametrize("crop_px", [32, 96])
@pytest.mark.parametrize(
    ("preset", "kernels", "most"),
    [
        *((preset, "torch", 4e-4) for preset in PRESETS),
        *(pytest.param(preset, "triton", 5e-5, marks=needs_triton) for preset in COVERED_PRESETS),
    ],
)
def test_a_gpu_makes_the_views_of_a_cpu(preset, kernels, most, crop_px):
    augment = FusedViews(preset, crop_px, MEAN, STD, normalize=False)
    expected = augment(augment.prepare(batch_of(SIZES), seed=0, number=0))
    on_gpu = FusedViews(preset, crop_px, MEAN, STD, normalize=False, kernels=kernels).cuda()
    moved = on_gpu.prepare(batch_of(SIZES), seed=0, number=0).to(torch.device("cuda"))
    views = on_gpu(moved)
    assert views.is_cuda
    assert (views.cpu() - expected).abs().max() <= most
