"""The settings of a fine-tuning with labels: one frozen tree, like `recipe.Recipe`."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from sslpipe.errors import RecipeError
from sslpipe.recipe.base import (
    Component,
    NonNegative,
    Optim,
    Positive,
    Rate,
    Run,
    Section,
    explain,
    read_tree,
)
from sslpipe.recipe.pretrain import Recipe, parse_recipe


class FinetuneData(Section):
    split: str = "train"  # the split of dataset.json that is trained on
    canvas_px: Positive = 256  # decoded images larger than this are reduced to fit, never squashed
    # classes kept from training altogether, to choose settings on: how many (drawn by a hash), or
    # their names
    validation_classes: NonNegative | tuple[str, ...] = 0


class Sampler(Section):
    """PK batches: classes_per_batch x images_per_class + random_images rows, over all processes."""

    classes_per_batch: Positive = 16
    images_per_class: Positive = 4
    random_images: NonNegative = 0  # of other classes
    # the classes come in groups of one and so many that lie nearest to it, from the third epoch on
    neighbours: NonNegative = 0
    buffer: Positive = 4096  # samples that may wait for others of their class
    num_streams: Positive = 1  # parts of the data read side by side
    shuffle_window: Positive = 256  # samples shuffled together inside a stream

    @property
    def batch_size(self) -> int:
        return self.classes_per_batch * self.images_per_class + self.random_images


class Embedding(Section):
    dim: Positive | None = None  # a linear layer of this width; none: the pooled features
    normalize: bool = True  # what the finished model gives out has length 1


class Tune(Section):
    """What is trained, and how fast, relative to the learning rate of [optim]."""

    backbone: Literal["full", "frozen"] = "full"
    last_blocks: Positive | None = None  # only these, counted from the output; none: all
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0  # a block's rate over the next one's
    backbone_lr: Rate = 1.0  # times the rate: the pretrained layers
    loss_lr: Rate = 1.0  # times the rate: the loss's own weights (proxies, class weights)
    batchnorm: Literal["train", "frozen"] = "train"  # frozen: the pretrained statistics stay


class Queue(Section):
    """Embeddings of past batches as further references (cross-batch memory)."""

    size: Positive
    start_step: NonNegative = 0  # filled from the first step, used from this one on


class Term(Section):
    """One more loss, times a weight, beside [loss]: an ID loss beside triplets, a center loss."""

    loss: Component
    weight: Rate = 1.0


class FinetuneOptim(Optim):
    kind: Literal["sgd", "adamw", "lars"] = "adamw"
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"  # never chosen by timing


class FinetuneRecipe(Section):
    """backbone: needed where no pretrained one is given, which else brings its own.

    init: filled in by the program: sha256 of the weights that the run started from, "" for random
    ones. Part of the digest: a resume from others is refused.
    """

    name: str
    steps: Positive | None = None  # optimizer steps
    epochs: Annotated[float, Field(gt=0)] | None = None  # instead of steps; becomes steps once
    seed: NonNegative = 0
    batchnorm: Literal["global", "local"] = "global"
    views: Literal[1, 2] = 1  # of each image in a batch
    data: FinetuneData = FinetuneData()
    sampler: Sampler
    augment: Component
    backbone: Component | None = None
    embedding: Embedding = Embedding()
    tune: Tune = Tune()
    loss: Component
    also: tuple[Term, ...] = ()
    miner: Component | None = None
    queue: Queue | None = None
    optim: FinetuneOptim
    run: Run = Run()
    init: str = ""

    @model_validator(mode="after")
    def _consistent(self) -> "FinetuneRecipe":
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give exactly one of steps and epochs")
        rows = self.sampler.batch_size * self.views
        if self.queue is not None and self.queue.size < rows:
            raise ValueError(
                f"queue.size = {self.queue.size} holds less than one batch of {rows} rows; "
                f"use at least {rows}"
            )
        group, classes = self.sampler.neighbours + 1, self.sampler.classes_per_batch
        if classes % group:
            raise ValueError(
                f"sampler.neighbours = {group - 1} makes groups of {group}, which do not divide "
                f"sampler.classes_per_batch = {classes}; use {classes // group * group or group}"
            )
        if self.tune.backbone == "frozen" and self.tune.last_blocks is not None:
            raise ValueError(
                "tune.backbone = 'frozen' trains no block, tune.last_blocks = "
                f"{self.tune.last_blocks} some: leave one of them out"
            )
        return self

    def resolved(self, steps_per_epoch: int, **changes: Any) -> "FinetuneRecipe":
        """The same recipe with `epochs` turned into `steps`, and with changes, validated anew."""
        tree = {**self.model_dump(), **changes}
        if self.epochs is not None:
            tree |= {"steps": max(1, round(self.epochs * steps_per_epoch)), "epochs": None}
        return FinetuneRecipe.model_validate(tree)

    @property
    def total_steps(self) -> int:
        assert self.steps is not None, "call resolved(steps_per_epoch) first"
        return self.steps


def load_finetune_recipe(
    path: str | Path, overrides: tuple[str, ...] | list[str] = ()
) -> FinetuneRecipe:
    """As `load_recipe`. Raises: RecipeError naming the key, its value and the remedy."""
    tree = read_tree(path, overrides)
    if not is_finetune(tree):
        raise RecipeError(f"{path} has no [sampler]: it is a recipe of pretraining")
    return parse_finetune_recipe(tree, str(path))


def parse_finetune_recipe(tree: dict[str, Any], origin: str) -> FinetuneRecipe:
    try:
        return FinetuneRecipe.model_validate(tree)
    except ValidationError as error:
        raise RecipeError(explain(error, FinetuneRecipe, origin)) from None


def is_finetune(tree: dict[str, Any]) -> bool:
    """Whether a recipe's tree is one of fine-tuning: it has a [sampler]."""
    return "sampler" in tree


def parse_any_recipe(tree: dict[str, Any], origin: str) -> Recipe | FinetuneRecipe:
    """The recipe of a run directory, whichever kind of run it was."""
    return (parse_finetune_recipe if is_finetune(tree) else parse_recipe)(tree, origin)
