"""Two SimCLR views of every image of a batch: images a second, ours against peers.

    python -m benchmarks.views [--cases 32,96,224] [--only ours,kornia] [--threads 1] [--seconds 4]
                               [--rounds 3] [--device cpu] [--json FILE]

Cases: 256 images of 32 px to 32 px; 64 of 96 px to 96 px; 16 of 500 x 375 px to 224 px. All
contenders do the preset `simclr` (strength 1.0, blur and all) and draw their own parameters; ours
and kornia take one uint8 batch, the others one decoded image at a time, in the form they like best.
Each contender runs in a fresh process, in turn with the others, `rounds` times; the figure is the
median over all calls, "+-" half the interquartile range of all calls over the median.
The limit: one float32 copy of the views into channels_last, measured in the same run.
Ratios are against torchvision on PIL images and the faster of kornia's two crops.
"""

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from sslpipe.augment.parameters import draws
from sslpipe.augment.two_views import FusedViews
from sslpipe.data.loader import Batch

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
Call = Callable[[], Any]


class Case(NamedTuple):
    count: int
    height: int
    width: int
    crop_px: int

    @property
    def blur_px(self) -> int:
        return self.crop_px // 10 // 2 * 2 + 1

    def images(self) -> Tensor:
        """(count, 3, H, W) uint8, as smooth as photographs: noise enlarged eight times."""
        generator = torch.Generator().manual_seed(0)
        coarse = torch.rand(
            self.count, 3, self.height // 8 + 2, self.width // 8 + 2, generator=generator
        )
        fine = torch.nn.functional.interpolate(coarse, (self.height, self.width), mode="bicubic")
        return (fine * 255).round().clamp(0, 255).to(torch.uint8)


CASES = {32: Case(256, 32, 32, 32), 96: Case(64, 96, 96, 96), 224: Case(16, 375, 500, 224)}


def ours(case: Case, device: str, *, compile: bool = False, **settings: Any) -> Call:
    augment = FusedViews("simclr", case.crop_px, MEAN, STD, **settings).to(device)
    if compile:
        augment.compile_colours()
    images = case.images().contiguous(memory_format=torch.channels_last).to(device)  # the loader's
    sizes = torch.tensor([[case.height, case.width]] * case.count)
    ids = torch.arange(case.count)
    epoch = iter(range(10**9))  # other parameters in each call

    def call() -> None:
        batch = Batch(images, sizes, ids, ids, ids, next(epoch))
        augment(batch, draws(0, batch.epoch, ids, sizes, augment.specs))

    return call


def kornia(case: Case, device: str, *, cropping: str) -> Call:
    import kornia.augmentation as K

    augment = K.AugmentationSequential(
        K.RandomResizedCrop((case.crop_px,) * 2, scale=(0.08, 1.0), cropping_mode=cropping),
        K.RandomHorizontalFlip(),
        K.ColorJitter(0.8, 0.8, 0.8, 0.2, p=0.8),
        K.RandomGrayscale(p=0.2),
        K.RandomGaussianBlur((case.blur_px,) * 2, (0.1, 2.0), p=0.5),
        K.Normalize(torch.tensor(MEAN), torch.tensor(STD)),
        data_keys=["input"],
    )
    images = case.images().to(device)

    def call() -> None:
        pixels = images.float() / 255
        augment(pixels)
        augment(pixels)

    return call


def torchvision(case: Case, device: str, *, form: str) -> Call:
    """form: "pil", or tensors, "uint8" or "float". One image at a time, as in a Dataset."""
    from torchvision.transforms import v2

    first = {"pil": [], "uint8": [], "float": [v2.ToDtype(torch.float32, scale=True)]}[form]
    last = {"pil": [v2.ToImage()], "uint8": [], "float": []}[form]
    augment = v2.Compose(
        [
            *first,
            v2.RandomResizedCrop(case.crop_px, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.RandomApply([v2.ColorJitter(0.8, 0.8, 0.8, 0.2)], p=0.8),
            v2.RandomGrayscale(p=0.2),
            v2.RandomApply([v2.GaussianBlur(case.blur_px, (0.1, 2.0))], p=0.5),
            *last,
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ]
    )
    images = pil_images(case) if form == "pil" else list(case.images())

    def call() -> None:
        torch.stack([augment(image) for _ in range(2) for image in images])

    return call


def lightly(case: Case, device: str) -> Call:
    from lightly.transforms import SimCLRTransform

    augment = SimCLRTransform(
        input_size=case.crop_px, sigmas=(0.1, 2.0), normalize={"mean": MEAN, "std": STD}
    )
    images = pil_images(case)

    def call() -> None:
        pairs = [augment(image) for image in images]
        torch.stack([view for pair in pairs for view in pair])

    return call


def pil_images(case: Case) -> list[Image.Image]:
    return [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in case.images()]


def output_copy(case: Case, device: str) -> Call:
    views = torch.rand(2 * case.count, 3, case.crop_px, case.crop_px, device=device)
    views = views.contiguous(memory_format=torch.channels_last)
    out = torch.empty_like(views)
    return lambda: out.copy_(views)


CONTENDERS: dict[str, Callable[[Case, str], Call]] = {
    "ours": ours,
    "ours, bf16 blur": lambda case, device: ours(case, device, blur="bf16"),
    "ours, compiled": lambda case, device: ours(case, device, compile=True),
    "ours, compiled, bf16 blur": lambda case, device: ours(case, device, compile=True, blur="bf16"),
    "kornia, slice": lambda case, device: kornia(case, device, cropping="slice"),
    "kornia, resample": lambda case, device: kornia(case, device, cropping="resample"),
    "torchvision v2, uint8": lambda case, device: torchvision(case, device, form="uint8"),
    "torchvision v2, float": lambda case, device: torchvision(case, device, form="float"),
    "torchvision, PIL": lambda case, device: torchvision(case, device, form="pil"),
    "lightly": lightly,
    "limit: copy of the views": output_copy,
}
NEEDS = {"lightly": "lightly"}


def measure(contender: str, case: Case, threads: int, seconds: float, device: str) -> list[float]:
    """Seconds of each call that fits into `seconds`, at least 3, after a warm-up of 2."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    np.random.seed(0)
    call = CONTENDERS[contender](case, device)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times: list[float] = []
    for _ in range(2):
        call()
    while len(times) < 3 or sum(times) < seconds:
        wait()
        start = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - start)
    return times


def in_fresh_process(contender: str, crop_px: int, arguments: argparse.Namespace) -> list[float]:
    command = [sys.executable, "-m", "benchmarks.views", "--one", contender]
    command += ["--cases", str(crop_px), "--threads", str(arguments.threads)]
    command += ["--seconds", str(arguments.seconds), "--device", arguments.device]
    environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{contender} at {crop_px} px failed:\n{done.stderr[-2000:]}")
    times: list[float] = json.loads(done.stdout.splitlines()[-1])
    return times


def hardware() -> dict[str, str]:
    cpu = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.split(":")[1].strip()
            break
    names = ("torch", "torchvision", "kornia", "lightly", "pillow")
    found = {name: version(name) for name in names if importlib.util.find_spec(_module(name))}
    return {"cpu": cpu, "vectors": torch.backends.cpu.get_cpu_capability(), **found}


def _module(package: str) -> str:
    return "PIL" if package == "pillow" else package


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", default="32,96,224")
    parser.add_argument("--only", help="contenders whose name begins with one of these")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=4.0, help="a contender, case and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", choices=CONTENDERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    cases = [int(case) for case in arguments.cases.split(",")]
    if arguments.one:
        times = measure(
            arguments.one, CASES[cases[0]], arguments.threads, arguments.seconds, arguments.device
        )
        print(json.dumps(times))
        return

    absent = [name for name, module in NEEDS.items() if importlib.util.find_spec(module) is None]
    wanted = tuple(arguments.only.split(",")) if arguments.only else ("",)
    names = [name for name in CONTENDERS if name not in absent and name.startswith(wanted)]
    records: list[dict[str, Any]] = []
    for crop_px in cases:
        case, times = CASES[crop_px], {name: list[float]() for name in names}
        for _ in range(arguments.rounds):
            for name in names:
                times[name] += in_fresh_process(name, crop_px, arguments)
        rows = [summary(name, case, of_name) for name, of_name in times.items()]
        records += rows
        print(table(case, rows), flush=True)
    if absent:
        print(f"left out, not installed (extra `bench`): {', '.join(absent)}")
    machine = hardware() | {"device": arguments.device, "threads": str(arguments.threads)}
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"machine": machine, "results": records}, indent=1) + "\n"
        )


def summary(name: str, case: Case, times: list[float]) -> dict[str, Any]:
    low, middle, high = statistics.quantiles(times, n=4)
    return {
        "case": f"{case.width}x{case.height} -> {case.crop_px} px, batch {case.count}",
        "contender": name,
        "images_per_s": case.count / middle,
        "spread": (high - low) / 2 / middle,
        "calls": len(times),
    }


def table(case: Case, rows: list[dict[str, Any]]) -> str:
    rate = {row["contender"]: row["images_per_s"] for row in rows}
    kornias = [rate[name] for name in rate if name.startswith("kornia")]
    pil = rate.get("torchvision, PIL")
    lines = [
        f"\n{rows[0]['case']}\n",
        "| two views of each image | images/s | +- | x kornia | x PIL | x lightly |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        speed = row["images_per_s"]
        ratios = [
            f"{speed / base:.1f}" if base else ""
            for base in (max(kornias, default=None), pil, rate.get("lightly"))
        ]
        lines.append(
            f"| {row['contender']} | {speed:.0f} | {row['spread']:.0%} | {' | '.join(ratios)} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
