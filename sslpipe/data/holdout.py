"""Which samples of a split a pretraining holds out, and which it trains on, in which order."""

import numpy as np
from numpy.typing import NDArray

from sslpipe.data.index import DatasetIndex, Split
from sslpipe.data.order import Order
from sslpipe.data.subsets import (
    FEW_HELD_OUT,
    HoldoutSettings,
    class_groups,
    held_out,
    lowest_hashes,
    repeated,
    suggest_holdout,
    with_a_partner,
)
from sslpipe.errors import RecipeError, naming
from sslpipe.recipe.pretrain import Recipe

MOST_READ = 10**7  # labels that are read to suggest settings
MOST_HOLDOUT = 2000  # samples, of such a split
MOST_HELD_OUT = 0.25  # of a split; of more a warning says that fewer are enough
MOST_BANK = 2000  # samples that an evaluation embeds beside the held-out ones
CLASS = "class"  # data.holdout_by: whole classes, where no column has this name


def plan_order(recipe: Recipe, index: DatasetIndex) -> Order:
    """Plan the order of a run: the split without held-out samples and those that are not kept."""
    split = index.split(recipe.data.split)
    without = untrained_ids(recipe, split)
    left = len(split) - len(without)
    if 0 < left < recipe.data.batch_size:
        held = len(holdout_ids(recipe, split))
        is_unwatched = not held and recipe.run.monitor_steps
        holds_much = held > MOST_HELD_OUT * len(split)  # fewer held out leave a larger batch
        holdout = suggested_holdout(recipe, split)[0] if is_unwatched or holds_much else {}
        settings = as_overrides(fitting(holdout, recipe, split))
        raise RecipeError(
            f"data.batch_size = {recipe.data.batch_size} is more than the {left} samples to train "
            f"on; set {settings}",
            settings,
        )
    return Order(
        split.starts,
        seed=recipe.seed,
        batch_size=recipe.data.batch_size,
        num_streams=recipe.data.num_streams,
        window=recipe.data.shuffle_window,
        without=without,
    )


def suggested_holdout(recipe: Recipe, split: Split, few: int = 0) -> tuple[HoldoutSettings, bool]:
    """Return settings that hold out about a tenth, and whether kNN can then be scored.

    What the recipe says of how images are held out stays. `few` is that of `suggest_holdout`.
    """
    if len(split) > MOST_READ:
        return {"holdout": MOST_HOLDOUT}, True
    settings, scores_knn = suggest_holdout(split.labels, few)
    if recipe.data.holdout_by is not None:
        settings.pop("holdout_by", None)
    return settings, scores_knn


def fitting(settings: HoldoutSettings, recipe: Recipe, split: Split) -> HoldoutSettings:
    """Complete settings of [data] by a batch that fits into what they leave to train on.

    Empty where they are what the recipe says.
    """
    data = recipe.data.model_copy(update=settings)
    changes = {} if data == recipe.data else dict(settings)
    left = _left(recipe, split, settings)
    if data.batch_size > left:
        streams = min(data.num_streams, left)
        changes["batch_size"] = left // streams * streams
        if streams < data.num_streams:
            changes["num_streams"] = streams
    return changes


def _left(recipe: Recipe, split: Split, settings: HoldoutSettings) -> int:
    """Count the samples to train on, with settings of [data]."""
    data = recipe.data.model_copy(update=settings)
    return len(split) - len(untrained_ids(recipe.model_copy(update={"data": data}), split))


def as_overrides(settings: HoldoutSettings) -> str:
    """Write settings of [data] as a command line has them: "data.holdout=2 data.batch_size=64"."""
    return " ".join(f"data.{key}={value}" for key, value in settings.items())


def with_holdout(recipe: Recipe, split: Split) -> Recipe:
    """Return the recipe with data.holdout as a number: 0, but a tenth in a run from weights.

    Of few images FEW_HELD_OUT or a fifth, where that leaves a batch. The recipe knows its weights
    already, see `sslpipe.export.start.with_init`.
    """
    if recipe.data.holdout is not None:
        return recipe
    settings: HoldoutSettings = {"holdout": 0}
    if recipe.init:
        settings = suggested_holdout(recipe, split)[0]
        if int(settings["holdout"]) < FEW_HELD_OUT:
            more = suggested_holdout(recipe, split, FEW_HELD_OUT)[0]
            least = max(recipe.data.batch_size, (1 - MOST_HELD_OUT) * len(split))
            if _left(recipe, split, more) >= least:
                settings = more
    return recipe.model_copy(update={"data": recipe.data.model_copy(update=settings)})


def holdout_ids(recipe: Recipe, split: Split) -> NDArray[np.int64]:
    """Return the ids held out from training, for the monitor; without any, no label is read."""
    count = recipe.data.holdout
    column = recipe.data.holdout_by
    if not count:
        return np.zeros(0, np.int64)
    groups = None
    if column == CLASS and CLASS not in split.columns:
        groups = class_groups(split.labels)
    elif column:
        with naming("data.holdout_by"):
            groups = split.column(column).groups.whole_split()
    # "all": those without a label, -1, are a class of their own
    labels = split.labels + 1 if recipe.data.holdout_from == "all" else split.labels
    labelled = int((labels >= 0).sum())
    if 0 < labelled <= count:
        settings = as_overrides(fitting(suggested_holdout(recipe, split)[0], recipe, split))
        raise RecipeError(
            f"data.holdout = {count} leaves nothing to train on: {labelled} images "
            f"{'can be held out' if recipe.data.holdout_from == 'all' else 'have a label'}; set "
            f"{settings}, or data.holdout = 0 for none",
            settings,
        )
    return held_out(labels, count, groups)


def holdout_doubt(recipe: Recipe, split: Split, ids: NDArray[np.int64]) -> str:
    """Return why kNN among the held-out samples, `ids`, means nothing, or little; else ''."""
    count = recipe.data.holdout
    labels = split.labels_of(ids)
    labels = labels[labels >= 0]
    classes = len(np.unique(labels))
    paired = with_a_partner(labels)
    if not count:
        return "data.holdout = 0"
    if not len(ids):
        known = split.labels[split.labels >= 0]
        if not len(known):
            return "no image has a label"
        return (
            f"data.holdout = {count} over {len(np.unique(known)):,} classes rounds to no image of "
            "each, so none is held out"
        )
    if not len(labels):
        return "no held-out image has a label"
    if not paired:
        return "no two held-out images are of one class, so no neighbour can be right"
    if classes == 1:
        return "all held-out images are of one class, so every neighbour is right"
    if 2 * paired < len(labels):
        return (
            f"only {paired:,} of {len(labels):,} held-out images have another one of their class, "
            "so no more can be right"
        )
    return ""


def bank_ids(recipe: Recipe, split: Split) -> NDArray[np.int64] | None:
    """Return the ids that a run is trained on and its held-out samples search; None: none are.

    Of a run from weights with labelled held-out samples: at most MOST_BANK labelled ones, by a
    hash. Among themselves a few held-out samples of each class say little.
    """
    ids = holdout_ids(recipe, split) if recipe.init else np.zeros(0, np.int64)
    if not len(ids) or not (split.labels_of(ids) >= 0).any():
        return None
    others = np.setdiff1d(np.flatnonzero(split.labels >= 0), untrained_ids(recipe, split))
    return lowest_hashes(others, MOST_BANK) if len(others) else None


def untrained_ids(recipe: Recipe, split: Split) -> NDArray[np.int64]:
    """Return the ids that are not trained on: held out, or not kept by data.keep."""
    ids = holdout_ids(recipe, split)
    column = recipe.data.keep_first_of
    if column is None:
        return ids
    with naming("data.keep"):
        groups = split.column(column).groups.whole_split()
    return np.union1d(ids, repeated(groups, ids))
