"""NT-Xent, forward + backward from raw projections: time and extra memory, ours against peers.

    python -m benchmarks.nt_xent [--rows 512,2048,8192] [--threads 1] [--seconds 4] [--json FILE]

Each contender runs in a fresh process; sizes are 2N, D = 128, temperature 0.1, float32 inputs.
time: median of the calls that fit into --seconds (at least 3). memory: peak resident memory over
that before the first call of this size, in MB. error: of the gradient, relative to float64.
Peers that are not installed (extra `bench`) are named as left out; pytorch-metric-learning builds
a matrix of (2N)^3 numbers and is asked for 512 rows at most. Linux only (reads /proc).
"""

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from sslpipe.losses import NTXentLoss

DIM, TEMPERATURE = 128, 0.1
Loss = Callable[[Tensor, Tensor], Tensor]


def textbook(z_a: Tensor, z_b: Tensor) -> Tensor:
    """The usual twelve lines: cat, normalise, one product, mask, cross entropy."""
    z = F.normalize(torch.cat([z_a, z_b]), dim=1)
    logits = z @ z.T / TEMPERATURE
    own = torch.eye(len(z), dtype=torch.bool, device=z.device)
    logits = logits.masked_fill(own, float("-inf"))
    return F.cross_entropy(logits, torch.arange(len(z), device=z.device).roll(len(z_a)))


def lightly() -> Loss:
    from lightly.loss import NTXentLoss as Peer

    peer: Loss = Peer(temperature=TEMPERATURE)
    return peer


def metric_learning() -> Loss:
    from pytorch_metric_learning.losses import NTXentLoss as Peer

    peer = Peer(temperature=TEMPERATURE)
    return lambda a, b: peer(torch.cat([a, b]), torch.arange(len(a)).repeat(2))


CONTENDERS: dict[str, Callable[[], Loss]] = {
    "ours": lambda: NTXentLoss(TEMPERATURE),
    "ours, bfloat16": lambda: NTXentLoss(TEMPERATURE, products="bfloat16"),
    "textbook": lambda: textbook,
    "lightly": lightly,
    "pytorch-metric-learning": metric_learning,
}
NEEDS = {"lightly": "lightly", "pytorch-metric-learning": "pytorch_metric_learning"}
MOST_ROWS = {"pytorch-metric-learning": 512}


def projections(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    z_a = torch.randn(rows // 2, DIM, generator=generator)
    z_b = z_a + torch.randn(rows // 2, DIM, generator=generator)
    return z_a.requires_grad_(), z_b.requires_grad_()


def gradient(loss_fn: Loss, z: tuple[Tensor, Tensor]) -> Tensor:
    return torch.cat(torch.autograd.grad(loss_fn(*z), z))


def memory_mb(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise LookupError(field)


def measure(contender: str, rows: int, threads: int, seconds: float) -> dict[str, float]:
    """One contender at one size, in this process."""
    torch.set_num_threads(threads)
    loss_fn = CONTENDERS[contender]()
    gradient(loss_fn, projections(64))  # imports, thread pools, kernels chosen
    z = projections(rows)
    before = memory_mb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    grad = gradient(loss_fn, z)
    peak = memory_mb("VmHWM") - before
    times: list[float] = []
    while len(times) < 3 or sum(times) < seconds:
        start = time.perf_counter()
        gradient(loss_fn, z)
        times.append(time.perf_counter() - start)
    wide = tuple(view.detach().double().requires_grad_() for view in z)
    exact = gradient(NTXentLoss(TEMPERATURE), (wide[0], wide[1]))  # tests hold it to the loops
    error = float((grad.double() - exact).norm() / exact.norm())
    return {"ms": statistics.median(times) * 1e3, "extra_mb": peak, "gradient_error": error}


def in_fresh_process(contender: str, rows: int, threads: int, seconds: float) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.nt_xent", "--one", contender]
    command += ["--rows", str(rows), "--threads", str(threads), "--seconds", str(seconds)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    result: dict[str, float] = json.loads(output.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", default="512,2048,8192")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", choices=CONTENDERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sizes = [int(rows) for rows in arguments.rows.split(",")]
    if arguments.one:
        result = measure(arguments.one, sizes[0], arguments.threads, arguments.seconds)
        print(json.dumps(result))
        return

    absent = [name for name, module in NEEDS.items() if importlib.util.find_spec(module) is None]
    records = []
    print(
        f"{'2N':>6} {'contender':<24} {'ms':>9} {'speed':>7} {'MB':>8} {'memory':>8} {'error':>8}"
    )
    for rows in sizes:
        measured = {
            name: in_fresh_process(name, rows, arguments.threads, arguments.seconds)
            for name in CONTENDERS
            if name not in absent and rows <= MOST_ROWS.get(name, rows)
        }
        base = measured["textbook"]
        for name, result in measured.items():
            speed, memory = base["ms"] / result["ms"], result["extra_mb"] / base["extra_mb"]
            records.append({"rows": rows, "contender": name, **result})
            print(
                f"{rows:>6} {name:<24} {result['ms']:>9.2f} {speed:>6.2f}x"
                f" {result['extra_mb']:>8.1f} {memory:>7.3f}x {result['gradient_error']:>8.1e}"
            )
    print("speed and memory: against the textbook version in the same run")
    if absent:
        print(f"left out, not installed (extra `bench`): {', '.join(absent)}")
    if arguments.json:
        arguments.json.write_text(json.dumps(records, indent=2) + "\n")


if __name__ == "__main__":
    main()
