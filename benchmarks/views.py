"""Two SimCLR views of every image of a batch: images a second, ours against peers.

    python -m benchmarks.views [--cases 32,96,224] [--only ours kornia] [--threads 1]
                               [--seconds 0.7] [--rounds 8] [--device cpu]
                               [--json docs/measured/views_speed.json]

Cases: 256 images of 32 px to 32 px; 64 of 96 px to 96 px; 16 of 500 x 375 px to 224 px; 224x5, the
last in float32 of five channels, of which ours and kornia can make views. All
contenders do the preset `simclr` (strength 1.0, blur and all) and draw their own parameters; ours
and kornia take one uint8 batch, the others one decoded image at a time, in the form they like best.
Each contender has a fresh process, which waits while another measures; they take turns, `rounds`
times. Time is the process's CPU time (wall time with more threads or on a GPU); the figure is the
median call of the quietest round, "noise" how much slower the median round was: on an idle machine
a few per cent. The limit: one copy of the float32 views, measured in the same run. Ours and the
limit keep freed memory (sslpipe.portable), as every run does; it is worth up to 7 % here.
Ratios are against torchvision on PIL images and the faster of kornia's two crops. `--cases ""`
measures nothing and compares what --json holds.
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from benchmarks.common import (
    Call,
    absent,
    chosen,
    compare,
    in_turns,
    machine,
    machine_line,
    markdown_table,
    quietest,
    save,
    timing_parser,
)
from sslpipe.augment.ops import draws
from sslpipe.augment.two_views import FusedViews
from sslpipe.data.pipeline import Batch
from sslpipe.portable import keep_freed_memory

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Case(NamedTuple):
    count: int
    height: int
    width: int
    crop_px: int
    channels: int = 3

    @property
    def blur_px(self) -> int:
        return self.crop_px // 10 // 2 * 2 + 1

    def images(self) -> Tensor:
        """(count, C, H, W), as smooth as photographs: noise enlarged eight times.

        uint8 of three channels, float32 of others.
        """
        generator = torch.Generator().manual_seed(0)
        coarse = torch.rand(
            (self.count, self.channels, self.height // 8 + 2, self.width // 8 + 2),
            generator=generator,
        )
        fine = torch.nn.functional.interpolate(coarse, (self.height, self.width), mode="bicubic")
        if self.channels != 3:
            return fine * 255
        return (fine * 255).round().clamp(0, 255).to(torch.uint8)


CASES = {
    "32": Case(256, 32, 32, 32),
    "96": Case(64, 96, 96, 96),
    "224": Case(16, 375, 500, 224),
    "224x5": Case(16, 375, 500, 224, 5),
}


def ours(case: Case, device: str, **settings: Any) -> Call:
    if case.channels == 3:
        settings |= {"mean": MEAN, "std": STD}
    else:
        settings |= {"channels": [f"band{k}" for k in range(case.channels)]}
    augment = FusedViews("simclr", case.crop_px, **settings).to(device)
    images = case.images().contiguous(memory_format=torch.channels_last).to(device)  # the loader's
    sizes = torch.tensor([[case.height, case.width]] * case.count)
    ids = torch.arange(case.count)
    epoch = iter(range(10**9))  # other parameters in each call

    def call() -> Tensor:
        batch = Batch(images, sizes, ids, ids, ids, next(epoch))
        return augment(batch, draws(0, batch.epoch, ids, sizes, augment.specs))

    return call


def kornia_augment(case: Case, *, cropping: str) -> Any:
    import kornia.augmentation as K

    colours = [K.ColorJitter(0.8, 0.8, 0.8, 0.2, p=0.8), K.RandomGrayscale(p=0.2)]
    if case.channels != 3:
        colours = [K.RandomBrightness((0.2, 1.8), p=0.8), K.RandomContrast((0.2, 1.8), p=0.8)]
    mean, std = (MEAN, STD) if case.channels == 3 else ((0.5,) * case.channels,) * 2
    return K.AugmentationSequential(
        K.RandomResizedCrop((case.crop_px,) * 2, scale=(0.08, 1.0), cropping_mode=cropping),
        K.RandomHorizontalFlip(),
        *colours,
        K.RandomGaussianBlur((case.blur_px,) * 2, (0.1, 2.0), p=0.5),
        K.Normalize(torch.tensor(mean), torch.tensor(std)),
        data_keys=["input"],
    )


def kornia(case: Case, device: str, *, cropping: str) -> Call:
    augment = kornia_augment(case, cropping=cropping)
    images = case.images().to(device)

    def call() -> tuple[Tensor, Tensor]:
        pixels = images.float() / 255
        return augment(pixels), augment(pixels)

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
    "kornia, slice": lambda case, device: kornia(case, device, cropping="slice"),
    "kornia, resample": lambda case, device: kornia(case, device, cropping="resample"),
    "torchvision v2, uint8": lambda case, device: torchvision(case, device, form="uint8"),
    "torchvision v2, float": lambda case, device: torchvision(case, device, form="float"),
    "torchvision, PIL": lambda case, device: torchvision(case, device, form="pil"),
    "lightly": lightly,
    "limit: copy of the views": output_copy,
}
NEEDS = {"lightly": "lightly"}


def main() -> None:
    parse = timing_parser(__doc__, rounds=8, seconds=0.7)
    parse.add_argument("--cases", default="32,96,224")
    parse.add_argument("--only", nargs="+", help="contenders by name, or what precedes its comma")
    parse.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    given = parse.parse_args()
    cases = [case for case in given.cases.split(",") if case]
    skipped = absent(NEEDS)
    names = [name for name in CONTENDERS if name not in skipped and chosen(name, given.only)]
    results: list[dict[str, Any]] = []
    for case in cases:
        able = [n for n in names if CASES[case].channels == 3 or n.startswith(("ours", "kornia"))]
        times, _ = in_turns(prepared, {name: (name, case, given.device) for name in able}, given)
        rows = [summary(name, CASES[case], of_name) for name, of_name in times.items()]
        results += rows
        print(table(rows), flush=True)
    report = {"machine": machine(given.threads) | {"device": given.device}, "results": results}
    if cases:
        save(given.json, report)
    else:
        report = json.loads(given.json.read_text())
    compare("views_speed.json", report, ratios)
    print(machine_line(report["machine"]))


def prepared(name: str, case: str, device: str) -> tuple[Call, None]:
    if name.startswith(("ours", "limit")):
        keep_freed_memory()
    return CONTENDERS[name](CASES[case], device), None


def summary(name: str, case: Case, rounds: list[list[float]]) -> dict[str, Any]:
    seconds, noise = quietest(rounds)
    return {
        "case": f"{case.width}x{case.height} -> {case.crop_px} px, batch {case.count}"
        + (f", {case.channels} channels" if case.channels != 3 else ""),
        "contender": name,
        "images_per_s": round(case.count / seconds, 2),
        "noise": round(noise, 3),
        "calls": sum(len(times) for times in rounds),
    }


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
    kornia = max((rate[name] for name in rate if name.startswith("kornia")), default=None)
    peers = (kornia, rate.get("torchvision, PIL"), rate.get("lightly"))
    cells = [
        [
            *(row["contender"], f"{row['images_per_s']:.0f}", f"{row['noise']:.0%}"),
            *(f"{row['images_per_s'] / peer:.1f}" if peer else "" for peer in peers),
        ]
        for row in rows
    ]
    head = ["two views of each image", "images/s", "noise", "x kornia", "x PIL", "x lightly"]
    return f"\n## {rows[0]['case']}\n\n{markdown_table(head, cells)}"


if __name__ == "__main__":
    main()
