"""The batches that a recipe asks for; where a data set has none, settings for which it has some."""

from collections.abc import Iterator, Sequence
from heapq import merge

from sslpipe.data.index import DatasetIndex, Split
from sslpipe.errors import DataError
from sslpipe.metric_learning.classes import (
    held_out,
    labelled_split,
    new_classes_are_tested,
    untrained_ids,
)
from sslpipe.metric_learning.recipe import FinetuneRecipe, Sampler
from sslpipe.metric_learning.sampling import BatchesDoNotFit, PKOrder
from sslpipe.planning.watch import can_choose, choosing_nothing

FEW_CLASSES = 32  # of a batch: each number up to it is tried, where they do not fit


def plan_batches(recipe: FinetuneRecipe, index: DatasetIndex) -> PKOrder:
    """Plan the batches of a run: the split without its validation classes.

    Raises:
        DataError: There are no such batches. Names settings for which there are some.
    """
    split, names = labelled_split(recipe, index)
    if not (split.labels >= 0).any():
        raise DataError(
            f"no image of the split {split.name!r} has a label, and this recipe learns from labels:"
            " build the data set with classes, name a column with sampler.column, or pretrain by a "
            "recipe without [sampler], which needs no labels"
        )
    try:
        return _batches(recipe, split, names)
    except BatchesDoNotFit as error:
        if settings := fitting_settings(recipe, split, names):
            raise DataError(f"{error.reason}; set {settings}", settings) from error
        raise


def fitting_settings(recipe: FinetuneRecipe, split: Split, names: Sequence[str]) -> str:
    """Find overrides for which there are batches, and a choice where one is asked for; "": none.

    The largest batch first, as a loss compares within it; of equals that which skips fewest images.
    Where new classes are tested, one that holds some out comes before those that do not.

    Args:
        recipe: Of a fine-tuning.
        split: As `labelled_split` gives it, like names.
        names: Of the classes, by label.
    """
    choosing = choosing_nothing(recipe.run)
    if choosing and (watching := watching_new_classes(recipe, split, names)):
        return watching
    first = None
    for sampler in _samplers(recipe, split, names):
        settings = _overrides(recipe.sampler, sampler)
        if first is None:
            first = settings
        if not choosing or _can_choose(recipe, sampler, split, names):
            return settings
        if recipe.data.validation_classes != "auto":  # no sampler changes what is held out
            break
    return "" if first is None else f"{first} {choosing}".strip()


def watching_new_classes(recipe: FinetuneRecipe, split: Split, names: Sequence[str]) -> str:
    """Find overrides with which new classes are watched where such are tested; "": none.

    The arguments are as in `fitting_settings`.
    """
    is_auto = recipe.data.validation_classes == "auto"
    if not is_auto or not new_classes_are_tested(split, recipe.sampler.column):
        return ""
    for sampler in _samplers(recipe, split, names):
        if _can_choose(recipe, sampler, split, names, new_classes=True):
            return _overrides(recipe.sampler, sampler)
    return ""


def _samplers(recipe: FinetuneRecipe, split: Split, names: Sequence[str]) -> Iterator[Sampler]:
    """Yield samplers that fit, best first; those without groups behind all that have them."""
    original = recipe.sampler
    images = {original.images_per_class, original.images_per_class // 2, 4, 3, 2}
    each = sorted((k for k in images if 1 < k <= original.images_per_class), reverse=True)
    for neighbours in sorted({original.neighbours, 0}, reverse=True):
        grouped = original.model_copy(update={"neighbours": neighbours})
        changed = recipe.model_copy(update={"sampler": grouped})
        largest_first = merge(
            *(_fitting_samplers(changed, split, names, k) for k in each),
            key=lambda fitting: (-fitting[0].batch_size, -fitting[1]),
        )
        for sampler, _ in largest_first:
            yield sampler


def _fitting_samplers(
    recipe: FinetuneRecipe, split: Split, names: Sequence[str], images: int
) -> Iterator[tuple[Sampler, int]]:
    """Yield samplers of so many images a class that fit, most classes first, and their images.

    Of fewer images a class there may be more classes: the batch stays as large as it was given.
    """
    original = recipe.sampler
    group = original.neighbours + 1  # classes come in groups of so many
    classes = original.classes_per_batch * original.images_per_class // images
    classes -= classes % group
    while classes >= max(2, group):
        fewer_classes = classes - group if classes <= FEW_CLASSES else classes // 2
        for streams in (original.num_streams, 1):
            changed = {
                "classes_per_batch": classes,
                "images_per_class": images,
                "num_streams": streams,
            }
            sampler = original.model_copy(update=changed)
            try:
                order = _batches(recipe.model_copy(update={"sampler": sampler}), split, names)
            except BatchesDoNotFit as error:
                if error.classes < classes:
                    fewer_classes = error.classes
            else:
                yield sampler, order.samples
                break
        classes = fewer_classes - fewer_classes % group


def _can_choose(
    recipe: FinetuneRecipe,
    sampler: Sampler,
    split: Split,
    names: Sequence[str],
    *,
    new_classes: bool = False,
) -> bool:
    """Return whether what such batches leave can choose weights, by `new_classes` if so asked."""
    held = held_out(recipe.model_copy(update={"sampler": sampler}), split, names)
    if new_classes and not held.whole_classes:
        return False
    return can_choose(split.labels_of(held.ids), views=False)


def _overrides(original: Sampler, changed: Sampler) -> str:
    """Write what differs, as overrides."""
    values = changed.model_dump()
    return " ".join(f"sampler.{k}={v}" for k, v in values.items() if getattr(original, k) != v)


def _batches(recipe: FinetuneRecipe, split: Split, names: Sequence[str]) -> PKOrder:
    sampler = recipe.sampler
    return PKOrder(
        split,
        seed=recipe.seed,
        classes_per_batch=sampler.classes_per_batch,
        images_per_class=sampler.images_per_class,
        random_images=sampler.random_images,
        neighbours=sampler.neighbours,
        buffer=sampler.buffer,
        num_streams=sampler.num_streams,
        window=sampler.shuffle_window,
        without=untrained_ids(recipe, split, names),
    )
