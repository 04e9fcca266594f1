"""Search as `sslpipe search` does it, exact and approximate, and by a flat faiss index, in turns.

    python -m benchmarks.image_search [--rows 1000000] [--json FILE]

Rows of 512 numbers in 5,000 loose groups, the 10 nearest of each query; queries are no rows. Unit
rows are made once, when a features file is opened, or by `index build`, which also writes what
`--approximate` searches; then exact search and faiss both do one product. Neighbours are compared.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss
import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.common import machine, parser, print_table, save
from sslpipe.evaluation.approximate import Approximate, write_approximate
from sslpipe.evaluation.embed import Embeddings, read_embeddings, save_embeddings
from sslpipe.evaluation.neighbours import Neighbours, fixed_point_units, nearest
from sslpipe.portable import sha256_of

Find = Callable[[Tensor], Neighbours]
WIDTH, TOP, TURNS = 512, 10, 3
GROUPS, LATENT = 5000, 48  # of the rows, and the dimensions in which groups differ
QUERIES = (1, 10, 100)


def seconds(call: Callable[[], Any]) -> tuple[dict[str, float], Any]:
    """Time by the clock, and of all threads, which others on the machine lengthen less."""
    begin, begin_cpu = time.perf_counter(), time.process_time()
    result = call()
    spent = {"s": time.perf_counter() - begin, "cpu_s": time.process_time() - begin_cpu}
    return spent, result


def least(times: list[dict[str, float]], prefix: str) -> dict[str, float]:
    return {f"{prefix}_{key}": min(each[key] for each in times) for key in ("s", "cpu_s")}


def unit_rows(count: int, draws: torch.Generator) -> Tensor:
    """Draw rows of length 1, (count, 512), around GROUPS centres, the same at each call."""
    fixed = torch.Generator().manual_seed(1)
    centres = torch.randn(GROUPS, LATENT, generator=fixed)
    directions = torch.randn(LATENT, WIDTH, generator=fixed) / LATENT**0.5
    rows = torch.empty(count, WIDTH)
    for part in rows.split(100_000):
        own = torch.randint(GROUPS, (len(part),), generator=draws)
        latent = centres[own] + 0.5 * torch.randn(len(part), LATENT, generator=draws)
        noise = 0.3 * torch.randn(part.shape, generator=draws)
        part.copy_(normalize(latent @ directions + noise, dim=1))
    return rows


def same(ours: Tensor, theirs: Tensor) -> float:
    """Share of their neighbours that are among ours, both (Q, TOP)."""
    return float((theirs[:, :, None] == ours[:, None]).any(2).float().mean())


def exact(bank: Tensor, queries: list[Tensor]) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Time exact search and a flat faiss index in turns; and what making unit rows takes."""
    index = faiss.IndexFlatIP(WIDTH)
    index.add(bank.numpy())
    opened, units = seconds(lambda: fixed_point_units(bank))
    figures = []
    for each in queries:
        own = fixed_point_units(each)
        theirs, ours = [], []
        for _ in range(TURNS):
            spent, (_, their_rows) = seconds(lambda q=each: index.search(q.numpy(), TOP))
            theirs.append(spent)
            spent, found = seconds(lambda q=own: nearest(units, q, TOP, units=True))
            ours.append(spent)
        one = {"queries": len(each), **least(ours, "ours"), **least(theirs, "faiss")}
        one |= {"ratio": one["faiss_s"] / one["ours_s"]}
        figures.append({**one, "same": same(found.indices, torch.from_numpy(their_rows))})
    return opened, figures


def indexes(bank: Tensor, queries: list[Tensor], folder: Path) -> list[dict[str, Any]]:
    """Write, open and search what `index build` writes, exact and approximate."""
    units, ids = fixed_point_units(bank), torch.arange(len(bank))
    file, near = folder / "rows.safetensors", folder / "rows.faiss"
    none = torch.full_like(ids, -1)
    written, _ = seconds(lambda: save_embeddings(file, Embeddings(units, none, ids), {}))
    made_s, (lists, stated) = seconds(lambda: write_approximate(units, near))
    opened, (mapped, _) = seconds(lambda: read_embeddings(file, hashed=False))
    digest = sha256_of(near)
    more, approximate = seconds(lambda: Approximate.read(near, digest, lists, units.shape))
    more = {key: value + opened[key] for key, value in more.items()}
    rows, true = mapped.features, [nearest(units, q, TOP, units=True).indices for q in queries]
    kinds: tuple[tuple[str, dict[str, float], dict[str, float], Path, Find], ...] = (
        ("exact", written, opened, file, lambda q: nearest(rows, q, TOP, units=True)),
        ("approximate", made_s, more, near, lambda q: approximate.nearest(rows, q, TOP)),
    )
    figures = []
    for kind, making, opening, path, find in kinds:
        one: dict[str, Any] = {"kind": kind, "bytes": path.stat().st_size}
        one |= least([making], "made") | least([opening], "open")
        if kind == "approximate":
            one |= {"lists": lists, "stated_recall": stated}
        for each, wanted in zip(queries, true, strict=True):
            timed = [seconds(lambda q=each, f=find: f(q)) for _ in range(TURNS)]
            recall = same(timed[-1][1].indices, wanted)
            one[f"of_{len(each)}"] = {**least([t for t, _ in timed], "search"), "recall": recall}
        figures.append(one)
    return figures


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rows", type=int, default=1_000_000)
    arguments.add_argument("--threads", type=int, default=2)
    given = arguments.parse_args()
    torch.set_num_threads(given.threads)
    faiss.omp_set_num_threads(given.threads)
    draws = torch.Generator().manual_seed(0)
    bank = unit_rows(given.rows, draws)
    queries = [unit_rows(count, draws) for count in QUERIES]
    opened, search = exact(bank, queries)
    print(f"{given.rows:,} rows; unit rows once: {opened['s']:.1f} s, {opened['cpu_s']:.1f} of CPU")
    head = ("queries", "ours, s", "of CPU", "faiss, s", "of CPU", "times as fast", "same")
    print_table(head, [[f"{value:.4g}" for value in each.values()] for each in search])
    with tempfile.TemporaryDirectory() as folder:
        built = indexes(bank, list(map(fixed_point_units, queries)), Path(folder))
    columns = [f"{n}, CPU s" for n in QUERIES]
    head = ("built", "MB", "made, CPU s", "opened, CPU s", *columns, "recall")
    lines = []
    for each in built:
        found = [each[f"of_{count}"] for count in QUERIES]
        numbers = [each["bytes"] / 1e6, each["made_cpu_s"], each["open_cpu_s"]]
        numbers += [*(one["search_cpu_s"] for one in found), found[-1]["recall"]]
        lines.append([each["kind"], *(f"{number:.4g}" for number in numbers)])
    print_table(head, lines)
    figures = {"opened": opened, "search": search, "built": built}
    save(given.json, {"machine": machine(given.threads), "rows": given.rows, **figures})


if __name__ == "__main__":
    main()
