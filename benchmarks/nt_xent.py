"""NT-Xent, forward + backward from raw projections: time and extra memory, ours against peers.

    python -m benchmarks.nt_xent [--rows 512,2048,8192,16384,65536] [--threads 1] [--rounds 5]
                                 [--seconds 0.6] [--json docs/measured/nt_xent.json]

Sizes are 2N, D = 128, temperature 0.1, float32 inputs. Contenders take turns as in
benchmarks.views. speed: lightly's time, or where lightly is absent the textbook's, over the
contender's. memory: peak resident memory over that before the first call of this size, in MB.
error: of the gradient, relative to float64. floor: share of the time that the bare matrix products
of the symmetric algorithm take (two units of (2N)^2 D multiply-adds, 1.5 where tiles are kept), by
the kernels that are used. Ours keeps freed memory (sslpipe.portable), as every run does; the peers
run as they come: lightly's would gain up to an eighth by it, the textbook version loses at 8192
rows. --json keeps the sizes that are in FILE and were not measured now. Peers that would need more
memory than this machine has are not asked. Linux only (reads /proc).
"""

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import (
    Call,
    Peak,
    absent,
    compare,
    in_turns,
    machine,
    machine_bytes,
    print_table,
    quietest,
    save,
    timing_parser,
)
from sslpipe.losses import NTXentLoss
from sslpipe.losses.engine.tiles import KEPT_TILES_BYTES, fast_kernels
from sslpipe.portable import keep_freed_memory

DIM, TEMPERATURE, TILE = 128, 0.1, 512
Loss = Callable[[Tensor, Tensor], Tensor]


def textbook(z_a: Tensor, z_b: Tensor) -> Tensor:
    """The usual twelve lines: cat, normalise, one product, mask, cross entropy."""
    z = F.normalize(torch.cat([z_a, z_b]), dim=1)
    logits = z @ z.T / TEMPERATURE
    own = torch.eye(len(z), dtype=torch.bool, device=z.device)
    logits = logits.masked_fill(own, float("-inf"))
    return F.cross_entropy(logits, torch.arange(len(z), device=z.device).roll(len(z_a)))


def cross_view(z_a: Tensor, z_b: Tensor) -> Tensor:
    """What image-text losses do, as in open_clip: other views only, both directions. Another loss,
    with a quarter of the pairs: shown for its cost."""
    logits = F.normalize(z_a, dim=1) @ F.normalize(z_b, dim=1).T / TEMPERATURE
    own = torch.arange(len(z_a), device=z_a.device)
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def lightly() -> Loss:
    from lightly.loss import NTXentLoss as Peer

    peer: Loss = Peer(temperature=TEMPERATURE)
    return peer


def metric_learning() -> Loss:
    from pytorch_metric_learning.losses import NTXentLoss as Peer

    peer = Peer(temperature=TEMPERATURE)
    return lambda a, b: peer(torch.cat([a, b]), torch.arange(len(a)).repeat(2))


CONTENDERS: dict[str, Callable[[], Loss]] = {
    "lightly": lightly,
    "pytorch-metric-learning": metric_learning,
    "textbook": lambda: textbook,
    "cross-view, as open_clip": lambda: cross_view,
    "ours": lambda: NTXentLoss(temperature=TEMPERATURE),
}
FLOORS = ("floor of ours",)
NEEDS = {"lightly": "lightly", "pytorch-metric-learning": "pytorch_metric_learning"}
# bytes at the peak; measured ones of small sizes, carried on
NEEDED: dict[str, Callable[[int], float]] = {
    "lightly": lambda rows: 20 * rows**2,
    "pytorch-metric-learning": lambda rows: 18 * rows**3,
    "textbook": lambda rows: 16 * rows**2,
    "cross-view, as open_clip": lambda rows: 6 * rows**2,
}


def projections(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    z_a = torch.randn(rows // 2, DIM, generator=generator)
    z_b = z_a + torch.randn(rows // 2, DIM, generator=generator)
    return z_a.requires_grad_(), z_b.requires_grad_()


def gradient(loss_fn: Loss, z: tuple[Tensor, Tensor]) -> Tensor:
    return torch.cat(torch.autograd.grad(loss_fn(*z), z))


def facts(loss_fn: Loss, contender: str, rows: int) -> dict[str, float | None]:
    """Memory and error of one contender at one size, in this process."""
    gradient(loss_fn, projections(256))  # imports, thread pools, kernels chosen
    z = projections(rows)
    peak = Peak()
    grad = gradient(loss_fn, z)
    actual: dict[str, float | None] = {"extra_mb": peak.extra_mb(), "gradient_error": None}
    if rows <= 16_384:
        wide = tuple(view.detach().double().requires_grad_() for view in z)
        # tests hold ours to the loops; another loss is compared with itself
        exact_fn = (
            cross_view
            if contender.startswith("cross-view")
            else NTXentLoss(temperature=TEMPERATURE)
        )
        exact = gradient(exact_fn, (wide[0], wide[1]))
        actual["gradient_error"] = float((grad.double() - exact).norm() / exact.norm())
    return actual


def bare_products(rows: int) -> Call:
    """The symmetric algorithm's matrix products and nothing else."""
    z = F.normalize(torch.cat([view.detach() for view in projections(rows)]), dim=1)
    sizes = min(TILE, rows), min(TILE, rows)
    tile, weights, into = z.new_zeros(sizes), z.new_zeros(sizes), torch.zeros_like(z)

    def once() -> None:
        for i in range(0, rows, TILE):
            for j in range(i, rows, TILE):
                left, right = z[i : i + TILE], z[j : j + TILE]
                at = tile[: len(left), : len(right)]
                w = weights[: len(left), : len(right)]
                for _ in range(2 if rows**2 * 2 > KEPT_TILES_BYTES else 1):  # few are kept
                    torch.mm(left, right.T, out=at)
                torch.mm(w, right, out=into[i : i + TILE])
                if j > i:
                    torch.mm(w.T, left, out=into[j : j + TILE])

    def call() -> None:
        with fast_kernels(z, rows**2):
            once()

    return call


def prepared(name: str, rows: int) -> tuple[Call, dict[str, float | None]]:
    """What is timed of a contender or a floor, in its own process, and its facts."""
    if name in FLOORS:
        return bare_products(rows), {}
    if name.startswith("ours"):
        keep_freed_memory()
    loss_fn, z = CONTENDERS[name](), projections(rows)
    return lambda: gradient(loss_fn, z), facts(loss_fn, name, rows)


def measured(names: list[str], rows: int, given: argparse.Namespace) -> list[dict[str, Any]]:
    """One record a contender; FLOORS are measured beside them."""
    contenders = {name: (name, rows) for name in (*names, *FLOORS)}
    times, known = in_turns(prepared, contenders, given)
    took = {name: quietest(of_name) for name, of_name in times.items()}
    floors = {name.removeprefix("floor of "): took[name][0] * 1e3 for name in FLOORS}
    return [
        {
            "rows": rows,
            "contender": name,
            "ms": took[name][0] * 1e3,
            "noise": round(took[name][1], 3),
            **known[name],
            "floor_ms": floors.get(name),
        }
        for name in names
    ]


def show(records: list[dict[str, Any]]) -> None:
    """Print the records of one size."""
    of_size = {record["contender"]: record for record in records}
    base = of_size.get("lightly") or of_size.get("textbook")
    rows = []
    for record in records:
        error, floor = record["gradient_error"], record["floor_ms"]
        memory = record["extra_mb"] / max(base["extra_mb"], 0.1) if base else None
        rows.append(
            [
                *(record["rows"], record["contender"], f"{record['ms']:.2f}"),
                f"{base['ms'] / record['ms']:.2f}x" if base else "-",
                *(f"{record['extra_mb']:.1f}", "-" if memory is None else f"{memory:.4f}x"),
                "-" if error is None else f"{error:.1e}",
                "-" if floor is None else f"{floor / record['ms']:.0%}",
            ]
        )
    print_table(["2N", "contender", "ms", "speed", "MB", "memory", "error", "floor"], rows)


def ratios(report: dict[str, Any]) -> dict[str, float]:
    """Times as fast as lightly, and the share of the bare products' speed."""
    lightly_ms = {r["rows"]: r["ms"] for r in report["records"] if r["contender"] == "lightly"}
    found = {}
    for record in report["records"]:
        name = f"{record['rows']} rows, {record['contender']}"
        if record["contender"].startswith("ours") and record["rows"] in lightly_ms:
            found[name] = lightly_ms[record["rows"]] / record["ms"]
        if record["floor_ms"]:
            found[f"{name}, of the bare products"] = record["floor_ms"] / record["ms"]
    return found


def main() -> None:
    parse = timing_parser(__doc__, rounds=5, seconds=0.6)
    parse.add_argument("--rows", default="512,2048,8192")
    given = parse.parse_args()
    sizes = [int(rows) for rows in given.rows.split(",")]
    skipped, room = absent(NEEDS), 0.5 * machine_bytes()
    records: list[dict[str, Any]] = []
    for rows in sizes:
        names = [
            name
            for name in CONTENDERS
            if name not in skipped and NEEDED.get(name, lambda _: 0.0)(rows) < room
        ]
        records += measured(names, rows, given)
        show(records[-len(names) :])
    if given.json and given.json.exists():
        earlier = json.loads(given.json.read_text())["records"]
        records += [record for record in earlier if record["rows"] not in sizes]
    records.sort(key=lambda r: (r["rows"], list(CONTENDERS).index(r["contender"])))
    save(given.json, {"machine": machine(given.threads), "records": records})
    compare("nt_xent.json", {"records": records}, ratios)
    print("speed and memory: against lightly (where absent, the textbook version) in the same run")


if __name__ == "__main__":
    main()
