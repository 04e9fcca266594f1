"""What all kinds of recipe share: sections and their validation."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import (
    AfterValidator,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from sslpipe.errors import RecipeError, did_you_mean, shown
from sslpipe.registry import added
from sslpipe.registry.plugins import plugin_hint
from sslpipe.registry.schema import Kinds, KindSettings, Settings, SparseSettings

EVALUATIONS = 10  # of a run that does not say run.monitor_steps
LARGEST = 2**31 - 1  # of a number of rows, pixels or steps
LONGEST_SIDE_PX = 65_535  # of a JPEG
Positive = Annotated[int, Field(gt=0, le=LARGEST)]
NonNegative = Annotated[int, Field(ge=0, le=LARGEST)]
Width = Annotated[int, Field(gt=0, le=65_536)]  # of a layer
Pixels = Annotated[int, Field(gt=0, le=LONGEST_SIDE_PX)]
Threads = Annotated[int, Field(ge=0, le=1024)]
TRACKER_NAMES = ("wandb", "tensorboard")
Rate = Annotated[float, Field(ge=0, le=1e12)]
Beta = Annotated[float, Field(ge=0, lt=1)]


def _no_twins(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{shown(name)} is named twice")
    return names


# their names are checked with the data set, which knows them
Channels = Annotated[tuple[str, ...], Field(min_length=1), AfterValidator(_no_twins)]


AUGMENT = Kinds("sslpipe.augment.two_views:AUGMENTS")
BACKBONE = Kinds("sslpipe.models.backbones:BACKBONES")
OPTIMIZER = Kinds("sslpipe.optim.optimizers:OPTIMIZERS")


class RunData(Settings):
    """Which images; each kind of run adds its own settings."""

    split: str = "train"
    """The split of dataset.json that is trained on."""
    canvas_px: Pixels = 256
    """Pixels; decoded images larger than this are reduced to fit, never squashed."""
    channels: Channels | None = None
    """Names of the channels to train on, of those of dataset.json, in the order that the network
    takes them; none: all. Part of the digest where it is set."""

    def check_processes(self, world: int) -> None:
        """Refuse a number of processes that cannot share a step: none here. Raises: RecipeError."""


class Optim(KindSettings):
    """The optimizer, its learning rate over the run, and the precision of the arithmetic.

    Each kind adds its own settings: `sslpipe.optim.optimizers`.
    """

    derived = frozenset({"groups"})

    peak_lr: Rate
    """The learning rate at the peak; no scaling rule is applied to it."""
    weight_decay: Rate = 1e-6
    """Weight decay; not on biases and norms unless `decay_one_dim`."""
    decay_one_dim: bool = False
    """Apply weight decay to biases and norms, too."""
    warmup_steps: NonNegative = 0
    """Optimizer steps over which the rate rises linearly from 0 to `peak_lr`."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """The rate after the warm-up; cosine ends at 0."""
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    """Largest norm of the global gradient; none: not clipped."""
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp64"] = "auto"
    """Of the model's arithmetic. auto: bf16 on a CUDA device that has it (Ampere and newer), else
    fp32; fp16 needs CUDA; fp64: for reference runs, exact to rounding. On CUDA, convolutions in
    fp32 round their factors to TF32 (a relative 2^-11) unless
    `torch.backends.cudnn.conv.fp32_precision = "ieee"`."""

    @property
    def state_copies(self) -> int:
        """How many numbers the optimizer keeps of each one that it trains."""
        raise NotImplementedError

    @property
    def gathers_gradients(self) -> bool:
        """Whether its step copies all gradients into one block on a GPU."""
        return False

    def group_settings(self, decayed: bool) -> dict[str, Any]:
        """Return what its step reads of a parameter group beside rate and weight decay."""
        return {}

    def usual_rate(self, batch_size: int) -> tuple[float, str] | None:
        """Return the peak rate that is usual at a batch size, and whose; None: none is known."""
        return None


class Tune(Settings):
    """What of a backbone that starts from weights is trained, and how fast."""

    projector_first_steps: NonNegative = 0
    """First steps in which only what stands behind the backbone is trained: the projector, or a
    fine-tuning's embedding layer and loss. The backbone is in eval mode: with batchnorm = "train"
    what was trained meets other features afterwards; leave it 0 there, and use `ramp_steps`."""
    ramp_steps: NonNegative = 0
    """Steps, from the backbone's first one on, over which its rate rises linearly to the full one;
    on top of optim.warmup_steps."""
    last_blocks: Positive | None = None
    """Train only so many blocks, counted from the output; none: all."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The rate of a block over that of the next one. The blocks of a timm network are those of its
    own `group_matcher`."""
    backbone_lr: Rate = 1.0
    """Times the learning rate: the backbone."""
    batchnorm: Literal["train", "frozen"] = "train"
    """frozen: the statistics of the weights stay."""
    eval_crop_px: Pixels | Literal["auto"] | None = None
    """Side of the images in evaluations, and of the export; none: augment.crop_px. auto: that of
    the export or run that --init names, or PX of SOURCE@PX; of other weights 1.5 times
    augment.crop_px. Random crops show objects larger than whole images do (FixRes, Touvron et al.
    2019, arXiv:1906.06423). Not for networks built for one size, such as ViTs."""


class RunConfig(Settings):
    """What may not change a trained weight beyond float rounding: not part of the digest."""

    log_steps: Positive = 10
    """Optimizer steps between two log lines."""
    monitor_steps: NonNegative | None = None
    """Optimizer steps between two evaluations on held-out samples; 0: never. Not set: a tenth of
    the run where `keep` is best or `patience` is set, else never."""
    save_steps: Positive = 500
    """Optimizer steps between two checkpoints."""
    keep_checkpoints: Annotated[int, Field(ge=2)] = 2
    """How many checkpoints stay; one of them may be in the middle of being written."""
    keep: Literal["last", "best"] | None = None
    """Not set: best in a run from weights and in a fine-tuning, if samples are held out to choose
    by, else last. best: the checkpoint of the best evaluation stays, as `--checkpoint best`. In a
    run from weights these compete, too, as step 0, and every command takes the best unless
    --checkpoint says otherwise: it is never below the start, by the held-out images, and with
    labels clearly above it, or the start. Else every command takes the last one."""
    patience: NonNegative = 0
    """End the run, as done, when so many evaluations in a row were no better than the best one; 0:
    never. Those of the steps of augment.half_size_share do not count. The learning rate still
    follows the whole length of the run."""
    trackers: tuple[str, ...] = ()
    """Where metrics are copied to, beside metrics.jsonl: wandb, tensorboard, or what an
    installed package adds."""
    num_workers: Threads = 2
    """Decoding threads of each process; 0: decode in the training thread."""
    cache: Literal["none", "memory", "device"] = "none"
    """memory: keep decoded images after their first use. device: decode all into the device's
    memory before the first step (pretraining only)."""
    compile: Literal["off", "default", "reduce-overhead"] = "off"
    """torch.compile's mode for the model. reduce-overhead: torch replays the model's passes as CUDA
    graphs, for small encoders, which compute faster than the host launches; not with
    `data.micro_batch`."""
    activation_checkpointing: bool = False
    """Keep only the inputs of the encoder's blocks for the backward pass, which computes the rest
    again (also called gradient checkpointing): less memory for one more forward. For networks
    without BatchNorm: ViT, Swin, ConvNeXt of timm, transformers, open_clip and torchvision."""
    max_bad_steps: Positive = 10
    """Non-finite steps in a row before the run stops."""
    max_bad_fraction: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Share of the samples that may be quarantined before the run stops."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto: CUDA where torch sees it, else the CPU."""
    deterministic: bool = False
    """On CUDA, only algorithms that give the same bits in each run on the same GPU and versions
    (ResNet-50 on an H200: as fast); an op without one is an error. TF32 stays as it is. A CPU needs
    no such setting."""
    timeout_s: Positive = 1800
    """Seconds; a collective, a loader or a save that takes longer ends the job."""

    @field_validator("trackers")
    @classmethod
    def _known_trackers(cls, names: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if not names or info.context == "recorded":  # who only loads a run needs no trackers
            return names
        known = list(dict.fromkeys([*TRACKER_NAMES, *added("sslpipe.trackers")]))
        for name in names:
            if name not in known:
                raise ValueError(
                    f"{name!r} is unknown{did_you_mean(name, known)}{plugin_hint()}; "
                    f"known: {', '.join(known)}"
                )
        return names


class Load(NamedTuple):
    """What a recipe asks of one process at a time."""

    images: int  # of a step, partners of [pairs] too
    together: int  # images whose activations are alive at once
    views: int  # of each image
    remedy: str  # the settings that take less


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ("section.key", value) for all that is no table inside of tables."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


class RunRecipe(Settings):
    """What every kind of run says; each kind adds its own sections."""

    said_elsewhere: ClassVar[frozenset[str]] = frozenset()
    """Keys of [backbone] that other sections of this kind of recipe decide."""
    of_weights: ClassVar[tuple[str, ...]] = ("projector_first_steps", "ramp_steps", "eval_crop_px")
    """Keys of [tune] that only a run from weights may set."""
    learns_classes: ClassVar[bool] = False
    """Whether images of one class are drawn together, which a model card says."""

    _backbone_overrides: frozenset[str] = frozenset()
    # keys of [backbone] that overrides name: weights with others are refused, not preferred

    name: str
    """The run's name in logs and trackers, which make files of it: no path; not part of the
    digest."""
    steps: Positive | None = None
    """Optimizer steps of the whole run; give these or `epochs`."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over the training samples, instead of `steps`; converted to steps once."""
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0
    """Decides initial weights, order and views."""
    data: RunData = RunData()
    """Which images."""
    augment: Annotated[SparseSettings, AUGMENT, Field(examples=["fused"])]
    """The views; `kind` is "fused", the usual one, or "kornia", the slow reference."""
    backbone: SparseSettings | None = None
    """The encoder; none: that of the weights that --init names."""
    loss: KindSettings
    """The objective."""
    optim: Annotated[Optim, OPTIMIZER, Field(examples=["sgd"])]
    """The optimizer and its schedule."""
    tune: Tune = Tune()
    """What of a backbone that starts from weights is trained, and how fast."""
    run: RunConfig = RunConfig()
    """Cadence, devices and caches; changes no weight beyond rounding."""
    init: str = ""
    """Filled in by the program: sha256 of the weights that the run started from, "" for random
    ones. Part of the digest: a resume from others is refused."""

    @field_validator("name")
    @classmethod
    def _file_name(cls, name: str, info: ValidationInfo) -> str:
        if info.context != "recorded" and (wrong := not_a_file_name(name)):
            raise ValueError(f"{shown(name)} {wrong}: trackers make files of it")
        return name

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give exactly one of steps and epochs")
        return self

    def __repr__(self) -> str:
        """Show the settings that are not at their defaults, and the kinds, a line each."""
        changed = dict(leaves(self.model_dump(exclude_none=True, exclude_defaults=True)))
        settings = leaves(self.model_dump(exclude_none=True))
        shown = [(key, value) for key, value in settings if key in changed or "kind" in key]
        return "\n".join([f"{type(self).__name__}:", *(f"{key} = {each!r}" for key, each in shown)])

    def __str__(self) -> str:
        return repr(self)

    def resolved(self, steps_per_epoch: int, **changes: Any) -> Self:
        """Return the recipe, validated anew, with `epochs` as `steps` and these fields replaced."""
        tree = {**self.model_dump(), **changes}
        if self.epochs is not None:
            steps = max(1, round(self.epochs * steps_per_epoch))
            if steps > LARGEST:
                raise RecipeError(
                    f"epochs = {self.epochs:g} are {steps:.3g} steps; a run has at most {LARGEST:,}"
                )
            tree |= {"steps": steps, "epochs": None}
        return type(self).model_validate(tree, context="recorded")  # its words were checked

    @property
    def keeps_best(self) -> bool:
        """Whether run.keep is "best" where it is not set: of a run from weights."""
        return bool(self.init)

    def with_watch(self, can_choose: bool) -> Self:
        """Return the resolved recipe with run.keep and run.monitor_steps filled in.

        Args:
            can_choose: Whether samples are held out by which weights can be compared.
        """
        run = self.run
        watched = self.keeps_best and can_choose and run.monitor_steps != 0
        keep = run.keep or ("best" if watched else "last")
        monitor_steps = run.monitor_steps
        if monitor_steps is None:
            evaluates = keep == "best" or run.patience > 0
            monitor_steps = max(1, self.total_steps // EVALUATIONS) if evaluates else 0
        run = run.model_copy(update={"keep": keep, "monitor_steps": monitor_steps})
        return self.model_copy(update={"run": run})

    def load(self, world: int) -> Load:
        """Return what a step asks of one of `world` processes."""
        raise NotImplementedError(f"{type(self).__name__} does not say what a step takes")

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run. Raises: RecipeError before `resolved`."""
        if self.steps is None:
            raise RecipeError("epochs is given; call resolved(steps_per_epoch) first")
        return self.steps

    @property
    def half_size_steps(self) -> int:
        """First steps whose views have half of augment.crop_px; the last step is never of them.

        Raises: RecipeError before `resolved`.
        """
        share: float = self.augment.arguments.get("half_size_share", 0.0)
        return min(round(share * self.total_steps), self.total_steps - 1)


def divisors(number: int) -> list[int]:
    """List the divisors of a number >= 1, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def not_a_file_name(text: str) -> str | None:
    """Return why a text cannot be the name of a file or a folder; None where it can."""
    if not text.strip() or text in (".", ".."):
        return "is not a name"
    if re.search(r"[/\\\x00-\x1f\x7f]", text) or not text.isprintable():
        return "holds a slash, a backslash or a character that cannot be printed"
    if len(text.encode("utf-8", "replace")) > 200:
        return "is longer than 200 bytes"
    return None
