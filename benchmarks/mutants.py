"""Measure how many of N random small faults in the library's core its own tests see.

A mutant is one changed comparison, operator, number, `and`/`or`, `not` or truth value of a part's
files; the part's quick tests run on it until one fails. Run it in a clone that nothing else uses: a
file is overwritten while its mutant is tested.

    python -m benchmarks.mutants --count 200
"""

import argparse
import ast
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

PARTS = {  # name -> (files of sslpipe, files of tests)
    "order": ("data/order.py data/plan.py data/pairing.py", "data/test_order data/test_pairing"),
    "views": (
        "augment/params.py augment/ops.py augment/resample.py augment/pixels.py",
        "augment/test_params augment/test_resample augment/test_pixels augment/test_two_views"
        " augment/test_plans",
    ),
    "losses": ("losses/*.py losses/engine/*.py", "losses/test_*"),
    "guard": ("run/guard.py", "run/test_guard"),
    "checkpoint": ("run/checkpoint*.py run/best.py", "run/test_checkpoint run/test_best"),
    "search": (
        "evaluation/neighbours.py evaluation/*search.py evaluation/knn.py evaluation/ranking.py"
        " evaluation/similarity.py evaluation/retrieval.py",
        "evaluation/test_*search evaluation/test_knn* evaluation/test_neighbours"
        " evaluation/test_retrieval",
    ),
    "verdict": (
        "evaluation/verdict.py evaluation/difference.py evaluation/against.py",
        "evaluation/test_verdict evaluation/test_difference evaluation/test_against",
    ),
}
SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.And: ast.Or, ast.Or: ast.And,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip


def change(node: Any) -> bool:
    """Change a node in place where one of the mutations applies."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        node.ops[0] = SWAPS[type(node.ops[0])]()
    elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPS:
        node.op = SWAPS[type(node.op)]()
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        node.op = ast.UAdd()
        node.operand = ast.Call(ast.Name("bool", ast.Load()), [node.operand], [])
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        node.value = not node.value
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        node.value += 1
    else:
        return False
    return True


def places(source: str) -> list[int]:
    """Where in the walk over the tree a mutation applies; type hints are none."""
    nodes, hints = list(ast.walk(ast.parse(source))), set[int]()
    for node in nodes:
        for hint in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            hints.update(map(id, ast.walk(hint)) if hint is not None else ())
    return [at for at, node in enumerate(nodes) if id(node) not in hints and change(node)]


def mutant(source: str, place: int) -> tuple[str, str]:
    """Return the mutated source and, for people, what changed where."""
    tree = ast.parse(source)
    node: Any = list(ast.walk(tree))[place]
    before = ast.unparse(node)
    change(node)
    ast.fix_missing_locations(tree)
    return ast.unparse(tree), f"{node.lineno}: {before} -> {ast.unparse(node)}"


def is_seen(tests: list[str], limit_s: float) -> bool:
    """Run tests in a fork, which has torch loaded already; a hang counts as seen."""
    child = os.fork()
    if child == 0:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        import pytest

        os._exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests])))
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status != 0
        time.sleep(0.1)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def main() -> None:
    """Print a line a mutant and the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--part", choices=PARTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=300)
    args = parser.parse_args()
    sys.path.insert(0, os.getcwd())
    import torch  # noqa: F401  each fork has it

    everywhere = [
        (part, path, place)
        for part, (files, _) in PARTS.items()
        for pattern in files.split()
        for path in sorted(Path("sslpipe").glob(pattern))
        for place in places(path.read_text())
    ]
    table = {part: [0, 0] for part in PARTS}
    for part, path, place in random.Random(args.seed).sample(everywhere, args.count):
        if args.part not in (None, part):
            continue
        tests = [str(t) for p in PARTS[part][1].split() for t in Path("tests").glob(f"{p}.py")]
        original = path.read_text()
        text, what = mutant(original, place)
        try:
            path.write_text(text)
            seen = is_seen(tests, args.limit_s)
        finally:
            path.write_text(original)
        table[part][0] += seen
        table[part][1] += 1
        print("seen  " if seen else "UNSEEN", f"{path}:{what}", flush=True)
    print(json.dumps({part: f"{seen} of {of}" for part, (seen, of) in table.items() if of}))


if __name__ == "__main__":
    main()
