"""A whole training step at 32 px: views, ResNet-18, loss, gradient, SGD; ours against the usual.

    python -m benchmarks.step [--batch 64] [--threads 1] [--rounds 3] [--only NAME] [--json FILE]

Each contender has a fresh process, which waits while another measures (see benchmarks.views for
the time that is taken); two steps of warm-up, in which the compiled ones compile. The encoder is
ResNet-18 with the small-image stem and a projector; `bare encoder` gets ready views and a loss that
costs nothing (the mean of z). Both keep freed memory (sslpipe.portable), as every run does.
naive: kornia's AugmentationSequential, float32, contiguous, lightly's NTXentLoss.
parts: views and loss (forward and backward, from z) alone, for their share of a step. Needs the
extra `bench` for lightly.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import (
    Call,
    absent,
    chosen,
    compare,
    in_turns,
    machine,
    machine_line,
    print_table,
    quietest,
    save,
    timing_parser,
)
from benchmarks.views import Case, kornia, ours
from sslpipe.losses import NTXentLoss
from sslpipe.models.backbones import backbone_settings, build_backbone
from sslpipe.models.simclr import SimCLR
from sslpipe.portable import keep_freed_memory
from sslpipe.recipe.pretrain import Projector

CROP_PX, TEMPERATURE = 32, 0.1
Loss = Callable[[Tensor, Tensor], Tensor]


def kornia_views(case: Case) -> Callable[[], Tensor]:
    views = kornia(case, "cpu", cropping="slice")
    return lambda: torch.cat(views())


def lightly_loss() -> Loss:
    from lightly.loss import NTXentLoss as Peer

    peer: Loss = Peer(temperature=TEMPERATURE)
    return peer


def step(
    views: Callable[[], Tensor], loss: Loss, *, bf16: bool, fast: bool, compile: bool = False
) -> Call:
    """fast: channels_last."""
    torch.manual_seed(0)
    backbone = build_backbone(backbone_settings(kind="torchvision/resnet18"), crop_px=CROP_PX)
    model: torch.nn.Module = SimCLR(backbone, Projector())
    if fast:
        model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    run = torch.compile(model) if compile else model

    def call() -> None:
        batch = views()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            z = run(batch)
        z_a, z_b = z.float().chunk(2)
        loss(z_a, z_b).backward()
        optimizer.step()
        optimizer.zero_grad()

    return call


def no_loss(z_a: Tensor, z_b: Tensor) -> Tensor:
    return z_a.mean() + z_b.mean()


def loss_alone(loss: Loss, count: int) -> Call:
    z_a, z_b = (torch.randn(count, 128).requires_grad_() for _ in range(2))

    def call() -> None:
        torch.autograd.grad(loss(z_a, z_b), (z_a, z_b))

    return call


def contenders(count: int) -> dict[str, Callable[[], Call]]:
    case = Case(count, CROP_PX, CROP_PX, CROP_PX)
    ready = torch.randn(2 * count, 3, CROP_PX, CROP_PX)
    ready = ready.contiguous(memory_format=torch.channels_last)
    our_views, our_loss = partial(ours, case, "cpu"), NTXentLoss(temperature=TEMPERATURE)
    found: dict[str, Callable[[], Call]] = {
        "naive": lambda: step(kornia_views(case), lightly_loss(), bf16=False, fast=False)
    }
    for name, settings in {
        "fp32": {"bf16": False},
        "bf16": {"bf16": True},
        "bf16, compiled": {"bf16": True, "compile": True},
    }.items():
        whole = partial(step, fast=True, **settings)
        found[f"ours, {name}"] = lambda whole=whole: whole(our_views(), our_loss)
        found[f"bare encoder, {name}"] = partial(whole, lambda: ready, no_loss)
    return found | {
        "part: our views": our_views,
        "part: kornia's views": partial(kornia_views, case),
        "part: our loss": lambda: loss_alone(our_loss, count),
        "part: lightly's loss": lambda: loss_alone(lightly_loss(), count),
    }


def prepared(name: str, count: int) -> tuple[Call, None]:
    if name.startswith(("ours", "bare encoder")):
        keep_freed_memory()
    return contenders(count)[name](), None


def ratios(report: dict[str, Any]) -> dict[str, float]:
    """Times as fast as the naive step, and the share of the bare encoder's speed."""
    seconds = report["seconds"]
    found = {}
    for name in (each for each in seconds if each.startswith("ours")):
        for other in ("naive", name.replace("ours", "bare encoder")):
            if other in seconds:
                found[f"{name}, {other}"] = seconds[other] / seconds[name]
    return found


def main() -> None:
    parse = timing_parser(__doc__, rounds=3, seconds=0.5)
    parse.add_argument("--batch", type=int, default=64)
    parse.add_argument("--only", nargs="+", help="contenders by name; part: all parts")
    given = parse.parse_args()
    skipped = absent({"lightly": "lightly"})
    names = [
        name
        for name in contenders(1)
        if chosen(name, given.only) and not (skipped and ("naive" in name or "lightly" in name))
    ]
    times, _ = in_turns(prepared, {name: (name, given.batch) for name in names}, given)
    seconds = {name: quietest(rounds)[0] for name, rounds in times.items()}
    rows = []
    for name, second in seconds.items():
        bare, naive = seconds.get(name.replace("ours", "bare encoder")), seconds.get("naive")
        cells = [name, f"{second * 1e3:.1f}", f"{given.batch / second:.1f}"]
        cells.append(f"{naive / second:.2f}" if naive and "part" not in name else "")
        cells.append(f"{bare / second:.1%}" if bare and name.startswith("ours") else "")
        rows.append(cells)
    print(f"\nResNet-18, {CROP_PX} px, {given.batch} images a step")
    print_table(["", "ms", "images/s", "x naive", "of the bare encoder"], rows)
    for name in ("ours, fp32", "ours, bf16", "ours, bf16, compiled"):
        parts = ["part: our views", "part: our loss"]
        if all(part in seconds for part in (name, *parts)):
            share = sum(seconds[part] for part in parts) / seconds[name]
            print(f"views and loss: {share:.2%} of the step of `{name}`")
    facts = machine(given.threads) | {"batch": given.batch}
    print(machine_line(facts))
    compare("step_speed.json", {"seconds": seconds}, ratios)
    save(given.json, {"machine": facts, "seconds": seconds})


if __name__ == "__main__":
    main()
