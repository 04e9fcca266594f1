"""Two SimCLR views of photographs: ours, by either kind of kernels, kornia and torchvision."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.common import Bench, Figures, check
from benchmarks.views import MEAN, STD, Case, kornia, ours, torchvision
from sslpipe.augment.ops import draws
from sslpipe.augment.two_views import FusedViews
from sslpipe.data.pipeline import Batch
from sslpipe.errors import RecipeError


def views(bench: Bench) -> Figures:
    """Milliseconds for both views of a batch, as float32; ours checked against the CPU's first."""
    case = bench.size(Case(256, 375, 500, 224), Case(4, 48, 64, 32))
    name = bench.device.type
    contenders: dict[str, Callable[[], Callable[[], Any]]] = {}
    for kernels in ("torch", "triton"):
        label = f"ours, kernels = {kernels}"
        contenders[label] = partial(ours, case, name, kernels=kernels)
        contenders[f"{label}, as in training"] = partial(planned, case, bench, kernels)
    contenders |= {
        "kornia, slice": partial(kornia, case, name, cropping="slice"),
        "kornia, resample": partial(kornia, case, name, cropping="resample"),
        "torchvision v2, image by image": partial(torchvision, case, name, form="float"),
    }
    figures: Figures = {"images": case.count}
    for kernels in ("torch", "triton"):
        try:
            error = difference(bench.device, case._replace(count=4), kernels)
        except RecipeError as refused:
            figures[f"ours, kernels = {kernels}"] = f"skipped: {refused}".partition(";")[0]
            for label in [label for label in contenders if f"kernels = {kernels}" in label]:
                del contenders[label]
        else:
            figures |= check(f"ours, kernels = {kernels}", error, 1e-3)
    for label, make in contenders.items():
        bench.forget_memory()
        time_s = bench.seconds(make())
        figures |= {f"{label}: ms": 1e3 * time_s, f"{label}: images/s": case.count / time_s}
        figures |= {f"{label}: {key}": value for key, value in bench.peak_gib().items()}
    return figures


def planned(case: Case, bench: Bench, kernels: str) -> Callable[[], Any]:
    """As a run under bf16 makes them: planned and sent by the loader's threads, written in bf16."""
    augment = FusedViews("simclr", case.crop_px, MEAN, STD, kernels=kernels).to(bench.device)
    sent = augment.prepare(batch_of(case), seed=0, number=0).to(bench.device)
    return partial(augment, sent, dtype=torch.bfloat16)


def difference(device: torch.device, case: Case, kernels: str) -> float:
    """Largest difference from the CPU's views, in units of the normalised views."""
    batch = batch_of(case)
    reference = FusedViews("simclr", case.crop_px, MEAN, STD, kernels="torch")
    drawn = draws(0, 0, batch.ids, batch.sizes, reference.specs)
    augment = FusedViews("simclr", case.crop_px, MEAN, STD, kernels=kernels).to(device)
    return float((augment(batch.to(device), drawn).cpu() - reference(batch, drawn)).abs().max())


def batch_of(case: Case) -> Batch:
    images = case.images().contiguous(memory_format=torch.channels_last)
    ids, sizes = torch.arange(case.count), torch.tensor([[case.height, case.width]] * case.count)
    return Batch(images, sizes, ids, ids, ids, 0)
