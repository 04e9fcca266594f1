"""A pretraining by hand: a plan and parts of the contract alone, and a run of it.

python -m tests.helpers.toy_plan DATA RUN_DIR: the modules of sslpipe that it loads, as JSON.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sslpipe.data.index import load_index
from sslpipe.data.order import Order
from sslpipe.pretrain import pretrain
from sslpipe.recipe.sections import Optim, RunConfig, RunData, RunRecipe, Tune
from sslpipe.registry.schema import SparseSettings
from sslpipe.run.contract import PretrainingParts, PretrainingPlan, Scores
from sslpipe.run.health import Alarms

STEPS = 4


class Corners:
    """Both views are the image's upper left corner."""

    crop_px = 8

    def prepare(self, batch, *, seed, number):
        return batch

    def to(self, device):
        return self

    def __call__(self, batch, *, dtype):
        view = batch.images[:, :, : self.crop_px, : self.crop_px].to(dtype) / 255
        return torch.cat([view, view])


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Flatten(), nn.LazyLinear(4))

    def forward(self, views):
        return self.backbone(views)


class Length(nn.Module):
    """Draws embeddings to length 0."""

    embeds = True
    had_negatives = False

    def forward(self, z_a: Tensor, z_b: Tensor, *, ids: Tensor, labels: Tensor) -> Tensor:
        return (z_a.square() + z_b.square()).mean()

    def stats(self):
        return {}


class Parts(PretrainingParts):
    def __init__(self):
        torch.manual_seed(0)
        self.augment = Corners()
        self.model = Linear()
        self.model(torch.zeros(2, 3, 8, 8))
        self.loss = Length()

    def first_frozen(self):
        return [self.model.backbone]

    def saved(self):
        return {"model": self.model}

    def guarded(self):
        return [self.model]


class Random:
    kind = "random"
    weights = None

    def keep(self, run_dir):
        pass


@dataclass(frozen=True, kw_only=True)
class Toy(PretrainingPlan[Parts]):
    followed: list[int] = field(default_factory=list)

    @classmethod
    def make(cls, data: Path) -> "Toy":
        recipe = RunRecipe.model_construct(  # its parts are those above: nothing is looked up
            name="toy",
            steps=STEPS,
            data=RunData(canvas_px=16),
            augment=SparseSettings(kind="by hand"),
            loss=None,
            optim=Optim(kind="by hand", peak_lr=0.01, clip_norm=1.0),
            tune=Tune(),
            run=RunConfig(num_workers=0, log_steps=1, monitor_steps=2, keep="last", device="cpu"),
        )
        index = load_index(data)
        split = index.split("train")
        return cls(
            recipe=recipe,
            index=index,
            split=split,
            order=Order(split.starts, seed=0, batch_size=8, num_streams=2, window=16),
            watched=np.arange(2),
            bank=None,
            start=Random(),
            not_used=None,
            pairing=None,
        )

    def build(self):
        return Parts()

    def identity(self) -> dict[str, Any]:
        return {"digest": "0" * 64, "recipe": {}, "index_sha256": "0" * 64, "order_version": 1}

    def remarks(self, parts):
        return ["this is a toy"]

    def warn_of_memory(self, parts, process):
        pass

    def groups(self, parts):
        return [{"params": list(parts.model.parameters())}]

    def optimizer(self, parts):
        return torch.optim.SGD(self.groups(parts), lr=0.01)

    def score(self, parts, process, device):
        return Scores({"trace": parts.backbone[1].weight.sum().item()})

    def draw_views(self, ids, *, epoch=0, num_epochs=1):
        raise NotImplementedError

    def torch_seed(self, step, rank, micro_batch):
        return (step, rank, micro_batch)

    def alarms(self, parts):
        return Alarms(STEPS)

    def metadata(self, parts):
        return {}

    def describe(self):
        return "by hand"

    def follow(self, parts, step):
        self.followed.append(step)


def main(data: str, run_dir: str) -> None:
    plan = Toy.make(Path(data))
    pretrain(plan, Path(run_dir))
    assert plan.followed == list(range(STEPS))
    print(json.dumps(sorted(name for name in sys.modules if name.startswith("sslpipe."))))


if __name__ == "__main__":
    main(*sys.argv[1:])
