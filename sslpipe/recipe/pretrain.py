"""The settings of a pretraining."""

import math
import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from sslpipe.errors import RecipeError, shown
from sslpipe.recipe.sections import (
    BACKBONE,
    Load,
    NonNegative,
    Positive,
    RunData,
    RunRecipe,
    Width,
    divisors,
)
from sslpipe.registry.schema import Kinds, KindSettings, Settings, SparseSettings

_UNIT_US = {"us": 1, "ms": 1_000, "s": 10**6, "min": 60 * 10**6, "h": 3600 * 10**6}
_UNIT_US["d"] = 24 * _UNIT_US["h"]
_SPAN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(us|ms|s|min|h|d)\s*")
ColumnName = Annotated[str, Field(min_length=1, max_length=200)]
Columns = tuple[ColumnName, ...]


class Data(RunData):
    """Which images, in what batches."""

    batch_size: Positive = 256
    """Images in a global step, over all processes."""
    micro_batch: Positive | None = None
    """Images whose activations are alive at once, over all processes; none: the whole batch. The
    negatives stay those of the whole batch (gradient caching); a step costs a forward more."""
    num_streams: Positive = 64
    """Parts of the data read side by side; the number of processes divides it."""
    shuffle_window: Positive = 256
    """Samples shuffled together inside a stream."""
    holdout: NonNegative | None = None
    """Samples of the split held out from training, for evaluations during the run; not set: a
    tenth, at most 2,000, in a run from weights (with labels or without), of fewer than 1,000 images
    100 or a fifth; else none. Of 100 images kNN is known to about 10 points, of 1,000 to 3, and
    what is held out teaches nothing."""
    holdout_by: str | None = None
    """A column, such as patient, whose groups data.holdout takes whole or not at all; then it is
    rough. class: whole classes, for many small ones. Without data.holdout it is refused."""
    keep: str | None = None
    """A column and the word first, as in "duplicate_group first": of the samples that share a value
    of it, only the one of the lowest id is trained on (of those that are not held out). A sample
    without a value is kept. No shard is rewritten."""
    holdout_from: Literal["labelled", "all"] = "labelled"
    """all: samples without a label are held out as well, for scores that need none; by default they
    are all trained on. Without data.holdout it is refused."""

    @field_validator("keep")
    @classmethod
    def _names_a_column(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"\S+ first", value):
            raise ValueError(f"{shown(value)} is no COLUMN first, such as 'duplicate_group first'")
        return value

    @property
    def keep_first_of(self) -> str | None:
        """The column that `keep` names; None: all samples are kept."""
        return None if self.keep is None else self.keep.removesuffix(" first")

    @property
    def micro_batches(self) -> int:
        """How many micro-batches a global step has; 1 without micro_batch."""
        return self.batch_size // (self.micro_batch or self.batch_size)

    def check_processes(self, world: int) -> None:
        """Refuse processes that cannot share the streams evenly. Raises: RecipeError."""
        if self.num_streams % world:
            valid = divisors(self.num_streams)[:20]
            raise RecipeError(
                f"data.num_streams = {self.num_streams} does not divide over {world} processes; "
                f"start {', '.join(map(str, valid))} processes, or set num_streams to a multiple "
                f"of {world}"
            )


class Projector(Settings):
    """The network between the backbone's features and the loss."""

    hidden_dim: Width = 2048
    """Width of the hidden layers."""
    out_dim: NonNegative = 128
    """Dimensions of what the loss compares. 0: an output for each image of the split, as
    loss.kind = "diet" needs."""
    num_layers: Annotated[int, Field(ge=0, le=100)] = 2
    """Linear layers; ReLU between them. 0: none, the loss compares the backbone's features
    themselves, and out_dim is their number."""
    batchnorm: bool = True
    """BatchNorm after every linear layer, the last without scale and shift."""


class Momentum(Settings):
    """A second encoder that follows the first and makes the keys of the second views (MoCo)."""

    start: Annotated[float, Field(ge=0, le=1)] = 0.999
    """Weight of its own weights at each step."""
    schedule: Literal["constant", "cosine"] = "constant"
    """cosine: rises to 1 over the run."""


class Teacher(Settings):
    """A frozen teacher, whose features the objective learns (loss.kind = "distill")."""

    features: Annotated[str, Field(min_length=1)]
    """The file that `sslpipe embed` wrote of data.split with any network or join of networks; the
    path is not in the digest, the content is."""
    sha256: str = ""
    """Filled in by the program: of the file. A resume with another file is refused."""


class Pairs(Settings):
    """What the columns of the data set say: who is a positive, who never a negative.

    A missing value knows nothing: it makes neither partners nor masks.
    """

    positive: Columns = ()
    """A column, or several: the second view is of a partner, another sample with the same value in
    all of them; and samples with the same values are no negatives of each other (with `within`,
    only where they are one image, or partners in the batch). A sample without a partner makes both
    views itself."""
    time: ColumnName | None = None
    """A column of times or numbers: partners are at most `within` apart in it."""
    within: Annotated[float, Field(ge=0)] | str | None = None
    """How far apart partners are in `time`, at most: of a column of times a text with its unit (us,
    ms, s, min, h, d), "60 s" say, else a number."""
    different: Columns = ()
    """A column, or several, in each of which a sample's partner differs: what they explain is not
    what the embedding keeps."""
    never_negative: Columns = ()
    """Columns: samples that share the value of any of them are no negatives of each other."""
    label: ColumnName | None = None
    """The column whose values are the labels that the loss sees (sup_con, mask_labels), instead of
    the data set's."""

    @field_validator("positive", "different", "never_negative", mode="before")
    @classmethod
    def _one_is_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("within")
    @classmethod
    def _known_unit(cls, value: float | str | None) -> float | str | None:
        if isinstance(value, str) and _SPAN.fullmatch(value) is None:
            raise ValueError(f"{shown(value)} is no span of time; write one as '60 s' or '1.5 h'")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for key in ("positive", "different", "never_negative"):
            names = getattr(self, key)
            twice = [name for name in names if names.count(name) > 1]
            if twice:
                raise ValueError(f"pairs.{key} names {twice[0]!r} twice; name each column once")
        if (self.time is None) != (self.within is None):
            raise ValueError(
                "pairs.time and pairs.within make a span of time together: give both, or neither"
            )
        if not self.has_partners:
            if self.different:
                raise ValueError(
                    "pairs.different is about partners, and pairs.positive names no column; give "
                    "positive, or time and within"
                )
            if not self.never_negative and self.label is None:
                raise ValueError(
                    "pairs says nothing; give positive, never_negative or label, or leave the "
                    "section out"
                )
        both = sorted(set(self.positive) & set(self.different))
        if both:
            raise ValueError(
                f"pairs.different and pairs.positive both name {both[0]!r}: no partner differs in "
                "what it has in common"
            )
        return self

    @property
    def has_partners(self) -> bool:
        """Whether second views may be of other samples."""
        return bool(self.positive) or self.time is not None

    @property
    def masks(self) -> tuple[Columns, ...]:
        """Columns whose values count together: samples that share all of any are no negatives."""
        apart = [(name,) for name in self.never_negative]
        # near samples are partners, and who is near whom is no group
        together = [self.positive] if self.positive and self.time is None else []
        return tuple(dict.fromkeys([*together, *apart]))

    @property
    def within_us(self) -> int | None:
        """`within` in microseconds; None where it is a number without a unit, or not given."""
        if not isinstance(self.within, str):
            return None
        match = _SPAN.fullmatch(self.within)
        assert match is not None
        return round(float(match[1]) * _UNIT_US[match[2]])


class Recipe(RunRecipe):
    """A pretraining: contrastive learning of an encoder and a projector."""

    of_weights = (
        *RunRecipe.of_weights,
        "last_blocks",
        "layer_decay",
        "backbone_lr",
        "batchnorm",
    )

    data: Data = Data()
    """Which images, in what batches."""
    # its keys are the fields of the class that `kind` has in LOSSES: see losses/nt_xent.py
    loss: Annotated[KindSettings, Kinds("sslpipe.losses:LOSSES"), Field(examples=["nt_xent"])]
    """The objective; `kind` "nt_xent" is SimCLR's."""
    backbone: Annotated[SparseSettings, BACKBONE] | None = Field(None, examples=["small_resnet"])
    """The encoder; `kind` is small_resnet, torchvision/NAME or timm/NAME. Needed where no weights
    are named with --init, which else bring their own."""
    projector: Projector = Projector()
    """The network between the backbone's features and the loss."""
    momentum: Momentum | None = None
    """A momentum encoder; without the section one encoder makes both views' embeddings."""
    teacher: Teacher | None = None
    """A frozen teacher; without the section, none."""
    pairs: Pairs | None = None
    """What columns of the data set say of its samples; without the section, nothing."""

    def load(self, world: int) -> Load:
        """Return what a step asks of one of `world` processes."""
        data = self.data
        images_a_row = 2 if self.pairs and self.pairs.has_partners else 1
        return Load(
            images=math.ceil(data.batch_size * images_a_row / world),
            together=math.ceil((data.micro_batch or data.batch_size) / world),
            views=2,
            remedy="data.micro_batch (the same negatives, a part of the memory), "
            "run.activation_checkpointing = true (networks without BatchNorm), or data.batch_size",
        )

    def with_outputs(self, images: int) -> Self:
        """Return the recipe with the number that projector.out_dim = 0 stands for."""
        if self.projector.out_dim:
            return self
        projector = self.projector.model_copy(update={"out_dim": images})
        return self.model_copy(update={"projector": projector})

    @model_validator(mode="after")
    def _holds_out_enough(self) -> Self:
        if self.data.holdout == 1:
            raise ValueError(
                "data.holdout = 1 leaves the kNN monitor no neighbour; use 0 (no monitor), or at "
                "least 2"
            )
        for key, none in (("holdout_by", None), ("holdout_from", "labelled")):
            value = getattr(self.data, key)
            if value != none and not self.data.holdout:
                raise ValueError(
                    f"data.{key} = {value!r} needs data.holdout, the number of samples to hold out"
                )
        return self

    @model_validator(mode="after")
    def _has_a_projector_to_train_first(self) -> Self:
        if not self.projector.num_layers and self.tune.projector_first_steps:
            raise ValueError(
                f"tune.projector_first_steps = {self.tune.projector_first_steps}, and "
                "projector.num_layers = 0 leaves no projector to train first; use 0"
            )
        return self

    @model_validator(mode="after")
    def _batch_splits_evenly(self) -> Self:
        batch = self.data.batch_size
        streams = self.data.num_streams
        if batch % streams:
            near = sorted(divisors(batch), key=lambda s: abs(s - streams))[:4]
            raise ValueError(
                f"data.batch_size = {batch} is not a multiple of data.num_streams = {streams}; "
                f"use num_streams = {' or '.join(map(str, near))}"
            )
        share = batch // streams
        micro = self.data.micro_batch
        if micro is not None and (batch % micro or share % (batch // micro)):
            every = (batch // count for count in divisors(share))
            valid = sorted(sorted(every, key=lambda m: abs(m - micro))[:8])
            raise ValueError(
                f"data.micro_batch = {micro} does not cut the {share} images that each of "
                f"{streams} streams gives to a batch of {batch} into equal slices; use "
                f"micro_batch = {' or '.join(map(str, valid))}"
            )
        return self

    @model_validator(mode="after")
    def _micro_batches_keep_their_embeddings(self) -> Self:
        micro = self.data.micro_batch
        if micro is not None and self.run.compile == "reduce-overhead":
            # a replayed graph writes the embeddings of each micro-batch to the same memory
            raise ValueError(
                f"run.compile = 'reduce-overhead' does not go with data.micro_batch = {micro}, "
                "whose parts overwrite each other's embeddings; use run.compile = 'default'"
            )
        return self
