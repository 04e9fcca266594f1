"""One GPU, measured and checked: a table, and JSON that further calls add to.

    python -m benchmarks.gpu [PART ...] [--json out/gpu.json]
    python -m benchmarks.gpu --tiny --device cpu

Each part has 2 minutes (`speedrun` and `labels` 7) and all of a call 17, which leaves 3 to the
tests of `make gpu`: a part that takes longer is ended as an error, and one that has no time left is
skipped; name it then. `speedrun` and `labels` need images: see docs/gpu.md. What
this machine cannot do is skipped with its reason. A part that fails, or whose numbers are off by
more than is allowed, is one line; the others go on, and the exit status is 1. Parts of another
machine, commit or version in the JSON are dropped, as one table would mix them. --tiny runs the
same code small, to try the program itself: its figures mean nothing.
"""

import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import commit, machine_line, markdown_table, parser, save
from benchmarks.gpu.accuracy import labels, speedrun
from benchmarks.gpu.common import Bench, Figures, SkippedError
from benchmarks.gpu.kernels import batchnorm, knn, nt_xent, several_gpus, views
from benchmarks.gpu.peers import peers
from benchmarks.gpu.runs import (
    mobile,
    mobile_variants,
    resnet18,
    resnet18_variants,
    resnet50,
    resnet50_variants,
    vit,
    vit_variants,
    waits,
)
from benchmarks.gpu.wheels import installed

# what others rest on comes first
TRAININGS = (resnet50, resnet18, vit, mobile)
VARIANTS = (resnet50_variants, resnet18_variants, vit_variants, mobile_variants)
ORDER = (views, waits, *TRAININGS, nt_xent, knn, batchnorm, several_gpus, peers, *VARIANTS)
PARTS: dict[str, Callable[[Bench], Figures]] = {
    part.__name__: part for part in (*ORDER, speedrun, labels)
}
LONG_S = {"speedrun": 420.0, "labels": 420.0}  # of three trainings to their end, and of thirty
PART_S, ALL_S, AGAIN_S = 120.0, 17 * 60.0, 10.0  # seconds
PACKAGES = ("torch", "torchvision", "triton", "kornia", "accelerate", "timm", "numpy", "simplejpeg")


def hardware(device: torch.device) -> dict[str, Any]:
    """Commit, processor, devices and versions: a number is worth nothing without them."""
    versions = {name: installed(name) or "none" for name in PACKAGES}
    facts: dict[str, Any] = {
        "commit": commit(),
        "cpus": f"{os.cpu_count()} {platform.machine()}",
        "python": platform.python_version(),
        **versions,
    }
    if device.type == "cuda" and torch.cuda.is_available():
        names = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
        memory_gib = torch.cuda.get_device_properties(0).total_memory / 2**30
        facts |= {"devices": ", ".join(names), "GiB": round(memory_gib), "cuda": torch.version.cuda}
    return facts


@contextmanager
def limited(limit_s: float) -> Iterator[None]:
    """Raise TimeoutError inside after so many seconds, and again where that is held up."""

    def end(*_: object) -> None:
        raise TimeoutError(f"took more than {limit_s:g} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, limit_s, AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def measure(
    part: Callable[[Bench], Figures], bench: Bench, limit_s: float = PART_S
) -> dict[str, Any]:
    """{"seconds", and "figures", "skipped" or "error"} of a part; it never raises.

    Beside an error stand the figures that the part had kept until then.
    """
    begin_s = time.perf_counter()
    bench.kept.clear()
    outcome: dict[str, Any]
    try:
        if bench.on_cuda and not torch.cuda.is_available():
            raise SkippedError("no CUDA device")
        if limit_s <= 0:
            raise SkippedError(f"the {ALL_S / 60:.0f} minutes of a call are over")
        bench.forget_memory()
        with limited(limit_s):
            outcome = {"figures": part(bench)}
    except SkippedError as reason:
        outcome = {"skipped": str(reason)}
    except Exception as error:  # whatever it is: the other parts are measured all the same
        text = " ".join(str(error).split()) or "no message"
        outcome = {"error": f"{type(error).__name__}: {text[:300]}"}
        if bench.kept:
            outcome["figures"] = dict(bench.kept)
    return {"seconds": round(time.perf_counter() - begin_s, 1), **outcome}


def earlier(path: Path | None, machine: dict[str, Any], tiny: bool) -> dict[str, Any]:
    """The parts of a JSON file that were measured on the same machine, else none."""
    if path is None or not path.exists():
        return {}
    report = json.loads(path.read_text())
    if report["machine"] != machine or report["tiny"] != tiny:
        print(f"{path} is of another machine, commit or version: its parts are dropped")
        return {}
    return dict(report["parts"])


def table(report: dict[str, Any]) -> str:
    """Markdown: a row a figure, and hardware and versions above."""
    rows = []
    for name, part in report["parts"].items():
        ended = {key: part[key] for key in ("skipped", "error") if key in part}
        for what, figure in {**part.get("figures", {}), **ended}.items():
            rows.append([name, what, figure if isinstance(figure, str) else _number(figure)])
        rows.append([name, "seconds of the measurement", str(part["seconds"])])
    lines = [machine_line(report["machine"])]
    lines += ["", "tiny sizes: the figures mean nothing"] * report["tiny"]
    return "\n".join([*lines, "", markdown_table(["part", "what", "figure"], rows)])


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def main(words: list[str] | None = None) -> int:
    parse = parser(__doc__)
    parse.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parse.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parse.add_argument("--tiny", action="store_true", help="small sizes, to try the program")
    parse.add_argument("--folder", type=Path, default=Path("out/gpu-data"), help="of data sets")
    arguments = parse.parse_args(words)
    if unknown := [name for name in arguments.parts if name not in PARTS]:
        parse.error(f"unknown part {unknown[0]!r}; known: {', '.join(PARTS)}")
    bench = Bench(torch.device(arguments.device), arguments.tiny, arguments.folder)
    machine = hardware(bench.device)
    done = earlier(arguments.json, machine, bench.tiny)
    report: dict[str, Any] = {"machine": machine, "tiny": bench.tiny, "parts": done}
    chosen, end_s = arguments.parts or list(PARTS), time.perf_counter() + ALL_S
    for name in chosen:
        outcome = measure(
            PARTS[name], bench, min(LONG_S.get(name, PART_S), end_s - time.perf_counter())
        )
        ended = {"skipped", "error"} & outcome.keys()
        print(
            f"{name}: {outcome['seconds']} s",
            *(f"{word}: {outcome[word]}" for word in ended),
            flush=True,
        )
        done[name] = outcome
        save(arguments.json, report)  # after each part: a call may be cut off
    print(f"\n{table(report)}")
    return int(any("error" in done[name] for name in chosen))


if __name__ == "__main__":
    sys.exit(main())
