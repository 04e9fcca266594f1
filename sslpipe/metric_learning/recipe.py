"""The settings of a fine-tuning with labels."""

import math
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from sslpipe.recipe.sections import (
    BACKBONE,
    Load,
    NonNegative,
    Positive,
    Rate,
    RunConfig,
    RunData,
    RunRecipe,
    Tune,
    Width,
)
from sslpipe.registry.schema import Kinds, KindSettings, Settings, SparseSettings

METRIC_LOSS = Kinds(
    "sslpipe.metric_learning.losses:METRIC_LOSSES",
    "sslpipe.metric_learning.heads:HEADS",
)
MINER = Kinds("sslpipe.metric_learning.miners:MINERS")


class FinetuneData(RunData):
    """Which labelled images."""

    validation_classes: Literal["auto"] | NonNegative | tuple[str, ...] = "auto"
    """Classes held out from training altogether, by which `run.keep` chooses: how many (drawn by a
    hash), or their names; 0: none. auto: classes of a tenth of the images, up to a quarter of few
    images; where classes are too few for that, as many images of each, or two to five classes if
    another split, such as test, has new classes alone, and a batch leaves so many."""
    holdout_by: str | None = None
    """A column, such as patient: samples that share its value with one of validation_classes are
    not trained on either. Without data.validation_classes it is refused."""


class Sampler(Settings):
    """PK batches: classes_per_batch x images_per_class + random_images rows, over all processes."""

    classes_per_batch: Positive = 16
    """P, the classes in a batch."""
    images_per_class: Positive = 4
    """K, the images of each."""
    random_images: NonNegative = 0
    """Further images of a batch, of other classes."""
    neighbours: NonNegative = 0
    """The classes come in groups: one, and so many that lie nearest to it by the running means of
    their embeddings; from the third epoch on."""
    buffer: Positive = 4096
    """Samples that may wait for others of their class."""
    num_streams: Positive = 1
    """Parts of the data read side by side."""
    shuffle_window: Positive = 256
    """Samples shuffled together inside a stream."""
    column: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """The column of the data set whose values are the classes: of batches, losses and validation;
    samples without a value are skipped. None: the data set's labels."""

    @property
    def batch_size(self) -> int:
        """Images in a global step."""
        return self.classes_per_batch * self.images_per_class + self.random_images


class Embedding(Settings):
    """What the finished model gives out."""

    dim: Width | None = None
    """Width of a linear layer behind the pooled features; none: the features themselves."""
    taps: tuple[str, ...] = ()
    """Names of the network's modules, "layer2" say, whose outputs have an embedding layer each,
    beside the pooled features: the branches of loss.kind = "hdc", which part `dim` equally."""
    normalize: bool = True
    """Whether embeddings have length 1."""


class FinetuneTune(Tune):
    """What is trained, and how fast, relative to the learning rate of [optim]."""

    backbone: Literal["full", "frozen"] = "full"
    """frozen: only the embedding layer and the loss's own weights are trained."""
    loss_lr: Rate = 1.0
    """Times the learning rate: the loss's own weights (proxies, class weights)."""


class Queue(Settings):
    """Embeddings of past batches as further references (cross-batch memory)."""

    size: Positive
    """Rows; at least one batch."""


class ExtraLoss(Settings):
    """One more loss, times a weight, beside [loss]: an ID loss beside triplets, a center loss."""

    loss: Annotated[KindSettings, METRIC_LOSS, Field(examples=["proxy_anchor"])]
    """The further loss; `kind` is the name of a metric loss or of a head."""
    weight: Rate = 1.0
    """What its value is multiplied by."""


class FinetuneRunConfig(RunConfig):
    """As in pretraining, without what only its loader can do."""

    cache: Literal["none", "memory"] = "none"
    """memory: keep decoded images after their first use."""

    @field_validator("cache", mode="before")
    @classmethod
    def _not_on_the_device(cls, value: Any) -> Any:
        if value == "device":
            raise ValueError("'device' is for pretraining; use 'none' or 'memory'")
        return value


class FinetuneRecipe(RunRecipe):
    """A fine-tuning: metric learning on labelled images."""

    said_elsewhere: ClassVar[frozenset[str]] = frozenset(
        {"embedding_dim", "embedding_taps", "normalize"}  # [embedding] says these
    )
    learns_classes: ClassVar[bool] = True

    views: Literal[1, 2] = 1
    """Views of each image in a batch."""
    data: FinetuneData = FinetuneData()
    """Which labelled images."""
    sampler: Sampler
    """What a batch holds; the section that makes a recipe a fine-tuning."""
    loss: Annotated[KindSettings, METRIC_LOSS, Field(examples=["proxy_anchor"])]
    """The metric loss, or the head; `kind` is its name: "proxy_anchor", "multi_similarity",
    "arcface", "triplet" and many more."""
    backbone: Annotated[SparseSettings, BACKBONE] | None = Field(None, examples=["small_resnet"])
    """Needed where no weights are named with --init, which else bring their own."""
    embedding: Embedding = Embedding()
    """What the finished model gives out."""
    tune: FinetuneTune = FinetuneTune()
    """What is trained, and how fast."""
    also: tuple[ExtraLoss, ...] = ()
    """Further losses."""
    miner: Annotated[KindSettings, MINER] | None = Field(None, examples=["multi_similarity"])
    """Which pairs or triplets of a batch the losses see; none: all."""
    queue: Queue | None = None
    """A memory of past batches."""
    run: FinetuneRunConfig = FinetuneRunConfig()
    """Cadence, devices and caches; changes no weight beyond rounding."""

    @property
    def keeps_best(self) -> bool:
        """Whether run.keep is "best" where it is not set: of every fine-tuning."""
        return True

    def load(self, world: int) -> Load:
        """Return what a step asks of one of `world` processes."""
        images = math.ceil(self.sampler.batch_size / world)
        return Load(
            images=images,
            together=images,
            views=self.views,
            remedy="run.activation_checkpointing = true (networks without BatchNorm), a smaller "
            "sampler.classes_per_batch or sampler.images_per_class",
        )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        rows = self.sampler.batch_size * self.views
        if self.queue is not None and self.queue.size < rows:
            raise ValueError(
                f"queue.size = {self.queue.size} holds less than one batch of {rows} rows; use at "
                f"least {rows}"
            )
        data = self.data
        if data.holdout_by is not None and not data.validation_classes:
            raise ValueError(
                f"data.holdout_by = {data.holdout_by!r} needs data.validation_classes, the classes "
                "to hold out"
            )
        classes = self.sampler.classes_per_batch
        group = self.sampler.neighbours + 1
        if classes % group:
            raise ValueError(
                f"sampler.neighbours = {group - 1} makes groups of {group}, which do not divide "
                f"sampler.classes_per_batch = {classes}; use {classes // group * group or group}"
            )
        for key in ("last_blocks", "projector_first_steps", "ramp_steps"):
            if self.tune.backbone == "frozen" and getattr(self.tune, key):
                raise ValueError(
                    f"tune.{key} is for a backbone that is trained, and tune.backbone = 'frozen': "
                    "leave one of them out"
                )
        return self
