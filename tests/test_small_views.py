"""Small extra views: their pixels, their loss against loops, whole trainings, what is refused."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sslpipe.augment.params import draws
from sslpipe.augment.preview import preview_grid
from sslpipe.augment.two_views import FusedViews
from sslpipe.check.pretraining import check_pretraining
from sslpipe.data.index import load_index
from sslpipe.data.loader import one_pass
from sslpipe.data.pipeline import PairRows
from sslpipe.distributed import Rank
from sslpipe.errors import RecipeError
from sslpipe.losses import LOSSES, MoCoLoss
from sslpipe.losses.base import with_small_views
from sslpipe.models.simclr import SimCLR
from sslpipe.recipe import load_recipe
from sslpipe.run.log import read_metrics
from tests.augment.test_preview import _contains
from tests.augment.test_two_views import MEAN, STD, batch_of, rows_of, torchvision_view
from tests.helpers.processes import run_processes
from tests.helpers.runs import (
    RECIPE,
    faulty_in_rank,
    final_weights,
    train_on_equal_views,
    train_over,
    write_recipe,
)
from tests.losses.loops import KNOWN, assert_same, loops, pair, tensors, unit
from tests.run.test_guard import poisoned_in_rank
from tests.test_invariance import FP64, assert_equal_weights
from tests.test_resume import assert_bitwise

SMALL = ("augment.small_views=3", "augment.small_px=10", "augment.small_crop_area=[0.1,0.3]")
SIZES = [(30, 40), (64, 20), (33, 33)]


def recipe_of(folder: Path, *overrides: str) -> Any:
    return load_recipe(str(write_recipe(folder)), overrides)


def augmented(**settings: Any) -> FusedViews:
    arguments = {"small_views": 3, "small_px": 10, "small_crop_area": (0.1, 0.3), **settings}
    return FusedViews("byol", 20, MEAN, STD, **arguments)


def test_small_views_are_torchvisions_with_settings_of_both_views_by_turns() -> None:
    augment, batch = augmented(), batch_of(SIZES, first_id=7, epoch=4)
    planned = augment.prepare(batch, seed=5, number=4)
    (small,) = augment.make_small(planned)
    assert small.shape == (3 * len(SIZES), 3, 10, 10)
    assert augment.small is not None
    large, own = augment.specs, augment.small.specs
    changed = {"crop_px": 10, "crop_area": (0.1, 0.3)}
    assert own == tuple(dataclasses.replace(large[k], **changed) for k in (0, 1, 0))
    params = planned.plan.small.draws  # type: ignore[union-attr]
    for row, view in enumerate(small):
        expected = torchvision_view(batch, params, row, augment.small)  # type: ignore[arg-type]
        assert float((view - expected).abs().max()) < 0.02, row
    # no view is drawn as another is, and no large one otherwise than without small ones
    boxes = torch.cat([planned.plan.draws.boxes, params.boxes]).view(5, len(SIZES), 4)  # type: ignore[union-attr]
    assert len({tuple(box.flatten().tolist()) for box in boxes}) == 5
    plain = FusedViews("byol", 20, MEAN, STD)
    expected = plain(batch, draws(5, 4, batch.ids, batch.sizes, plain.specs))
    assert torch.equal(augment(planned), expected)


def test_they_depend_on_seed_epoch_and_id_not_on_the_batch() -> None:
    augment, batch = (
        augmented(extra=[{"name": "RandomErasing", "args": {"p": 1.0}}]),
        batch_of(SIZES),
    )
    (small,) = augment.make_small(augment.prepare(batch, seed=5, number=4))
    (alone,) = augment.make_small(augment.prepare(rows_of(batch, [2]), seed=5, number=4))
    torch.testing.assert_close(alone, small[2::3], rtol=0, atol=1e-5)
    (other,) = augment.make_small(augment.prepare(batch, seed=5, number=5))
    assert not torch.equal(other, small)
    # those of view 1 and 3 share settings, and neither crops nor what `extra` erases
    assert not torch.equal(small[:3], small[6:])


def test_with_partners_they_show_the_rows_own_image() -> None:
    batch, augment = batch_of(SIZES), augmented()
    (expected,) = augment.make_small(augment.prepare(batch, seed=5, number=4))
    extra = batch_of([*SIZES, (64, 40)])
    ids = torch.tensor([[0, 3], [1, 1], [2, 3]])
    nothing = torch.zeros(3, 2, 0, dtype=torch.int64)
    pairs = PairRows(torch.tensor([3, 1, 3]), ids, ids, nothing, torch.zeros(3, dtype=torch.bool))
    paired = batch._replace(images=extra.images, sizes=extra.sizes, pairs=pairs)
    (small,) = augment.make_small(augment.prepare(paired, seed=5, number=4))
    torch.testing.assert_close(small, expected)


def small_loops(kind: str, views: list[Tensor], **known: Any) -> Tensor:
    z_a, z_b, *small = views
    target = torch.stack([unit(a) + unit(b) for a, b in zip(z_a, z_b, strict=True)]).detach()
    parts = [loops(kind, z, target, 0.1, **known)[0] for z in small]
    return (loops(kind, z_a, z_b, 0.1, **known)[0] + sum(parts)) / (1 + len(small))


def four_views() -> list[Tensor]:
    return [*pair(9, 4), *pair(9, 4, seed=1)]


@pytest.mark.parametrize("kind", ["nt_xent", "dcl", "sup_con"])
@pytest.mark.parametrize("name", ["nothing", "views", "two groups"])
def test_loss_and_gradient_are_those_of_the_loops(kind: str, name: str) -> None:
    views = four_views()
    expected = small_loops(kind, views, **KNOWN[name])
    loss = with_small_views(LOSSES[kind](temperature=0.1), *views, **tensors(KNOWN[name]))
    found = torch.cat(torch.autograd.grad(loss, views))
    assert_same((loss, found), (expected, torch.cat(torch.autograd.grad(expected, views))))


def test_with_keys_each_small_view_is_a_query_and_the_queue_gets_the_large_ones_keys() -> None:
    z_a, z_b, *small = four_views()
    keys = z_b.detach()
    loss_fn, plain = (MoCoLoss(4, 20, 0.1).double() for _ in range(2))
    for each in (loss_fn, plain):
        each(*pair(9, 4, seed=2))  # something is in the queue
    bank = [unit(row) for row in plain.keys[:9]]

    def of(queries: Tensor) -> Tensor:
        total = queries.new_zeros(())
        for query, key in zip(queries, keys, strict=True):
            others = [unit(query) @ each / 0.1 for each in (unit(key), *bank)]
            total = total + torch.logsumexp(torch.stack(others), 0) - others[0]
        return total / len(keys)

    expected = (of(z_a) + of(small[0]) + of(small[1])) / 3
    loss = with_small_views(loss_fn, z_a, keys, *small, has_keys=True)
    given = [z_a, *small]
    found = torch.cat(torch.autograd.grad(loss, given))
    assert_same((loss, found), (expected, torch.cat(torch.autograd.grad(expected, given))))
    plain(z_a, keys)
    assert_bitwise(dict(plain.state_dict()), dict(loss_fn.state_dict()))
    assert loss_fn.training


def _in_rank(process: Rank) -> tuple[Tensor, Tensor]:
    share = slice(0, 5) if process.rank == 0 else slice(5, 9)
    views = [z.detach()[share].clone().requires_grad_() for z in four_views()]
    known = {name: x[share] for name, x in tensors(KNOWN["views"]).items()}
    loss = with_small_views(LOSSES["nt_xent"](temperature=0.1), *views, **known)
    return loss.detach(), torch.cat(torch.autograd.grad(loss, views), 1)


def test_two_processes_give_the_loss_and_gradient_of_the_loops() -> None:
    (loss, first), (other, second) = run_processes(_in_rank, 2)
    views = four_views()
    expected = small_loops("nt_xent", views, **KNOWN["views"])
    grad = torch.cat(torch.autograd.grad(expected, views), 1)
    assert torch.equal(loss, other)
    assert_same((loss, torch.cat([first, second]) / 2), (expected, grad))


def test_batchnorm_sees_them_apart_and_its_running_statistics_are_the_large_views(
    tmp_path: Path,
) -> None:
    backbone = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    backbone.num_features = 4  # type: ignore[assignment]
    model = SimCLR(backbone, recipe_of(tmp_path).projector)  # type: ignore[arg-type]
    large, small = torch.randn(8, 3, 12, 12), 3 + torch.randn(12, 3, 6, 6)
    state = {name: x.clone() for name, x in model.state_dict().items()}
    expected = model(large)
    after = {name: x.clone() for name, x in model.state_dict().items()}
    model.load_state_dict(state)
    both = model(large, small)
    assert_bitwise(after, dict(model.state_dict()))
    torch.testing.assert_close(both, torch.cat([expected, model(small)]), rtol=0, atol=0)
    assert not torch.equal(model.backbone[1].running_mean, after["backbone.1.running_mean"])


@pytest.mark.parametrize(
    "settings", [(), ("momentum.start=0.9", "loss.kind=moco", "loss.queue_rows=24")]
)
def test_two_processes_train_the_weights_of_one(
    data: Path, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    recipe = write_recipe(tmp_path)
    for world in (1, 2):
        arguments = (str(recipe), str(data), str(tmp_path / str(world)), *FP64, *SMALL, *settings)
        run_processes(train_on_equal_views, world, *arguments)
    one, two = (read_metrics(tmp_path / str(world)) for world in (1, 2))
    for a, b in zip(one, two, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-9)
    assert_equal_weights(final_weights(tmp_path / "1"), final_weights(tmp_path / "2"))


def test_a_killed_and_resumed_run_ends_with_bitwise_the_same_weights(
    data: Path, tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path)
    train_over(2, recipe, data, tmp_path / "straight", *SMALL)
    arguments = (str(recipe), str(data), str(tmp_path / "run"), *SMALL)
    with pytest.raises(AssertionError, match="ended without a word"):
        run_processes(faulty_in_rank, 2, "train.step:7", *arguments)
    train_over(2, recipe, data, tmp_path / "run", *SMALL)
    assert_bitwise(final_weights(tmp_path / "straight"), final_weights(tmp_path / "run"))


def test_no_small_views_are_todays_run_bit_for_bit(
    data: Path, straight: Path, tmp_path: Path
) -> None:
    train_over(1, write_recipe(tmp_path), data, tmp_path / "run", "augment.small_views=0")
    assert_bitwise(final_weights(straight / "1"), final_weights(tmp_path / "run"))


def test_small_views_that_are_nan_skip_the_step(data: Path, tmp_path: Path) -> None:
    """A step makes large views, then small ones: the fifth call is of step 2, the sixth too."""
    settings = ("steps=4", "run.save_steps=1", "run.keep_checkpoints=4", *SMALL)
    arguments = (str(write_recipe(tmp_path)), str(data), str(tmp_path / "run"), *settings)
    run_processes(poisoned_in_rank, 2, (5,), *arguments)
    lines = read_metrics(tmp_path / "run")
    assert [line["skipped_steps"] for line in lines] == [0, 0, 1, 1]
    assert lines[2]["loss"] is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("augment.small_px=17",), "small_px = 17 must be from 2 to crop_px = 16"),
        (("augment.small_px=1",), "small_px = 1 must be from 2"),
        (("augment.small_views=65",), "small_views = 65 must be from 0 to 64"),
        (("augment.small_views=-1",), "small_views = -1 must be"),
        (("augment.small_crop_area=[0.3,1.2]",), "small_crop_area = .* is more than 1"),
        (("augment.small_crop_area=[0.3,0.1]",), "small_crop_area = .* is not .low, high."),
        (("data.canvas_px=8",), "of 10 px, and images of data.canvas_px = 8"),
        (("data.micro_batch=8",), "data.micro_batch embeds views of one size"),
        (("augment.kind=kornia",), "augment.small_views is not a setting"),
    ],
)
def test_what_cannot_be_is_refused_before_the_first_step(
    settings: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=message):
        check_pretraining(recipe_of(tmp_path, *SMALL, *settings), None)


def test_a_network_that_takes_one_size_is_named_with_the_setting(tmp_path: Path) -> None:
    vit = ("backbone.kind=timm/vit_tiny_patch16_224", "augment.crop_px=32", "augment.small_px=16")
    text = RECIPE.replace("widths = [8, 16, 16]\n", "")
    (tmp_path / "vit.toml").write_text(text)
    recipe = load_recipe(str(tmp_path / "vit.toml"), ("augment.small_views=1", *vit))
    with pytest.raises(RecipeError, match=r"cannot take views of augment\.small_px = 16"):
        check_pretraining(recipe, None)


def test_check_says_what_they_cost(tmp_path: Path) -> None:
    """FLOPs and memory of two views at either size add up, with three small ones for two."""
    plain, small, at_ten = (
        check_pretraining(recipe_of(tmp_path, *settings), None)
        for settings in ((), SMALL, ("augment.crop_px=10",))
    )
    assert small.step_flops == pytest.approx(plain.step_flops + 1.5 * at_ten.step_flops)
    for part in ("activations", "views"):
        a, b, c = (getattr(each.memory, part) for each in (plain, small, at_ten))
        assert b == pytest.approx(a + 1.5 * c, rel=0.02), part
    assert small.small == (3, 10)


def test_the_preview_shows_them(tmp_path: Path, data: Path) -> None:
    index, ids = load_index(str(data)), [1, 2, 6]
    augment = augmented()
    page = np.asarray(
        preview_grid(index, index.split("train"), augment, seed=3, epoch=5, ids=ids, canvas_px=64)
    )
    batch = next(one_pass(index.split("train"), ids=ids, canvas_px=64, num_workers=0))
    plain = augmented(normalize=False)
    for epoch in (5, 6):
        (views,) = plain.make_small(plain.prepare(batch, seed=3, number=epoch))
        for view in views.permute(0, 2, 3, 1).numpy():
            assert _contains(page, np.rint(np.clip(view, 0, 1) * 255), scale=9)
