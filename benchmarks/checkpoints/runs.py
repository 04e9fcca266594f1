"""The runs of the table: each changes one thing of base.toml, for better or worse."""

from pathlib import Path

BASE = Path(__file__).with_name("base.toml")

# name -> overrides
RUNS: dict[str, tuple[str, ...]] = {
    "base": (),
    "seed 1": ("seed=1",),
    # temperatures
    "temperature 0.05": ("loss.temperature=0.05",),
    "temperature 0.5": ("loss.temperature=0.5",),
    "temperature 1": ("loss.temperature=1.0",),
    # objectives
    "dcl": ("loss.kind=dcl",),
    "hard negatives": ("loss.kind=hard_negatives",),
    "moco": ("loss.kind=moco", "loss.queue_rows=1024", "momentum.start=0.99"),
    # rates
    "rate / 20": ("optim.peak_lr=1e-4",),
    "rate x 10": ("optim.peak_lr=2e-2", "optim.warmup_steps=0"),
    "constant rate x 5": ("optim.peak_lr=1e-2", "optim.schedule=constant"),
    # views
    "weak views": ("augment.crop_area=[0.9,1.0]", "augment.jitter_prob=0.0"),
    "colour alone": ("augment.crop_area=[0.9,1.0]", "augment.jitter_strength=1.0"),
    "strong views": ("augment.crop_area=[0.02,0.3]", "augment.jitter_strength=1.0"),
    # collapses: of the projection, of its gradient, of the weights
    "projection of 2": ("projector.out_dim=2",),
    "weights decay": (
        "optim.weight_decay=20.0",
        "optim.decay_one_dim=true",
        "optim.schedule=constant",
    ),
    # the weights of two runs above, averaged over the last 1 / (1 - 0.95) = 20 steps
    "averaged": ("optim.ema=0.95",),
    "constant rate x 5, averaged": (
        "optim.peak_lr=1e-2",
        "optim.schedule=constant",
        "optim.ema=0.95",
    ),
}
