"""Exact search as `sslpipe search` does it, and by a flat faiss index: seconds, in turns.

    python -m benchmarks.image_search [--rows 1000000] [--json FILE]

Random rows of 512 numbers, the 10 nearest of each query. Unit rows are made once, when a features
file is opened; both then do one product. The neighbours are compared.
"""

import time
from collections.abc import Callable
from typing import Any

import faiss
import torch
from torch.nn.functional import normalize

from benchmarks.common import machine, parser, print_table, save
from sslpipe.evaluation.neighbours import fixed_point_units, nearest

WIDTH, TOP, TURNS = 512, 10, 3


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = call()
    return time.perf_counter() - begin, result


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rows", type=int, default=1_000_000)
    arguments.add_argument("--threads", type=int, default=2)
    given = arguments.parse_args()
    torch.set_num_threads(given.threads)
    faiss.omp_set_num_threads(given.threads)
    draws = torch.Generator().manual_seed(0)
    bank = normalize(torch.randn(given.rows, WIDTH, generator=draws), dim=1)
    index = faiss.IndexFlatIP(WIDTH)
    index.add(bank.numpy())
    opened, units = seconds(lambda: fixed_point_units(bank))
    table = []
    for count in (1, 10, 100):
        queries = normalize(torch.randn(count, WIDTH, generator=draws), dim=1)
        own = fixed_point_units(queries)
        theirs, ours = [], []
        for _ in range(TURNS):
            spent, (_, theirs_found) = seconds(lambda q=queries: index.search(q.numpy(), TOP))
            theirs.append(spent)
            spent, found = seconds(lambda q=own: nearest(units, q, TOP, units=True))
            ours.append(spent)
        same = (torch.from_numpy(theirs_found) == found.indices).float().mean()
        table.append((count, min(ours), min(theirs), min(theirs) / min(ours), float(same)))
    head = ("queries", "sslpipe, s", "faiss, s", "times as fast", "same neighbours")
    print(f"{given.rows:,} rows; unit rows once: {opened:.1f} s")
    print_table(head, [(row[0], *(f"{value:.2f}" for value in row[1:])) for row in table])
    figures = [
        dict(zip(("queries", "ours_s", "faiss_s", "ratio", "same"), row, strict=True))
        for row in table
    ]
    save(
        given.json,
        {
            "machine": machine(given.threads),
            "rows": given.rows,
            "opened_s": opened,
            "search": figures,
        },
    )


if __name__ == "__main__":
    main()
