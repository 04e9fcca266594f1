"""Two SimCLR views of every image of a batch: images a second, ours against peers.

    python -m benchmarks.views [--cases 32,96,224] [--only ours kornia] [--threads 1]
                               [--seconds 0.7] [--rounds 8] [--device cpu]
                               [--json docs/measured/views_speed.json]
                               [--markdown docs/views_speed.md]

Cases: 256 images of 32 px to 32 px; 64 of 96 px to 96 px; 16 of 500 x 375 px to 224 px. All
contenders do the preset `simclr` (strength 1.0, blur and all) and draw their own parameters; ours
and kornia take one uint8 batch, the others one decoded image at a time, in the form they like best.
Each contender has a fresh process, which waits while another measures; they take turns, `rounds`
times. Time is the process's CPU time (wall time with more threads or on a GPU); the figure is the
median call of the quietest round, "noise" how much slower the median round was: on an idle machine
a few per cent. The limit: one copy of the float32 views, measured in the same run. Ours and the
limit keep freed memory (sslpipe.portable), as every run does; it is worth up to 7 % here.
Ratios are against torchvision on PIL images and the faster of kornia's two crops. `--cases ""`
measures nothing and writes the tables of what --json holds.
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
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from benchmarks.documented import compare
from sslpipe.augment.params import draws
from sslpipe.augment.resample import bfloat16_pays
from sslpipe.augment.two_views import FusedViews
from sslpipe.data.pipeline import Batch
from sslpipe.portable import keep_freed_memory

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
    """form: "pil", or tensors on the device, "uint8" or "float". One image at a time."""
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
    images = pil_images(case) if form == "pil" else list(case.images().to(device))

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


class Contender:
    """A fresh process that measures when asked to, and otherwise waits."""

    def __init__(self, module: str, name: str, arguments: list[str], threads: int) -> None:
        self.name = name
        command = [sys.executable, "-W", "ignore", "-m", module, "--one", name, *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, env=environment
        )
        self.ready = self._read()  # what it says when it has warmed up

    def times(self) -> list[float]:
        """Seconds of each call of one round."""
        assert self.process.stdin
        print(file=self.process.stdin, flush=True)
        times: list[float] = json.loads(self._read())
        return times

    def close(self) -> None:
        """End it, by the end of its input, and wait for that."""
        self.process.communicate()

    def _read(self) -> str:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            self.close()
            raise SystemExit(f"{self.name} failed with {self.process.returncode}")
        return line


def in_turns(
    module: str, names: Iterable[str], arguments: list[str], *, threads: int, rounds: int
) -> tuple[dict[str, list[list[float]]], dict[str, str]]:
    """Measure contenders in turns: seconds of their calls by round, and what each said first."""
    with ExitStack() as stack:
        processes = []
        for name in names:
            processes.append(Contender(module, name, arguments, threads))
            stack.callback(processes[-1].close)
        times: dict[str, list[list[float]]] = {process.name: [] for process in processes}
        for _ in range(rounds):
            for process in processes:
                times[process.name].append(process.times())
    return times, {process.name: process.ready for process in processes}


def serve(
    call: Call, *, seconds: float, threads: int, device: str = "cpu", ready: str = "ready"
) -> None:
    """The contender's side: two calls to warm up, then a round for each line of stdin."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    clock = time.process_time if device == "cpu" and threads == 1 else time.perf_counter
    for _ in range(2):
        call()
    print(ready, flush=True)
    for _ in sys.stdin:
        times: list[float] = []
        while not times or sum(times) < seconds:
            wait()
            start = clock()
            call()
            wait()
            times.append(clock() - start)
        print(json.dumps(times), flush=True)


def quietest(rounds: list[list[float]]) -> tuple[float, float]:
    """Seconds of the median call of the quietest round, and the noise (see the module)."""
    medians = sorted(statistics.median(times) for times in rounds)
    return medians[0], statistics.median(medians) / medians[0] - 1


def chosen(name: str, only: list[str] | None) -> bool:
    """Whether `only` holds the name, or its part before a comma or colon."""
    return not only or any(part in only for part in (name, *name.split(",", 1), *name.split(":")))


def hardware() -> dict[str, str]:
    """Commit, processor, versions: a number is worth nothing without them."""
    cpu = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.split(":")[1].strip()
            break
    names = ("torch", "torchvision", "kornia", "lightly", "pillow")
    versions = {name: version(name) for name in names if importlib.util.find_spec(_module(name))}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return {
        "commit": commit.stdout.strip(),
        "cpu": cpu,
        "vectors": torch.backends.cpu.get_cpu_capability(),
        **versions,
    }


def _module(package: str) -> str:
    return "PIL" if package == "pillow" else package


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", default="32,96,224")
    parser.add_argument("--only", nargs="+", help="contenders by name, or what precedes its comma")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.7, help="a contender and round")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--one", choices=CONTENDERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    cases = [int(case) for case in arguments.cases.split(",") if case]
    if arguments.one:
        torch.set_num_threads(arguments.threads)
        torch.manual_seed(0)
        if arguments.one.startswith(("ours", "limit")):
            keep_freed_memory()
        call = CONTENDERS[arguments.one](CASES[cases[0]], arguments.device)
        serve(call, seconds=arguments.seconds, threads=arguments.threads, device=arguments.device)
        return

    absent = [name for name, module in NEEDS.items() if importlib.util.find_spec(module) is None]
    if not bfloat16_pays(torch.device(arguments.device)):
        absent += [name for name in CONTENDERS if "bf16" in name]  # exact then, and twice the same
    names = [n for n in CONTENDERS if n not in absent and chosen(n, arguments.only)]
    records: list[dict[str, Any]] = []
    for crop_px in cases:
        own = ["--cases", str(crop_px), "--threads", str(arguments.threads)]
        own += ["--seconds", str(arguments.seconds), "--device", arguments.device]
        turns = {"threads": arguments.threads, "rounds": arguments.rounds}
        times, _ = in_turns("benchmarks.views", names, own, **turns)
        rows = [summary(name, CASES[crop_px], of_name) for name, of_name in times.items()]
        records += rows
        print(table(rows), flush=True)
    if absent:
        print(f"skipped, not installed (extra `bench`) or no use here: {', '.join(absent)}")
    machine = hardware() | {"device": arguments.device, "threads": str(arguments.threads)}
    report = {"machine": machine, "results": records}
    if not cases:
        report = json.loads(arguments.json.read_text())
    elif arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    compare("views_speed.json", report, ratios)
    print(machine_line(report["machine"]))
    if arguments.markdown:
        arguments.markdown.write_text(markdown(report))


def summary(name: str, case: Case, rounds: list[list[float]]) -> dict[str, Any]:
    seconds, noise = quietest(rounds)
    return {
        "case": f"{case.width}x{case.height} -> {case.crop_px} px, batch {case.count}",
        "contender": name,
        "images_per_s": round(case.count / seconds, 2),
        "noise": round(noise, 3),
        "calls": sum(len(times) for times in rounds),
    }


def machine_line(machine: dict[str, str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in machine.items())


def markdown(report: dict[str, Any]) -> str:
    """docs/views_speed.md."""
    tables = [table(list(rows)) for _, rows in groupby(report["results"], lambda row: row["case"])]
    head = """# How fast the views are

Two SimCLR views of every image (strength 1.0, blur and all), by `python -m benchmarks.views`: one
process a contender, one core, in turns; CPU time of the median call in the quietest round. Ours and
the limit keep freed memory, as every run does.
"""
    return f"{head}{machine_line(report['machine'])}.\n" + "\n".join(tables) + "\n"


def ratios(report: dict[str, Any]) -> dict[str, float]:
    """Times as fast as each peer, by case."""
    rates = {(row["case"], row["contender"]): row["images_per_s"] for row in report["results"]}
    return {
        f"{case}: {name}, {peer}": rate / rates[case, peer]
        for (case, name), rate in rates.items()
        for peer in CONTENDERS
        if name.startswith("ours") and not peer.startswith("ours") and (case, peer) in rates
    }


def table(rows: list[dict[str, Any]]) -> str:
    rate = {row["contender"]: row["images_per_s"] for row in rows}
    kornias = [rate[name] for name in rate if name.startswith("kornia")]
    pil = rate.get("torchvision, PIL")
    lines = [
        f"\n## {rows[0]['case']}\n",
        "| two views of each image | images/s | noise | x kornia | x PIL | x lightly |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        speed = row["images_per_s"]
        ratios = [
            f"{speed / base:.1f}" if base else ""
            for base in (max(kornias, default=None), pil, rate.get("lightly"))
        ]
        lines.append(
            f"| {row['contender']} | {speed:.0f} | {row['noise']:.0%} | {' | '.join(ratios)} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
