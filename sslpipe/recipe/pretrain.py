"""The settings of a pretraining: one frozen tree, each documented where it is defined."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from sslpipe.errors import RecipeError
from sslpipe.recipe.base import (
    Component,
    NonNegative,
    Optim,
    Positive,
    Run,
    Section,
    explain,
    read_tree,
)


class Data(Section):
    split: str = "train"  # the split of dataset.json that is trained on
    batch_size: Positive = 256  # images in a global step, over all processes
    # images whose activations are alive at once, over all processes; none: the whole batch. The
    # negatives stay those of the whole batch (gradient caching); a step costs a forward more.
    micro_batch: Positive | None = None
    num_streams: Positive = 64  # parts of the data read side by side; processes divide it
    shuffle_window: Positive = 256  # samples shuffled together inside a stream
    holdout: NonNegative = 0  # samples of the split kept from training, for the kNN monitor
    canvas_px: Positive = 256  # decoded images larger than this are reduced to fit, never squashed
    # nvjpeg: JPEGs are decoded on the CUDA device; pixels differ from the CPU's by a few levels
    decoder: Literal["cpu", "nvjpeg"] = "cpu"

    @property
    def micro_batches(self) -> int:
        """How many micro-batches a global step is cut into; 1 without micro_batch."""
        return self.batch_size // (self.micro_batch or self.batch_size)


class Projector(Section):
    hidden_dim: Positive = 2048
    out_dim: Positive = 128
    num_layers: Positive = 2  # linear layers; ReLU between them
    batchnorm: bool = True  # after every linear layer, the last without scale and shift


class Momentum(Section):
    """A second encoder that follows the first and makes the keys of the second views (MoCo)."""

    start: Annotated[float, Field(ge=0, le=1)] = 0.999  # weight of its own weights at each step
    schedule: Literal["constant", "cosine"] = "constant"  # cosine: rises to 1 over the run


class Recipe(Section):
    name: str
    steps: Positive | None = None  # optimizer steps
    epochs: Annotated[float, Field(gt=0)] | None = None  # instead of steps; becomes steps once
    seed: NonNegative = 0
    batchnorm: Literal["global", "local"] = (
        "global"  # statistics over all processes, or each its own
    )
    data: Data = Data()
    augment: Component
    backbone: Component
    projector: Projector = Projector()
    momentum: Momentum | None = None  # without the section one encoder makes both views' z
    loss: Component
    optim: Optim
    run: Run = Run()

    @model_validator(mode="after")
    def _consistent(self) -> "Recipe":
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give exactly one of steps and epochs")
        if self.data.holdout == 1:
            raise ValueError(
                "data.holdout = 1 leaves the kNN monitor no neighbour; use 0 (no monitor), or at "
                "least 2"
            )
        batch, streams = self.data.batch_size, self.data.num_streams
        if batch % streams:
            valid = [s for s in range(1, batch + 1) if batch % s == 0]
            near = sorted(valid, key=lambda s: abs(s - streams))[:4]
            raise ValueError(
                f"data.batch_size = {batch} is not a multiple of data.num_streams = {streams}; "
                f"use num_streams = {' or '.join(map(str, near))}"
            )
        share, micro = batch // streams, self.data.micro_batch
        valid = [batch // count for count in range(share, 0, -1) if share % count == 0]
        if micro is not None and micro not in valid:
            raise ValueError(
                f"data.micro_batch = {micro} does not cut the {share} images that each of "
                f"{streams} streams gives to a batch of {batch} into equal slices; use "
                f"micro_batch = {' or '.join(map(str, valid))}"
            )
        return self

    def resolved(self, steps_per_epoch: int) -> "Recipe":
        """The same recipe with `epochs` turned into `steps`."""
        if self.epochs is None:
            return self
        steps = max(1, round(self.epochs * steps_per_epoch))
        return Recipe.model_validate({**self.model_dump(), "steps": steps, "epochs": None})

    @property
    def total_steps(self) -> int:
        if self.steps is None:
            raise RecipeError("epochs is given; call resolved(steps_per_epoch) first")
        return self.steps


def load_recipe(path: str | Path, overrides: tuple[str, ...] | list[str] = ()) -> Recipe:
    """Read a TOML recipe, apply `section.key=value` overrides, validate everything.

    Raises: RecipeError naming the key, its value, the remedy and the nearest valid key.
    """
    tree = read_tree(path, overrides)
    if "sampler" in tree:
        raise RecipeError(f"{path} has a [sampler]: it is a recipe of fine-tuning")
    return parse_recipe(tree, str(path))


def parse_recipe(tree: dict[str, Any], origin: str) -> Recipe:
    """Validate a tree of plain values. origin: where it came from, for messages."""
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        raise RecipeError(explain(error, Recipe, origin)) from None
