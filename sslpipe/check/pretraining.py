"""What a pretraining will do and cost: its parts are built, its first epoch is looked at."""

import numpy as np
from numpy.typing import NDArray

from sslpipe.check.estimate import check_of, estimate_parts
from sslpipe.check.outcome import Check, Rows
from sslpipe.data.holdout import MOST_HELD_OUT
from sslpipe.data.order import Order
from sslpipe.data.pairing import survey
from sslpipe.data.partners import Pairing, joint_codes
from sslpipe.errors import RecipeError
from sslpipe.models.tuning import count_parameters
from sslpipe.parts import Parts, recipe_flops
from sslpipe.plan import Pretraining
from sslpipe.planning.memory import Room, check_memory
from sslpipe.planning.watch import watch_text
from sslpipe.random import permutation
from sslpipe.recipe.sections import divisors

_PLANNED_STEPS = 100  # global batches of the first epoch that are looked at, evenly spread
WELL_MIXED = 0.98  # mixing score below which there is a warning
_UNIFORM = 0x5F  # names the draw of a uniform shuffle


def check_pretraining(plan: Pretraining) -> Check:
    """Build every part of a planned pretraining and look at its order; train nothing.

    Raises:
        UserError: The plan cannot be trained, or this machine cannot train it.
    """
    recipe = plan.recipe
    estimate = estimate_parts(plan)
    parts = estimate.parts
    if estimate.too_much:
        few = estimate.memory.of_images(4, recipe)
        if alone := check_memory(few, recipe, Room.here(estimate.device)):
            raise RecipeError(f"with no more than 4 images at a time {alone}")
    order_rows, mixing_rows, poorly_mixed = _look_at_order(plan)
    flops = recipe_flops(recipe, parts.model, parts.augment.crop_px)
    return check_of(
        plan,
        estimate,
        watch=watch_text(recipe.run, plan.split.labels_of(plan.watched), views=True),
        rows=[*_size_rows(plan, parts), *order_rows],
        details=[
            (
                "FLOPs per step",
                f"{flops:.3g}, forward and backward of {2 * recipe.data.batch_size} views"
                + " of crop_px" * bool(recipe.half_size_steps),
            ),
            *mixing_rows,
        ],
        warnings=[poorly_mixed],
        in_several=recipe.pairs.different if recipe.pairs else (),
        step_flops=flops,
    )


def _size_rows(plan: Pretraining, parts: Parts) -> Rows:
    recipe = plan.recipe
    data = recipe.data
    batch = data.batch_size
    backbone = parts.model.backbone
    rows = [("steps", f"{recipe.total_steps:,}")]
    if data.micro_batches > 1:
        text = f"{data.micro_batches} of {data.micro_batch} images: activations and views of one"
        rows.append(("micro-batches", f"{text} at a time, negatives of the whole batch"))
    negatives = parts.loss.negatives_per_anchor(batch)
    planned = parts.negatives
    in_batch = negatives == 2 * batch - 2
    counted = f"{negatives} ({f'2 x {batch} - 2' if in_batch else 'the full queue'})"
    if in_batch and planned and min(planned) < negatives:
        mean = sum(planned) / len(planned)
        counted = f"{mean:.1f} on average over {_planned(len(planned))} (at most {negatives})"
    stem = f", stem {backbone.stem}" if backbone.stem else ""
    return [
        *rows,
        (
            "negatives per anchor",
            counted if negatives else "none (the objective uses no negatives)",
        ),
        ("starts from", plan.start.describe(recipe.tune)),
        (
            "parameters",
            f"backbone {count_parameters(backbone):,} ({backbone.num_features} features{stem}), "
            f"projector {count_parameters(parts.model.projector):,}",
        ),
        (
            "processes",
            f"{', '.join(map(str, divisors(data.num_streams)))} (they divide num_streams)",
        ),
    ]


def _look_at_order(plan: Pretraining) -> tuple[Rows, Rows, str | None]:
    """Look at some batches of the first epoch.

    Returns:
        Rows on the data, rows on how batches mix, and a warning where they mix poorly.
    """
    split = plan.split
    order = plan.order
    count = min(order.steps_per_epoch, _PLANNED_STEPS)
    steps = np.linspace(0, order.steps_per_epoch - 1, count).astype(np.int64).tolist()
    batches = [order.ids(step, range(order.num_streams))[1] for step in steps]
    twice = sum(len(ids) - len(np.unique(ids)) for ids in batches)
    served = np.concatenate(
        [
            split.starts[shard] + order.rows(shard, np.arange(kept))
            for shard, kept in enumerate(order.kept.tolist())
        ]
    )
    mixing = mixing_score([split.labels[ids] for ids in batches], split.labels[served])
    pair_rows, poor = _look_at_pairs(plan.pairing, order, steps)
    held_out = len(plan.watched)
    # few images left of some classes mix badly, however the shards are: that warning comes first
    few_held_out = held_out <= MOST_HELD_OUT * len(split)
    if poor is None and mixing is not None and mixing < WELL_MIXED and few_held_out:
        poor = (
            f"mixing score {mixing:.3f}: batches hold fewer classes than a uniform shuffle's; "
            "build the shards shuffled, or raise data.num_streams or lower data.shuffle_window"
        )
    not_kept = len(split) - held_out - order.samples
    left_out = f"{held_out:,} held out" + (f", {not_kept:,} not kept" if not_kept else "")
    asked = plan.recipe.data.holdout or 0
    if held_out != asked:  # each class gives its share, rounded; groups are whole
        rounded = plan.recipe.data.holdout_by is None
        why = "each class gives its share, rounded" if rounded else "groups stay whole"
        left_out += f" (data.holdout = {asked}: {why})"
    epochs = plan.recipe.total_steps / order.steps_per_epoch
    looked = f"over {_planned(count)} of the first epoch"
    score = "unknown (unlabelled, or one class)" if mixing is None else f"{mixing:.4f}"
    rows = [
        ("data", f"{split.index.manifest.name}: {len(split):,} images, {left_out}"),
        ("steps per epoch", f"{order.steps_per_epoch:,} (the run: {epochs:.4g} epochs)"),
    ]
    mixing_rows = [
        ("duplicates in a global batch", f"{twice} {looked}"),
        ("mixing score", f"{score} (1: as a uniform shuffle) {looked}"),
    ]
    return rows, [*mixing_rows, *pair_rows], poor


def _planned(batches: int) -> str:
    return f"{batches} planned batch{'es' * (batches != 1)}"


def _look_at_pairs(
    pairing: Pairing | None, order: Order, steps: list[int]
) -> tuple[Rows, str | None]:
    """Describe who finds a partner and what that costs; warn of groups that mix poorly."""
    if pairing is None or pairing.partners is None:
        return [], None
    partners = pairing.partners
    counts = survey(pairing, steps)
    text = (
        f"{counts.partners / counts.samples:.1%} of the samples have one, about "
        f"{1 - counts.outside / max(1, counts.partners):.1%} of these in the window that is read"
    )
    cost = f"{counts.reads_an_epoch(order)} an epoch, unless run.cache holds them"
    rows = [("partners", text), ("reads of other partners", cost)]
    if not partners.same:
        return rows, None
    every = np.arange(len(pairing.split))
    codes = joint_codes(partners.same, every)
    codes = np.where(codes < 0, codes.max(initial=0) + 1 + every, codes)  # a group of one each
    codes = np.unique(codes, return_inverse=True)[1]
    batches = [order.ids(step, range(order.num_streams))[1] for step in steps]
    served = np.setdiff1d(every, order.without, assume_unique=True)
    mixing = mixing_score([codes[ids] for ids in batches], codes[served])
    if mixing is None:  # one group
        return rows, None
    rows.append(("mixing score of groups", f"{mixing:.4f} (1: as a uniform shuffle)"))
    if mixing >= WELL_MIXED:
        return rows, None
    return rows, (
        f"mixing score of groups {mixing:.3f}: each of {order.num_streams} streams gives "
        f"{order.batch_size // order.num_streams} samples to a batch from windows of "
        f"{order.window}, which hold few groups side by side; raise data.shuffle_window or "
        "data.num_streams"
    )


def mixing_score(batches: list[NDArray[np.int64]], pool: NDArray[np.int64]) -> float | None:
    """Divide the mean label entropy of batches by that of as many uniform shuffles'.

    Returns 1 for batches (B,) as mixed as a uniform shuffle of the pool (N,), 0 where each has one
    class; None where a label is missing (-1), or the pool has one class.
    """
    if (pool < 0).any() or (pool == pool[0]).all():
        return None
    rows = len(batches[0])
    uniform: list[NDArray[np.int64]] = []
    while len(uniform) < len(batches):
        shuffled = pool[permutation(len(pool), (_UNIFORM, len(uniform)))]
        uniform += list(shuffled[: len(pool) // rows * rows].reshape(-1, rows))
    return _mean_entropy(batches) / _mean_entropy(uniform[: len(batches)])


def _mean_entropy(batches: list[NDArray[np.int64]]) -> float:
    """In nats."""
    shares = [np.unique(labels, return_counts=True)[1] / len(labels) for labels in batches]
    return float(np.mean([-(each * np.log(each)).sum() for each in shares]))
