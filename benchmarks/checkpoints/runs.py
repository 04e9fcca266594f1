"""The runs of the table: each changes one thing of base.toml, for better or worse."""

from pathlib import Path

BASE = Path(__file__).with_name("base.toml")

_CONSTANT = ("optim.peak_lr=1e-2", "optim.schedule=constant")
_AVERAGE = "optim.ema=0.95"  # over the last 1 / (1 - 0.95) = 20 steps

# name -> overrides: temperatures, objectives, rates, views, collapses (of the projection and of the
# weights), averages; no kind is last, so that a table that is stopped early has some of each
RUNS: dict[str, tuple[str, ...]] = {
    "base": (),
    "temperature 0.05": ("loss.temperature=0.05",),
    "temperature 1": ("loss.temperature=1.0",),
    "rate / 20": ("optim.peak_lr=1e-4",),
    "strong views": ("augment.crop_area=[0.02,0.3]", "augment.jitter_strength=1.0"),
    "weights decay": (
        "optim.weight_decay=20.0",
        "optim.decay_one_dim=true",
        "optim.schedule=constant",
    ),
    "weak views": ("augment.crop_area=[0.9,1.0]", "augment.jitter_prob=0.0"),
    "moco": ("loss.kind=moco", "loss.queue_rows=1024", "momentum.start=0.99"),
    "projection of 2": ("projector.out_dim=2",),
    "rate x 10": ("optim.peak_lr=2e-2", "optim.warmup_steps=0"),
    "dcl": ("loss.kind=dcl",),
    "colour alone": ("augment.crop_area=[0.9,1.0]", "augment.jitter_strength=1.0"),
    "constant rate x 5": _CONSTANT,
    "constant rate x 5, averaged": (*_CONSTANT, _AVERAGE),
    "hard negatives": ("loss.kind=hard_negatives",),
    "averaged": (_AVERAGE,),
    "temperature 0.5": ("loss.temperature=0.5",),
    "seed 1": ("seed=1",),
}
