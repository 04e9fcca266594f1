"""Plan: all that is known of a run before its first step; and the parts that it trains.

`sslpipe.plan.Pretraining` is one, a fine-tuning's plan another. A run needs no more than this.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.optim import Optimizer

from sslpipe.data.index import DatasetIndex, Split
from sslpipe.data.order import Order
from sslpipe.data.partners import Pairing
from sslpipe.data.pipeline import Batch
from sslpipe.distributed import Rank
from sslpipe.recipe.identity import run_identity
from sslpipe.recipe.sections import RunRecipe
from sslpipe.run.health import Alarms


class Views(Protocol):
    """What makes the views of a batch: see `sslpipe.augment.two_views`."""

    crop_px: int  # side of the square views

    def prepare(self, batch: Batch, *, seed: int, number: int) -> Batch:
        """Return the batch with its views planned, by a function of seed, number and ids."""

    def to(self, device: torch.device) -> object:
        """Compute on a device from here on."""

    def __call__(self, batch: Batch, *, dtype: torch.dtype) -> Tensor:
        """Make planned views: all first ones, then all second, (2B, C, S, S)."""


class TrainingParts(ABC):
    """What is trained: built on the CPU by a plan, or handed in."""

    augment: Views
    # is optimised: takes views (B, C, S, S), and what else its forward needs, in one call; it has a
    # `backbone`
    model: Any

    @property
    def backbone(self) -> nn.Module:
        """The encoder, which evaluations embed by."""
        encoder: nn.Module = self.model.backbone
        return encoder

    @property
    def encoder(self) -> nn.Module | None:
        """What takes views alone, where the model takes more."""
        return None

    @property
    def others(self) -> Sequence[nn.Module]:
        """What else a step computes with, on the device and in the model's precision."""
        return []

    @abstractmethod
    def first_frozen(self) -> Sequence[nn.Module]:
        """Return the networks that tune.projector_first_steps keeps out of training."""

    @abstractmethod
    def saved(self) -> Mapping[str, Any]:
        """Return what a checkpoint holds beside the optimizer, by name; "model" is exported."""

    @abstractmethod
    def guarded(self) -> Sequence[nn.Module]:
        """Return the modules whose buffers a non-finite step must not change."""


PartsT = TypeVar("PartsT", bound=TrainingParts)


class RunOrder(Protocol):
    """What a run asks of its order of samples: see `sslpipe.data.order.Order`."""

    samples: int  # that an epoch draws from
    batch_size: int  # images of a global step
    steps_per_epoch: int


class StartingWeights(Protocol):
    """What a run asks of the weights that it starts from: see `sslpipe.export.start.Start`."""

    @property
    def kind(self) -> str:
        """Whether they are "random", "named" by the command, or "kept" by the run."""

    @property
    def weights(self) -> Any:
        """The backbone; None for random ones."""

    def keep(self, run_dir: Path) -> None:
        """Write named weights to the run directory; on rank 0."""


class Scores(NamedTuple):
    """What an evaluation during a run says of a backbone."""

    numbers: dict[str, float]  # by name; none on ranks other than 0
    draw: Callable[[], Image.Image] | None = None  # what lies nearest to some samples, if any
    by_sample: Mapping[int, float] = {}  # id -> MAP@R, where it has one; on rank 0


@dataclass(frozen=True, kw_only=True)
class Plan(ABC, Generic[PartsT]):
    """All that is known of a run before its first step: a value; it opens no device."""

    recipe: RunRecipe  # resolved: backbone, hashes, number of steps
    index: DatasetIndex  # of the channels that are read
    split: Split  # what is trained on, and held out from
    order: RunOrder  # which sample comes in which step
    watched: NDArray[np.int64]  # ids of the held-out samples that are scored during the run
    bank: NDArray[np.int64] | None  # of trained ones that these search, too; None: each other
    start: StartingWeights
    not_used: str | None  # what of the recipe the start replaces, as a sentence; None: nothing

    order_version: ClassVar[int]  # of the rule that orders samples; part of the identity

    def identity(self) -> dict[str, Any]:
        """Return what decides the weights, with its digest; once parts of plug-ins are loaded."""
        return run_identity(self.recipe, self.index, self.order_version)

    @abstractmethod
    def build(self) -> PartsT:
        """Build the parts on the CPU from recipe.seed, the same on every rank.

        Raises:
            RecipeError: The recipe names what cannot be built.
        """

    @abstractmethod
    def remarks(self, parts: PartsT) -> list[str]:
        """List what a user should know before the first step. Raises: RecipeError: refused."""

    @abstractmethod
    def warn_of_memory(self, parts: PartsT, process: Rank) -> None:
        """Warn on rank 0 where a step is likely to need more memory than this machine has free.

        Raises: RecipeError where it can never have as much.
        """

    @abstractmethod
    def groups(self, parts: PartsT) -> list[dict[str, Any]]:
        """Take what [tune] freezes out of training; return the optimizer's parameter groups."""

    def optimizer(self, parts: PartsT) -> Optimizer:
        """Build the optimizer over `groups`, once the parts are on their device."""
        optimizer: Optimizer = self.recipe.optim.build(groups=self.groups(parts))
        return optimizer

    def micro_batches(self, world_size: int) -> list[Tensor]:
        """Return the rows of this rank's micro-batches; one or none: the batch is not cut."""
        return []

    @abstractmethod
    def score(self, parts: PartsT, process: Rank, device: torch.device) -> Scores:
        """Score the parts' backbone, as it is on a device, on the held-out samples. Collective."""

    @abstractmethod
    def draw_views(
        self, ids: NDArray[np.int64], *, epoch: int = 0, num_epochs: int = 1
    ) -> Image.Image:
        """Draw samples (n,) beside their views of some epochs. Raises: DataError: one is bad."""

    @abstractmethod
    def torch_seed(self, step: int, rank: int, micro_batch: int) -> tuple[int, ...]:
        """Return the integers that decide dropout and the like."""

    @abstractmethod
    def alarms(self, parts: PartsT) -> Alarms:
        """Return what reads the numbers of each log line."""

    @abstractmethod
    def metadata(self, parts: PartsT) -> dict[str, Any]:
        """Return plain values that are stored beside each checkpoint."""

    @abstractmethod
    def describe(self) -> str:
        """Describe data and start for the console."""


# of a pretraining


class Objective(Protocol):
    """What a pretraining asks of its loss over two views: see `sslpipe.losses.Objective`."""

    embeds: bool
    had_negatives: bool

    def __call__(self, z_a: Tensor, z_b: Tensor, **known: Tensor) -> Tensor:
        """Compute the loss () over all ranks, of embeddings (B, D) each. Collective."""

    def stats(self) -> dict[str, float]:
        """Return what the log shows of the last call."""


class PretrainingParts(TrainingParts):
    """What a pretraining trains."""

    loss: Objective


PretrainingPartsT = TypeVar("PretrainingPartsT", bound=PretrainingParts)


@dataclass(frozen=True, kw_only=True)
class PretrainingPlan(Plan[PretrainingPartsT]):
    """All that is known of a pretraining before its first step: see `sslpipe.plan.Pretraining`."""

    order: Order
    pairing: Pairing | None  # partners, masks and labels of [pairs]; None without

    @abstractmethod
    def follow(self, parts: PretrainingPartsT, step: int) -> None:
        """Move a momentum encoder behind the trained weights."""
